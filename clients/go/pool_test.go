package penstock

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc"

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
	opened := ps.connections[0]
	opened.mu.Lock()
	defer opened.mu.Unlock()
	for at, open := range opened.calls {
		if open != 0 {
			t.Errorf("connection %d still counts %d calls", at, open)
		}
	}
}
