package penstock

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

// sentCall is a call as a gate sends it to a session with suffix_only.
func sentCall(id, branch, parent string, omitted int, prompt ...int32) *interceptionv1.ModelCall {
	whole := EncodeTokenIDs(prompt)
	digest := sha256.Sum256(whole)
	return &interceptionv1.ModelCall{
		CallId: id, LeaseId: "lease-" + id, RolloutId: "r1", BranchId: branch, ParentCallId: some(parent),
		PromptTokenIds: whole[4*omitted:], PromptCount: uint32(len(prompt)), OmittedPrefixCount: uint32(omitted),
		PromptSha256: digest[:],
	}
}

func (c *conversation) calls(calls ...*interceptionv1.ModelCall) {
	frame := &interceptionv1.InterceptResponse_Calls{Calls: &interceptionv1.Calls{Calls: calls}}
	c.say(&interceptionv1.InterceptResponse{Frame: frame})
}

func wantPrompt(t *testing.T, session *Session, want ...int32) {
	t.Helper()
	if call := nextCall(t, session); !slices.Equal(call.PromptTokenIDs(), want) {
		t.Fatalf("the prompt of %s came as %v", call.ID(), call.PromptTokenIDs())
	}
}

// A session hands out whole prompts, of which only the rest was sent; what is not known is asked for (R32, R82).
func TestASessionPutsPromptsTogether(t *testing.T) {
	gate, session, talk := opened(t)
	gate.getCall = func(_ context.Context, request *interceptionv1.GetCallRequest) (*interceptionv1.GetCallResponse, error) {
		if request.GetCallId() != "d" || request.GetRolloutId() != "r1" {
			return nil, fmt.Errorf("asked for was %v", request)
		}
		return &interceptionv1.GetCallResponse{PromptTokenIds: EncodeTokenIDs([]int32{4, 4})}, nil
	}
	talk.calls(sentCall("a", "b1", "", 0, 1, 2, 3), sentCall("b", "b1", "a", 3, 1, 2, 3, 5, -1, 7))
	talk.calls(sentCall("c", "b2", "b", 2, 1, 2, 9), sentCall("d", "b2", "a", 1, 4, 4))
	wantPrompt(t, session, 1, 2, 3)
	wantPrompt(t, session, 1, 2, 3, 5, -1, 7)
	wantPrompt(t, session, 1, 2, 9)
	wantPrompt(t, session, 4, 4)
}

// A call whose prompt cannot be had comes again on a new stream, whole (R22, R82).
func TestAnUnknownPromptBreaksTheStream(t *testing.T) {
	gate, session, talk := opened(t)
	gate.getCall = func(context.Context, *interceptionv1.GetCallRequest) (*interceptionv1.GetCallResponse, error) {
		return nil, status.Error(codes.NotFound, "no such call")
	}
	talk.calls(sentCall("b", "b1", "a", 1, 1, 2))
	again := gate.session(t)
	again.welcome(&interceptionv1.Welcome{SessionId: "second", Resumed: true, HeldCallIds: []string{"b"}})
	again.calls(sentCall("b", "b1", "a", 0, 1, 2))
	wantPrompt(t, session, 1, 2)
}

// Prompts are kept of sixteen branches of a rollout, within a number of bytes, until the rollout is closed (R32).
func TestKeptPromptsAreBounded(t *testing.T) {
	kept := newPrompts(nil, nil)
	kept.most = 4 * 70
	for i := range 20 {
		message := sentCall(fmt.Sprint("c", i), fmt.Sprint("b", i), "", 0, 1, 2, 3)
		if err := kept.complete(bounded(t), message); err != nil {
			t.Fatal(err)
		}
	}
	if branches := kept.rollouts["r1"].branches; len(branches) != 16 || kept.bytes != 16*12 || branches["b3"].prompt != nil {
		t.Fatalf("%d branches with %d bytes are kept", len(branches), kept.bytes)
	}
	large := sentCall("d", "b1", "", 0, make([]int32, 60)...)
	large.RolloutId = "r2"
	if err := kept.complete(bounded(t), large); err != nil || kept.rollouts["r1"] != nil || kept.bytes != 240 {
		t.Fatalf("%v, and %d bytes are kept", err, kept.bytes)
	}
	kept.forget("r2", "r9")
	if len(kept.rollouts) != 0 || kept.bytes != 0 {
		t.Fatalf("%d bytes are kept of closed rollouts", kept.bytes)
	}
	unknown := sentCall("e", "b1", "d", 1, 1, 2)
	unknown.PromptSha256 = nil
	if err := kept.complete(bounded(t), unknown); err != nil || len(kept.rollouts) != 0 {
		t.Fatal("a gate that leaves nothing out has no digest")
	}
}
