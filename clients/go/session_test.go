package penstock

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

// opened is a session with the gate's side of it.
func opened(t *testing.T, opts ...SessionOption) (*server, *Session, *conversation) {
	t.Helper()
	gate, ps := serve(t)
	type answer struct {
		session *Session
		err     error
	}
	opening := make(chan answer, 1)
	go func() {
		session, err := ps.Intercept(bounded(t), Selector{RunID: "run"}, opts...)
		opening <- answer{session, err}
	}()
	talk := gate.session(t)
	talk.welcome(&interceptionv1.Welcome{SessionId: "first"})
	said := <-opening
	if said.err != nil {
		t.Fatal(said.err)
	}
	t.Cleanup(func() {
		gate.grpc.Stop() // so that nobody waits for an answer to Goodbye
		_ = said.session.Close()
	})
	return gate, said.session, talk
}

func nextCall(t *testing.T, session *Session) *Call {
	t.Helper()
	for call, err := range session.Calls(bounded(t)) {
		if err != nil {
			t.Fatal(err)
		}
		return call
	}
	t.Fatal("no call came")
	return nil
}

func delivering(t *testing.T, call *Call) <-chan error {
	t.Helper()
	completion, err := Sampled([]int32{1, 2}, []float32{-0.5, 0}, 3)
	if err != nil {
		t.Fatal(err)
	}
	ctx, done := bounded(t), make(chan error, 1)
	go func() { done <- call.Deliver(ctx, completion) }()
	return done
}

// A delivery returns when the gate has it, and not before; the session ends with Goodbye and leaves nothing running (R29).
func TestADeliveryReturnsWhenTheGateHasIt(t *testing.T) {
	_, session, talk := opened(t)
	talk.lease("a")
	call := nextCall(t, session)
	if ids := call.PromptTokenIDs(); len(ids) != 2 || ids[0] != 7 || ids[1] != -1 {
		t.Fatalf("the prompt came as %v", ids)
	}
	done := delivering(t, call)
	result := talk.result()
	if result.GetLeaseId() != "lease-a" || result.GetCompletion().GetSpan().GetCount() != 2 {
		t.Fatalf("sent was %v", result)
	}
	select {
	case err := <-done:
		t.Fatalf("it returned before the gate spoke: %v", err)
	default:
	}
	talk.accept("a")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	<-call.Ended()
	if err := <-delivering(t, call); !errors.Is(err, ErrAlreadyDelivered) || !errors.Is(err, ErrRejected) {
		t.Fatalf("a second answer gave %v", err)
	}
	closing := make(chan error, 1)
	go func() { closing <- session.Close() }()
	talk.goodbye()
	if err := <-closing; err != nil {
		t.Fatal(err)
	}
	for call, err := range session.Calls(bounded(t)) {
		t.Fatalf("a closed session gave %v, %v", call, err)
	}
}

// A session whose stream breaks resumes: its calls stay, and what was not acknowledged is sent again, once (R34).
func TestASessionThatBreaksIsTakenUpAgain(t *testing.T) {
	gate, session, talk := opened(t)
	talk.lease("a", "b")
	first, second := nextCall(t, session), nextCall(t, session)
	done := delivering(t, first)
	talk.result()
	talk.finished <- status.Error(codes.Unavailable, "the gate restarts")

	again := gate.session(t)
	hello := again.welcome(&interceptionv1.Welcome{SessionId: "first", Resumed: true, HeldCallIds: []string{"a", "b"}})
	if hello.GetResumeSessionId() != "first" || len(hello.GetHeld().GetCallIds()) != 2 {
		t.Fatalf("it said %v", hello)
	}
	again.lease("a") // sent again by a gate that did not trust its own frame: no new call
	if repeated := again.result(); repeated.GetCallId() != "a" {
		t.Fatalf("sent again was %v", repeated)
	}
	again.accept("a")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	done = delivering(t, second)
	for {
		result := again.result()
		again.accept(result.GetCallId())
		if result.GetCallId() == "b" {
			break
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	session.Finish()
	for call, err := range session.Calls(bounded(t)) {
		t.Fatalf("handed out twice: %v, %v", call, err)
	}
}

// Calls that the gate no longer holds for the session after a break are told as ended (R26).
func TestACallWhoseLeaseWasLostEnds(t *testing.T) {
	gate, session, talk := opened(t)
	talk.lease("a")
	call := nextCall(t, session)
	talk.finished <- status.Error(codes.Unavailable, "gone")
	gate.session(t).welcome(&interceptionv1.Welcome{SessionId: "first", Resumed: true})
	<-call.Ended()
	if call.EndReason() != "LEASE_LOST" {
		t.Fatalf("it ended with %s", call.EndReason())
	}
	if err := <-delivering(t, call); !errors.Is(err, ErrCallEnded) {
		t.Fatalf("an answer gave %v", err)
	}
}

// A gate that forgot the session leases the same calls anew: they are not handed out twice, and answers go out under the
// new lease.
func TestANewLeaseOfACallThatIsHeldReplacesTheOld(t *testing.T) {
	gate, session, talk := opened(t)
	talk.lease("a")
	done := delivering(t, nextCall(t, session))
	talk.result()
	talk.finished <- status.Error(codes.Unavailable, "gone")
	again := gate.session(t)
	again.welcome(&interceptionv1.Welcome{SessionId: "second"})
	call := &interceptionv1.ModelCall{CallId: "a", LeaseId: "newer"}
	calls := &interceptionv1.Calls{Calls: []*interceptionv1.ModelCall{call}}
	again.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Calls{Calls: calls}})
	for again.result().GetLeaseId() != "newer" {
		continue // what was sent before the new lease came
	}
	again.accept("a")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if session.ID() != "second" {
		t.Fatalf("the session is %s", session.ID())
	}
}

// A completion that breaks a rule is refused with the fields, and the call may be answered again (R29, R83).
func TestARefusedCompletionMayBeAnsweredAgain(t *testing.T) {
	_, session, talk := opened(t)
	talk.lease("a")
	call := nextCall(t, session)
	done := delivering(t, call)
	talk.result()
	talk.acknowledge(&interceptionv1.ResultsAcknowledged{Rejected: []*interceptionv1.ResultRejected{{
		CallId: "a", Reason: interceptionv1.ResultRejected_REASON_INVALID,
		Violations: []string{"completion.span.logprobs: positive"},
	}}})
	var failure *Error
	if err := <-done; !errors.As(err, &failure) || !errors.Is(err, ErrInvalidCompletion) || !failure.AnswerAgain() {
		t.Fatalf("the refusal came as %v", err)
	}
	if len(failure.Violations) != 1 || failure.Violations[0].Field != "completion.span.logprobs" {
		t.Fatalf("its violations are %v", failure.Violations)
	}
	done = delivering(t, call)
	talk.result()
	talk.accept("a")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// What another session or the end of a rollout did to a call is told by type.
func TestARejectionForGoodEndsTheCall(t *testing.T) {
	_, session, talk := opened(t)
	talk.lease("a", "b")
	call, closed := nextCall(t, session), nextCall(t, session)
	done := delivering(t, call)
	talk.result()
	talk.acknowledge(&interceptionv1.ResultsAcknowledged{Rejected: []*interceptionv1.ResultRejected{{
		CallId: "a", Reason: interceptionv1.ResultRejected_REASON_NOT_LEASED, Message: "another session has it",
	}}})
	if err := <-done; !errors.Is(err, ErrNotLeased) || !errors.Is(err, ErrRejected) {
		t.Fatalf("the refusal came as %v", err)
	}
	<-call.Ended()
	ids := &interceptionv1.RolloutsClosed{RolloutIds: []string{"rollout"}}
	talk.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_RolloutsClosed{RolloutsClosed: ids}})
	<-closed.Ended()
	if closed.EndReason() != "ROLLOUT_CLOSED" {
		t.Fatalf("it ended with %s", closed.EndReason())
	}
}

// A token that is not good ends the opening at once, with the service's own reason (R5).
func TestARefusedOpeningIsNotTriedAgain(t *testing.T) {
	gate, ps := serve(t)
	go func() { gate.session(t).finished <- status.Error(codes.Unauthenticated, "nobody's token") }()
	_, err := ps.Intercept(bounded(t), Selector{})
	if !errors.Is(err, ErrUnauthenticated) {
		t.Fatalf("the opening gave %v", err)
	}
	if len(gate.sessions) != 0 {
		t.Fatal("it was tried again")
	}
}

// Another process that took the session over ends it: two of one session would steal each other's calls.
func TestASessionThatWasTakenOverEnds(t *testing.T) {
	_, session, talk := opened(t)
	talk.lease("a")
	done := delivering(t, nextCall(t, session))
	talk.result()
	talk.finished <- status.Error(codes.Aborted, "taken over")
	if err := <-done; !errors.Is(err, ErrAborted) {
		t.Fatalf("the answer under way gave %v", err)
	}
	for _, err := range session.Calls(bounded(t)) {
		if !errors.Is(err, ErrAborted) {
			t.Fatalf("the loop ended with %v", err)
		}
	}
	if _, err := session.Pause(bounded(t), "", 0); !errors.Is(err, ErrAborted) {
		t.Fatalf("a pause gave %v", err)
	}
}

// A gate that falls silent is taken for gone, and the session is taken up again.
func TestASilentGateIsTakenForGone(t *testing.T) {
	gate, ps := serve(t)
	opening := make(chan *Session, 1)
	go func() {
		session, err := ps.Intercept(bounded(t), Selector{})
		if err != nil {
			t.Error(err)
		}
		opening <- session
	}()
	silent := &interceptionv1.Welcome{SessionId: "first", HeartbeatInterval: durationpb.New(time.Millisecond)}
	gate.session(t).welcome(silent)
	// Not after Intercept has returned: where it is slow, it first sees a stream that has broken already, and waits for this one.
	again := gate.session(t)
	hello := again.welcome(&interceptionv1.Welcome{SessionId: "first", Resumed: true})
	if hello.GetResumeSessionId() != "first" {
		t.Fatalf("it said %v", hello)
	}
	session := <-opening
	closing := make(chan error, 1)
	go func() { closing <- session.Close() }()
	again.goodbye()
	if err := <-closing; err != nil {
		t.Fatal(err)
	}
}

// After its reconnect timeout a session is lost: loops and answers under way say so.
func TestASessionThatDoesNotComeBackIsLost(t *testing.T) {
	gate, session, talk := opened(t, WithReconnectTimeout(time.Nanosecond))
	talk.lease("a")
	done := delivering(t, nextCall(t, session))
	talk.result()
	gate.grpc.Stop()
	if err := <-done; !errors.Is(err, ErrSessionLost) {
		t.Fatalf("the answer under way gave %v", err)
	}
	for _, err := range session.Calls(bounded(t)) {
		if !errors.Is(err, ErrSessionLost) || !errors.Is(err, ErrUnavailable) {
			t.Fatalf("the loop ended with %v", err)
		}
	}
}

// Pause and Resume return when they are in force.
func TestAPauseIsAcknowledged(t *testing.T) {
	_, session, talk := opened(t)
	pausing := make(chan int, 1)
	go func() {
		open, err := session.Pause(bounded(t), "weight sync", time.Minute)
		if err != nil {
			t.Error(err)
		}
		pausing <- open
	}()
	if pause := talk.next().GetPause(); pause.GetReason() != "weight sync" || pause.GetMaxDuration().GetSeconds() != 60 {
		t.Fatalf("it said %v", pause)
	}
	talk.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Paused{
		Paused: &interceptionv1.CallsPaused{OpenCalls: 2},
	}})
	if open := <-pausing; open != 2 {
		t.Fatalf("open were %d", open)
	}
	resuming := make(chan error, 1)
	go func() { resuming <- session.Resume(bounded(t)) }()
	if talk.next().GetResume() == nil {
		t.Fatal("it did not resume")
	}
	talk.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Resumed{}})
	if err := <-resuming; err != nil {
		t.Fatal(err)
	}
	session.Announce(4)
	if talk.next().GetPolicy().GetPolicyVersion() != 4 {
		t.Fatal("it did not announce")
	}
	if err := session.SetCredits(0); err != nil {
		t.Fatal(err)
	}
	if credits := talk.next().GetCredits(); credits == nil || credits.GetCalls() != 0 {
		t.Fatalf("it said %v", credits)
	}
	if err := session.SetCredits(-1); !errors.Is(err, ErrInvalidArgument) {
		t.Fatalf("negative credits gave %v", err)
	}
}

// A pause after a resume that nobody waited for is asked for itself; neither an older pause's answer nor a late one to the
// resume is taken for its own, so a gate that forgot the session is told again (R26).
func TestAPauseIsNotAnsweredByAnOlderOne(t *testing.T) {
	gate, session, talk := opened(t)
	over, cancel := context.WithCancel(bounded(t))
	cancel()
	if _, err := session.Pause(over, "", 0); !errors.Is(err, ErrCancelled) {
		t.Fatalf("the first pause gave %v", err)
	}
	if err := session.Resume(over); !errors.Is(err, ErrCancelled) {
		t.Fatalf("the resume gave %v", err)
	}
	if _, err := session.Pause(over, "", 0); !errors.Is(err, ErrCancelled) {
		t.Fatalf("the second pause gave %v", err)
	}
	session.Announce(1)
	if talk.next().GetPause() == nil || talk.next().GetResume() == nil || talk.next().GetPause() == nil {
		t.Fatal("it did not ask for a pause, a resume and a pause")
	}
	talk.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Paused{
		Paused: &interceptionv1.CallsPaused{OpenCalls: 1},
	}})
	talk.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Resumed{}})
	talk.lease("a")
	nextCall(t, session) // so that it has heard all this
	talk.finished <- status.Error(codes.Unavailable, "gone")
	again := gate.session(t)
	again.welcome(&interceptionv1.Welcome{SessionId: "second"})
	if again.next().GetPause() == nil {
		t.Fatal("a gate that forgot the session was not told to pause")
	}
}

// A gate that was killed resumes the session from its journal, which has no pause: the client asks for the rest of it again, and what
// it leases before it has read that is put back (R22, R26).
func TestAPauseIsAskedForAgainOfAGateThatResumesTheSession(t *testing.T) {
	gate, session, talk := opened(t)
	pausing := make(chan error, 1)
	go func() {
		_, err := session.Pause(bounded(t), "weights", time.Minute)
		pausing <- err
	}()
	first := talk.next().GetPause().GetMaxDuration().AsDuration()
	holds := &interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Paused{
		Paused: &interceptionv1.CallsPaused{},
	}}
	talk.say(holds)
	if err := <-pausing; err != nil {
		t.Fatal(err)
	}
	talk.finished <- status.Error(codes.Unavailable, "gone")
	again := gate.session(t)
	again.welcome(&interceptionv1.Welcome{SessionId: "first", Resumed: true})
	again.lease("a")
	pause := again.next().GetPause()
	if left := pause.GetMaxDuration().AsDuration(); pause.GetReason() != "weights" || left <= 0 || left >= first {
		t.Fatalf("it said %v", pause)
	}
	if results := again.next().GetResults().GetResults(); len(results) != 1 || results[0].GetRelease() == nil {
		t.Fatalf("what was leased in the pause is not put back: %v", results)
	}
	again.say(holds)
}

// A pause of which nothing is left is not asked for again, also where the gate could not say that it has ended.
func TestAPauseThatIsOverIsNotAskedForAgain(t *testing.T) {
	asked := pauses{}
	asked.want(&interceptionv1.PauseCalls{MaxDuration: durationpb.New(time.Minute)})
	if asked.again() == nil || !asked.unconfirmed {
		t.Fatal("a pause in force was not asked for again")
	}
	asked.until = time.Now()
	if pause := asked.again(); pause != nil || asked.unconfirmed {
		t.Fatalf("it asked for %v", pause)
	}
}

// A gate that comes back has forgotten the pause, and leases calls before it reads that the pause is to last longer (R26).
func TestWhatAGateLeasesBeforeItReadsOfALongerPauseIsPutBack(t *testing.T) {
	asked := pauses{}
	asked.ask(&interceptionv1.PauseCalls{Reason: "push"})
	asked.paused(0)
	asked.ask(&interceptionv1.PauseCalls{Reason: "push", MaxDuration: durationpb.New(time.Hour)})
	if pause := asked.again(); pause != nil || !asked.unconfirmed {
		t.Fatalf("it asked for %v, unconfirmed: %t", pause, asked.unconfirmed)
	}
	asked.paused(0)
	if asked.unconfirmed {
		t.Fatal("calls are put back once the gate knows of the pause")
	}
	asked.ask(nil)
	if asked.again(); asked.unconfirmed {
		t.Fatal("calls are put back that may flow")
	}
}

// A gate that comes back after the pause would hold calls once more, for nobody; it still has to answer (R26, R118).
func TestAPauseThatBeganWithoutAGateLastsThereForWhatIsLeftOfIt(t *testing.T) {
	minute := &interceptionv1.PauseCalls{Reason: "weights", MaxDuration: durationpb.New(time.Minute)}
	asked := pauses{}
	asked.ask(minute)
	for _, test := range []struct {
		waits       bool
		left        time.Duration
		least, most time.Duration
	}{
		{true, 0, time.Minute, time.Minute}, // it begins when the gate answers, and whoever is told so may rely on it
		{false, 40 * time.Second, time.Millisecond, 40 * time.Second},
		{false, -time.Hour, time.Millisecond, time.Millisecond},
		{true, -time.Hour, time.Minute, time.Minute},
	} {
		if asked.ask(minute); !test.waits {
			asked.beganWithoutIt()
		}
		asked.until = time.Now().Add(test.left)
		open := asked.unanswered()
		if len(open) != 1 || open[0].GetReason() != "weights" {
			t.Fatalf("open are %v", open)
		}
		if limit := open[0].GetMaxDuration().AsDuration(); limit < test.least || limit > test.most {
			t.Errorf("of %v it asked for %v", test, limit)
		}
	}
	asked.ask(nil)
	if open := asked.unanswered(); len(open) != 2 || open[1] != nil {
		t.Fatalf("open are %v", open)
	}
}

// A context that is over ends a wait with the context's own error; the answer stays under way.
func TestAContextThatIsOverEndsTheWaitOnly(t *testing.T) {
	_, session, talk := opened(t)
	talk.lease("a")
	call := nextCall(t, session)
	ctx, cancel := context.WithCancel(bounded(t))
	cancel()
	completion, err := Sampled([]int32{1}, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := call.Deliver(ctx, completion); !errors.Is(err, context.Canceled) || !errors.Is(err, ErrCancelled) {
		t.Fatalf("the delivery gave %v", err)
	}
	for _, err := range session.Calls(ctx) {
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("the loop ended with %v", err)
		}
	}
	talk.result()
	talk.accept("a")
	<-call.Ended()
}

// Many goroutines answer at once, and leaving the loop of a group ends its session and its watch (R22, R23).
func TestLeavingTheLoopOfAGroupLeavesNothingBehind(t *testing.T) {
	gate, ps := serve(t)
	gate.waitGroup = func(ctx context.Context, _ *driverv1.WaitGroupRequest) (*driverv1.WaitGroupResponse, error) {
		<-ctx.Done() // rollouts go on
		return nil, ctx.Err()
	}
	const many = 200
	ctx, loop := bounded(t), make(chan error, 1)
	go func() {
		var answering sync.WaitGroup
		count := 0
		for call, err := range (&Group{ID: "group", client: ps, at: givenDriver(ps)}).Calls(ctx, WithCredits(many)) {
			if err != nil {
				loop <- err
				return
			}
			answering.Add(1)
			go func() {
				defer answering.Done()
				if err := call.Fail(ctx, "NO_ANSWER", "", true); err != nil && !errors.Is(err, ErrSessionLost) {
					t.Error(err)
				}
			}()
			if count++; count == many {
				break
			}
			if count == many-1 {
				answering.Wait()
			}
		}
		answering.Wait()
		loop <- nil
	}()
	talk := gate.session(t)
	if hello := talk.welcome(&interceptionv1.Welcome{SessionId: "s"}); hello.GetSelector().GetGroupId() != "group" {
		t.Fatalf("it said %v", hello)
	}
	for i := range many {
		talk.lease(string(rune('a' + i)))
	}
	for answered := 0; answered < many-1; {
		for _, result := range talk.next().GetResults().GetResults() {
			talk.accept(result.GetCallId())
			answered++
		}
	}
	// The last one's answer and the end of the loop race: both orders are good, for the call goes back to the queue.
	for frame := talk.next(); frame.GetGoodbye() == nil; frame = talk.next() {
		for _, result := range frame.GetResults().GetResults() {
			talk.accept(result.GetCallId())
		}
	}
	talk.finished <- nil
	if err := <-loop; err != nil {
		t.Fatal(err)
	}
}

// A result that has no form on the wire fails alone: the stream stays, and other results pass (R29).
func TestAResultThatCannotBeSentFailsAlone(t *testing.T) {
	gate, session, talk := opened(t)
	talk.lease("a", "b")
	bad, good := nextCall(t, session), nextCall(t, session)
	for _, answer := range []func() error{
		func() error { return bad.Deliver(bounded(t), Injected("cut in the middle of \xe4\xb8")) },
		func() error { return bad.Fail(bounded(t), "ENGINE", "\xff", false) },
	} {
		var failure *Error
		err := answer()
		if !errors.As(err, &failure) || failure.Kind != ErrInvalidCompletion || failure.Reason != "RESULT_NOT_SENDABLE" {
			t.Fatalf("it came as %v", err)
		}
	}
	if _, err := session.Pause(bounded(t), "\xff", 0); !errors.Is(err, ErrInvalidArgument) {
		t.Fatalf("a pause gave %v", err)
	}
	for _, call := range []*Call{good, bad} {
		done := delivering(t, call)
		if result := talk.result(); result.GetCallId() != call.ID() {
			t.Fatalf("sent was %v", result)
		}
		talk.accept(call.ID())
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if len(gate.sessions) != 0 {
		t.Fatal("the session connected again")
	}
}

// What is said between Hello and Welcome reaches the gate, once, after Welcome.
func TestWhatIsSaidBetweenHelloAndWelcomeReachesTheGate(t *testing.T) {
	gate, session, talk := opened(t)
	talk.finished <- status.Error(codes.Unavailable, "the gate restarts")
	again := gate.session(t)
	hello := again.next().GetHello()
	session.Announce(7)
	if err := session.SetCredits(3); err != nil {
		t.Fatal(err)
	}
	paused := make(chan error, 1)
	go func() {
		_, err := session.Pause(bounded(t), "sync", 0)
		paused <- err
	}()
	until(t, func() bool {
		at := session.all()[0].stream
		at.mu.Lock()
		defer at.mu.Unlock()
		return len(at.pauses.asked) == 1
	})
	if hello.PolicyVersion != nil || hello.GetCredits().GetCalls() != 64 {
		t.Fatalf("it said %v", hello)
	}
	again.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Welcome{
		Welcome: &interceptionv1.Welcome{SessionId: "second", HeartbeatInterval: durationpb.New(10 * time.Second)},
	}})
	if frame := again.next(); frame.GetPolicy().GetPolicyVersion() != 7 {
		t.Fatalf("it said %v", frame)
	}
	if frame := again.next(); frame.GetCredits().GetCalls() != 3 {
		t.Fatalf("it said %v", frame)
	}
	if frame := again.next(); frame.GetPause().GetReason() != "sync" {
		t.Fatalf("it said %v", frame)
	}
	again.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Paused{
		Paused: &interceptionv1.CallsPaused{},
	}})
	if err := <-paused; err != nil {
		t.Fatal(err)
	}
	closing := make(chan error, 1)
	go func() { closing <- session.Close() }()
	again.goodbye() // and nothing was said twice
	if err := <-closing; err != nil {
		t.Fatal(err)
	}
}

// More calls than the wire can count are as many as it can.
func TestCreditsBeyondTheWireAreTheMostThatThereAre(t *testing.T) {
	_, session, talk := opened(t, WithCredits(1<<40))
	if calls := session.options.credits.GetCalls(); calls != math.MaxInt32 {
		t.Fatalf("opened with %d", calls)
	}
	for _, calls := range []int{5, 1 << 40} {
		if err := session.SetCredits(calls); err != nil {
			t.Fatal(err)
		}
	}
	if calls := talk.next().GetCredits().GetCalls(); calls != 5 {
		t.Fatalf("set to %d", calls)
	}
	if calls := talk.next().GetCredits().GetCalls(); calls != math.MaxInt32 {
		t.Fatalf("set to %d", calls)
	}
}
