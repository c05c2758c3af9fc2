package penstock

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

const (
	// branchesKept are the branches of a rollout whose last prompt is kept, as CallView.suffix_only demands.
	branchesKept = 16
	// promptBytesKept are the bytes of prompts that are kept; beyond, those of the rollouts whose last call is oldest are
	// dropped.
	promptBytesKept = 256 << 20

	promptTimeout = 30 * time.Second
)

// prompts are the last prompt of each of the newest branches of each open rollout: a session's gate leaves out of later
// calls what it sent on the same stream. Only the goroutine that reads the stream uses it.
type prompts struct {
	service *service
	stub    interceptionv1.InterceptServiceClient
	most    int

	rollouts map[string]*keptRollout
	bytes    int
	serial   int
}

type keptRollout struct {
	branches map[string]keptPrompt
	serial   int
}

type keptPrompt struct {
	callID string
	prompt []byte
	serial int
}

func newPrompts(s *service, stub interceptionv1.InterceptServiceClient) *prompts {
	return &prompts{service: s, stub: stub, most: promptBytesKept, rollouts: map[string]*keptRollout{}}
}

// complete makes a call carry its whole prompt. For each call of a stream, in their order. One that cannot be put together,
// or has another digest than the gate's, is fetched: none is guessed.
//
// Errors: ErrUnavailable, PROMPT_UNKNOWN, where that fails: a new stream begins with whole prompts.
func (p *prompts) complete(ctx context.Context, message *interceptionv1.ModelCall) *Error {
	if len(message.GetPromptSha256()) == 0 {
		return nil // of a gate that leaves nothing out, or text
	}
	if omitted := int(message.GetOmittedPrefixCount()); omitted > 0 {
		start := p.start(message)
		whole := append(bytes.Clone(start[:min(len(start), 4*omitted)]), message.GetPromptTokenIds()...)
		if !isPromptOf(message, whole) {
			request := &interceptionv1.GetCallRequest{CallId: message.GetCallId(), RolloutId: message.GetRolloutId()}
			answer, err := call(ctx, p.service, p.stub.GetCall, request, promptTimeout, true)
			whole = answer.GetPromptTokenIds()
			if err != nil || !isPromptOf(message, whole) {
				return &Error{
					Kind: ErrUnavailable, Reason: "PROMPT_UNKNOWN", cause: err,
					Message: fmt.Sprintf("The prompt of call %s is not known", message.GetCallId()),
				}
			}
		}
		message.PromptTokenIds, message.OmittedPrefixCount = whole, 0
	}
	p.keep(message)
	return nil
}

// start is the prompt of a call's parent; nil where it is not kept.
func (p *prompts) start(message *interceptionv1.ModelCall) []byte {
	if kept := p.rollouts[message.GetRolloutId()]; kept != nil {
		for _, branch := range kept.branches {
			if branch.callID == message.GetParentCallId() {
				return branch.prompt
			}
		}
	}
	return nil
}

func (p *prompts) keep(message *interceptionv1.ModelCall) {
	kept := p.rollouts[message.GetRolloutId()]
	if kept == nil {
		kept = &keptRollout{branches: map[string]keptPrompt{}}
		p.rollouts[message.GetRolloutId()] = kept
	}
	p.serial++
	kept.serial = p.serial
	p.bytes += len(message.GetPromptTokenIds()) - len(kept.branches[message.GetBranchId()].prompt)
	kept.branches[message.GetBranchId()] = keptPrompt{message.GetCallId(), message.GetPromptTokenIds(), p.serial}
	if len(kept.branches) > branchesKept {
		oldest := ""
		for id, branch := range kept.branches {
			if oldest == "" || branch.serial < kept.branches[oldest].serial {
				oldest = id
			}
		}
		p.bytes -= len(kept.branches[oldest].prompt)
		delete(kept.branches, oldest)
	}
	for p.bytes > p.most {
		oldest := ""
		for id, rollout := range p.rollouts {
			if oldest == "" || rollout.serial < p.rollouts[oldest].serial {
				oldest = id
			}
		}
		p.forget(oldest)
	}
}

// forget drops what is kept of closed rollouts.
func (p *prompts) forget(rolloutIDs ...string) {
	for _, id := range rolloutIDs {
		if kept := p.rollouts[id]; kept != nil {
			for _, branch := range kept.branches {
				p.bytes -= len(branch.prompt)
			}
			delete(p.rollouts, id)
		}
	}
}

// clear drops everything: a new stream begins with whole prompts.
func (p *prompts) clear() {
	p.rollouts, p.bytes = map[string]*keptRollout{}, 0
}

// isPromptOf: whether these are the tokens that the gate has for the call.
func isPromptOf(message *interceptionv1.ModelCall, prompt []byte) bool {
	digest := sha256.Sum256(prompt)
	return bytes.Equal(digest[:], message.GetPromptSha256())
}
