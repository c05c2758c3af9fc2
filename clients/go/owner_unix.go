//go:build unix

package penstock

import (
	"io/fs"
	"os"
	"syscall"
)

// isOursAlone reports whether a file is closed to other users. Root may open a file of its own to a group of readers.
func isOursAlone(info fs.FileInfo) bool {
	owned, ok := info.Sys().(*syscall.Stat_t)
	return ok && isClosed(int(owned.Uid), os.Getuid(), info.Mode().Perm())
}

// isClosed is isOursAlone for a file's owner and mode, and the user who reads it. Kubernetes mounts a Secret as a file of root that one
// group may read.
func isClosed(owner, user int, mode fs.FileMode) bool {
	if owner == 0 {
		return mode&0o037 == 0
	}
	return owner == user && mode&0o077 == 0
}
