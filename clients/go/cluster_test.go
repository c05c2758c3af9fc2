package penstock

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	opsv1 "penstock.example/penstock/gen/ops/v1"
)

// asking is a driver that is asked for others, and counts how often.
type asking struct {
	opsv1.UnimplementedOperationsServiceServer
	asked  atomic.Int64
	answer func(ctx context.Context) (*opsv1.GetServerInfoResponse, error)
}

func (a *asking) GetServerInfo(
	ctx context.Context, _ *opsv1.GetServerInfoRequest,
) (*opsv1.GetServerInfoResponse, error) {
	a.asked.Add(1)
	return a.answer(ctx)
}

func (a *asking) serve(t *testing.T) (string, *Client) {
	t.Helper()
	leakFree(t)
	s := &server{operations: a}
	s.listen(t, "127.0.0.1:0")
	t.Cleanup(s.grpc.Stop)
	return s.address, connectTo(t, s.address)
}

// waitingForMembers is how many goroutines wait for the list of members.
func waitingForMembers() int {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	waiting := 0
	for _, stack := range strings.Split(string(stacks), "\n\n") {
		state, _, _ := strings.Cut(stack, "\n")
		if strings.Contains(state, "[select") && strings.Contains(stack, "(*cluster).members(") {
			waiting++
		}
	}
	return waiting
}

// Many calls at once that find the list stale ask once; they share a failure too (R118).
func TestCallsThatWaitForTheListShareItsFailure(t *testing.T) {
	const many = 16
	answer := make(chan struct{})
	driver := &asking{answer: func(context.Context) (*opsv1.GetServerInfoResponse, error) {
		<-answer
		return nil, status.Error(codes.Unavailable, "it restarts")
	}}
	_, ps := driver.serve(t)
	ctx, failures := bounded(t), make(chan error, many)
	for range many {
		go func() {
			_, err := ps.cluster.members(ctx, "sandbox", fresh, false)
			failures <- err
		}()
	}
	until(t, func() bool { return waitingForMembers() == many })
	close(answer)
	for range many {
		if err := <-failures; !errors.Is(err, ErrUnavailable) {
			t.Error(err)
		}
	}
	if driver.asked.Load() != 1 {
		t.Fatalf("the driver was asked %d times", driver.asked.Load())
	}
}

// One that stops waiting for the list takes it from nobody; when all have stopped, the request ends (R32, R118).
func TestARequestForTheListLastsWhileSomebodyWaits(t *testing.T) {
	asked, gone := make(chan struct{}, 2), make(chan struct{})
	answer := make(chan struct{})
	driver := &asking{answer: func(ctx context.Context) (*opsv1.GetServerInfoResponse, error) {
		asked <- struct{}{}
		select {
		case <-answer:
			return &opsv1.GetServerInfoResponse{}, nil
		case <-ctx.Done():
			close(gone)
			return nil, ctx.Err()
		}
	}}
	_, ps := driver.serve(t)
	begin := func() (context.CancelFunc, chan error) {
		ctx, cancel := context.WithCancel(bounded(t))
		ended := make(chan error, 1)
		go func() {
			_, err := ps.cluster.members(ctx, "interception", 0, false)
			ended <- err
		}()
		return cancel, ended
	}
	stop, first := begin()
	<-asked
	_, second := begin()
	until(t, func() bool { return waitingForMembers() == 2 })
	stop()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	answer <- struct{}{}
	if err := <-second; err != nil || driver.asked.Load() != 1 {
		t.Fatalf("%v after %d questions", err, driver.asked.Load())
	}
	stop, third := begin()
	<-asked
	stop()
	if err := <-third; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	<-gone
}

// When all drivers are away each is asked once, and the list stays in use for as long as after an answer (R118).
func TestDriversThatAreAllAwayAreNotAskedAgainByEachCall(t *testing.T) {
	var away atomic.Bool
	driver := &asking{}
	address, ps := driver.serve(t)
	driver.answer = func(context.Context) (*opsv1.GetServerInfoResponse, error) {
		if away.Load() {
			return nil, status.Error(codes.Unavailable, "it restarts")
		}
		return &opsv1.GetServerInfoResponse{
			Server:  &opsv1.ServerInfo{Name: "d0"},
			Members: []*opsv1.Member{{Service: "driver", Name: "d0", Address: address}},
		}, nil
	}
	if _, err := ps.cluster.members(bounded(t), "driver", fresh, true); err != nil {
		t.Fatal(err)
	}
	away.Store(true)
	driver.asked.Store(0)
	ps.cluster.mu.Lock()
	ps.cluster.askedAt = time.Now().Add(-time.Hour)
	ps.cluster.mu.Unlock()
	for range 3 {
		if found, err := ps.cluster.members(bounded(t), "driver", fresh, true); err != nil || found[0].name != "d0" {
			t.Fatalf("%v, %v", found, err)
		}
	}
	if driver.asked.Load() != 1 {
		t.Fatalf("the driver was asked %d times", driver.asked.Load())
	}
}

// twoThatDrain are two drivers, which take nothing new the first times that they are asked, and a client of them.
func twoThatDrain(t *testing.T, times int64) (*Client, *atomic.Int64) {
	t.Helper()
	leakFree(t)
	known, asked := &listing{}, &atomic.Int64{}
	drivers := make([]*server, 2)
	for at := range drivers {
		drivers[at] = &server{operations: known}
		drivers[at].create = func(
			context.Context, *driverv1.CreateRolloutRequest,
		) (*driverv1.CreateRolloutResponse, error) {
			if asked.Add(1) <= times {
				return nil, refusal(t, codes.Unavailable, "it stops", &errdetails.ErrorInfo{Reason: draining})
			}
			return &driverv1.CreateRolloutResponse{Rollout: &driverv1.Rollout{RolloutId: "r"}}, nil
		}
		drivers[at].listen(t, "127.0.0.1:0")
		t.Cleanup(drivers[at].grpc.Stop)
	}
	up := opsv1.MemberState_MEMBER_STATE_UP
	known.list(
		&opsv1.Member{Service: "driver", Name: "d0", Address: drivers[0].address, State: up},
		&opsv1.Member{Service: "driver", Name: "d1", Address: drivers[1].address, State: up},
	)
	return connectTo(t, drivers[0].address), asked
}

// A creation fails with the error of the services if all of them drain for too long (R51, R117).
func TestSomethingNewWaitsForABoundedTimeWhileAllServicesDrain(t *testing.T) {
	defer func(before time.Duration) { allDrainFor = before }(allDrainFor)
	allDrainFor = 0
	ps, asked := twoThatDrain(t, 1<<20)
	_, err := ps.Rollouts.Create(bounded(t), &driverv1.RolloutSpec{}, "")
	var failure *Error
	if !errors.As(err, &failure) || failure.Reason != draining || asked.Load() != 1 {
		t.Fatalf("%v after %d requests", err, asked.Load())
	}
}

// Something new waits while all of several services drain, as where they are restarted in turn (R51, R117).
func TestSomethingNewWaitsWhileAllServicesDrain(t *testing.T) {
	ps, asked := twoThatDrain(t, 5)
	for _, id := range []string{"", "chosen"} {
		asked.Store(0)
		if _, err := ps.Rollouts.Create(bounded(t), &driverv1.RolloutSpec{}, id); err != nil || asked.Load() != 6 {
			t.Fatalf("%q: %v after %d requests", id, err, asked.Load())
		}
	}
}
