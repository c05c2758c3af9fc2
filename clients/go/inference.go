package penstock

import (
	"context"

	"google.golang.org/protobuf/proto"

	chatv1 "penstock.example/penstock/gen/chat/v1"
	inferencev1 "penstock.example/penstock/gen/inference/v1"
)

// Inference is the inference service, as Client.Inference. What it can do beyond this has generated clients: Client.Conn.
//
// Where the gates have a list of engines, what changes an engine (weights, adapters, pauses) is done at all of them; questions
// and generations go to the one at the connection's address.
type Inference struct {
	client  *Client
	engines *engines
}

// Info says what is served, what it can do, which weights are in force.
func (i *Inference) Info(ctx context.Context) (*inferencev1.GetInfoResponse, error) {
	request := &inferencev1.GetInfoRequest{}
	return call(ctx, i.client.services["inference"], i.client.inference.GetInfo, request, callTimeout, true)
}

// Generate samples one completion of token ids; nil sampling = the engine's defaults. Requests of one session, such as a
// rollout's id ("" = none), reuse its cache. Cancelling the context aborts the generation. Thinking and
// ThinkingBudgetTokens of the sampling are left out, so that a call's own can be passed on: the prompt says whether to
// think, and no engine has a limit of thoughts.
func (i *Inference) Generate(
	ctx context.Context, prompt []int32, sampling *chatv1.Sampling, session string,
) (*chatv1.Completion, error) {
	if sampling != nil && (sampling.Thinking != nil || sampling.ThinkingBudgetTokens != nil) {
		sampling = proto.Clone(sampling).(*chatv1.Sampling)
		sampling.Thinking, sampling.ThinkingBudgetTokens = nil, nil
	}
	request := &inferencev1.GenerateRequest{
		RequestId: requestID(), SessionId: session, Sampling: sampling,
		Prompt: &inferencev1.GenerateRequest_TokenIds{TokenIds: EncodeTokenIDs(prompt)},
	}
	var done *chatv1.Completion
	each := func(message *inferencev1.GenerateResponse) bool {
		if message.GetDone() != nil {
			done = message.GetDone().GetCompletion()
		}
		return true
	}
	if err := receive(ctx, i.client.inference.Generate, request, each); err != nil {
		return nil, fromRPC(ctx, err, i.client.services["inference"])
	}
	if done == nil {
		return nil, &Error{Kind: ErrInternal, Reason: "STREAM_CUT", Message: "The generation ended without its result"}
	}
	return done, nil
}
