package main

import (
	"context"
	"encoding/hex"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.example/penstock"
	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

func (s *subject) sandboxCommand(ctx context.Context, ps *penstock.Client, c *command, m *more) (object, error, bool) {
	switch c.Do {
	case "sandbox_create":
		spec := &sandboxv1.SandboxSpec{Labels: m.Labels}
		if m.LeaseS > 0 {
			spec.Lease = durationpb.New(time.Duration(m.LeaseS * float64(time.Second)))
		}
		sandbox, err := ps.Sandboxes.Create(ctx, spec)
		if err != nil {
			return nil, err, true
		}
		keep(s, s.sandboxes, sandbox.ID, sandbox)
		return object{"sandbox_id": sandbox.ID}, nil, true
	case "sandbox_attach":
		sandbox, err := ps.Sandboxes.Attach(ctx, m.SandboxID)
		if err != nil {
			return nil, err, true
		}
		keep(s, s.sandboxes, sandbox.ID, sandbox)
		return object{"sandbox_id": sandbox.ID}, nil, true
	case "sandbox_list":
		ids := []string{}
		for sandbox, err := range ps.Sandboxes.List(ctx, m.Labels) {
			if err != nil {
				return nil, err, true
			}
			ids = append(ids, sandbox.GetSandboxId())
		}
		return object{"sandbox_ids": ids}, nil, true
	case "sandbox_prepare":
		spec := &sandboxv1.SnapshotSpec{Setup: commands(m.Setup)}
		for path, text := range m.Files {
			spec.Files = append(spec.Files, &sandboxv1.SeedFile{Path: path, Content: []byte(text)})
		}
		snapshot, err := ps.Sandboxes.Prepare(ctx, spec)
		return object{"snapshot_id": snapshot.GetSnapshotId()}, err, true
	case "snapshot_list":
		ids := []string{}
		for snapshot, err := range ps.Sandboxes.Snapshots(ctx) {
			if err != nil {
				return nil, err, true
			}
			ids = append(ids, snapshot.GetSnapshotId())
		}
		return object{"snapshot_ids": ids}, nil, true
	case "snapshot_delete":
		return nil, ps.Sandboxes.DeleteSnapshot(ctx, m.Snapshot), true
	case "sandbox_fork":
		children := ps.Sandboxes.Fork(ctx, m.Snapshot, m.Count, nil)
		if m.SandboxID != "" {
			sandbox, err := s.sandbox(ctx, ps, m.SandboxID)
			if err != nil {
				return nil, err, true
			}
			children = sandbox.Fork(ctx, m.Count, nil)
		}
		ids := make([]string, m.Count)
		for fork, err := range children {
			if err != nil {
				return nil, err, true
			}
			if fork.Failure != nil {
				return nil, fork.Failure, true
			}
			ids[fork.Index] = fork.Sandbox.ID
			keep(s, s.sandboxes, fork.Sandbox.ID, fork.Sandbox)
		}
		return object{"sandbox_ids": ids}, nil, true
	}
	if m.SandboxID == "" {
		return nil, nil, false
	}
	sandbox, err := s.sandbox(ctx, ps, m.SandboxID)
	if err != nil {
		return nil, err, true
	}
	answer, err := s.ofSandbox(ctx, sandbox, c, m)
	return answer, err, true
}

func (s *subject) sandbox(ctx context.Context, ps *penstock.Client, id string) (*penstock.Sandbox, error) {
	if known, err := one(s, s.sandboxes, id); err == nil {
		return known, nil
	}
	return ps.Sandboxes.Attach(ctx, id)
}

func (s *subject) ofSandbox(ctx context.Context, sandbox *penstock.Sandbox, c *command, m *more) (object, error) {
	switch c.Do {
	case "sandbox_run":
		var opts []penstock.ProcessOption
		if text, has := m.Stdin.(string); has {
			opts = append(opts, penstock.WithStdin([]byte(text)))
		}
		ran, err := sandbox.Run(ctx, penstock.Shell(m.Shell), opts...)
		answer := observedExit(ran.GetExit())
		answer["stdout"], answer["stderr"] = string(ran.GetStdout()), string(ran.GetStderr())
		return answer, err
	case "process_start":
		var opts []penstock.ProcessOption
		if m.Stdin == true {
			opts = append(opts, penstock.WithOpenStdin())
		}
		process, err := sandbox.Start(ctx, penstock.Shell(m.Shell), opts...)
		if err != nil {
			return nil, err
		}
		keep(s, s.processes, process.ID, process)
		return object{"process_id": process.ID}, nil
	case "process_write", "process_output", "process_wait", "process_kill":
		process, err := one(s, s.processes, m.ProcessID)
		if err != nil {
			return nil, err
		}
		return ofProcess(ctx, process, c, m)
	case "file_write":
		var mode uint32
		if given, has := m.Mode.(float64); has {
			mode = uint32(given)
		}
		return nil, sandbox.WriteFile(ctx, m.Path, []byte(m.Text), mode)
	case "file_read":
		content, err := sandbox.ReadFile(ctx, m.Path)
		return object{"text": string(content)}, err
	case "file_list":
		names := []string{}
		for info, err := range sandbox.Files(ctx, m.Path) {
			if err != nil {
				return nil, err
			}
			names = append(names, info.GetName())
		}
		return object{"names": names}, nil
	case "file_stat":
		info, err := sandbox.Stat(ctx, m.Path)
		return object{
			"kind": word(info.GetKind(), "FILE_KIND_"), "size": info.GetSizeBytes(), "mode": info.GetMode(),
		}, err
	case "file_remove":
		return nil, sandbox.Remove(ctx, m.Path, m.Recursive)
	case "make_directory":
		return nil, sandbox.MakeDirectory(ctx, m.Path)
	case "tree_read":
		tar, err := sandbox.ReadTree(ctx, m.Path, 0)
		return object{"tar": hex.EncodeToString(tar)}, err
	case "tree_write":
		return nil, sandbox.WriteTree(ctx, m.Path, unhex(m.Tar))
	case "sandbox_renew":
		_, err := sandbox.Renew(ctx, time.Duration(m.LeaseS*float64(time.Second)))
		return nil, err
	case "sandbox_pause":
		return nil, sandbox.Pause(ctx)
	case "sandbox_resume":
		return nil, sandbox.Resume(ctx)
	case "sandbox_diff":
		diff, err := sandbox.Diff(ctx, 0)
		if err != nil {
			return nil, err
		}
		return object{"tar": hex.EncodeToString(diff.Tar), "deleted": diff.DeletedPaths}, nil
	default:
		return nil, sandbox.Delete(ctx)
	}
}

func ofProcess(ctx context.Context, process *penstock.Process, c *command, m *more) (object, error) {
	switch c.Do {
	case "process_write":
		return nil, process.Write(ctx, []byte(m.Text), m.Last)
	case "process_wait":
		exit, err := process.Wait(ctx)
		return observedExit(exit), err
	case "process_kill":
		exit, err := process.Kill(ctx)
		return observedExit(exit), err
	}
	outputs, answer := map[sandboxv1.OutputStream]string{}, object{}
	for message, err := range process.Output(ctx) {
		if err != nil {
			return nil, err
		}
		if chunk := message.GetChunk(); chunk != nil {
			outputs[chunk.GetStream()] += string(chunk.GetData())
		}
		if exit := message.GetExit(); exit != nil {
			answer = observedExit(exit)
		}
	}
	answer["stdout"] = outputs[sandboxv1.OutputStream_OUTPUT_STREAM_STDOUT]
	answer["stderr"] = outputs[sandboxv1.OutputStream_OUTPUT_STREAM_STDERR]
	return answer, nil
}

func observedExit(exit *sandboxv1.Exit) object {
	return object{"reason": word(exit.GetReason(), "EXIT_REASON_"), "code": exit.GetCode()}
}
