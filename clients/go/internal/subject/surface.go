package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"penstock.example/penstock"
	driverv1 "penstock.example/penstock/gen/driver/v1"
	inferencev1 "penstock.example/penstock/gen/inference/v1"
)

// more is what commands beside those of the gate are given.
type more struct {
	After     int64          `json:"after"`
	CallIDs   []string       `json:"call_ids"`
	Commit    bool           `json:"commit"`
	Config    map[string]any `json:"config"`
	Count     int            `json:"count"`
	Descr     any            `json:"descriptor"`
	Files     map[string]string
	FromStep  int64 `json:"from_step"`
	Sequences []toScore
	Labels    map[string]string
	Last      bool
	LeaseS    float64 `json:"lease_s"`
	Like      string
	MaxCalls  int `json:"max_calls"`
	MaxPoints int `json:"max_points"`
	Mode      any
	Name      string
	Names     []string
	Options   any
	Partial   bool
	Path      string
	ProcessID string `json:"process_id"`
	Recursive bool
	SandboxID string `json:"sandbox_id"`
	Service   string
	Setup     []string
	Shell     string
	Snapshot  string `json:"snapshot_id"`
	SpecOnly  bool   `json:"spec_only"`
	Stdin     any
	Step      int64
	Tar       string
	Tensors   map[string]struct {
		Shape []int64
		Fill  float32
	}
	Terminal string `json:"terminal_id"`
	Text     string
	Backend  string
	Tools    []struct {
		Name, Does string
		Parameters any
	}
	Values  map[string]float64
	Version int64
	WaitS   float64 `json:"wait_s"`
}

// tensors are those of the command, each of one value.
func (m *more) tensors() []penstock.Tensor {
	var all []penstock.Tensor
	for name, item := range m.Tensors {
		count := int64(1)
		for _, length := range item.Shape {
			count *= length
		}
		values := slices.Repeat([]float32{item.Fill}, int(count))
		all = append(all, penstock.Float32Tensor(name, item.Shape, values))
	}
	return all
}

// surface carries out what is not the gate's; false where there is no such command.
func (s *subject) surface(ctx context.Context, ps *penstock.Client, c *command) (object, error, bool) {
	m := &more{}
	if err := json.Unmarshal(c.line, m); err != nil {
		return nil, err, true
	}
	for _, known := range []func(context.Context, *penstock.Client, *command, *more) (object, error, bool){
		s.sandboxCommand, s.terminalCommand, s.weightCommand, s.scoreCommand, s.toolCommand, s.pullCommand, s.metricCommand,
	} {
		if answer, err, is := known(ctx, ps, c, m); is {
			return answer, err, true
		}
	}
	return nil, nil, false
}

func (s *subject) terminalCommand(ctx context.Context, ps *penstock.Client, c *command, m *more) (object, error, bool) {
	switch c.Do {
	case "agent_list":
		names := []string{}
		for agent, err := range ps.Agents.List(ctx) {
			if err != nil {
				return nil, err, true
			}
			names = append(names, agent.GetSpec().GetName())
		}
		return object{"names": names}, nil, true
	case "agent_get":
		agent, err := ps.Agents.Get(ctx, m.Name, "")
		return observedAgent(agent), err, true
	case "agent_register":
		like, err := ps.Agents.Get(ctx, m.Like, "")
		if err != nil {
			return nil, err, true
		}
		spec := proto.Clone(like.GetSpec()).(*driverv1.AgentSpec)
		spec.Name = m.Name
		agent, err := ps.Agents.Register(ctx, spec)
		return observedAgent(agent), err, true
	case "agent_delete":
		return nil, ps.Agents.Delete(ctx, m.Name), true
	case "agent_check":
		findings := []object{}
		request := &driverv1.CheckAgentRequest{Name: m.Name, SpecOnly: m.SpecOnly}
		for finding, err := range ps.Agents.Check(ctx, request) {
			if err != nil {
				return nil, err, true
			}
			findings = append(findings, object{"step": finding.GetStep(), "outcome": word(finding.GetOutcome(), "OUTCOME_")})
		}
		return object{"findings": findings}, nil, true
	case "terminal_open":
		terminal, err := ps.Terminals.Open(ctx, &driverv1.OpenTerminalRequest{Task: c.Spec.message().GetTask()})
		if err != nil {
			return nil, err, true
		}
		keep(s, s.terminals, terminal.ID, terminal)
		return object{"terminal_id": terminal.ID}, nil, true
	case "terminal_get":
		terminal, err := ps.Terminals.Attach(ctx, m.Terminal)
		if err != nil {
			return nil, err, true
		}
		keep(s, s.terminals, terminal.ID, terminal)
		return object{"step_count": terminal.Message.GetStepCount(), "ended": terminal.Message.GetEnded()}, nil, true
	case "terminal_run", "terminal_answer", "terminal_close":
	default:
		return nil, nil, false
	}
	terminal, err := one(s, s.terminals, m.Terminal)
	if err != nil {
		return nil, err, true
	}
	switch c.Do {
	case "terminal_run":
		seen, err := terminal.Run(ctx, penstock.Shell(m.Shell))
		result := seen.GetResult()
		return object{
			"stdout": string(result.GetStdout()), "code": result.GetExit().GetCode(), "ended": seen.GetEnded(),
		}, err, true
	case "terminal_answer":
		seen, err := terminal.Answer(ctx, m.Text)
		answer := object{"ended": seen.GetEnded(), "reward": nil}
		if seen.GetReward() != nil {
			answer["reward"] = seen.GetReward().GetValue()
		}
		return answer, err, true
	default:
		return nil, terminal.Close(ctx), true
	}
}

func observedAgent(agent *driverv1.Agent) object {
	return object{"name": agent.GetSpec().GetName(), "built_in": agent.GetBuiltIn()}
}

func (s *subject) weightCommand(ctx context.Context, ps *penstock.Client, c *command, m *more) (object, error, bool) {
	engine := ps.Inference
	version := func(update interface{ GetPolicyVersion() int64 }, err error) (object, error, bool) {
		return object{"policy_version": update.GetPolicyVersion()}, err, true
	}
	loaded := func(adapter *inferencev1.Adapter, err error) (object, error, bool) {
		return object{
			"name": adapter.GetName(), "policy_version": adapter.GetPolicyVersion(), "rank": adapter.GetRank(),
		}, err, true
	}
	switch c.Do {
	case "policy_version":
		now, err := engine.PolicyVersion(ctx)
		return object{"policy_version": now}, err, true
	case "update_weights":
		var opts []penstock.WeightOption
		if m.Partial {
			opts = append(opts, penstock.WithPartialWeights())
		}
		update, err := engine.UpdateWeights(ctx, m.After+1, m.tensors(), opts...)
		away := append([]string{}, update.Away...)
		return object{"policy_version": update.GetPolicyVersion(), "away": away}, err, true
	case "update_weights_from":
		return version(engine.UpdateWeightsFrom(ctx, m.After+1, m.Path))
	case "init_transfer":
		return nil, engine.InitTransfer(ctx, m.Backend, m.Options), true
	case "transfer":
		transfer, err := engine.StartTransfer(ctx, m.After+1)
		if err != nil {
			return nil, err, true
		}
		defer transfer.Abandon(ctx)
		if err := transfer.Tensors(ctx, m.Descr); err != nil {
			return nil, err, true
		}
		if m.Commit {
			return version(transfer.Commit(ctx))
		}
		if err := transfer.Abandon(ctx); err != nil {
			return nil, err, true
		}
		now, err := engine.PolicyVersion(ctx)
		return object{"policy_version": now}, err, true
	case "load_adapter":
		return loaded(engine.LoadAdapter(ctx, m.Name, m.Version, m.tensors(), m.Config))
	case "load_adapter_from":
		return loaded(engine.LoadAdapterFrom(ctx, m.Name, m.Version, m.Path))
	case "adapter_list":
		names := []string{}
		for adapter, err := range engine.Adapters(ctx) {
			if err != nil {
				return nil, err, true
			}
			names = append(names, adapter.GetName())
		}
		return object{"names": names}, nil, true
	case "unload_adapter":
		return nil, engine.UnloadAdapter(ctx, m.Name), true
	case "pause_engine":
		mode := value(inferencev1.PauseMode_value, "PAUSE_MODE_", m.Mode.(string))
		count, err := engine.Pause(ctx, inferencev1.PauseMode(mode))
		return object{"in_flight": count}, err, true
	case "resume_engine":
		return nil, engine.Resume(ctx), true
	default:
		return nil, nil, false
	}
}

// toScore is a sequence of a command.
type toScore struct {
	TokenIDs     []int32  `json:"token_ids"`
	Start        int      `json:"start"`
	TopLogprobs  int      `json:"top_logprobs"`
	Temperature  *float64 `json:"temperature"`
	ExactVersion *int64   `json:"exact_version"`
}

func (t toScore) sequence() penstock.ToScore {
	return penstock.ToScore{
		TokenIDs: t.TokenIDs, Start: t.Start, TopLogprobs: t.TopLogprobs, Temperature: t.Temperature, ExactVersion: t.ExactVersion,
	}
}

func observedScore(score *penstock.Score) object {
	shown := object{
		"logprobs": hex.EncodeToString(penstock.EncodeLogprobs(score.Logprobs)), "top_count": nil, "top_token_ids": nil,
	}
	if score.Top != nil {
		shown["top_count"], shown["top_token_ids"] = score.Top.Count, score.Top.IDs
	}
	return shown
}

func (s *subject) scoreCommand(ctx context.Context, ps *penstock.Client, c *command, m *more) (object, error, bool) {
	var sequences []penstock.ToScore
	for _, item := range m.Sequences {
		sequences = append(sequences, item.sequence())
	}
	switch c.Do {
	case "score":
		score, err := ps.Inference.Score(ctx, sequences[0])
		if err != nil {
			return nil, err, true
		}
		return observedScore(score), nil, true
	case "score_batch":
		scores, err := ps.Inference.ScoreBatch(ctx, sequences)
		found := []object{}
		for _, score := range scores {
			found = append(found, observedScore(score))
		}
		return object{"scores": found}, err, true
	case "score_each":
		found := make([]object, len(sequences))
		for one, err := range ps.Inference.ScoreEach(ctx, sequences) {
			switch {
			case err != nil:
				return nil, err, true
			case one.Failure != nil:
				found[one.Index] = object{"failure": one.Failure.Reason}
			default:
				found[one.Index] = observedScore(one.Score)
			}
		}
		return object{"scores": found}, nil, true
	default:
		return nil, nil, false
	}
}

// tool is a host tool of a case.
type tool struct {
	does   string
	runs   atomic.Int32
	called chan struct{} // room for many
	let    chan struct{}
}

func (t *tool) run(ctx context.Context, call *penstock.HostToolCall) (any, error) {
	runs := t.runs.Add(1)
	t.called <- struct{}{}
	var arguments struct{ Word any }
	if err := call.Arguments(&arguments); err != nil {
		return nil, err
	}
	switch t.does {
	case "text":
		return "the word is " + arguments.Word.(string), nil
	case "fails":
		return nil, penstock.ToolError("There is no such word.")
	case "breaks":
		return nil, errors.New("a secret of the host")
	case "waits":
		select {
		case <-t.let:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return map[string]any{"word": arguments.Word, "runs": runs}, nil
}

func (s *subject) toolCommand(ctx context.Context, _ *penstock.Client, c *command, m *more) (object, error, bool) {
	switch c.Do {
	case "offer_tools":
		session, err := one(s, s.sessions, c.Session)
		if err != nil {
			return nil, err, true
		}
		var offered []penstock.HostTool
		for _, item := range m.Tools {
			made := &tool{does: item.Does, called: make(chan struct{}, 100), let: make(chan struct{})}
			keep(s, s.tools, item.Name, made)
			offered = append(offered, penstock.HostTool{Name: item.Name, Parameters: item.Parameters, Function: made.run})
		}
		return nil, session.OfferTools(ctx, offered, nil), true
	case "tool_called", "let_tool":
	default:
		return nil, nil, false
	}
	known, err := one(s, s.tools, m.Name)
	if err != nil {
		return nil, err, true
	}
	if c.Do == "let_tool" {
		close(known.let)
		return nil, nil, true
	}
	select {
	case <-known.called:
		known.called <- struct{}{}
		return object{"runs": known.runs.Load()}, nil, true
	case <-ctx.Done():
		return nil, ctx.Err(), true
	}
}

func (s *subject) metricCommand(ctx context.Context, ps *penstock.Client, c *command, m *more) (object, error, bool) {
	switch c.Do {
	case "log_metrics":
		if session, err := one(s, s.sessions, c.Session); c.RunID == "" && err == nil {
			return nil, session.Log(ctx, m.Step, m.Values), true
		}
		return nil, ps.Runs.Log(ctx, c.RunID, m.Step, m.Values), true
	case "metrics":
		found, err := ps.Runs.Metrics(ctx, c.RunID, penstock.WithMetrics(m.Names...), penstock.WithMaxPoints(m.MaxPoints))
		metrics := map[string][][]float64{}
		for _, metric := range found {
			for _, point := range metric.Points {
				metrics[metric.Name] = append(metrics[metric.Name], []float64{float64(point.Step), point.Value})
			}
		}
		return object{"metrics": metrics}, err, true
	case "delete_metrics":
		count, err := ps.Runs.DeleteMetrics(ctx, c.RunID, m.FromStep, m.Names...)
		return object{"count": count}, err, true
	}
	return nil, nil, false
}

func (s *subject) pullCommand(ctx context.Context, ps *penstock.Client, c *command, m *more) (object, error, bool) {
	switch c.Do {
	case "lease_calls":
		wait := time.Duration(m.WaitS * float64(time.Second))
		options := penstock.LeaseOptions{MaxCalls: m.MaxCalls, Wait: wait}
		calls, err := ps.LeaseCalls(ctx, penstock.Selector{RunID: c.RunID, PolicyIDs: c.PolicyIDs}, options)
		found := []object{}
		for _, call := range calls {
			keep(s, s.calls, call.ID(), call)
			found = append(found, observedCall(call))
		}
		return object{"calls": found}, err, true
	case "extend_leases":
		var calls []*penstock.Call
		for _, id := range m.CallIDs {
			call, err := one(s, s.calls, id)
			if err != nil {
				return nil, err, true
			}
			calls = append(calls, call)
		}
		lost, err := ps.ExtendLeases(ctx, calls...)
		ids := []string{}
		for _, call := range lost {
			ids = append(ids, call.ID())
		}
		return object{"lost": ids}, err, true
	case "watch_rollouts":
		ids, away := []string{}, []string{}
		request := &driverv1.WatchRolloutsRequest{Filter: &driverv1.RolloutFilter{RunId: &c.RunID}}
		for message, err := range ps.Rollouts.Watch(ctx, request) {
			if err != nil {
				return nil, err, true
			}
			for _, row := range message.GetRollouts() {
				ids = append(ids, row.GetRolloutId())
			}
			away = append([]string{}, message.Away...)
			if c.UntilAway && len(away) > 0 || !c.UntilAway && message.GetSnapshotComplete() {
				break
			}
		}
		slices.Sort(ids)
		return object{"rollout_ids": ids, "away": away}, nil, true
	case "export":
		found := []object{}
		request := &driverv1.ExportTrajectoriesRequest{Filter: &driverv1.RolloutFilter{RunId: &c.RunID}}
		for item, err := range ps.Rollouts.Export(ctx, request) {
			if err != nil {
				return nil, err, true
			}
			row := object{
				"rollout_id": item.Trajectory.GetRolloutId(), "samples": len(item.Trajectory.GetSamples()), "reward": nil,
			}
			if reward := item.Outcome.GetReward(); reward != nil {
				row["reward"] = reward.GetValue()
			}
			found = append(found, row)
		}
		slices.SortFunc(found, func(one, other object) int {
			return strings.Compare(one["rollout_id"].(string), other["rollout_id"].(string))
		})
		return object{"rollouts": found}, nil, true
	case "server_info":
		server, err := ps.ServerInfo(ctx, m.Service)
		return object{
			"service": server.GetService(), "revision": server.GetContractRevision(),
			"max_message_bytes": server.GetMaxMessageBytes(),
		}, err, true
	default:
		return nil, nil, false
	}
}

// quiet has a case's broken tool complain to nobody.
func quiet(*penstock.HostToolCall, error) {}

func unhex(text string) []byte {
	content, err := hex.DecodeString(text)
	if err != nil {
		panic("what came as hexadecimal is none: " + text)
	}
	return content
}
