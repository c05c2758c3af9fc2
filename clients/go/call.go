package penstock

import (
	"context"
	"fmt"
	"sync"

	chatv1 "penstock.example/penstock/gen/chat/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

// Call is a model call of an agent, leased to a session, or by LeaseCalls, until it is answered. Answer it once: Deliver, Fail, Delegate or
// Release. It is safe for use by many goroutines.
type Call struct {
	// Message is the call as the gate sent it.
	Message *interceptionv1.ModelCall

	leasedAt *service // of LeaseCalls, the gate; else nil

	send   func(context.Context, *interceptionv1.CallResult) error
	decode sync.Once
	prompt []int32
	ending sync.Once
	ended  chan struct{}
	why    string // set before ended is closed
}

// ID is the call's id.
func (c *Call) ID() string { return c.Message.GetCallId() }

// RolloutID is the rollout whose agent asks.
func (c *Call) RolloutID() string { return c.Message.GetRolloutId() }

// PolicyID is the policy that shall answer, where the rollout has several models; empty = it has one.
func (c *Call) PolicyID() string { return c.Message.GetPolicyId() }

// Index is its position among the rollout's calls, from 0.
func (c *Call) Index() int { return int(c.Message.GetIndex()) }

// PromptTokenIDs is the whole prompt: the conversation exactly as it was sampled, then the tokens of the new messages.
// Give it to an engine as it is, and do not change it. Empty where the rollout's source has no tokenizer.
func (c *Call) PromptTokenIDs() []int32 {
	c.decode.Do(func() { c.prompt = viewedTokenIDs(c.Message.GetPromptTokenIds()) })
	return c.prompt
}

// Sampling is as the agent asked, max_tokens bounded by the budgets and the context.
func (c *Call) Sampling() *chatv1.Sampling { return c.Message.GetSampling() }

// Ended is closed when the call needs no answer any more: answered, cancelled, or lost. Stop generating for it then.
func (c *Call) Ended() <-chan struct{} { return c.ended }

// EndReason says why the call needs no answer any more (ANSWERED, ROLLOUT_CLOSED, AGENT_GONE, ...); empty while it does.
func (c *Call) EndReason() string {
	select {
	case <-c.ended:
		return c.why
	default:
		return ""
	}
}

// Deliver answers the call. It returns when the gate has the completion on disk: it will neither be lost nor asked for
// again, whatever breaks. When the context is over first the answer stays under way.
//
// Errors, of all four: ErrInvalidCompletion and ErrStalePolicy, after which the call may be answered again;
// ErrAlreadyDelivered, ErrCallEnded, ErrNotLeased and ErrUnknownCall, after which it is over; ErrSessionLost.
func (c *Call) Deliver(ctx context.Context, completion *chatv1.Completion) error {
	return c.answer(ctx, &interceptionv1.CallResult{
		Result: &interceptionv1.CallResult_Completion{Completion: completion},
	})
}

// Fail says that the trainer cannot answer. The reason (UPPER_SNAKE) and the message are recorded, the agent sees
// neither; retriable asks it to try again.
func (c *Call) Fail(ctx context.Context, reason, message string, retriable bool) error {
	failure := &interceptionv1.CallFailure{Reason: reason, Message: message, Retriable: retriable}
	return c.answer(ctx, &interceptionv1.CallResult{
		Result: &interceptionv1.CallResult_Failure{Failure: failure},
	})
}

// Delegate lets the rollout's model source answer; the sampling, which may be nil, replaces field by field what the agent
// asked for.
func (c *Call) Delegate(ctx context.Context, sampling *chatv1.Sampling) error {
	delegation := &interceptionv1.Delegation{SamplingOverride: sampling}
	return c.answer(ctx, &interceptionv1.CallResult{
		Result: &interceptionv1.CallResult_Delegation{Delegation: delegation},
	})
}

// Release puts the call back into the queue, for another session.
func (c *Call) Release(ctx context.Context) error {
	return c.answer(ctx, &interceptionv1.CallResult{
		Result: &interceptionv1.CallResult_Release{Release: &interceptionv1.Release{}},
	})
}

func (c *Call) answer(ctx context.Context, result *interceptionv1.CallResult) error {
	result.CallId, result.RolloutId = c.ID(), c.RolloutID()
	if c.EndReason() == "ANSWERED" {
		return &Error{
			Kind: ErrAlreadyDelivered, Reason: "ALREADY_DELIVERED",
			Message: fmt.Sprintf("Call %s was answered already", c.ID()),
		}
	}
	return c.send(ctx, result)
}

// end marks the call as over.
func (c *Call) end(reason string) {
	c.ending.Do(func() {
		c.why = reason
		close(c.ended)
	})
}
