package penstock

import (
	"encoding/binary"
	"math"
	"unsafe"

	chatv1 "penstock.example/penstock/gen/chat/v1"
	trajectoryv1 "penstock.example/penstock/gen/trajectory/v1"
)

// TokenIDs reads little-endian int32, as every token id of the protos is written.
func TokenIDs(data []byte) []int32 {
	ids := make([]int32, len(data)/4)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return ids
}

// viewedTokenIDs is TokenIDs without a copy where the bytes lie as the machine has them: not to be changed, by nobody.
func viewedTokenIDs(data []byte) []int32 {
	if len(data) < 4 || !littleEndian || uintptr(unsafe.Pointer(&data[0]))%unsafe.Alignof(int32(0)) != 0 {
		return TokenIDs(data)
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&data[0])), len(data)/4)
}

var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// EncodeTokenIDs is the reverse of TokenIDs.
func EncodeTokenIDs(ids []int32) []byte {
	data := make([]byte, 4*len(ids))
	for i, id := range ids {
		binary.LittleEndian.PutUint32(data[4*i:], uint32(id))
	}
	return data
}

// Logprobs reads little-endian float32, as every logprob of the protos is written.
func Logprobs(data []byte) []float32 {
	logprobs := make([]float32, len(data)/4)
	for i := range logprobs {
		logprobs[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return logprobs
}

// EncodeLogprobs is the reverse of Logprobs.
func EncodeLogprobs(logprobs []float32) []byte {
	data := make([]byte, 4*len(logprobs))
	for i, logprob := range logprobs {
		binary.LittleEndian.PutUint32(data[4*i:], math.Float32bits(logprob))
	}
	return data
}

// Sampled is a completion from an engine of your own: every token that it sampled, the stop token included, all by the
// weights of one policy version, with natural logarithms of the probabilities that they were drawn with (nil where there
// are none). Whatever else is known may be set in what it returns, for example the finish reason, which is STOP.
//
// Errors: ErrInvalidArgument, COMPLETION_SHAPE: there are logprobs, and not one for each token.
func Sampled(ids []int32, logprobs []float32, policyVersion int64) (*chatv1.Completion, error) {
	if logprobs != nil && len(logprobs) != len(ids) {
		return nil, &Error{
			Kind: ErrInvalidArgument, Reason: "COMPLETION_SHAPE",
			Message: "There is one logprob for each token, or none at all.",
		}
	}
	span := &chatv1.TokenSpan{
		TokenIds: EncodeTokenIDs(ids), Count: uint32(len(ids)), Logprobs: EncodeLogprobs(logprobs),
		LogprobsMode: chatv1.LogprobsMode_LOGPROBS_MODE_PROCESSED,
	}
	if logprobs == nil {
		span.LogprobsMode = chatv1.LogprobsMode_LOGPROBS_MODE_UNSPECIFIED
	}
	if len(ids) > 0 {
		span.Versions = []*chatv1.PolicyVersionSpan{{PolicyVersion: policyVersion, End: uint32(len(ids))}}
	}
	return &chatv1.Completion{
		Span: span, FinishReason: chatv1.FinishReason_FINISH_REASON_STOP, Engine: "trainer",
	}, nil
}

// TopLogprobs are alternatives, row after row: Count (at most 20) for each token, the likeliest first. A row with fewer ends
// with id -1 and logprob -Inf.
type TopLogprobs struct {
	Count    int
	IDs      []int32
	Logprobs []float32
}

// SetTop gives a completion the alternatives of its tokens.
//
// Errors: ErrInvalidArgument, COMPLETION_SHAPE: there are not Count of them for each token.
func SetTop(completion *chatv1.Completion, top TopLogprobs) error {
	span := completion.GetSpan()
	size := top.Count * int(span.GetCount())
	if span == nil || len(top.IDs) != size || len(top.Logprobs) != size {
		return &Error{
			Kind: ErrInvalidArgument, Reason: "COMPLETION_SHAPE",
			Message: "There are Count ids and logprobs for each token.",
		}
	}
	span.TopCount, span.TopTokenIds, span.TopLogprobs = uint32(top.Count), EncodeTokenIDs(top.IDs), EncodeLogprobs(top.Logprobs)
	if span.LogprobsMode == chatv1.LogprobsMode_LOGPROBS_MODE_UNSPECIFIED {
		span.LogprobsMode = chatv1.LogprobsMode_LOGPROBS_MODE_PROCESSED
	}
	return nil
}

// Top reads the alternatives of a span or of a sample; nil where there are none, or where they were left out.
func Top(message interface {
	GetTopCount() uint32
	GetTopTokenIds() []byte
	GetTopLogprobs() []byte
}) *TopLogprobs {
	if len(message.GetTopTokenIds()) == 0 {
		return nil
	}
	return &TopLogprobs{
		int(message.GetTopCount()), TokenIDs(message.GetTopTokenIds()), Logprobs(message.GetTopLogprobs()),
	}
}

// Injected is a completion without tokens: the agent is shown it, it is recorded as injected, and never trained on.
func Injected(text string, calls ...*chatv1.ToolCall) *chatv1.Completion {
	completion := &chatv1.Completion{
		Message:      &chatv1.Message{Role: chatv1.Role_ROLE_ASSISTANT},
		FinishReason: chatv1.FinishReason_FINISH_REASON_STOP, Engine: "trainer",
	}
	if text != "" {
		part := &chatv1.Part{Part: &chatv1.Part_Text{Text: &chatv1.Text{Text: text}}}
		completion.Message.Parts = append(completion.Message.Parts, part)
	}
	for _, call := range calls {
		completion.FinishReason = chatv1.FinishReason_FINISH_REASON_TOOL_CALLS
		part := &chatv1.Part{Part: &chatv1.Part_ToolCall{ToolCall: call}}
		completion.Message.Parts = append(completion.Message.Parts, part)
	}
	return completion
}

// Sample is what a trainer eats: one token sequence, root to leaf of a branch. The three slices are of one length;
// Logprobs is nil where the source gives none.
type Sample struct {
	// InputIDs are prompt and completions in one.
	InputIDs []int32
	// LossMask is true exactly on sampled tokens that may be trained.
	LossMask []bool
	// Logprobs are finite and <= 0 where LossMask is true, else 0.
	Logprobs []float32
	// Top are the alternatives of the tokens where LossMask is true, in order, and of no others; nil where there are none, or
	// they were not asked for (Rollout.TrajectoryWithTop).
	Top *TopLogprobs
	// TokenRewards are the verifier's for each token, 0 where it gave none; nil where it gave none for any. Where LossMask is
	// true, each is there once. Those of turns are in the turns.
	TokenRewards []float32
	// Message has the rest: versions, turns, weight, branch.
	Message *trajectoryv1.Sample
}

// Samples reads a trajectory's samples.
func Samples(trajectory *trajectoryv1.Trajectory) []Sample {
	samples := make([]Sample, len(trajectory.GetSamples()))
	for i, message := range trajectory.GetSamples() {
		sample := Sample{InputIDs: TokenIDs(message.GetInputIds()), Top: Top(message), Message: message}
		sample.LossMask = make([]bool, len(message.GetLossMask()))
		for j, bit := range message.GetLossMask() {
			sample.LossMask[j] = bit != 0
		}
		if len(message.GetLogprobs()) > 0 {
			sample.Logprobs = Logprobs(message.GetLogprobs())
		}
		if len(message.GetTokenRewards()) > 0 {
			sample.TokenRewards = Logprobs(message.GetTokenRewards())
		}
		samples[i] = sample
	}
	return samples
}
