// Command trainer is a whole trainer: a policy that learns by reinforcement which command to run.
//
// The task hides a word; the policy is a softmax over four commands, each of which writes one word. A step is a group of
// rollouts: real agents in sandboxes, whose model calls this program answers with what its policy samples. What it learns
// from is what Penstock captured: the sampled tokens and the verifier's reward. Advantages are relative to the group, as
// in GRPO.
//
//	penstock up --model-dir DIR                        # in another terminal: any model, for its tokenizer
//	go run ./examples/trainer -steps 8
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"sync"

	"penstock.example/penstock"
	chatv1 "penstock.example/penstock/gen/chat/v1"
	driverv1 "penstock.example/penstock/gen/driver/v1"
	inferencev1 "penstock.example/penstock/gen/inference/v1"
	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

var words = []string{"amber", "birch", "cedar", "delta"}

const hidden = "cedar"

func main() {
	steps := flag.Int("steps", 8, "updates")
	size := flag.Int("n", 8, "rollouts in a group")
	seed := flag.Uint64("seed", 1, "decides what is sampled")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := train(ctx, *steps, *size, *seed); err != nil {
		fmt.Fprintln(os.Stderr, "trainer:", err)
		var failure *penstock.Error
		if errors.As(err, &failure) && failure.Advice() != "" {
			fmt.Fprintln(os.Stderr, failure.Advice())
		}
		os.Exit(1)
	}
}

func train(ctx context.Context, steps, size int, seed uint64) error {
	ps, err := penstock.Connect()
	if err != nil {
		return err
	}
	defer ps.Close()
	learner, err := newPolicy(ctx, ps)
	if err != nil {
		return err
	}
	for step := range steps {
		group, err := ps.Groups.Create(ctx, spec(), size)
		if err != nil {
			return err
		}
		if err := answer(ctx, group, learner, seed); err != nil {
			return err
		}
		results, err := group.Results(ctx)
		if err != nil {
			return err
		}
		reward, err := learner.update(results)
		if err != nil {
			return err
		}
		fmt.Printf("step %d: reward %.2f, P(%s) = %.2f\n", step+1, reward, hidden, learner.probabilities()[learner.arm(hidden)])
	}
	return nil
}

// answer answers every call of the group, each in a goroutine of its own.
func answer(ctx context.Context, group *penstock.Group, learner *policy, seed uint64) error {
	var answering sync.WaitGroup
	defer answering.Wait()
	for call, err := range group.Calls(ctx, penstock.WithPolicyVersion(learner.version)) {
		if err != nil {
			return err
		}
		answering.Add(1)
		go func() {
			defer answering.Done()
			ids, logprobs := learner.sample(call, seed)
			completion, err := penstock.Sampled(ids, logprobs, learner.version)
			if err == nil {
				err = call.Deliver(ctx, completion)
			}
			if err != nil && !errors.Is(err, penstock.ErrRejected) { // rejected: its rollout ended meanwhile, and says why
				fmt.Fprintln(os.Stderr, "trainer: an answer was not delivered:", err)
			}
		}()
	}
	return nil
}

func spec() *driverv1.RolloutSpec {
	judge := fmt.Sprintf(`[ "$(cat answer.txt)" = %s ]`, hidden)
	return &driverv1.RolloutSpec{
		Agent: &driverv1.AgentChoice{Name: "shell"},
		Task: &driverv1.Task{
			TaskId:      "hidden-word",
			Instruction: "Write the hidden word to answer.txt.",
			Verifier: &driverv1.Verifier{
				Commands: []*sandboxv1.Command{{Command: &sandboxv1.Command_Shell{Shell: judge}}},
				Reward:   &driverv1.Verifier_PassedShare{PassedShare: &driverv1.RewardPassedShare{}},
			},
		},
	}
}

// policy is a softmax over commands, and what each is in the model's tokens.
type policy struct {
	logits []float64
	arms   [][]int32
	done   []int32
	// version counts the updates.
	version int64
}

func newPolicy(ctx context.Context, ps *penstock.Client) (*policy, error) {
	p := &policy{logits: make([]float64, len(words))}
	turns := make([]*chatv1.Message, 0, len(words)+1)
	for _, word := range words {
		turns = append(turns, calling(fmt.Sprintf(`{"command": "echo %s > answer.txt"}`, word)))
	}
	for _, turn := range append(turns, saying("Done.")) {
		ids, err := tokens(ctx, ps, turn)
		if err != nil {
			return nil, err
		}
		p.arms = append(p.arms, ids)
	}
	p.arms, p.done = p.arms[:len(words)], p.arms[len(words)]
	return p, nil
}

func (p *policy) arm(word string) int { return slices.Index(words, word) }

func (p *policy) probabilities() []float64 {
	probabilities, total := make([]float64, len(p.logits)), 0.0
	for i, logit := range p.logits {
		probabilities[i] = math.Exp(logit - slices.Max(p.logits))
		total += probabilities[i]
	}
	for i := range probabilities {
		probabilities[i] /= total
	}
	return probabilities
}

// sample is a turn's tokens with their logprobs. The first turn is one of the commands, drawn as a whole: its first token
// carries the logprob of the choice, and the others follow from it. The second says that it is done.
func (p *policy) sample(call *penstock.Call, seed uint64) ([]int32, []float32) {
	if call.Index() > 0 {
		return p.done, make([]float32, len(p.done))
	}
	// By its place in the run, so that the order in which agents arrive changes nothing.
	place := uint64(call.Message.GetGroupIndex())<<32 + uint64(call.Index())
	draw := rand.New(rand.NewPCG(seed+uint64(p.version)<<8, place)).Float64()
	probabilities := p.probabilities()
	chosen := 0
	for draw -= probabilities[0]; draw > 0 && chosen+1 < len(p.arms); draw -= probabilities[chosen] {
		chosen++
	}
	logprobs := make([]float32, len(p.arms[chosen]))
	logprobs[0] = float32(math.Log(probabilities[chosen]))
	return p.arms[chosen], logprobs
}

// update takes a step of gradient ascent on the advantages of a group, and returns its mean reward. Rollouts that failed
// for reasons of the machine, and those without a reward, say nothing about the policy.
func (p *policy) update(results []*penstock.Result) (float64, error) {
	const rate = 4.0
	var chosen []int
	var rewards []float64
	mean := 0.0
	for _, result := range results {
		reward, graded := result.Reward()
		if failure := result.Failure(); !graded {
			fmt.Fprintf(os.Stderr, "trainer: %s has no reward: %s\n", result.Rollout.GetRolloutId(), failure.GetMessage())
			continue
		}
		arm, err := p.sampledArm(result)
		if err != nil {
			return 0, err
		}
		chosen, rewards, mean = append(chosen, arm), append(rewards, reward), mean+reward
	}
	if len(rewards) == 0 {
		return 0, errors.New("no rollout of the group was graded")
	}
	mean /= float64(len(rewards))
	probabilities := p.probabilities()
	for i, arm := range chosen {
		for k := range p.logits {
			gradient := -probabilities[k]
			if k == arm {
				gradient++
			}
			p.logits[k] += rate * (rewards[i] - mean) * gradient / float64(len(chosen))
		}
	}
	p.version++
	return mean, nil
}

// sampledArm is the command that a rollout's first turn was, by the tokens that were captured.
func (p *policy) sampledArm(result *penstock.Result) (int, error) {
	for _, sample := range result.Samples() {
		for _, turn := range sample.Message.GetTurns() {
			ids := sample.InputIDs[turn.GetStart():turn.GetEnd()]
			if arm := slices.IndexFunc(p.arms, func(arm []int32) bool { return slices.Equal(arm, ids) }); arm >= 0 {
				return arm, nil
			}
		}
	}
	return 0, fmt.Errorf("rollout %s has no turn of this policy", result.Rollout.GetRolloutId())
}

// tokens are what the model's template makes of an answer: what it adds behind a prompt, up to the token that ends a turn.
func tokens(ctx context.Context, ps *penstock.Client, answer *chatv1.Message) ([]int32, error) {
	info, err := ps.Inference.Info(ctx)
	if err != nil {
		return nil, err
	}
	asked := &chatv1.Message{Role: chatv1.Role_ROLE_USER, Parts: []*chatv1.Part{text("?")}}
	before, err := render(ctx, ps, true, asked)
	if err != nil {
		return nil, err
	}
	whole, err := render(ctx, ps, false, asked, answer)
	if err != nil {
		return nil, err
	}
	end := -1
	if len(whole) > len(before) && slices.Equal(whole[:len(before)], before) {
		end = slices.IndexFunc(whole[len(before):], func(id int32) bool { return slices.Contains(info.GetStopTokenIds(), id) })
	}
	if end < 0 {
		return nil, errors.New("this model's template does not write answers behind the prompt as they are")
	}
	return whole[len(before) : len(before)+end+1], nil
}

func render(ctx context.Context, ps *penstock.Client, prompted bool, messages ...*chatv1.Message) ([]int32, error) {
	stub := inferencev1.NewInferenceServiceClient(ps.Conn("inference")) // what the client does not wrap
	answer, err := stub.Render(ctx, &inferencev1.RenderRequest{
		Prompt: &inferencev1.ChatPrompt{Messages: messages}, AddGenerationPrompt: &prompted,
	})
	return penstock.TokenIDs(answer.GetTokenIds()), penstock.FromRPC(ctx, err)
}

func saying(words string) *chatv1.Message {
	return &chatv1.Message{Role: chatv1.Role_ROLE_ASSISTANT, Parts: []*chatv1.Part{text(words)}}
}

func calling(arguments string) *chatv1.Message {
	call := &chatv1.ToolCall{Id: "call", Name: "bash", ArgumentsJson: arguments}
	return &chatv1.Message{
		Role: chatv1.Role_ROLE_ASSISTANT, Parts: []*chatv1.Part{{Part: &chatv1.Part_ToolCall{ToolCall: call}}},
	}
}

func text(words string) *chatv1.Part {
	return &chatv1.Part{Part: &chatv1.Part_Text{Text: &chatv1.Text{Text: words}}}
}
