//go:build unix

package penstock

import (
	"io/fs"
	"os"
	"syscall"
)

// isOursAlone tells whether nobody but us, and root, can read or change a file.
func isOursAlone(info fs.FileInfo) bool {
	owned, ok := info.Sys().(*syscall.Stat_t)
	ours := ok && (int(owned.Uid) == os.Getuid() || owned.Uid == 0)
	return ours && info.Mode().Perm()&0o077 == 0
}
