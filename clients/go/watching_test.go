//go:build go1.25

package penstock

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// What the caller does between two messages takes nothing of the time in which a watch is taken up again; failures one
// after the other do.
func TestTheCallersOwnTimeIsNoneOfAWatchsPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		away := &Error{Kind: ErrUnavailable, Reason: "TRANSPORT_UNAVAILABLE"}
		var watch watching
		for range 2 {
			time.Sleep(time.Hour)
			if err := watch.pause(context.Background(), away); err != nil {
				t.Fatalf("after an hour of work: %v", err)
			}
			watch.sign()
		}
		begun := time.Now()
		for watch.pause(context.Background(), away) == nil {
			continue
		}
		if taken := time.Since(begun); taken < longPatience || taken > 2*longPatience {
			t.Fatalf("it was taken up again for %v", taken)
		}
	})
}
