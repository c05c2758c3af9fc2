package penstock

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"iter"
	"time"

	"google.golang.org/protobuf/proto"

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

// Create starts a rollout and returns at once. The mode is the gate unless the spec says otherwise; an id in place of ""
// is the rollout's. The create is repeated while the driver is away, and starts one rollout all the same.
//
// Errors: ErrInvalidArgument (Violations name the fields), ErrNotFound (AGENT_UNKNOWN), ErrUnavailable (Reason says which
// service that it needs cannot be reached), and more in docs/errors.md.
func (r *Rollouts) Create(ctx context.Context, spec *driverv1.RolloutSpec, id string) (*Rollout, error) {
	request := &driverv1.CreateRolloutRequest{RequestId: requestID(), Spec: gated(spec), RolloutId: id}
	answer, err := call(ctx, r.client.services["driver"], r.client.driver.CreateRollout, request, createTimeout, true)
	if err != nil {
		return nil, err
	}
	return &Rollout{answer.GetRollout().GetRolloutId(), r.client}, nil
}

// Get is a rollout as it stands.
//
// Errors: ErrNotFound, ROLLOUT_UNKNOWN.
func (r *Rollouts) Get(ctx context.Context, id string) (*driverv1.Rollout, error) {
	return (&Rollout{id, r.client}).Get(ctx)
}

// Attach is a handle of a rollout that was started elsewhere.
//
// Errors: ErrNotFound, ROLLOUT_UNKNOWN.
func (r *Rollouts) Attach(ctx context.Context, id string) (*Rollout, error) {
	if _, err := r.Get(ctx, id); err != nil {
		return nil, err
	}
	return &Rollout{id, r.client}, nil
}

// List yields rollouts that match the filter (nil = all), newest first. An error is the last thing that it yields.
func (r *Rollouts) List(ctx context.Context, filter *driverv1.RolloutFilter) iter.Seq2[*driverv1.Rollout, error] {
	page := func(token string) ([]*driverv1.Rollout, string, error) {
		request := &driverv1.ListRolloutsRequest{Filter: filter, PageToken: token}
		answer, err := call(ctx, r.client.services["driver"], r.client.driver.ListRollouts, request, callTimeout, true)
		return answer.GetRollouts(), answer.GetNextPageToken(), err
	}
	return paged(page)
}

// Watch yields the state of the rollouts that the request's filter selects: first of all that there are, then of each that
// changes, without end. Messages without rows come where nothing changes. A watch that broke is not taken up again: the
// first messages of a new one have all that was missed. An error is the last thing that it yields.
func (r *Rollouts) Watch(
	ctx context.Context, request *driverv1.WatchRolloutsRequest,
) iter.Seq2[*driverv1.WatchRolloutsResponse, error] {
	return streamed(ctx, r.client.services["driver"], r.client.driver.WatchRollouts, request)
}

// Exported is an ended rollout of an export.
type Exported struct {
	Trajectory *trajectoryv1.Trajectory
	Outcome    *driverv1.Outcome
}

// Export yields the trajectories of all ended rollouts that the request's filter selects. It is not taken up again where it
// breaks. An error is the last thing that it yields.
func (r *Rollouts) Export(
	ctx context.Context, request *driverv1.ExportTrajectoriesRequest,
) iter.Seq2[*Exported, error] {
	return func(yield func(*Exported, error) bool) {
		var whole *Exported
		for part, err := range streamed(ctx, r.client.services["driver"], r.client.driver.ExportTrajectories, request) {
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
	request := &driverv1.GetRolloutRequest{RolloutId: r.ID}
	answer, err := call(ctx, r.client.services["driver"], r.client.driver.GetRollout, request, callTimeout, true)
	return answer.GetRollout(), err
}

// Wait is the rollout when it has ended, however often the driver restarts meanwhile.
func (r *Rollout) Wait(ctx context.Context) (*driverv1.Rollout, error) {
	var watch watching
	for {
		asked := time.Now()
		request := &driverv1.WaitRolloutRequest{RolloutId: r.ID}
		answer, err := call(ctx, r.client.services["driver"], r.client.driver.WaitRollout, request, waitTimeout, false)
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

// Events yields what happened after the event of that sequence number (0 = all) and what happens, until the rollout has
// ended. It goes on where it was when the stream breaks. An error is the last thing that it yields.
func (r *Rollout) Events(ctx context.Context, after int64) iter.Seq2[*driverv1.RolloutEvent, error] {
	return func(yield func(*driverv1.RolloutEvent, error) bool) {
		over := false
		err := resumed(ctx, r.client.services["driver"], func(sign func()) error {
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
			return receive(ctx, r.client.driver.WatchRollout, request, each)
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
	answer, err := call(ctx, r.client.services["driver"], r.client.driver.CancelRollout, request, cancelTimeout, true)
	return answer.GetRollout(), err
}

// Delete removes the ended rollout with its events and trajectory.
func (r *Rollout) Delete(ctx context.Context) error {
	request := &driverv1.DeleteRolloutRequest{RolloutId: r.ID}
	_, err := call(ctx, r.client.services["driver"], r.client.driver.DeleteRollout, request, callTimeout, true)
	return err
}

func (r *Rollout) ended(ctx context.Context) (*Result, error) {
	info, err := r.Get(ctx)
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
	const timeout = 5 * time.Minute
	parts, err := collect(ctx, r.client.services["driver"], r.client.driver.GetTrajectory, request, timeout)
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

// resumed opens a watch again and again until it is over, `watch` fails for good, or the service is away for too long.
func resumed(ctx context.Context, s *service, watch func(sign func()) error, over func() bool) error {
	var patient watching
	for {
		err := watch(patient.sign)
		if over() {
			return nil
		}
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
