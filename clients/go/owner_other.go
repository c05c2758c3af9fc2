//go:build !unix

package penstock

import "io/fs"

// isOursAlone cannot be read from a file's mode on this system.
func isOursAlone(fs.FileInfo) bool { return true }
