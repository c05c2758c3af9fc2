package main

import (
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"penstock.example/penstock"
	driverv1 "penstock.example/penstock/gen/driver/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
	trajectoryv1 "penstock.example/penstock/gen/trajectory/v1"
)

// spec is a rollout's, as cases write it.
type spec struct {
	TaskID           string            `json:"task_id"`
	Instruction      string            `json:"instruction"`
	Agent            string            `json:"agent"`
	Files            map[string]string `json:"files"`
	Setup            []string          `json:"setup"`
	Verify           []string          `json:"verify"`
	Reward           string            `json:"reward"`
	FreshFork        *bool             `json:"fresh_fork"`
	RunID            *string           `json:"run_id"`
	Labels           map[string]string `json:"labels"`
	Options          map[string]any    `json:"options"`
	Mode             string            `json:"mode"`
	MaxCalls         *int32            `json:"max_calls"`
	AgentTimeoutS    *float64          `json:"agent_timeout_s"`
	MinPolicyVersion *int64            `json:"min_policy_version"`
	MaxStaleness     *int64            `json:"max_staleness"`
	Models           []struct {
		PolicyID   string `json:"policy_id"`
		FromIndex  *int32 `json:"from_index"`
		UntilIndex *int32 `json:"until_index"`
	} `json:"models"`
}

func (s *spec) message() *driverv1.RolloutSpec {
	task := &driverv1.Task{TaskId: s.TaskID, Instruction: s.Instruction, Setup: commands(s.Setup)}
	for _, path := range slices.Sorted(maps.Keys(s.Files)) { // their order counts where a task is compared
		task.Files = append(task.Files, &sandboxv1.SeedFile{Path: path, Content: []byte(s.Files[path])})
	}
	if s.Verify != nil {
		task.Verifier = &driverv1.Verifier{Commands: commands(s.Verify), FreshFork: s.FreshFork}
		if s.Reward == "file" {
			task.Verifier.Reward = &driverv1.Verifier_RewardFile{RewardFile: &driverv1.RewardFile{}}
		} else {
			task.Verifier.Reward = &driverv1.Verifier_PassedShare{PassedShare: &driverv1.RewardPassedShare{}}
		}
	}
	whole := &driverv1.RolloutSpec{
		Task: task, Agent: &driverv1.AgentChoice{Name: s.Agent}, RunId: s.RunID, Labels: s.Labels,
		Mode: interceptionv1.Mode(value(interceptionv1.Mode_value, "MODE_", s.Mode)),
	}
	if s.Options != nil {
		options, err := structpb.NewStruct(s.Options)
		if err != nil {
			panic(fmt.Sprintf("what came as JSON is none: %v", err))
		}
		whole.Agent.Options = options
	}
	if s.MaxCalls != nil {
		whole.Budgets = &interceptionv1.Budgets{MaxCalls: s.MaxCalls}
	}
	if s.AgentTimeoutS != nil {
		agent := time.Duration(*s.AgentTimeoutS * float64(time.Second))
		whole.Limits = &driverv1.Limits{Agent: durationpb.New(agent)}
	}
	if s.MinPolicyVersion != nil {
		whole.Policy = &interceptionv1.PolicyVersionConstraint{MinVersion: s.MinPolicyVersion}
	}
	if s.MaxStaleness != nil {
		whole.Policy = &interceptionv1.PolicyVersionConstraint{MaxStaleness: s.MaxStaleness}
	}
	for _, item := range s.Models {
		model := &interceptionv1.RolloutModel{PolicyId: item.PolicyID}
		if item.FromIndex != nil || item.UntilIndex != nil {
			model.Calls = &interceptionv1.CallRule{FromIndex: item.FromIndex, UntilIndex: item.UntilIndex}
		}
		whole.Models = append(whole.Models, model)
	}
	return whole
}

// assayed is the command's spec, which passed its assay where there is one.
func (c *command) assayed() (*driverv1.RolloutSpec, error) {
	whole := c.Spec.message()
	if c.Assay == "" {
		return whole, nil
	}
	assays, err := penstock.LoadAssays(c.Assay, "")
	if err != nil {
		return nil, err
	}
	return whole, assays.Require(whole)
}

func commands(lines []string) []*sandboxv1.Command {
	var all []*sandboxv1.Command
	for _, line := range lines {
		all = append(all, &sandboxv1.Command{Command: &sandboxv1.Command_Shell{Shell: line}})
	}
	return all
}

func observedCall(call *penstock.Call) object {
	messages := []object{}
	for _, message := range call.Message.GetMessages() {
		var text strings.Builder
		for _, part := range message.GetParts() {
			text.WriteString(part.GetText().GetText())
		}
		messages = append(messages, object{"role": word(message.GetRole(), "ROLE_"), "text": text.String()})
	}
	return object{
		"call_id": call.ID(), "rollout_id": call.RolloutID(), "index": call.Index(),
		"prompt":       hex.EncodeToString(penstock.EncodeTokenIDs(call.PromptTokenIDs())),
		"prompt_count": call.Message.GetPromptCount(), "max_tokens": call.Sampling().MaxTokens,
		"lease_attempt": call.Message.GetLeaseAttempt(), "messages": messages,
		"policy_id": call.PolicyID(), "min_policy_version": call.Message.MinPolicyVersion,
	}
}

func observedResult(result *penstock.Result) object {
	shown := object{
		"rollout_id": result.Rollout.GetRolloutId(), "index": result.Rollout.GetIndex(),
		"reward": nil, "failure": nil, "grade": nil,
	}
	if reward, graded := result.Reward(); graded {
		shown["reward"] = reward
	}
	if failure := result.Failure(); failure != nil {
		shown["failure"] = object{
			"cause": word(failure.GetCause(), "FAILURE_CAUSE_"), "reason": failure.GetReason(),
			"retriable": failure.GetRetriable(),
		}
	}
	if result.Trajectory != nil {
		shown["grade"] = word(result.Trajectory.GetGrade(), "GRADE_")
	}
	samples := []object{}
	for _, sample := range result.Samples() {
		samples = append(samples, observedSample(sample))
	}
	shown["samples"] = samples
	annotations := []object{}
	for _, one := range result.Trajectory.GetAnnotations() {
		annotations = append(annotations, observedAnnotation(one))
	}
	shown["annotations"] = annotations
	return shown
}

func observedAnnotation(one *trajectoryv1.Annotation) object {
	shown := object{
		"name": one.GetName(), "author": one.GetAuthor(), "call_id": one.CallId, "value": one.Value,
		"token_values": nil, "details": one.GetDetails().AsMap(),
	}
	if values := one.GetTokenValues(); len(values) > 0 {
		shown["token_values"] = hex.EncodeToString(penstock.EncodeLogprobs(penstock.Logprobs(values)))
	}
	return shown
}

func observedSample(sample penstock.Sample) object {
	mask := make([]byte, len(sample.LossMask))
	for i, trained := range sample.LossMask {
		if trained {
			mask[i] = 1
		}
	}
	versions, turns := [][]any{}, [][]any{}
	for _, item := range sample.Message.GetVersions() {
		versions = append(versions, []any{item.GetPolicyVersion(), item.GetStart(), item.GetEnd()})
	}
	for _, item := range sample.Message.GetTurns() {
		turns = append(turns, []any{item.GetCallId(), item.GetStart(), item.GetEnd(), item.GetUntrainedReason()})
	}
	rewards, policies := []*float64{}, []string{}
	for _, item := range sample.Message.GetTurns() {
		rewards, policies = append(rewards, item.Reward), append(policies, item.GetPolicyId())
	}
	shown := object{
		"turn_rewards": rewards, "token_rewards": nil,
		"policy_id": sample.Message.GetPolicyId(), "turn_policies": policies,
		"input_ids": hex.EncodeToString(penstock.EncodeTokenIDs(sample.InputIDs)),
		"loss_mask": hex.EncodeToString(mask), "logprobs": nil, "versions": versions, "turns": turns,
		"prompt_count": sample.Message.GetPromptCount(), "weight": sample.Message.GetWeight(),
		"branch_class": word(sample.Message.GetBranchClass(), "CALL_CLASS_"), "truncated": sample.Message.GetTruncated(),
		"top": nil,
	}
	if sample.Logprobs != nil {
		shown["logprobs"] = hex.EncodeToString(penstock.EncodeLogprobs(sample.Logprobs))
	}
	if sample.TokenRewards != nil {
		shown["token_rewards"] = hex.EncodeToString(penstock.EncodeLogprobs(sample.TokenRewards))
	}
	if top := sample.Top; top != nil {
		shown["top"] = object{
			"count": top.Count, "token_ids": hex.EncodeToString(penstock.EncodeTokenIDs(top.IDs)),
			"logprobs": hex.EncodeToString(penstock.EncodeLogprobs(top.Logprobs)),
		}
	}
	return shown
}

// word is a value of an enum as cases write it: `timeout` of FAILURE_CAUSE_TIMEOUT.
func word(value fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(value.String(), prefix))
}

// value is the reverse; nothing is UNSPECIFIED.
func value(values map[string]int32, prefix, word string) int32 {
	known, ok := values[prefix+strings.ToUpper(word)]
	if !ok && word != "" {
		names := make([]string, 0, len(values))
		for name := range values {
			names = append(names, name)
		}
		slices.Sort(names)
		panic(fmt.Sprintf("%q is none of %v", word, names))
	}
	return known
}
