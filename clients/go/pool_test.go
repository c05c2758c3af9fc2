package penstock

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// A service bounds the calls of one connection; a client with more opens another, and none waits (R148).
func TestAClientWithMoreCallsThanAConnectionMayHaveOpensAnother(t *testing.T) {
	leakFree(t)
	s := &server{options: []grpc.ServerOption{grpc.MaxConcurrentStreams(256)}}
	const calls = 600
	var arrived sync.WaitGroup
	arrived.Add(calls)
	s.getRollout = func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
		arrived.Done()
		arrived.Wait() // for all the others: nobody is answered while one of them waits for a place
		return &driverv1.GetRolloutResponse{Rollout: &driverv1.Rollout{}}, nil
	}
	s.listen(t, "127.0.0.1:0")
	ps := connectTo(t, s.address)
	t.Cleanup(func() { s.grpc.Stop() })
	ctx := bounded(t)
	failures := make(chan error, calls)
	for range calls {
		go func() {
			_, err := ps.Rollouts.Get(ctx, "r")
			failures <- err
		}()
	}
	for range calls {
		if err := <-failures; err != nil {
			t.Fatal(err)
		}
	}
	counted(t, ps)
}

// A call that fails before it has a stream takes no place for ever, whole or streamed.
func TestACallThatNeverHadAStreamIsNotCounted(t *testing.T) {
	leakFree(t)
	ps := connectTo(t, "127.0.0.1:1")
	// gRPC refuses the metadata before it makes a stream.
	ctx := metadata.AppendToOutgoingContext(bounded(t), "not a key", "x")
	if _, err := ps.Rollouts.Get(ctx, "r"); err == nil {
		t.Fatal("it was answered")
	}
	for _, err := range (&Rollout{"r", ps, givenDriver(ps)}).Events(ctx, 0) {
		if err == nil {
			t.Fatal("it was answered")
		}
	}
	counted(t, ps)
}

// counted fails the test where a connection counts calls that are over.
func counted(t *testing.T, ps *Client) {
	t.Helper()
	opened := ps.connections[0]
	opened.mu.Lock()
	defer opened.mu.Unlock()
	for at, open := range opened.calls {
		if open != 0 {
			t.Errorf("connection %d still counts %d calls", at, open)
		}
	}
}
