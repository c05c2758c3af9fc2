package penstock

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"iter"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
	trajectoryv1 "penstock.example/penstock/gen/trajectory/v1"
)

// The driver's Wait calls answer at 80 % of this with things as they stand.
const waitTimeout = 30 * time.Second

// Rollouts is the driver's rollouts, as Client.Rollouts.
type Rollouts struct{ client *Client }

// Rollout is a handle of one rollout. It holds no connection of its own and may be made anew at any time, by Attach.
type Rollout struct {
	// ID is the rollout's id.
	ID     string
	client *Client
	at     *driver
}

// Result is an ended rollout.
type Result struct {
	// Rollout is as the driver reports it.
	Rollout *driverv1.Rollout
	// Trajectory is what it made; nil where the gate was never opened for it.
	Trajectory *trajectoryv1.Trajectory
}

// Reward is the verifier's; false = not graded, which is not zero.
func (r *Result) Reward() (float64, bool) {
	reward := r.Rollout.GetOutcome().GetReward()
	return reward.GetValue(), reward != nil
}

// Failure is why the rollout did not complete; nil where it did. One that is retriable says nothing about the policy.
func (r *Result) Failure() *driverv1.Failure { return r.Rollout.GetOutcome().GetFailure() }

// Samples are what a trainer eats.
func (r *Result) Samples() []Sample { return Samples(r.Trajectory) }

// Create starts a rollout at one of the drivers and returns at once. The mode is the gate unless the spec says otherwise; an id in place of ""
// is the rollout's. The create is repeated while the driver is away, and starts one rollout all the same.
//
// Errors: ErrInvalidArgument (Violations name the fields), ErrNotFound (AGENT_UNKNOWN), ErrUnavailable (Reason says which
// service that it needs cannot be reached), and more in docs/errors.md.
func (r *Rollouts) Create(ctx context.Context, spec *driverv1.RolloutSpec, id string) (*Rollout, error) {
	if err := r.client.assayed(spec); err != nil {
		return nil, err
	}
	request := &driverv1.CreateRolloutRequest{RequestId: requestID(), Spec: gated(spec), RolloutId: id}
	at, answer, err := create(ctx, r.client.cluster, "driver", id, func(
		ctx context.Context, at member, again func(*Error) bool,
	) (*driverv1.CreateRolloutResponse, error) {
		return repeated(ctx, at.service, r.client.driverOf(at).stub().CreateRollout, request, createTimeout, again)
	})
	if err != nil {
		return nil, err
	}
	return &Rollout{answer.GetRollout().GetRolloutId(), r.client, r.client.driverOf(at)}, nil
}

// Get is a rollout as it stands.
//
// Errors: ErrNotFound, ROLLOUT_UNKNOWN.
func (r *Rollouts) Get(ctx context.Context, id string) (*driverv1.Rollout, error) {
	_, info, err := r.find(ctx, id)
	return info, err
}

// Attach is a handle of a rollout that was started elsewhere.
//
// Errors: ErrNotFound, ROLLOUT_UNKNOWN.
func (r *Rollouts) Attach(ctx context.Context, id string) (*Rollout, error) {
	at, _, err := r.find(ctx, id)
	if err != nil {
		return nil, err
	}
	return &Rollout{id, r.client, at}, nil
}

func (r *Rollouts) find(ctx context.Context, id string) (*driver, *driverv1.Rollout, error) {
	return having(ctx, r.client, id, func(ctx context.Context, at *driver) (*driverv1.Rollout, error) {
		return (&Rollout{id, r.client, at}).Get(ctx)
	})
}

// Branch starts rollouts that continue this one, their parent, from one of its calls, and returns at once. Calls before that one
// get the parent's answers without sampling; that call is sampled, or answered with the request's Answer. The request needs
// Count, and CallId or CallIndex; RequestId and RolloutId are set here. With Seed each branch samples with a seed of its own;
// without it, with the parent's, if there is one.
//
// Errors: those of Rollouts.Create; ErrNotFound, CALL_UNKNOWN; ErrFailedPrecondition, CALL_UNANSWERED, TRAJECTORY_ABSENT,
// SPEC_FORGOTTEN.
func (r *Rollout) Branch(ctx context.Context, request *driverv1.BranchRolloutRequest) (*Group, error) {
	request = proto.Clone(request).(*driverv1.BranchRolloutRequest)
	request.RequestId, request.RolloutId = requestID(), r.ID
	answer, err := call(ctx, r.at.service(), r.at.stub().BranchRollout, request, createTimeout, true)
	if err != nil {
		return nil, err
	}
	return (&Groups{r.client}).handle(answer.GetGroup(), r.at), nil
}

// List yields rollouts of all drivers that match the filter (nil = all), newest first. An error is the last thing that it
// yields; that of a driver that is away comes after the rollouts of all others.
func (r *Rollouts) List(ctx context.Context, filter *driverv1.RolloutFilter) iter.Seq2[*driverv1.Rollout, error] {
	return func(yield func(*driverv1.Rollout, error) bool) {
		drivers, err := r.client.drivers(ctx)
		if err != nil {
			yield(nil, err)
			return
		}
		var lists []iter.Seq2[*driverv1.Rollout, error]
		for _, at := range drivers {
			lists = append(lists, paged(func(token string) ([]*driverv1.Rollout, string, error) {
				request := &driverv1.ListRolloutsRequest{Filter: filter, PageToken: token}
				answer, err := call(ctx, at.service(), at.stub().ListRollouts, request, callTimeout, true)
				return answer.GetRollouts(), answer.GetNextPageToken(), err
			}))
		}
		newestFirst(lists, (*driverv1.Rollout).GetCreateTime)(yield)
	}
}

// Watch yields the state of the rollouts of all drivers that the request's filter selects: first of all that there are, then
// of each that changes, without end. Messages without rows come where nothing changes. Drivers that do not answer are named in
// Away, and watched again. Where the only one or all of them went away the watch ends: the first messages of a new one have
// all that was missed. An error is the last thing that it yields.
func (r *Rollouts) Watch(
	ctx context.Context, request *driverv1.WatchRolloutsRequest,
) iter.Seq2[*RolloutChanges, error] {
	return r.client.watchAll(ctx, request)
}

// Exported is an ended rollout of an export.
type Exported struct {
	Trajectory *trajectoryv1.Trajectory
	Outcome    *driverv1.Outcome
}

// Export yields the trajectories of all ended rollouts that the request's filter selects, driver by driver. It is not taken up
// again where it breaks. An error is the last thing that it yields; that of a driver that is away comes after the trajectories
// of all others.
func (r *Rollouts) Export(
	ctx context.Context, request *driverv1.ExportTrajectoriesRequest,
) iter.Seq2[*Exported, error] {
	return func(yield func(*Exported, error) bool) {
		drivers, err := r.client.drivers(ctx)
		if err != nil {
			yield(nil, err)
			return
		}
		var exports []iter.Seq2[*Exported, error]
		for _, at := range drivers {
			exports = append(exports, at.exported(ctx, request))
		}
		oneAfterAnother(exports)(yield)
	}
}

// exported is what one driver exports.
func (d *driver) exported(
	ctx context.Context, request *driverv1.ExportTrajectoriesRequest,
) iter.Seq2[*Exported, error] {
	return func(yield func(*Exported, error) bool) {
		var whole *Exported
		for part, err := range streamed(ctx, d.service(), d.stub().ExportTrajectories, request) {
			if err != nil {
				yield(nil, err)
				return
			}
			id := part.GetTrajectory().GetRolloutId()
			if whole != nil && id != "" && id != whole.Trajectory.GetRolloutId() {
				if !yield(whole, nil) {
					return
				}
				whole = nil
			}
			if whole == nil {
				whole = &Exported{&trajectoryv1.Trajectory{}, part.GetOutcome()}
			}
			proto.Merge(whole.Trajectory, part.GetTrajectory())
		}
		if whole != nil {
			yield(whole, nil)
		}
	}
}

// Get is the rollout as it stands.
//
// Errors, of all calls of a handle: ErrNotFound, ROLLOUT_UNKNOWN.
func (r *Rollout) Get(ctx context.Context) (*driverv1.Rollout, error) {
	return r.get(ctx, callTimeout)
}

func (r *Rollout) get(ctx context.Context, timeout time.Duration) (*driverv1.Rollout, error) {
	request := &driverv1.GetRolloutRequest{RolloutId: r.ID}
	answer, err := call(ctx, r.at.service(), r.at.stub().GetRollout, request, timeout, true)
	return answer.GetRollout(), err
}

// Wait is the rollout when it has ended, however often the driver restarts meanwhile.
func (r *Rollout) Wait(ctx context.Context) (*driverv1.Rollout, error) {
	watch := watching{follow: r.at.follow}
	for {
		asked := time.Now()
		request := &driverv1.WaitRolloutRequest{RolloutId: r.ID}
		answer, err := call(ctx, r.at.service(), r.at.stub().WaitRollout, request, waitTimeout, false)
		if err = watch.judge(ctx, err); err != nil {
			return nil, err
		}
		if answer.GetRollout().GetOutcome() != nil {
			return answer.GetRollout(), nil
		}
		if answer != nil {
			if err = watch.askAgain(ctx, asked); err != nil {
				return nil, err
			}
		}
	}
}

// Result is the rollout with its trajectory's samples, when it has ended.
func (r *Rollout) Result(ctx context.Context) (*Result, error) {
	if _, err := r.Wait(ctx); err != nil {
		return nil, err
	}
	return r.ended(ctx)
}

// Trajectory is all that the ended rollout made: samples, calls and branches; with the agents' request bodies, if wanted.
//
// Errors: ErrFailedPrecondition, ROLLOUT_RUNNING; TRAJECTORY_ABSENT: it ended before the gate was opened.
func (r *Rollout) Trajectory(ctx context.Context, bodies bool) (*trajectoryv1.Trajectory, error) {
	return r.trajectory(ctx, &driverv1.GetTrajectoryRequest{RolloutId: r.ID, IncludeBodies: bodies})
}

// TrajectoryWithTop is Trajectory with the alternatives of the sampled tokens, 8 bytes for each.
func (r *Rollout) TrajectoryWithTop(ctx context.Context, bodies bool) (*trajectoryv1.Trajectory, error) {
	request := &driverv1.GetTrajectoryRequest{RolloutId: r.ID, IncludeBodies: bodies, IncludeTop: true}
	return r.trajectory(ctx, request)
}

// Regrade runs a verifier (nil = the rollout's own) on the ended rollout's end state, in a sandbox of its own, and records a further
// grade; the first one stays as it is. It returns once the grade is on disk. The name is 1 to 64 letters, digits, "-", "_" and
// ".", not "first"; empty = from the verifier's SHA-256. A repeat with the same verifier and name gives the grade that is there.
//
// Errors: ErrAlreadyExists, GRADE_EXISTS: the name is that of another verifier's grade; ErrFailedPrecondition, ROLLOUT_RUNNING,
// END_STATE_GONE, SPEC_FORGOTTEN, REGRADE_FAILED; ErrResourceExhausted, GRADE_LIMIT, REGRADE_LIMIT; ErrUnavailable,
// REGRADE_INTERRUPTED: nothing was graded, and a repeat may succeed.
func (r *Rollout) Regrade(ctx context.Context, verifier *driverv1.Verifier, name string) (*driverv1.Grade, error) {
	request := &driverv1.RegradeRolloutRequest{RolloutId: r.ID, Verifier: verifier, Name: name}
	answer, err := call(ctx, r.at.service(), r.at.stub().RegradeRollout, request, regradeTimeout, true)
	return answer.GetGrade(), err
}

// Annotate adds what somebody outside the environment says about the ended rollout's trajectory, 1 to 1024 annotations: all or
// none. They are on disk when it returns; an equal one changes nothing. EncodeLogprobs writes TokenValues.
//
// Errors: ErrNotFound, CALL_UNKNOWN; ErrInvalidArgument, FIELD_INVALID; ErrFailedPrecondition, ROLLOUT_RUNNING,
// TRAJECTORY_ABSENT; ErrResourceExhausted, ANNOTATION_LIMIT.
func (r *Rollout) Annotate(ctx context.Context, annotations ...*trajectoryv1.Annotation) error {
	request := &driverv1.AnnotateTrajectoryRequest{RolloutId: r.ID, Annotations: annotations}
	_, err := call(ctx, r.at.service(), r.at.stub().AnnotateTrajectory, request, resultTimeout, true)
	return err
}

// Events yields what happened after the event of that sequence number (0 = all) and what happens, until the rollout has
// ended; nothing, at once, where an ended one has none. It goes on where it was when the stream breaks. An error is the last thing that it yields.
func (r *Rollout) Events(ctx context.Context, after int64) iter.Seq2[*driverv1.RolloutEvent, error] {
	return func(yield func(*driverv1.RolloutEvent, error) bool) {
		over := false
		err := resumed(ctx, r.at.service, r.at.follow, func(sign func()) error {
			request := &driverv1.WatchRolloutRequest{RolloutId: r.ID, AfterSequence: after}
			each := func(message *driverv1.WatchRolloutResponse) bool {
				sign()
				event := message.GetEvent()
				if event == nil {
					return true
				}
				after = event.GetSequence()
				over = !yield(event, nil) || event.GetEnded() != nil
				return !over
			}
			if err := receive(ctx, r.at.stub().WatchRollout, request, each); err != nil || over {
				return err
			}
			// The driver itself ended the stream: it sends nothing more where the end is not after `after`.
			now, err := r.Get(ctx)
			over = err == nil && now.GetOutcome() != nil && after >= now.GetLastSequence()
			return err
		}, func() bool { return over })
		if err != nil {
			yield(nil, err)
		}
	}
}

// Calls yields the model calls of this rollout until it has ended: see Group.Calls.
func (r *Rollout) Calls(ctx context.Context, opts ...SessionOption) iter.Seq2[*Call, error] {
	ended := func(ctx context.Context) error { _, err := r.Wait(ctx); return err }
	return r.client.callsUntil(ctx, Selector{RolloutIDs: []string{r.ID}}, ended, opts)
}

// Cancel ends it: agent and sandbox are gone when this returns. One that has ended keeps its outcome.
func (r *Rollout) Cancel(ctx context.Context, reason string) (*driverv1.Rollout, error) {
	request := &driverv1.CancelRolloutRequest{RolloutId: r.ID, Reason: reason}
	answer, err := call(ctx, r.at.service(), r.at.stub().CancelRollout, request, cancelTimeout, true)
	return answer.GetRollout(), err
}

// Pause holds it, in whatever phase it is, and returns once it is held: its agent's sandbox is frozen, its calls wait at the gate,
// and its time limits stand still. One that waits is not started; one that is being graded ends. After limit it goes on;
// 0 = as long as the operator allows. It fails with ROLLOUT_ENDED, PAUSE_LIMIT, PAUSE_PENDING or DRAINING.
func (r *Rollout) Pause(ctx context.Context, reason string, limit time.Duration) (*driverv1.Rollout, error) {
	request := &driverv1.PauseRolloutRequest{RolloutId: r.ID, Reason: reason, MaxDuration: span(limit)}
	answer, err := call(ctx, r.at.service(), r.at.stub().PauseRollout, request, pauseTimeout, true)
	return answer.GetRollout(), err
}

// Resume ends its pause, if it has one, and returns once nothing holds it.
func (r *Rollout) Resume(ctx context.Context) (*driverv1.Rollout, error) {
	request := &driverv1.ResumeRolloutRequest{RolloutId: r.ID}
	answer, err := call(ctx, r.at.service(), r.at.stub().ResumeRollout, request, pauseTimeout, true)
	return answer.GetRollout(), err
}

// span is a duration of the wire; 0 = none.
func span(limit time.Duration) *durationpb.Duration {
	if limit == 0 {
		return nil
	}
	return durationpb.New(limit)
}

// Delete removes the ended rollout with its events and trajectory.
func (r *Rollout) Delete(ctx context.Context) error {
	request := &driverv1.DeleteRolloutRequest{RolloutId: r.ID}
	_, err := call(ctx, r.at.service(), r.at.stub().DeleteRollout, request, callTimeout, true)
	return err
}

func (r *Rollout) ended(ctx context.Context) (*Result, error) {
	info, err := r.get(ctx, resultTimeout)
	if err != nil {
		return nil, err
	}
	trajectory, err := r.trajectory(ctx, &driverv1.GetTrajectoryRequest{RolloutId: r.ID, SamplesOnly: true})
	var failure *Error
	if errors.As(err, &failure) && failure.Reason == "TRAJECTORY_ABSENT" {
		return &Result{Rollout: info}, nil
	}
	return &Result{info, trajectory}, err
}

func (r *Rollout) trajectory(
	ctx context.Context, request *driverv1.GetTrajectoryRequest,
) (*trajectoryv1.Trajectory, error) {
	parts, err := collect(ctx, r.at.service(), r.at.stub().GetTrajectory, request, resultTimeout)
	if err != nil {
		return nil, err
	}
	whole := &trajectoryv1.Trajectory{}
	for _, part := range parts {
		proto.Merge(whole, part.GetTrajectory())
	}
	return whole, nil
}

// callsUntil yields the calls of a session that lasts until `ended` returns.
func (c *Client) callsUntil(
	ctx context.Context, selector Selector, ended func(context.Context) error, opts []SessionOption,
) iter.Seq2[*Call, error] {
	return func(yield func(*Call, error) bool) {
		session, err := c.Intercept(ctx, selector, opts...)
		if err != nil {
			yield(nil, err)
			return
		}
		defer session.Close()
		watching, cancel := context.WithCancel(ctx)
		watched := make(chan error, 1)
		go func() {
			watched <- ended(watching)
			session.Finish()
		}()
		over := false
		for call, err := range session.Calls(ctx) {
			if over = !yield(call, err) || err != nil; over {
				break
			}
		}
		if over {
			cancel()
			<-watched
			return
		}
		defer cancel()
		if err := <-watched; err != nil {
			yield(nil, err)
		}
	}
}

// resumed opens a watch again and again until it is over, `watch` fails for good, or the service is away for too long. follow
// goes to where the service is by now; nil = it does not move.
func resumed(
	ctx context.Context, at func() *service, follow func(context.Context) error,
	watch func(sign func()) error, over func() bool,
) error {
	patient := watching{follow: follow}
	for {
		err := watch(patient.sign)
		if over() {
			return nil
		}
		s := at()
		failure := &Error{Kind: ErrUnavailable, Reason: "STREAM_ENDED", Message: s.peer + " ended the stream"}
		if err != nil {
			failure = fromRPC(ctx, err, s)
		}
		if err := patient.pause(ctx, failure); err != nil {
			return err
		}
	}
}

func paged[T any](page func(token string) ([]T, string, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for token := ""; ; {
			items, next, err := page(token)
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if err != nil {
				var nothing T
				yield(nothing, err)
			}
			if err != nil || next == "" {
				return
			}
			token = next
		}
	}
}

// gated is the spec with the gate as its mode where it says none.
func gated(spec *driverv1.RolloutSpec) *driverv1.RolloutSpec {
	if spec.GetMode() != interceptionv1.Mode_MODE_UNSPECIFIED {
		return spec
	}
	spec = proto.Clone(spec).(*driverv1.RolloutSpec)
	spec.Mode = interceptionv1.Mode_MODE_INTERCEPTION_GATE
	return spec
}

func requestID() string {
	var random [16]byte
	if _, err := rand.Read(random[:]); err != nil {
		panic("the system gives no random bytes: " + err.Error()) // Go itself has it that this never happens
	}
	return hex.EncodeToString(random[:])
}
