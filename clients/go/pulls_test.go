package penstock

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
	opsv1 "penstock.example/penstock/gen/ops/v1"
)

// A gate that goes away once another one has leased calls is asked once more and not waited for: the leases of those calls run
// meanwhile (R117).
func TestAGateThatGoesAwayHoldsBackNoLeasedCalls(t *testing.T) {
	leakFree(t)
	known, asked := &listing{}, make(chan struct{})
	var settled atomic.Int64
	leases := func(ctx context.Context, _ *interceptionv1.LeaseCallsRequest) (*interceptionv1.LeaseCallsResponse, error) {
		select {
		case <-asked:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return &interceptionv1.LeaseCallsResponse{Calls: []*interceptionv1.ModelCall{{CallId: "a", LeaseId: "lease-a"}}}, nil
	}
	leaves := func(ctx context.Context, request *interceptionv1.LeaseCallsRequest) (*interceptionv1.LeaseCallsResponse, error) {
		if request.GetWait().AsDuration() > 0 {
			close(asked)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		settled.Add(1)
		if deadline, has := ctx.Deadline(); !has || time.Until(deadline) > 10*time.Second {
			t.Errorf("it is waited for until %v (%t)", deadline, has)
		}
		return nil, status.Error(codes.Unavailable, "the gate restarts")
	}
	gates := []*server{{operations: known, lease: leases}, {lease: leaves}}
	for _, gate := range gates {
		gate.listen(t, "127.0.0.1:0")
		t.Cleanup(gate.grpc.Stop)
	}
	up := opsv1.MemberState_MEMBER_STATE_UP
	known.list(gateAt(gates[0], "g0", up), gateAt(gates[1], "g1", up))
	calls, err := connectTo(t, gates[0].address).LeaseCalls(bounded(t), Selector{}, LeaseOptions{})
	if err != nil || len(calls) != 1 || calls[0].ID() != "a" {
		t.Fatalf("%v, %v", calls, err)
	}
	if settled.Load() != 1 {
		t.Fatalf("the gate that was given up was asked %d times more", settled.Load())
	}
}
