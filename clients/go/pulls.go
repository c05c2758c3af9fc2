package penstock

import (
	"context"
	"os"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	chatv1 "penstock.example/penstock/gen/chat/v1"
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

// LeasedCall is a model call that was leased without a session. Answer it before its lease ends, or Extend it.
type LeasedCall struct {
	// Message is the call as the gate sent it.
	Message *interceptionv1.ModelCall
	client  *Client
}

// LeaseCalls leases calls that the selector wants, without a session: for programs that would rather not hold a stream. It is
// empty where none came in time. It may be repeated by itself while the gate is away, and leases no call twice.
//
// Errors: ErrResourceExhausted, SESSION_LIMIT.
func (c *Client) LeaseCalls(ctx context.Context, selector Selector, options LeaseOptions) ([]*LeasedCall, error) {
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
	var calls []*LeasedCall
	for _, message := range answer.GetCalls() {
		calls = append(calls, &LeasedCall{message, c})
	}
	return calls, err
}

// CompleteCalls answers many leased calls in one message, each judged by itself, and extends leases by their length. A result
// names its call and lease, as LeasedCall.Result does.
func (c *Client) CompleteCalls(
	ctx context.Context, results []*interceptionv1.CallResult, extendLeaseIDs ...string,
) (*interceptionv1.CompleteCallsResponse, error) {
	request := &interceptionv1.CompleteCallsRequest{Results: results, ExtendLeaseIds: extendLeaseIDs}
	return call(ctx, c.services["interception"], c.intercept.CompleteCalls, request, callTimeout, true)
}

// PromptTokenIDs is the whole prompt: see Call.PromptTokenIDs.
func (l *LeasedCall) PromptTokenIDs() []int32 { return TokenIDs(l.Message.GetPromptTokenIds()) }

// Result is an answer to this call, for CompleteCalls.
func (l *LeasedCall) Result(completion *chatv1.Completion) *interceptionv1.CallResult {
	return &interceptionv1.CallResult{
		CallId: l.Message.GetCallId(), LeaseId: l.Message.GetLeaseId(),
		Result: &interceptionv1.CallResult_Completion{Completion: completion},
	}
}

// Deliver answers the call; it returns when the gate has the completion on disk.
//
// Errors, of all answers: those of Call.Deliver, but for ErrSessionLost.
func (l *LeasedCall) Deliver(ctx context.Context, completion *chatv1.Completion) error {
	return l.answer(ctx, l.Result(completion))
}

// Fail says that the trainer cannot answer: see Call.Fail.
func (l *LeasedCall) Fail(ctx context.Context, reason, message string, retriable bool) error {
	failure := &interceptionv1.CallFailure{Reason: reason, Message: message, Retriable: retriable}
	return l.answer(ctx, &interceptionv1.CallResult{Result: &interceptionv1.CallResult_Failure{Failure: failure}})
}

// Delegate lets the rollout's model source answer: see Call.Delegate.
func (l *LeasedCall) Delegate(ctx context.Context, sampling *chatv1.Sampling) error {
	delegation := &interceptionv1.Delegation{SamplingOverride: sampling}
	return l.answer(ctx, &interceptionv1.CallResult{Result: &interceptionv1.CallResult_Delegation{Delegation: delegation}})
}

// Release puts the call back into the queue.
func (l *LeasedCall) Release(ctx context.Context) error {
	release := &interceptionv1.CallResult_Release{Release: &interceptionv1.Release{}}
	return l.answer(ctx, &interceptionv1.CallResult{Result: release})
}

// Extend extends the lease by its length.
//
// Errors: ErrNotLeased: the lease has ended.
func (l *LeasedCall) Extend(ctx context.Context) error {
	answer, err := l.client.CompleteCalls(ctx, nil, l.Message.GetLeaseId())
	if err == nil && len(answer.GetLostLeaseIds()) > 0 {
		return &Error{
			Kind: ErrNotLeased, Reason: "NOT_LEASED", Message: "The lease of call " + l.Message.GetCallId() + " has ended",
		}
	}
	return err
}

func (l *LeasedCall) answer(ctx context.Context, result *interceptionv1.CallResult) error {
	result.CallId, result.LeaseId = l.Message.GetCallId(), l.Message.GetLeaseId()
	answer, err := l.client.CompleteCalls(ctx, []*interceptionv1.CallResult{result})
	for _, rejected := range answer.GetAcknowledged().GetRejected() {
		return rejection(rejected)
	}
	return err
}
