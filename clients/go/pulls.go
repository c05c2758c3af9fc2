package penstock

import (
	"context"
	"os"
	"slices"
	"time"

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

// LeaseCalls leases calls that the selector wants, without a session: for programs that would rather not hold a stream. It is
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
		request.Wait = durationpb.New(wait)
	}
	if options.Lease > 0 {
		request.Lease = durationpb.New(options.Lease)
	}
	// The gate waits for at most 80 % of the call's deadline.
	answer, err := call(ctx, c.services["interception"], c.intercept.LeaseCalls, request, wait*5/4+callTimeout, true)
	var calls []*Call
	for _, message := range answer.GetCalls() {
		calls = append(calls, c.leased(message))
	}
	return calls, err
}

// leased is a call whose answers go out by CompleteCalls.
func (c *Client) leased(message *interceptionv1.ModelCall) *Call {
	leased := &Call{Message: message, ended: make(chan struct{})}
	leased.send = func(ctx context.Context, result *interceptionv1.CallResult) error {
		result.LeaseId = message.GetLeaseId()
		if _, err := writable(result); err != nil {
			return err
		}
		answer, err := c.complete(ctx, &interceptionv1.CompleteCallsRequest{Results: []*interceptionv1.CallResult{result}})
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

// ExtendLeases extends the leases of calls by their length; it returns the calls whose leases have ended.
func (c *Client) ExtendLeases(ctx context.Context, calls ...*Call) ([]*Call, error) {
	request := &interceptionv1.CompleteCallsRequest{}
	for _, leased := range calls {
		request.ExtendLeaseIds = append(request.ExtendLeaseIds, leased.Message.GetLeaseId())
	}
	answer, err := c.complete(ctx, request)
	lost := set(answer.GetLostLeaseIds())
	return slices.DeleteFunc(slices.Clone(calls), func(call *Call) bool { return !lost[call.Message.GetLeaseId()] }), err
}

func (c *Client) complete(
	ctx context.Context, request *interceptionv1.CompleteCallsRequest,
) (*interceptionv1.CompleteCallsResponse, error) {
	return call(ctx, c.services["interception"], c.intercept.CompleteCalls, request, callTimeout, true)
}
