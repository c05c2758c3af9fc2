package penstock

import (
	"context"
	"encoding/hex"
	"errors"
	"iter"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

const (
	sandboxTimeout = 5 * time.Minute
	deleteTimeout  = time.Minute
	noteBytes      = 2000
)

// Sandboxes is all sandbox services that the driver lists, as Client.Sandboxes: sandboxes without agents or models. Backends is
// of the connection's own service, which also has the toolboxes.
type Sandboxes struct{ client *Client }

// node is one sandbox service.
type node struct {
	service *service
	stub    sandboxv1.SandboxServiceClient
}

func nodeOf(m member) node {
	return node{m.service, sandboxv1.NewSandboxServiceClient(m.service.conn)}
}

func (s *Sandboxes) given() node { return nodeOf(s.client.cluster.givenMember("sandbox")) }

// home is the service that has a sandbox or snapshot.
func (s *Sandboxes) home(ctx context.Context, id string) (node, error) {
	at, err := s.client.cluster.home(ctx, "sandbox", id)
	if err != nil {
		return node{}, err
	}
	return nodeOf(at), nil
}

// nodes are all, for a question to all of them.
func (s *Sandboxes) nodes(ctx context.Context) ([]node, error) {
	members, err := s.client.cluster.membersOrGiven(ctx, "sandbox", fresh)
	var all []node
	for _, one := range ofSeveral(members) {
		all = append(all, nodeOf(one))
	}
	return all, err
}

// Create makes a sandbox and returns when it is ready; nil is an empty one, completed by the operator's settings. The services
// take turns; one with toolboxes is at the connection's service, one of a snapshot at the snapshot's. It lives until Delete, or
// until its lease ends. The create is repeated while the service is away, and makes one sandbox all the same.
//
// Errors: ErrFailedPrecondition, CAPABILITY_MISSING, BACKEND_UNAVAILABLE; ErrNotFound, SNAPSHOT_UNKNOWN;
// ErrResourceExhausted, SANDBOX_LIMIT, OWNER_LIMIT.
func (s *Sandboxes) Create(ctx context.Context, spec *sandboxv1.SandboxSpec) (*Sandbox, error) {
	if spec == nil {
		spec = &sandboxv1.SandboxSpec{}
	}
	request := &sandboxv1.CreateSandboxRequest{RequestId: requestID(), Spec: spec}
	made := func(ctx context.Context, at member, again func(*Error) bool) (*sandboxv1.CreateSandboxResponse, error) {
		return repeated(ctx, at.service, nodeOf(at).stub.CreateSandbox, request, sandboxTimeout, again)
	}
	var at node
	var answer *sandboxv1.CreateSandboxResponse
	var err error
	switch base := spec.GetBase().GetSnapshotId(); {
	case len(spec.GetToolboxIds()) > 0:
		at = s.given()
		answer, err = call(ctx, at.service, at.stub.CreateSandbox, request, sandboxTimeout, true)
	case base != "":
		if at, err = s.home(ctx, base); err == nil {
			answer, err = call(ctx, at.service, at.stub.CreateSandbox, request, sandboxTimeout, true)
		}
	default:
		var taken member
		if taken, answer, err = create(ctx, s.client.cluster, "sandbox", "", made); err == nil {
			at = nodeOf(taken)
		}
	}
	if err != nil {
		return nil, err
	}
	return s.handle(at, answer.GetSandbox(), answer.GetDataPlane())
}

// Attach is a handle of a sandbox that was made elsewhere.
//
// Errors: ErrNotFound, SANDBOX_UNKNOWN.
func (s *Sandboxes) Attach(ctx context.Context, id string) (*Sandbox, error) {
	at, err := s.home(ctx, id)
	if err != nil {
		return nil, err
	}
	found, err := call(ctx, at.service, at.stub.GetSandbox, &sandboxv1.GetSandboxRequest{SandboxId: id}, callTimeout, true)
	if err != nil {
		return nil, err
	}
	where, err := call(
		ctx, at.service, at.stub.GetDataPlane, &sandboxv1.GetDataPlaneRequest{SandboxId: id}, callTimeout, true,
	)
	if err != nil {
		return nil, err
	}
	return s.handle(at, found.GetSandbox(), where.GetDataPlane())
}

func (s *Sandboxes) handle(at node, message *sandboxv1.Sandbox, plane *sandboxv1.DataPlane) (*Sandbox, error) {
	data, err := s.client.planes.service(plane, at, message.GetSandboxId())
	if err != nil {
		return nil, err
	}
	return &Sandbox{
		ID: message.GetSandboxId(), Message: message, sandboxes: s, home: at, data: data,
		processes: sandboxv1.NewProcessServiceClient(data.conn), files: sandboxv1.NewFileServiceClient(data.conn),
	}, nil
}

// List yields sandboxes of all services with all these labels (nil = any), newest first. An error is the last thing that it
// yields; that of a service that is away comes after the sandboxes of all others.
func (s *Sandboxes) List(ctx context.Context, labels map[string]string) iter.Seq2[*sandboxv1.Sandbox, error] {
	return listed(ctx, s, func(at node, token string) ([]*sandboxv1.Sandbox, string, error) {
		request := &sandboxv1.ListSandboxesRequest{Labels: labels, PageToken: token}
		answer, err := call(ctx, at.service, at.stub.ListSandboxes, request, callTimeout, true)
		return answer.GetSandboxes(), answer.GetNextPageToken(), err
	})
}

// listed are the items of all services, of which `page` gives a page of one.
func listed[T interface{ GetCreateTime() *timestamppb.Timestamp }](
	ctx context.Context, s *Sandboxes, page func(at node, token string) ([]T, string, error),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		nodes, err := s.nodes(ctx)
		if err != nil {
			failing[T](err)(yield)
			return
		}
		var lists []iter.Seq2[T, error]
		for _, at := range nodes {
			lists = append(lists, paged(func(token string) ([]T, string, error) { return page(at, token) }))
		}
		newestFirst(lists, T.GetCreateTime)(yield)
	}
}

// Backends are the backends of the connection's own service, and what each can do on its machine.
func (s *Sandboxes) Backends(ctx context.Context) ([]*sandboxv1.Backend, error) {
	at := s.given()
	answer, err := call(ctx, at.service, at.stub.ListBackends, &sandboxv1.ListBackendsRequest{}, callTimeout, true)
	return answer.GetBackends(), err
}

// Prepare is the snapshot of a sandbox with these files after this setup; made once and shared by all callers, at one of the
// services.
//
// Errors: ErrFailedPrecondition: SETUP_FAILED, whose Message has the end of the command's output; CAPABILITY_MISSING.
func (s *Sandboxes) Prepare(ctx context.Context, spec *sandboxv1.SnapshotSpec) (*sandboxv1.Snapshot, error) {
	request := &sandboxv1.PrepareSnapshotRequest{Spec: spec}
	if len(spec.GetSandbox().GetToolboxIds()) > 0 {
		return s.given().prepare(ctx, request)
	}
	// Every client prepares equal states at the same service.
	key, err := proto.MarshalOptions{Deterministic: true}.Marshal(request)
	if err != nil {
		return nil, &Error{Kind: ErrInvalidArgument, Reason: "ARGUMENT_TYPE", Message: err.Error(), cause: err}
	}
	_, made, err := create(ctx, s.client.cluster, "sandbox", hex.EncodeToString(key), func(
		ctx context.Context, at member, _ func(*Error) bool,
	) (*sandboxv1.Snapshot, error) {
		return nodeOf(at).prepare(ctx, request)
	})
	return made, err
}

func (n node) prepare(ctx context.Context, request *sandboxv1.PrepareSnapshotRequest) (*sandboxv1.Snapshot, error) {
	var ran *sandboxv1.RunResult
	var snapshot *sandboxv1.Snapshot
	err := receive(ctx, n.stub.PrepareSnapshot, request, func(event *sandboxv1.PrepareSnapshotResponse) bool {
		if finished := event.GetCommandFinished(); finished != nil {
			ran = finished.GetResult()
		}
		snapshot = event.GetSnapshot()
		return true
	})
	if err != nil {
		failure := fromRPC(ctx, err, n.service)
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

// Snapshots yields the snapshots of all services, newest first. An error is the last thing that it yields; that of a service
// that is away comes after the snapshots of all others.
func (s *Sandboxes) Snapshots(ctx context.Context) iter.Seq2[*sandboxv1.Snapshot, error] {
	return listed(ctx, s, func(at node, token string) ([]*sandboxv1.Snapshot, string, error) {
		request := &sandboxv1.ListSnapshotsRequest{PageToken: token}
		answer, err := call(ctx, at.service, at.stub.ListSnapshots, request, callTimeout, true)
		return answer.GetSnapshots(), answer.GetNextPageToken(), err
	})
}

// DeleteSnapshot deletes a snapshot; sandboxes made from it live on. It may be repeated.
func (s *Sandboxes) DeleteSnapshot(ctx context.Context, id string) error {
	at, err := s.home(ctx, id)
	if err != nil {
		return err
	}
	request := &sandboxv1.DeleteSnapshotRequest{SnapshotId: id}
	_, err = call(ctx, at.service, at.stub.DeleteSnapshot, request, deleteTimeout, true)
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
	return func(yield func(*Fork, error) bool) {
		at, err := s.home(ctx, snapshotID)
		if err != nil {
			yield(nil, err)
			return
		}
		request := &sandboxv1.ForkSandboxesRequest{Source: source, Count: int32(count), Spec: child}
		s.forks(ctx, at, request)(yield)
	}
}

func (s *Sandboxes) forks(
	ctx context.Context, at node, request *sandboxv1.ForkSandboxesRequest,
) iter.Seq2[*Fork, error] {
	request.RequestId = requestID()
	if request.Spec == nil {
		request.Spec = &sandboxv1.SandboxSpec{}
	}
	return func(yield func(*Fork, error) bool) {
		for answer, err := range streamed(ctx, at.service, at.stub.ForkSandboxes, request) {
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
			} else if fork.Sandbox, err = s.handle(at, answer.GetSandbox(), answer.GetDataPlane()); err != nil {
				if !errors.As(err, &fork.Failure) {
					fork.Failure = fromRPC(ctx, err, at.service)
				}
			}
			if !yield(fork, nil) {
				return
			}
		}
	}
}
