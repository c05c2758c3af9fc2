package penstock

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	opsv1 "penstock.example/penstock/gen/ops/v1"
)

// rows is a message with rollouts: "e" and a number has ended and was created then, all others run.
func rows(complete bool, ids ...string) *driverv1.WatchRolloutsResponse {
	message := &driverv1.WatchRolloutsResponse{SnapshotComplete: complete}
	for _, id := range ids {
		row := &driverv1.RolloutSummary{RolloutId: id, Phase: driverv1.Phase_PHASE_RUNNING}
		if created, err := strconv.Atoi(id[1:]); err == nil && id[0] == 'e' {
			row.Phase, row.CreateTime = driverv1.Phase_PHASE_ENDED, &timestamppb.Timestamp{Seconds: int64(created)}
		}
		message.Rollouts = append(message.Rollouts, row)
	}
	return message
}

// A driver that was away has its deleted rollouts named, and not those that its limit leaves out (R118).
func TestADriverThatWasAwaySaysWhatItHasNoMore(t *testing.T) {
	for _, c := range []struct {
		limit               int32
		before, after, gone []string
	}{
		{1000, []string{"r1", "r2", "e1", "e2"}, []string{"r2", "e2"}, []string{"e1", "r1"}},
		{2, []string{"e3", "e2"}, []string{"e4", "e3"}, nil},                        // e2 was left out: there are more than two
		{2, []string{"e4", "e3", "r9"}, []string{"e4", "e2"}, []string{"e3", "r9"}}, // e2 is older
		{2, []string{"e4", "e3"}, []string{"e4"}, []string{"e3"}},                   // there is no second one any more
		{0, []string{"r1", "e1"}, nil, []string{"r1"}},
	} {
		given := newRolloutsGiven(&driverv1.WatchRolloutsRequest{EndedLimit: &c.limit})
		given.taken(rows(true, c.before...))
		given.broke()
		given.taken(rows(false, c.after...)) // it breaks before its snapshot is complete
		given.broke()
		gone := slices.Concat(given.taken(rows(false, c.after...)), given.taken(rows(true)))
		if slices.Sort(gone); !slices.Equal(gone, c.gone) {
			t.Errorf("of %v it has %v, and %v are gone", c.before, c.after, gone)
		}
	}
}

// Ended rollouts that a long watch remembers are the newest; all that run are remembered (R118).
func TestALongWatchRemembersABoundedNumberOfEndedRollouts(t *testing.T) {
	given := newRolloutsGiven(nil)
	given.taken(rows(true, "r1"))
	for at := range mostEnded + 3*endedSlack {
		given.taken(rows(false, fmt.Sprint("e", at)))
		if len(given.now) > mostEnded+endedSlack+1 {
			t.Fatalf("it remembers %d", len(given.now))
		}
	}
	given.broke()
	if len(given.earlier) != mostEnded+1 || !given.has("r1") || given.has(fmt.Sprint("e", 3*endedSlack-1)) {
		t.Fatalf("it remembers %d", len(given.earlier))
	}
}

// A watch of several drivers names what one that was away has no more, and all that was of one that left the list, but for
// what is at its new address (R118).
func TestAWatchOfSeveralDriversNamesWhatIsGone(t *testing.T) {
	defer func(look, age time.Duration) { lookAgain, fresh = look, age }(lookAgain, fresh)
	lookAgain, fresh = 20*time.Millisecond, 0
	leakFree(t)
	known, again := &listing{}, make(chan struct{})
	restart := sync.OnceFunc(func() { close(again) })
	var broken atomic.Bool
	watches := []func(driverv1.RolloutService_WatchRolloutsServer) error{
		func(stream driverv1.RolloutService_WatchRolloutsServer) error { return stream.Send(rows(true, "r0")) },
		func(stream driverv1.RolloutService_WatchRolloutsServer) error {
			if broken.CompareAndSwap(false, true) {
				if err := stream.Send(rows(true, "r1", "r2", "r3")); err != nil {
					return err
				}
				<-again
				return status.Error(codes.Unavailable, "it restarts")
			}
			return stream.Send(rows(true, "r2", "r3"))
		},
		func(stream driverv1.RolloutService_WatchRolloutsServer) error { return stream.Send(rows(true, "r3")) },
	}
	drivers := make([]*server, len(watches))
	members := make([]*opsv1.Member, len(watches))
	for at, watch := range watches {
		drivers[at] = &server{watchAll: func(
			_ *driverv1.WatchRolloutsRequest, stream driverv1.RolloutService_WatchRolloutsServer,
		) error {
			if err := watch(stream); err != nil {
				return err
			}
			<-stream.Context().Done()
			return stream.Context().Err()
		}}
		if at == 0 {
			drivers[at].operations = known
		}
		drivers[at].listen(t, "127.0.0.1:0")
		members[at] = &opsv1.Member{
			Service: "driver", Name: fmt.Sprint("d", at), Address: drivers[at].address, State: opsv1.MemberState_MEMBER_STATE_UP,
		}
	}
	known.list(members[:2]...)
	ps := connectTo(t, drivers[0].address)
	t.Cleanup(func() {
		for _, driver := range drivers {
			driver.grpc.Stop()
		}
	})
	seen := map[string]int{}
	for changes, err := range ps.Rollouts.Watch(bounded(t), nil) {
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range changes.GetRollouts() {
			seen[row.GetRolloutId()]++
		}
		if seen["r1"] == 1 && seen["r0"] == 1 {
			restart()
		}
		switch gone := changes.GetGoneRolloutIds(); {
		case slices.Equal(gone, []string{"r1"}):
			known.list(members...)
		case slices.Equal(gone, []string{"r2"}):
			return
		case len(gone) > 0:
			t.Fatalf("%v are gone", gone)
		}
		if seen["r3"] == 3 {
			known.list(members[0], members[2])
		}
	}
	t.Fatal("the watch ended")
}
