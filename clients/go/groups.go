package penstock

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// Groups is the driver's groups, as Client.Groups.
type Groups struct{ client *Client }

// Group is a handle of rollouts of one spec, whose rewards are compared.
type Group struct {
	// ID is the group's id.
	ID string
	// RolloutIDs are its rollouts', spares included, in the order of their index.
	RolloutIDs []string
	client     *Client
	at         *driver
}

// GroupOption is one setting of a group.
type GroupOption func(*driverv1.CreateGroupRequest)

// WithGroupID chooses the group's id, of at most 120 characters; its rollouts are ID-INDEX.
func WithGroupID(id string) GroupOption {
	return func(r *driverv1.CreateGroupRequest) { r.GroupId = id }
}

// WithSpares starts so many more rollouts at once, so that the wanted number of results comes although some fail.
func WithSpares(spares int) GroupOption {
	return func(r *driverv1.CreateGroupRequest) { r.Spares = int32(spares) }
}

// WithQuorum has the group count as complete with so many results.
func WithQuorum(quorum int) GroupOption {
	return func(r *driverv1.CreateGroupRequest) {
		wanted := int32(quorum)
		r.Quorum = &wanted
	}
}

// WithStragglerGrace gives the others this long from the quorum-th result on; without it they are waited for.
func WithStragglerGrace(grace time.Duration) GroupOption {
	return func(r *driverv1.CreateGroupRequest) {
		r.Stragglers = &driverv1.StragglerPolicy{Grace: durationpb.New(grace)}
	}
}

// Create starts n rollouts (1 to 256) of one spec, which share one prepared state, at one of the drivers and returns at once. Mode, repetition
// and errors are those of Rollouts.Create.
func (g *Groups) Create(
	ctx context.Context, spec *driverv1.RolloutSpec, n int, opts ...GroupOption,
) (*Group, error) {
	if err := g.client.assayed(spec); err != nil {
		return nil, err
	}
	request := &driverv1.CreateGroupRequest{RequestId: requestID(), Spec: gated(spec), Size: int32(n)}
	for _, option := range opts {
		option(request)
	}
	at, answer, err := create(ctx, g.client.cluster, "driver", request.GetGroupId(), func(
		ctx context.Context, at member, again func(*Error) bool,
	) (*driverv1.CreateGroupResponse, error) {
		return repeated(ctx, at.service, g.client.driverOf(at).stub().CreateGroup, request, createTimeout, again)
	})
	if err != nil {
		return nil, err
	}
	return g.handle(answer.GetGroup(), g.client.driverOf(at)), nil
}

// Attach is a handle of a group that was started elsewhere.
//
// Errors: ErrNotFound, GROUP_UNKNOWN.
func (g *Groups) Attach(ctx context.Context, id string) (*Group, error) {
	at, info, err := having(ctx, g.client, id, func(ctx context.Context, at *driver) (*driverv1.Group, error) {
		return (&Group{ID: id, client: g.client, at: at}).Get(ctx)
	})
	if err != nil {
		return nil, err
	}
	return g.handle(info, at), nil
}

func (g *Groups) handle(info *driverv1.Group, at *driver) *Group {
	return &Group{info.GetGroupId(), info.GetRolloutIds(), g.client, at}
}

// List yields groups of all drivers, those of one run or ("") all, newest first. An error is the last thing that it yields; that
// of a driver that is away comes after the groups of all others.
func (g *Groups) List(ctx context.Context, runID string) iter.Seq2[*driverv1.Group, error] {
	return func(yield func(*driverv1.Group, error) bool) {
		drivers, err := g.client.drivers(ctx)
		if err != nil {
			yield(nil, err)
			return
		}
		var lists []iter.Seq2[*driverv1.Group, error]
		for _, at := range drivers {
			lists = append(lists, paged(func(token string) ([]*driverv1.Group, string, error) {
				request := &driverv1.ListGroupsRequest{RunId: some(runID), PageToken: token}
				answer, err := call(ctx, at.service(), at.stub().ListGroups, request, callTimeout, true)
				return answer.GetGroups(), answer.GetNextPageToken(), err
			}))
		}
		newestFirst(lists, (*driverv1.Group).GetCreateTime)(yield)
	}
}

// Get is the group as it stands.
//
// Errors, of all calls of a handle: ErrNotFound, GROUP_UNKNOWN.
func (g *Group) Get(ctx context.Context) (*driverv1.Group, error) {
	request := &driverv1.GetGroupRequest{GroupId: g.ID}
	answer, err := call(ctx, g.at.service(), g.at.stub().GetGroup, request, callTimeout, true)
	return answer.GetGroup(), err
}

// Wait is the group when all its rollouts have ended, however often the driver restarts meanwhile.
func (g *Group) Wait(ctx context.Context) (*driverv1.Group, error) {
	watch := watching{follow: g.at.follow}
	for {
		asked := time.Now()
		request := &driverv1.WaitGroupRequest{GroupId: g.ID}
		answer, err := call(ctx, g.at.service(), g.at.stub().WaitGroup, request, waitTimeout, false)
		if err = watch.judge(ctx, err); err != nil {
			return nil, err
		}
		if answer.GetGroup().GetEnded() {
			return answer.GetGroup(), nil
		}
		if answer != nil {
			if err = watch.askAgain(ctx, asked); err != nil {
				return nil, err
			}
		}
	}
}

// Calls yields the model calls of all its rollouts until all have ended; calls wait at the gate, so none is missed. An
// error is the last thing that it yields. Leaving the loop puts calls without an answer back into the queue. Goroutines
// that the loop started may still be answering when it ends: nobody waits for those answers any more.
//
// For pauses, announcements and a session that spans groups use Client.Intercept.
func (g *Group) Calls(ctx context.Context, opts ...SessionOption) iter.Seq2[*Call, error] {
	ended := func(ctx context.Context) error { _, err := g.Wait(ctx); return err }
	return g.client.callsUntil(ctx, Selector{GroupID: g.ID}, ended, opts)
}

// Events yields the events of all its rollouts, each one's in order, until all have ended; a summary is phase changes and
// ends only. It goes on where it was when the stream breaks. An error is the last thing that it yields.
func (g *Group) Events(ctx context.Context, summary bool) iter.Seq2[*driverv1.RolloutEvent, error] {
	return func(yield func(*driverv1.RolloutEvent, error) bool) {
		over, positions := false, map[string]int64{}
		err := resumed(ctx, g.at.service, g.at.follow, func(sign func()) error {
			request := &driverv1.WatchGroupRequest{GroupId: g.ID, AfterSequences: positions, Summary: summary}
			each := func(message *driverv1.WatchGroupResponse) bool {
				sign()
				if event := message.GetEvent(); event != nil {
					positions[event.GetRolloutId()] = event.GetSequence()
					over = !yield(event, nil)
				}
				over = over || message.GetGroup().GetEnded()
				return !over
			}
			return receive(ctx, g.at.stub().WatchGroup, request, each)
		}, func() bool { return over })
		if err != nil {
			yield(nil, err)
		}
	}
}

// Ended yields each rollout as it ends, with its trajectory's samples. An error is the last thing that it yields.
func (g *Group) Ended(ctx context.Context) iter.Seq2[*Result, error] {
	return func(yield func(*Result, error) bool) {
		for event, err := range g.Events(ctx, true) {
			if err == nil && event.GetEnded() == nil {
				continue
			}
			var result *Result
			if err == nil {
				result, err = (&Rollout{event.GetRolloutId(), g.client, g.at}).ended(ctx)
			}
			if !yield(result, err) || err != nil {
				return
			}
		}
	}
}

// Results waits for all: every rollout in the order of its index, failed ones and spares included. Those that count are
// Get's ResultRolloutIds.
func (g *Group) Results(ctx context.Context) ([]*Result, error) {
	var results []*Result
	for result, err := range g.Ended(ctx) {
		if err != nil {
			return nil, err
		}
		results = append(results, result)
	}
	slices.SortFunc(results, func(a, b *Result) int { return cmp.Compare(a.Rollout.GetIndex(), b.Rollout.GetIndex()) })
	return results, nil
}

// Cancel ends all its rollouts.
func (g *Group) Cancel(ctx context.Context, reason string) (*driverv1.Group, error) {
	request := &driverv1.CancelGroupRequest{GroupId: g.ID, Reason: reason}
	answer, err := call(ctx, g.at.service(), g.at.stub().CancelGroup, request, cancelTimeout, true)
	return answer.GetGroup(), err
}

// Pause holds each of its rollouts that has not ended: see Rollout.Pause.
func (g *Group) Pause(ctx context.Context, reason string, limit time.Duration) (*driverv1.Group, error) {
	request := &driverv1.PauseGroupRequest{GroupId: g.ID, Reason: reason, MaxDuration: span(limit)}
	answer, err := call(ctx, g.at.service(), g.at.stub().PauseGroup, request, pauseTimeout, true)
	return answer.GetGroup(), err
}

// Resume ends the pauses of its rollouts.
func (g *Group) Resume(ctx context.Context) (*driverv1.Group, error) {
	request := &driverv1.ResumeGroupRequest{GroupId: g.ID}
	answer, err := call(ctx, g.at.service(), g.at.stub().ResumeGroup, request, pauseTimeout, true)
	return answer.GetGroup(), err
}

// Delete removes the ended group with its rollouts.
func (g *Group) Delete(ctx context.Context) error {
	request := &driverv1.DeleteGroupRequest{GroupId: g.ID}
	_, err := call(ctx, g.at.service(), g.at.stub().DeleteGroup, request, callTimeout, true)
	return err
}
