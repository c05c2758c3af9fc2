//go:build unix

package penstock

import (
	"io/fs"
	"os"
	"syscall"
)

// isOursAlone tells whether nobody but us, root, and those whom root lets read it can read or change a file.
func isOursAlone(info fs.FileInfo) bool {
	owned, ok := info.Sys().(*syscall.Stat_t)
	return ok && isClosed(int(owned.Uid), os.Getuid(), info.Mode().Perm())
}

// isClosed tells the same by a file's owner and mode, for a user. Kubernetes mounts a Secret as a file of root that one
// group may read.
func isClosed(owner, user int, mode fs.FileMode) bool {
	if owner == 0 {
		return mode&0o037 == 0
	}
	return owner == user && mode&0o077 == 0
}
