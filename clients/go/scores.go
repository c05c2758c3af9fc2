package penstock

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	inferencev1 "penstock.example/penstock/gen/inference/v1"
)

const scoreTimeout = 5 * time.Minute

// ToScore is a sequence to score.
type ToScore struct {
	// TokenIDs are the whole sequence, at least 2 tokens.
	TokenIDs []int32
	// Start is the first token that is scored; 0 = 1.
	Start int
	// TopLogprobs is how many of the likeliest tokens to give at each position, 0 to 20.
	TopLogprobs int
	// Adapter is a loaded adapter; empty = the base weights.
	Adapter string
	// Temperature is that of the distribution; nil = 1.
	Temperature *float64
	// ExactVersion refuses unless exactly these weights score; nil = those that are in force.
	ExactVersion *int64
}

func (s *ToScore) message() *inferencev1.ScoreRequest {
	request := &inferencev1.ScoreRequest{
		TokenIds: EncodeTokenIDs(s.TokenIDs), Start: uint32(max(s.Start, 1)), Adapter: s.Adapter,
		Temperature: s.Temperature, ExactVersion: s.ExactVersion,
	}
	if s.TopLogprobs != 0 {
		most := window(s.TopLogprobs)
		request.TopLogprobs = &most
	}
	return request
}

// Score are logprobs of the tokens from ToScore.Start on.
type Score struct {
	Logprobs []float32
	// PolicyVersion is that of the weights that scored.
	PolicyVersion int64
	// Top are the likeliest tokens at each position; nil = they were not asked for.
	Top *TopLogprobs
}

func newScore(message *inferencev1.ScoreResponse) *Score {
	return &Score{Logprobs(message.GetLogprobs()), message.GetPolicyVersion(), Top(message)}
}

// Scored is a sequence's position in its batch, with its score, or its failure.
type Scored struct {
	Index   int
	Score   *Score
	Failure *Error
}

// Score gives logprobs of the tokens of a sequence.
//
// Errors: ErrFailedPrecondition, POLICY_VERSION_UNAVAILABLE; ErrInvalidArgument.
func (i *Inference) Score(ctx context.Context, sequence ToScore) (*Score, error) {
	at := i.client.services["inference"]
	answer, err := call(ctx, at, i.client.inference.Score, sequence.message(), scoreTimeout, true)
	if err != nil {
		return nil, err
	}
	return newScore(answer), nil
}

// ScoreBatch scores several sequences (1 to 1024, at most 64 MiB together) in one call; the engine computes them together as far
// as it can. The scores are in the order of their sequences.
//
// Errors: those of Score, for the first sequence that fails: the rest is not scored then; ErrInternal, STREAM_CUT.
func (i *Inference) ScoreBatch(ctx context.Context, sequences []ToScore) ([]*Score, error) {
	found := make([]*Score, len(sequences))
	count := 0
	for one, err := range i.ScoreEach(ctx, sequences) {
		switch {
		case err != nil:
			return nil, err
		case one.Failure != nil:
			return nil, one.Failure
		case one.Index < len(found):
			found[one.Index] = one.Score
			count++
		}
	}
	if count != len(sequences) {
		return nil, &Error{
			Kind: ErrInternal, Reason: "STREAM_CUT",
			Message: fmt.Sprintf("The batch ended with %d of %d scores", count, len(sequences)),
		}
	}
	return found, nil
}

// ScoreEach is ScoreBatch, but yields each sequence's score, or its failure, as they are ready. An error is the last thing that
// it yields.
func (i *Inference) ScoreEach(ctx context.Context, sequences []ToScore) iter.Seq2[Scored, error] {
	request := &inferencev1.ScoreBatchRequest{}
	for at := range sequences {
		request.Sequences = append(request.Sequences, sequences[at].message())
	}
	answers := streamed(ctx, i.client.services["inference"], i.client.inference.ScoreBatch, request)
	return func(yield func(Scored, error) bool) {
		for answer, err := range answers {
			one := Scored{Index: int(answer.GetIndex())}
			if failure := answer.GetFailure(); failure != nil {
				one.Failure = scoreFailure(failure)
			} else if err == nil {
				one.Score = newScore(answer.GetScore())
			}
			if !yield(one, err) || err != nil {
				return
			}
		}
	}
}

// scoreFailure is why one sequence of a batch was not scored.
func scoreFailure(message *inferencev1.ScoreFailure) *Error {
	failure := &Error{
		Kind: kinds[codes.Code(message.GetCode())], Reason: message.GetReason(), Message: message.GetMessage(),
	}
	if failure.Kind == "" {
		failure.Kind = ErrInternal
	}
	for _, text := range message.GetViolations() {
		field, description, _ := strings.Cut(text, ": ")
		failure.Violations = append(failure.Violations, Violation{field, description})
	}
	return failure
}
