package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"iter"
	"time"

	"google.golang.org/protobuf/types/known/structpb"

	"penstock.example/penstock"
	chatv1 "penstock.example/penstock/gen/chat/v1"
	driverv1 "penstock.example/penstock/gen/driver/v1"
	trajectoryv1 "penstock.example/penstock/gen/trajectory/v1"
)

func (s *subject) carryOut(ctx context.Context, c *command) (object, error) {
	switch c.Do {
	case "connect":
		return nil, s.connect(c)
	case "abort":
		cancel, err := one(s, s.waitingByName(), fmt.Sprint(c.Target))
		if err == nil {
			cancel(errAborted)
		}
		return nil, err
	case "next_call":
		return s.nextCall(ctx, c)
	case "deliver", "deliver_text", "deliver_unsendable", "fail", "delegate", "release", "call_ended":
		call, err := one(s, s.calls, c.CallID)
		if err != nil {
			return nil, err
		}
		return answerCall(ctx, call, c)
	case "announce", "set_credits", "pause", "resume", "finish", "close_session":
		session, err := one(s, s.sessions, c.Session)
		if err != nil {
			return nil, err
		}
		return steer(ctx, session, c)
	}
	ps, err := one(s, s.clients, c.Client)
	if err != nil {
		return nil, err
	}
	switch c.Do {
	case "close":
		return nil, ps.Close()
	case "create_rollout":
		spec, err := c.assayed()
		if err != nil {
			return nil, err
		}
		rollout, err := ps.Rollouts.Create(ctx, spec, c.RolloutID)
		if err != nil {
			return nil, err
		}
		keep(s, s.rollouts, rollout.ID, rollout)
		return object{"rollout_id": rollout.ID}, nil
	case "create_group":
		spec, err := c.assayed()
		if err != nil {
			return nil, err
		}
		group, err := ps.Groups.Create(ctx, spec, c.N)
		if err != nil {
			return nil, err
		}
		keep(s, s.groups, group.ID, group)
		return object{"group_id": group.ID, "rollout_ids": group.RolloutIDs}, nil
	case "get_rollout":
		info, err := ps.Rollouts.Get(ctx, c.RolloutID)
		if err != nil {
			return nil, err
		}
		labels := info.GetSpec().GetLabels()
		if labels == nil {
			labels = map[string]string{}
		}
		return object{"rollout_id": info.GetRolloutId(), "phase": word(info.GetPhase(), "PHASE_"), "labels": labels}, nil
	case "list_rollouts":
		ids := []string{}
		for rollout, err := range ps.Rollouts.List(ctx, &driverv1.RolloutFilter{RunId: &c.RunID}) {
			if err != nil {
				return nil, err
			}
			ids = append(ids, rollout.GetRolloutId())
		}
		return object{"rollout_ids": ids}, nil
	case "intercept":
		return s.intercept(ctx, ps, c)
	}
	if answer, err, is := s.surface(ctx, ps, c); is {
		return answer, err
	}
	if c.GroupID != "" {
		group, err := one(s, s.groups, c.GroupID)
		if err != nil {
			group, err = ps.Groups.Attach(ctx, c.GroupID)
		}
		if err != nil {
			return nil, err
		}
		return s.ofGroup(ctx, group, c)
	}
	rollout, err := one(s, s.rollouts, c.RolloutID)
	if err != nil {
		rollout, err = ps.Rollouts.Attach(ctx, c.RolloutID)
	}
	if err != nil {
		return nil, err
	}
	return s.ofRollout(ctx, rollout, c)
}

func (s *subject) waitingByName() map[string]context.CancelCauseFunc {
	s.mu.Lock()
	defer s.mu.Unlock()
	named := map[string]context.CancelCauseFunc{}
	for id, cancel := range s.waiting {
		named[fmt.Sprint(id)] = cancel
	}
	return named
}

func (s *subject) connect(c *command) error {
	var opts []penstock.Option
	switch {
	case c.ConnectionFile != "":
		opts = append(opts, penstock.WithConnectionFile(c.ConnectionFile))
	case c.Host != "":
		opts = append(opts, penstock.WithHost(c.Host))
	default:
		opts = append(opts, penstock.WithAddresses(penstock.Addresses{
			Sandbox: c.Addresses["sandbox"], Driver: c.Addresses["driver"],
			Interception: c.Addresses["interception"], Inference: c.Addresses["inference"],
		}))
	}
	if c.Token != "" {
		opts = append(opts, penstock.WithToken(c.Token))
	}
	if c.Namespace != "" {
		opts = append(opts, penstock.WithNamespace(c.Namespace))
	}
	if c.Discover != nil && !*c.Discover {
		opts = append(opts, penstock.WithoutDiscovery())
	}
	if c.TLS != nil {
		opts = append(opts, penstock.WithTLS(penstock.TLS{CA: c.TLS.CA}))
	}
	ps, err := penstock.Connect(opts...)
	if err == nil {
		keep(s, s.clients, c.Client, ps)
	}
	return err
}

func (s *subject) intercept(ctx context.Context, ps *penstock.Client, c *command) (object, error) {
	opts := []penstock.SessionOption{penstock.WithCredits(c.Credits), penstock.WithToolErrors(quiet)}
	if c.PolicyVersion != nil {
		opts = append(opts, penstock.WithPolicyVersion(*c.PolicyVersion))
	}
	if c.Policies != nil {
		opts = append(opts, penstock.WithPolicies(c.Policies))
	}
	if c.Messages {
		opts = append(opts, penstock.WithMessages())
	}
	session, err := ps.Intercept(ctx, penstock.Selector{RunID: c.RunID, GroupID: c.GroupID, PolicyIDs: c.PolicyIDs}, opts...)
	if err != nil {
		return nil, err
	}
	keep(s, s.sessions, c.Session, session)
	s.serve(c.Session, session.Calls(s.whole))
	return object{"session_id": session.ID()}, nil
}

// serve runs a loop over calls, from which next_call takes them one by one.
func (s *subject) serve(name string, calls iter.Seq2[*penstock.Call, error]) {
	given, whole := make(chan next), s.whole
	keep(s, s.serving, name, (<-chan next)(given))
	s.pumps.Add(1)
	go func() {
		defer s.pumps.Done()
		defer close(given)
		for call, err := range calls {
			select {
			case given <- next{call, err}:
			case <-whole.Done():
				return
			}
		}
	}()
}

func (s *subject) nextCall(ctx context.Context, c *command) (object, error) {
	calls, err := one(s, s.serving, c.Session)
	if err != nil {
		return nil, err
	}
	select {
	case given, more := <-calls:
		if !more {
			return object{"end": true}, nil
		}
		if given.err != nil {
			return nil, given.err
		}
		keep(s, s.calls, given.call.ID(), given.call)
		return observedCall(given.call), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func setTop(completion *chatv1.Completion, given map[string]any) error {
	ids, err := hex.DecodeString(given["token_ids"].(string))
	if err != nil {
		return err
	}
	logprobs, err := hex.DecodeString(given["logprobs"].(string))
	if err != nil {
		return err
	}
	count := int(given["count"].(float64))
	return penstock.SetTop(completion, penstock.TopLogprobs{
		Count: count, IDs: penstock.TokenIDs(ids), Logprobs: penstock.Logprobs(logprobs),
	})
}

func answerCall(ctx context.Context, call *penstock.Call, c *command) (object, error) {
	switch c.Do {
	case "deliver":
		ids, err := hex.DecodeString(c.TokenIDs)
		if err != nil {
			return nil, err
		}
		logprobs, err := hex.DecodeString(c.Logprobs)
		if err != nil {
			return nil, err
		}
		var version int64
		if c.PolicyVersion != nil {
			version = *c.PolicyVersion
		}
		completion, err := penstock.Sampled(penstock.TokenIDs(ids), penstock.Logprobs(logprobs), version)
		if err != nil {
			return nil, err
		}
		if c.PolicyVersion == nil {
			completion.Span.Versions = nil // not known
		}
		if c.FinishReason != "" {
			completion.FinishReason = chatv1.FinishReason(value(chatv1.FinishReason_value, "FINISH_REASON_", c.FinishReason))
		}
		if given, has := c.Top.(map[string]any); has {
			if err := setTop(completion, given); err != nil {
				return nil, err
			}
		}
		return nil, call.Deliver(ctx, completion)
	case "deliver_text":
		return nil, call.Deliver(ctx, penstock.Injected(c.Text))
	case "deliver_unsendable":
		return nil, call.Deliver(ctx, penstock.Injected("half a character: \xe4\xb8"))
	case "fail":
		return nil, call.Fail(ctx, c.Reason, c.Message, c.Retriable)
	case "delegate":
		return nil, call.Delegate(ctx, nil)
	case "release":
		return nil, call.Release(ctx)
	default:
		select {
		case <-call.Ended():
			return object{"reason": call.EndReason()}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func steer(ctx context.Context, session *penstock.Session, c *command) (object, error) {
	switch c.Do {
	case "announce":
		session.AnnouncePolicy(c.PolicyID, *c.PolicyVersion)
		return nil, nil
	case "set_credits":
		return nil, session.SetCredits(c.Calls)
	case "pause":
		open, err := session.Pause(ctx, "conformance", 0)
		return object{"open_calls": open}, err
	case "resume":
		return nil, session.Resume(ctx)
	case "finish":
		session.Finish()
		return nil, nil
	default:
		return nil, session.Close()
	}
}

func (s *subject) ofGroup(ctx context.Context, group *penstock.Group, c *command) (object, error) {
	switch c.Do {
	case "results":
		results, err := group.Results(ctx)
		shown := []object{}
		for _, result := range results {
			shown = append(shown, observedResult(result))
		}
		return object{"results": shown}, err
	case "serve":
		s.serve(c.Session, group.Calls(s.whole, penstock.WithCredits(c.Credits)))
		return nil, nil
	case "pause_rollouts":
		_, err := group.Pause(ctx, "conformance", seconds(c.MaxDurationS))
		return nil, err
	case "resume_rollouts":
		_, err := group.Resume(ctx)
		return nil, err
	case "cancel":
		_, err := group.Cancel(ctx, c.Reason)
		return nil, err
	case "delete":
		return nil, group.Delete(ctx)
	default:
		return nil, fmt.Errorf("there is no command %q for a group", c.Do)
	}
}

func (s *subject) ofRollout(ctx context.Context, rollout *penstock.Rollout, c *command) (object, error) {
	switch c.Do {
	case "events":
		sequences := []int64{}
		for event, err := range rollout.Events(ctx, c.After) {
			if err != nil {
				return nil, err
			}
			sequences = append(sequences, event.GetSequence())
		}
		return object{"sequences": sequences}, nil
	case "result":
		result, err := rollout.Result(ctx)
		if err != nil {
			return nil, err
		}
		if c.Top == true {
			if result.Trajectory, err = rollout.TrajectoryWithTop(ctx, false); err != nil {
				return nil, err
			}
		}
		return observedResult(result), nil
	case "trajectory":
		return trajectoryOf(ctx, rollout, c)
	case "image":
		data, err := rollout.Image(ctx, unhex(c.Sha256))
		return object{"data": hex.EncodeToString(data)}, err
	case "regrade":
		var verifier *driverv1.Verifier
		if c.Verify != nil {
			verifier = (&spec{Verify: c.Verify}).message().GetTask().GetVerifier()
		}
		grade, err := rollout.Regrade(ctx, verifier, c.Name)
		shown := object{"name": grade.GetName(), "reward": nil, "failure": nil}
		if grade.GetReward() != nil {
			shown["reward"] = grade.GetReward().GetValue()
		}
		if grade.GetFailure() != nil {
			shown["failure"] = grade.GetFailure().GetReason()
		}
		return shown, err
	case "serve":
		s.serve(c.Session, rollout.Calls(s.whole, penstock.WithCredits(c.Credits)))
		return nil, nil
	case "branch":
		group, err := rollout.Branch(ctx, branches(c))
		if err != nil {
			return nil, err
		}
		keep(s, s.groups, group.ID, group)
		return object{"group_id": group.ID, "rollout_ids": group.RolloutIDs}, nil
	case "annotate":
		annotations, err := annotationsOf(c)
		if err != nil {
			return nil, err
		}
		return nil, rollout.Annotate(ctx, annotations...)
	case "pause_rollouts":
		info, err := rollout.Pause(ctx, "conformance", seconds(c.MaxDurationS))
		return object{"frozen": info.GetPause().GetSandboxFrozen()}, err
	case "resume_rollouts":
		_, err := rollout.Resume(ctx)
		return nil, err
	case "cancel":
		_, err := rollout.Cancel(ctx, c.Reason)
		return nil, err
	case "delete":
		return nil, rollout.Delete(ctx)
	default:
		return nil, fmt.Errorf("there is no command %q for a rollout", c.Do)
	}
}

// trajectoryOf is what a trajectory describes and does not carry.
func trajectoryOf(ctx context.Context, rollout *penstock.Rollout, c *command) (object, error) {
	whole, err := rollout.Trajectory(ctx, false)
	if err == nil && c.Tensors {
		err = rollout.AddTensors(ctx, whole)
	}
	if err == nil && c.Images {
		err = rollout.AddImages(ctx, whole)
	}
	if err != nil {
		return nil, err
	}
	tensors, images := []string{}, []string{}
	for _, one := range whole.GetCalls() {
		for _, tensor := range one.GetCompletion().GetTensors() {
			tensors = append(tensors, hex.EncodeToString(tensor.GetData()))
		}
		for _, media := range one.GetMedia() {
			images = append(images, hex.EncodeToString(media.GetData()))
		}
	}
	for _, sample := range whole.GetSamples() {
		for _, tensor := range sample.GetTensors() {
			tensors = append(tensors, hex.EncodeToString(tensor.GetData()))
		}
	}
	return object{"tensors": tensors, "images": images}, nil
}

// annotationsOf are those of a command.
func annotationsOf(c *command) ([]*trajectoryv1.Annotation, error) {
	annotations := []*trajectoryv1.Annotation{}
	for _, given := range c.Annotations {
		values, err := hex.DecodeString(given.TokenValues)
		if err != nil {
			return nil, err
		}
		one := &trajectoryv1.Annotation{
			Name: given.Name, Author: given.Author, CallId: given.CallID, Value: given.Value, TokenValues: values,
		}
		if given.Details != nil {
			if one.Details, err = structpb.NewStruct(given.Details); err != nil {
				return nil, err
			}
		}
		annotations = append(annotations, one)
	}
	return annotations, nil
}

// branches is what a command asks of a parent.
func branches(c *command) *driverv1.BranchRolloutRequest {
	request := &driverv1.BranchRolloutRequest{Count: int32(c.N), Seed: c.Seed, TrainPrefix: c.TrainPrefix}
	switch at := c.Call.(type) {
	case string:
		request.Call = &driverv1.BranchRolloutRequest_CallId{CallId: at}
	case float64:
		request.Call = &driverv1.BranchRolloutRequest_CallIndex{CallIndex: int32(at)}
	}
	if c.Answer != "" {
		request.Answer = penstock.Injected(c.Answer).GetMessage()
	}
	if c.Replay != "" {
		request.Replay = driverv1.Replay(value(driverv1.Replay_value, "REPLAY_", c.Replay))
	}
	return request
}

func seconds(given float64) time.Duration { return time.Duration(given * float64(time.Second)) }
