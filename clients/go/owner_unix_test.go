//go:build unix

package penstock

import (
	"io/fs"
	"testing"
)

// So Kubernetes mounts a Secret for a pod with `fsGroup`, on a volume where nobody can change it (R1).
func TestAFileOfRootMayBeReadableByAGroup(t *testing.T) {
	for _, file := range []struct {
		owner, user int
		mode        fs.FileMode
		taken       bool
	}{
		{0, 1000, 0o400, true},
		{0, 1000, 0o440, true},
		{0, 1000, 0o640, true},
		{0, 1000, 0o460, false},
		{0, 1000, 0o444, false},
		{0, 0, 0o400, true},
		{0, 0, 0o440, true},
		{0, 0, 0o460, false},
		{0, 0, 0o444, false},
		{1000, 1000, 0o600, true},
		{1000, 1000, 0o440, false},
		{1001, 1000, 0o400, false},
	} {
		if isClosed(file.owner, file.user, file.mode) != file.taken {
			t.Errorf("of %d for %d, mode %o: taken must be %t", file.owner, file.user, file.mode, file.taken)
		}
	}
}
