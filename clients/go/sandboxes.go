package penstock

import (
	"context"
	"errors"
	"iter"
	"time"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

const (
	sandboxTimeout = 5 * time.Minute
	deleteTimeout  = time.Minute
	noteBytes      = 2000
)

// Sandboxes is the sandbox service, as Client.Sandboxes: sandboxes without agents or models.
type Sandboxes struct {
	client *Client
	stub   sandboxv1.SandboxServiceClient
}

func (s *Sandboxes) service() *service { return s.client.services["sandbox"] }

// Create makes a sandbox and returns when it is ready; nil is an empty one, completed by the operator's settings. It lives
// until Delete, or until its lease ends. The create is repeated while the service is away, and makes one sandbox all the
// same.
//
// Errors: ErrFailedPrecondition, CAPABILITY_MISSING, BACKEND_UNAVAILABLE; ErrNotFound, SNAPSHOT_UNKNOWN;
// ErrResourceExhausted, SANDBOX_LIMIT, OWNER_LIMIT.
func (s *Sandboxes) Create(ctx context.Context, spec *sandboxv1.SandboxSpec) (*Sandbox, error) {
	if spec == nil {
		spec = &sandboxv1.SandboxSpec{}
	}
	request := &sandboxv1.CreateSandboxRequest{RequestId: requestID(), Spec: spec}
	answer, err := call(ctx, s.service(), s.stub.CreateSandbox, request, sandboxTimeout, true)
	if err != nil {
		return nil, err
	}
	return s.handle(answer.GetSandbox(), answer.GetDataPlane())
}

// Attach is a handle of a sandbox that was made elsewhere.
//
// Errors: ErrNotFound, SANDBOX_UNKNOWN.
func (s *Sandboxes) Attach(ctx context.Context, id string) (*Sandbox, error) {
	found, err := call(
		ctx, s.service(), s.stub.GetSandbox, &sandboxv1.GetSandboxRequest{SandboxId: id}, callTimeout, true,
	)
	if err != nil {
		return nil, err
	}
	where, err := call(
		ctx, s.service(), s.stub.GetDataPlane, &sandboxv1.GetDataPlaneRequest{SandboxId: id}, callTimeout, true,
	)
	if err != nil {
		return nil, err
	}
	return s.handle(found.GetSandbox(), where.GetDataPlane())
}

func (s *Sandboxes) handle(message *sandboxv1.Sandbox, plane *sandboxv1.DataPlane) (*Sandbox, error) {
	data, err := s.client.planes.service(plane, s.service())
	if err != nil {
		return nil, err
	}
	return &Sandbox{
		ID: message.GetSandboxId(), Message: message, sandboxes: s, data: data,
		processes: sandboxv1.NewProcessServiceClient(data.conn), files: sandboxv1.NewFileServiceClient(data.conn),
	}, nil
}

// List yields sandboxes with all these labels (nil = any), newest first. An error is the last thing that it yields.
func (s *Sandboxes) List(ctx context.Context, labels map[string]string) iter.Seq2[*sandboxv1.Sandbox, error] {
	return paged(func(token string) ([]*sandboxv1.Sandbox, string, error) {
		request := &sandboxv1.ListSandboxesRequest{Labels: labels, PageToken: token}
		answer, err := call(ctx, s.service(), s.stub.ListSandboxes, request, callTimeout, true)
		return answer.GetSandboxes(), answer.GetNextPageToken(), err
	})
}

// Backends are the service's backends and what each can do on its machine.
func (s *Sandboxes) Backends(ctx context.Context) ([]*sandboxv1.Backend, error) {
	answer, err := call(ctx, s.service(), s.stub.ListBackends, &sandboxv1.ListBackendsRequest{}, callTimeout, true)
	return answer.GetBackends(), err
}

// Prepare is the snapshot of a sandbox with these files after this setup; made once and shared by all callers.
//
// Errors: ErrFailedPrecondition: SETUP_FAILED, whose Message has the end of the command's output; CAPABILITY_MISSING.
func (s *Sandboxes) Prepare(ctx context.Context, spec *sandboxv1.SnapshotSpec) (*sandboxv1.Snapshot, error) {
	var ran *sandboxv1.RunResult
	var snapshot *sandboxv1.Snapshot
	request := &sandboxv1.PrepareSnapshotRequest{Spec: spec}
	err := receive(ctx, s.stub.PrepareSnapshot, request, func(event *sandboxv1.PrepareSnapshotResponse) bool {
		if finished := event.GetCommandFinished(); finished != nil {
			ran = finished.GetResult()
		}
		snapshot = event.GetSnapshot()
		return true
	})
	if err != nil {
		failure := fromRPC(ctx, err, s.service())
		if output := append(ran.GetStdout(), ran.GetStderr()...); failure.Reason == "SETUP_FAILED" && len(output) > 0 {
			failure.Message += "\n" + string(output[max(0, len(output)-noteBytes):])
		}
		return nil, failure
	}
	if snapshot == nil {
		return nil, &Error{
			Kind: ErrUnavailable, Reason: "STREAM_ENDED", Message: "The service ended the preparation without a snapshot",
		}
	}
	return snapshot, nil
}

// Snapshots yields the snapshots that exist, newest first. An error is the last thing that it yields.
func (s *Sandboxes) Snapshots(ctx context.Context) iter.Seq2[*sandboxv1.Snapshot, error] {
	return paged(func(token string) ([]*sandboxv1.Snapshot, string, error) {
		request := &sandboxv1.ListSnapshotsRequest{PageToken: token}
		answer, err := call(ctx, s.service(), s.stub.ListSnapshots, request, callTimeout, true)
		return answer.GetSnapshots(), answer.GetNextPageToken(), err
	})
}

// DeleteSnapshot deletes a snapshot; sandboxes made from it live on. It may be repeated.
func (s *Sandboxes) DeleteSnapshot(ctx context.Context, id string) error {
	request := &sandboxv1.DeleteSnapshotRequest{SnapshotId: id}
	_, err := call(ctx, s.service(), s.stub.DeleteSnapshot, request, deleteTimeout, true)
	return err
}

// Fork is one child of a fork: a sandbox, or why there is none.
type Fork struct {
	// Index is 0 to count - 1.
	Index int
	// Sandbox is nil where the child failed.
	Sandbox *Sandbox
	// Failure is ErrUnavailable where trying again may help, else ErrFailedPrecondition.
	Failure *Error
}

// Fork makes `count` sandboxes (1 to 256) from a snapshot and yields them as they are ready. The child says their lease,
// labels, network and further environment; it may be nil. An error is the last thing that it yields.
//
// Errors: ErrNotFound, SNAPSHOT_UNKNOWN.
func (s *Sandboxes) Fork(
	ctx context.Context, snapshotID string, count int, child *sandboxv1.SandboxSpec,
) iter.Seq2[*Fork, error] {
	source := &sandboxv1.ForkSandboxesRequest_SnapshotId{SnapshotId: snapshotID}
	return s.forks(ctx, &sandboxv1.ForkSandboxesRequest{Source: source, Count: int32(count), Spec: child})
}

func (s *Sandboxes) forks(ctx context.Context, request *sandboxv1.ForkSandboxesRequest) iter.Seq2[*Fork, error] {
	request.RequestId = requestID()
	if request.Spec == nil {
		request.Spec = &sandboxv1.SandboxSpec{}
	}
	return func(yield func(*Fork, error) bool) {
		for answer, err := range streamed(ctx, s.service(), s.stub.ForkSandboxes, request) {
			if err != nil {
				yield(nil, err)
				return
			}
			fork := &Fork{Index: int(answer.GetIndex())}
			if failed := answer.GetFailure(); failed != nil {
				fork.Failure = &Error{Kind: ErrFailedPrecondition, Reason: failed.GetReason(), Message: failed.GetMessage()}
				if failed.GetRetriable() {
					fork.Failure.Kind = ErrUnavailable
				}
			} else if fork.Sandbox, err = s.handle(answer.GetSandbox(), answer.GetDataPlane()); err != nil {
				if !errors.As(err, &fork.Failure) {
					fork.Failure = fromRPC(ctx, err, s.service())
				}
			}
			if !yield(fork, nil) {
				return
			}
		}
	}
}
