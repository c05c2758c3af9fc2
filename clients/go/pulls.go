package penstock

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

// LeaseOptions are settings of LeaseCalls; the zero value is one call, waited for for 20 s, leased for 5 min.
type LeaseOptions struct {
	// MaxCalls is how many calls are leased at most, to 256.
	MaxCalls int
	// Wait is how long a call is waited for where none is there.
	Wait time.Duration
	// Lease is how long the calls stay leased; at most 1 h.
	Lease time.Duration
	// Identity is who leases them, for people. Empty = the machine's name.
	Identity string
	// PolicyVersion is the newest weights that the trainer has; nil = unknown.
	PolicyVersion *int64
	// Messages and Bodies have calls carry messages and tools, and the agent's request body.
	Messages, Bodies bool
}

// LeaseCalls leases calls that the selector wants, at any of the gates, without a session: for programs that would rather not hold a stream. It is
// empty where none came in time. Answer each call before its lease ends, or extend that: ExtendLeases. It is repeated while the
// gate is away, and leases no call twice.
//
// Errors: ErrResourceExhausted, SESSION_LIMIT.
func (c *Client) LeaseCalls(ctx context.Context, selector Selector, options LeaseOptions) ([]*Call, error) {
	largest := int64(MaxMessageBytes)
	request := &interceptionv1.LeaseCallsRequest{
		RequestId: requestID(), Selector: selector.message(), Identity: options.Identity, MaxCalls: window(options.MaxCalls),
		PolicyVersion: options.PolicyVersion, MaxMessageBytes: &largest,
		View: &interceptionv1.CallView{Messages: options.Messages, Body: options.Bodies},
	}
	if request.Identity == "" {
		request.Identity, _ = os.Hostname() // a machine without a name is nobody's name
	}
	wait := 20 * time.Second
	if options.Wait > 0 {
		wait = options.Wait
	}
	if options.Lease > 0 {
		request.Lease = durationpb.New(options.Lease)
	}
	request.Wait = durationpb.New(wait)
	// The gate waits for at most 80 % of the call's deadline.
	timeout := wait*5/4 + callTimeout
	gates, err := c.gates(ctx)
	if err != nil {
		return nil, err
	}
	if len(gates) == 1 {
		return c.leaseAt(ctx, gates[0], request, timeout, true)
	}
	// They are all asked at once. When one has calls the others are asked no longer: what they have leased meanwhile is taken too,
	// or put back where it is too much.
	finding, found := context.WithCancel(ctx)
	defer found()
	leased, failures := make([][]*Call, len(gates)), make([]error, len(gates))
	var asking sync.WaitGroup
	for at, gate := range gates {
		asking.Add(1)
		go func() {
			defer asking.Done()
			calls, err := c.leaseAt(finding, gate, request, timeout, true)
			switch {
			case err == nil && len(calls) > 0, err != nil && !isAway(err) && finding.Err() == nil:
				found()
			case err != nil && finding.Err() != nil && ctx.Err() == nil:
				// The same request again: its answer has what the gate leased to it before it was cancelled. Where there is none the
				// leases end. It is not repeated: what another gate has leased is held back meanwhile.
				again := proto.Clone(request).(*interceptionv1.LeaseCallsRequest)
				again.Wait = durationpb.New(0)
				calls, err = c.leaseAt(ctx, gate, again, settleTimeout, false)
				if err != nil {
					calls, err = nil, nil
				}
			}
			leased[at], failures[at] = calls, err
		}()
	}
	asking.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fromRPC(ctx, err, anyone)
	}
	calls := slices.Concat(leased...)
	if len(calls) == 0 {
		return nil, leaseFailure(failures)
	}
	most := max(1, options.MaxCalls)
	for len(calls) > most {
		_ = calls[len(calls)-1].Release(ctx) // where that fails its lease ends
		calls = calls[:len(calls)-1]
	}
	return calls, nil
}

const settleTimeout = 10 * time.Second

// leaseFailure is the error of a gate that refused, or of the first where all are away.
func leaseFailure(failures []error) error {
	isFine := false
	for _, err := range failures {
		if err != nil && !isAway(err) {
			return err
		}
		isFine = isFine || err == nil
	}
	if isFine {
		return nil
	}
	return failures[0]
}

// gates are those that can be reached, as far as the driver knows.
func (c *Client) gates(ctx context.Context) ([]*service, error) {
	members, err := c.cluster.members(ctx, "interception", fresh, false)
	if err != nil {
		// A token that the driver refuses may be valid at the given gate.
		if ctx.Err() != nil || !isAway(err) && !errors.Is(err, ErrUnauthenticated) && !errors.Is(err, ErrPermissionDenied) {
			return nil, err
		}
		return []*service{c.services["interception"]}, nil
	}
	var reachable, all []*service
	for _, one := range members {
		all = append(all, one.service)
		if !one.lost {
			reachable = append(reachable, one.service)
		}
	}
	if len(reachable) == 0 {
		return all, nil
	}
	return reachable, nil
}

func (c *Client) leaseAt(
	ctx context.Context, at *service, request *interceptionv1.LeaseCallsRequest, timeout time.Duration, repeatable bool,
) ([]*Call, error) {
	stub := interceptionv1.NewInterceptServiceClient(at.conn)
	answer, err := call(ctx, at, stub.LeaseCalls, request, timeout, repeatable)
	var calls []*Call
	for _, message := range answer.GetCalls() {
		calls = append(calls, leasedCall(at, message))
	}
	return calls, err
}

// leasedCall is a call whose answers go out by CompleteCalls.
func leasedCall(at *service, message *interceptionv1.ModelCall) *Call {
	leased := &Call{Message: message, ended: make(chan struct{}), leasedAt: at}
	leased.send = func(ctx context.Context, result *interceptionv1.CallResult) error {
		result.LeaseId = message.GetLeaseId()
		if _, err := writable(result); err != nil {
			return err
		}
		request := &interceptionv1.CompleteCallsRequest{Results: []*interceptionv1.CallResult{result}}
		answer, err := complete(ctx, at, request)
		if err != nil {
			return err
		}
		for _, rejected := range answer.GetAcknowledged().GetRejected() {
			failure := rejection(rejected)
			if !failure.AnswerAgain() {
				leased.end(failure.Reason)
			}
			return failure
		}
		leased.end("ANSWERED")
		return nil
	}
	return leased
}

// ExtendLeases extends the leases of calls by their length, each at its gate; it returns the calls whose leases have ended.
//
// Errors: ErrInvalidArgument, NOT_LEASED: a call is not of LeaseCalls.
func (c *Client) ExtendLeases(ctx context.Context, calls ...*Call) ([]*Call, error) {
	requests := map[*service]*interceptionv1.CompleteCallsRequest{}
	for _, leased := range calls {
		at := leased.leasedAt
		if at == nil {
			return nil, &Error{
				Kind: ErrInvalidArgument, Reason: "NOT_LEASED", Message: "Only calls of LeaseCalls have leases of their own",
			}
		}
		if requests[at] == nil {
			requests[at] = &interceptionv1.CompleteCallsRequest{}
		}
		requests[at].ExtendLeaseIds = append(requests[at].ExtendLeaseIds, leased.Message.GetLeaseId())
	}
	lost := map[string]bool{}
	for at, request := range requests {
		answer, err := complete(ctx, at, request)
		if err != nil {
			return nil, err
		}
		for _, id := range answer.GetLostLeaseIds() {
			lost[id] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(calls), func(call *Call) bool { return !lost[call.Message.GetLeaseId()] }), nil
}

func complete(
	ctx context.Context, at *service, request *interceptionv1.CompleteCallsRequest,
) (*interceptionv1.CompleteCallsResponse, error) {
	stub := interceptionv1.NewInterceptServiceClient(at.conn)
	return call(ctx, at, stub.CompleteCalls, request, callTimeout, true)
}
