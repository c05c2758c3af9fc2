package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

const (
	handshakeTimeout = 20 * time.Second
	goodbyeTimeout   = 5 * time.Second
	settled          = 5 * time.Second
)

// stream is a session's part at one gate: calls in, results out, over one stream that is taken up again when it breaks.
// Leases stay, results that were not acknowledged are sent again, and no call is handed out twice. session.go has the session
// over all gates.
type stream struct {
	service  *service
	stub     interceptionv1.InterceptServiceClient
	selector *interceptionv1.CallSelector
	identity string
	view     *interceptionv1.CallView
	book     *leases
	tools    *hostTools
	prompts  *prompts
	changed  func() // called after a change of connected or failure
	moved    func() // called after frames that may change how many calls are held
	wake     chan struct{}
	closing  chan struct{}
	done     chan struct{} // closed when the stream's goroutine has ended
	cancel   context.CancelFunc
	close    sync.Once

	mu            sync.Mutex
	id            string
	credits       *interceptionv1.Credits
	policyVersion *int64
	policies      map[string]int64 // the newest version by policy; replaced, never changed
	reconnect     time.Duration    // how long the gate is waited for, at first and when the stream broke; negative = without end
	outbox        []*interceptionv1.InterceptRequest
	unregistered  bool // tools are to be offered with the next stream, before any call of it is handed out
	pauses        pauses
	goAway        *Error
	lastReceived  time.Time
	connected     bool
	failure       *Error
	away          bool // the failure is that the gate did not come back in time
}

// newStream is the part of a session at one gate, with its options; nothing runs before `start`.
func newStream(at *service, options *sessionOptions, calls *inbox, changed, moved func()) *stream {
	s := &stream{
		service: at, stub: interceptionv1.NewInterceptServiceClient(at.conn), selector: options.selector,
		identity: options.identity, view: options.view, credits: proto.Clone(options.credits).(*interceptionv1.Credits),
		policyVersion: options.policyVersion, policies: options.policies, reconnect: options.reconnect, changed: changed, moved: moved,
		wake: make(chan struct{}, 1), closing: make(chan struct{}), done: make(chan struct{}),
	}
	s.book, s.tools = newLeases(s.wake, calls), newHostTools(s.wake, options.toolErrors)
	s.prompts = newPrompts(s.service, s.stub)
	return s
}

func (s *stream) start() {
	running, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go s.run(running)
}

// state is whether the stream stands, what ended the session here, and whether that is that the gate did not come back.
func (s *stream) state() (connected bool, failure *Error, away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connected, s.failure, s.away
}

func (s *stream) sessionID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id
}

// window is how many calls may be leased here and not answered.
func (s *stream) window() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int(s.credits.Calls)
}

// waitsWithoutEnd reports whether the gate is waited for without a limit.
func (s *stream) waitsWithoutEnd() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reconnect < 0
}

func (s *stream) setReconnect(timeout time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reconnect = timeout
}

// announce informs the gate which weights of a policy are the newest; empty = of the only trained one of each rollout.
func (s *stream) announce(policyID string, policyVersion int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if policyID == "" {
		s.policyVersion = &policyVersion
	} else {
		s.policies = with(s.policies, policyID, policyVersion)
	}
	s.send(&interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Policy{
		Policy: &interceptionv1.PolicyAnnounced{PolicyId: policyID, PolicyVersion: policyVersion},
	}})
}

// setCredits replaces the window.
func (s *stream) setCredits(credits *interceptionv1.Credits) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !proto.Equal(credits, s.credits) {
		s.credits = credits
		s.send(creditsFrame(credits))
	}
}

// ask sends the gate what is wanted of the flow of calls; nil = that they flow.
func (s *stream) ask(pause *interceptionv1.PauseCalls) (*promise, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure != nil {
		return nil, s.failure
	}
	answer, isNew := s.pauses.ask(pause)
	if isNew {
		s.send(flowFrame(pause))
	}
	return answer, nil
}

// beganWithoutIt: the session's pause did not wait for this gate. Calls that it leases before it holds them are put back.
func (s *stream) beganWithoutIt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pauses.beganWithoutIt()
}

// offerTools offers tools to the agents of rollouts that are created from now on.
func (s *stream) offerTools(ctx context.Context, tools []HostTool, whose *interceptionv1.CallSelector) error {
	s.mu.Lock()
	id, over := s.id, s.failure
	s.mu.Unlock()
	if over != nil {
		return over
	}
	undo, messages, err := s.tools.offer(tools, whose) // first: a call may come before the answer
	if err != nil {
		return err
	}
	request := &interceptionv1.RegisterToolsRequest{SessionId: id, Selector: whose, Tools: messages}
	if _, err := call(ctx, s.service, s.stub.RegisterTools, request, callTimeout, true); err != nil {
		undo()
		return err
	}
	s.tools.registered(request)
	return nil
}

// adoptTools has tools offered, or withdrawn, with the next stream, before any call of it is handed out. They were checked
// before.
func (s *stream) adoptTools(tools []HostTool, whose *interceptionv1.CallSelector) {
	if _, _, err := s.tools.offer(tools, whose); err != nil {
		return // the same check refused them when they were offered
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(tools) == 0 && s.id != "" {
		s.tools.withdraws(whose) // a session that is resumed keeps them
	}
	s.unregistered = true
}

// leave sends what is still to be sent and says goodbye: calls without an answer are queued again at once. It returns when
// nothing of the stream runs any more, and may be called again.
func (s *stream) leave() {
	s.close.Do(func() { close(s.closing) })
	timer := time.NewTimer(goodbyeTimeout)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C: // the gate does not answer: it will notice that we are gone by our silence
	}
	s.cancel()
	<-s.done
}

// lose ends the session here without a word to the gate: waiting calls end. It returns when nothing of the stream
// runs any more.
func (s *stream) lose(failure *Error) {
	s.mu.Lock()
	s.away = true
	s.mu.Unlock()
	s.fail(failure)
	<-s.done
}

// fail ends the session here: waiting calls end.
func (s *stream) fail(failure *Error) {
	s.end(failure)
	s.cancel()
}

func (s *stream) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// run connects, converses, and connects again until the session is closed or cannot be saved.
func (s *stream) run(ctx context.Context) {
	defer close(s.done)
	defer s.tools.ended()
	defer s.cancel()
	var wait delays
	s.mu.Lock()
	s.lastReceived = time.Now()
	s.mu.Unlock()
	for {
		began := time.Now()
		failure := s.converse(ctx)
		if failure == nil || s.isClosing() || ctx.Err() != nil {
			s.end(&Error{Kind: ErrSessionLost, Reason: "SESSION_CLOSED", Message: "The session is closed"})
			return
		}
		s.mu.Lock()
		s.connected = false
		opened, silent, wish, patience := s.id != "", time.Since(s.lastReceived), s.goAway, s.reconnect
		s.goAway = nil
		isLate := patience >= 0 && silent > patience
		s.away = s.away || isLate
		s.mu.Unlock()
		s.changed()
		// A gate that is away is waited for, at first and later; at first nothing else that may pass is.
		if !passes(failure) || !opened && (failure.Kind != ErrUnavailable || isLate) {
			s.end(failure)
			return
		}
		if isLate {
			s.end(&Error{
				Kind: ErrSessionLost, Reason: "SESSION_LOST", cause: failure,
				Message: fmt.Sprintf("The session could not be resumed in %v: %v", patience, failure),
			})
			return
		}
		if time.Since(began) > settled {
			wait.reset()
		}
		if wish == nil {
			wish = failure
		}
		timer := time.NewTimer(wait.next(wish))
		select {
		case <-timer.C:
		case <-s.closing:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// passes reports whether connecting again may help: the transport broke, or the gate restarts or lost our heartbeats.
func passes(failure *Error) bool {
	if broken(failure) {
		return true
	}
	switch failure.Kind {
	case ErrCancelled, ErrDeadlineExceeded:
		return true
	case ErrInternal:
		return strings.HasPrefix(failure.Reason, "TRANSPORT_")
	default:
		return false // ErrAborted: another process took the session over
	}
}

// end: nothing comes or goes any more, and every waiter gets the error.
func (s *stream) end(failure *Error) {
	s.mu.Lock()
	if s.failure != nil {
		s.mu.Unlock()
		return
	}
	s.failure, s.connected = failure, false
	s.pauses.end(failure)
	s.mu.Unlock()
	s.book.end(failure)
	s.changed()
}

// converse is one stream from Hello to its end; nil when it ended with our Goodbye.
func (s *stream) converse(parent context.Context) *Error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	watchdog := time.AfterFunc(handshakeTimeout, func() {
		cancel(&Error{Kind: ErrUnavailable, Reason: "HANDSHAKE", Message: s.service.peer + " did not answer Hello"})
	})
	defer watchdog.Stop()
	broke := func(err error) *Error {
		if why := (*Error)(nil); parent.Err() == nil && errors.As(context.Cause(ctx), &why) {
			return why
		}
		return fromRPC(parent, err, s.service)
	}
	stream, err := s.stub.Intercept(ctx)
	if err != nil {
		return broke(err)
	}
	hello := &interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Hello{Hello: s.hello()}}
	if err := stream.Send(hello); err != nil && !errors.Is(err, io.EOF) { // io.EOF: refused already, and Recv returns why
		return broke(err)
	}
	first, err := stream.Recv()
	if err != nil {
		return broke(err)
	}
	welcome := first.GetWelcome()
	if welcome == nil {
		return &Error{Kind: ErrInternal, Reason: "PROTOCOL", Message: "The gate's first message was not Welcome"}
	}
	s.takeUp(welcome)
	for !s.isUpToDate() { // more tools may be adopted meanwhile
		for _, request := range s.tools.registrations(welcome.GetSessionId()) {
			if _, err := call(ctx, s.service, s.stub.RegisterTools, request, handshakeTimeout, false); err != nil {
				s.mu.Lock()
				s.unregistered = true // the next stream does it
				s.mu.Unlock()
				return broke(err)
			}
			s.tools.registered(request)
		}
	}
	s.changed()
	interval := welcome.GetHeartbeatInterval().AsDuration()
	if interval <= 0 {
		interval = 10 * time.Second
	}
	watchdog.Stop()
	silence := time.AfterFunc(3*interval, func() {
		cancel(&Error{Kind: ErrUnavailable, Reason: "HEARTBEAT_MISSED", Message: s.service.peer + " stopped sending heartbeats"})
	})
	defer silence.Stop()
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		s.write(ctx, stream, interval)
	}()
	defer func() { cancel(nil); <-wrote }()
	for {
		frame, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && s.isClosing():
			return nil
		case errors.Is(err, io.EOF):
			return &Error{Kind: ErrUnavailable, Reason: "STREAM_ENDED", Message: s.service.peer + " ended the session"}
		case err != nil:
			return broke(err)
		}
		silence.Reset(3 * interval)
		for _, message := range frame.GetCalls().GetCalls() {
			if failure := s.prompts.complete(ctx, message); failure != nil {
				return failure
			}
		}
		s.receive(frame)
		s.moved()
	}
}

// hello says what the session wants now. The outbox begins anew with it: what is queued from here on goes out after
// Welcome.
func (s *stream) hello() *interceptionv1.Hello {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.outbox = nil
	if s.credits.Calls == 0 {
		s.send(creditsFrame(s.credits))
	}
	for _, pause := range s.pauses.unanswered() {
		s.send(flowFrame(pause))
	}
	largest := int64(MaxMessageBytes)
	hello := &interceptionv1.Hello{
		Selector: s.selector,
		// None for now is said by a frame of its own, after Welcome.
		Credits:       &interceptionv1.Credits{Calls: max(1, s.credits.Calls), Bytes: s.credits.Bytes},
		Identity:      s.identity,
		PolicyVersion: s.policyVersion,
		View:          s.view,

		MaxMessageBytes: &largest,
	}
	for id, version := range s.policies {
		announced := &interceptionv1.PolicyAnnounced{PolicyId: id, PolicyVersion: version}
		hello.Policies = append(hello.Policies, announced)
	}
	if s.id != "" {
		hello.ResumeSessionId = some(s.id)
		hello.Held = &interceptionv1.HeldCalls{CallIds: s.book.callIDs()}
	}
	return hello
}

// takeUp, after Welcome: calls that were lost end, what is unanswered is sent again.
func (s *stream) takeUp(welcome *interceptionv1.Welcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.id, s.lastReceived = welcome.GetSessionId(), time.Now()
	s.book.takenUp(welcome.GetResumed(), welcome.GetHeldCallIds())
	s.tools.takenUp(welcome.GetResumed())
	s.prompts.clear()
	if pause := s.pauses.again(); pause != nil {
		s.send(flowFrame(pause))
	}
	s.unregistered = s.unregistered || !welcome.GetResumed()
}

// isUpToDate is whether the gate has the tools that the session offers. If not, the client registers them before it sends
// any frame.
func (s *stream) isUpToDate() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unregistered {
		s.unregistered = false
		return false
	}
	s.connected = s.failure == nil
	return true
}

// write sends what is ready, as soon as it is; heartbeats in between; Goodbye at the end. Where the stream breaks, the
// reader has its status.
func (s *stream) write(
	ctx context.Context, stream interceptionv1.InterceptService_InterceptClient, interval time.Duration,
) {
	silence := time.NewTicker(interval / 2)
	defer silence.Stop()
	for {
		for frame := s.nextFrame(); frame != nil; frame = s.nextFrame() {
			if stream.Send(frame) != nil {
				return
			}
		}
		if s.isClosing() {
			goodbye := &interceptionv1.Goodbye{Reason: "closed"}
			frame := &interceptionv1.InterceptRequest_Goodbye{Goodbye: goodbye}
			if stream.Send(&interceptionv1.InterceptRequest{Frame: frame}) == nil {
				_ = stream.CloseSend() // it never fails
			}
			return
		}
		select {
		case <-s.wake:
			runtime.Gosched() // the goroutine that woke us may be about to answer: one frame more or one result more in this one
		case <-s.closing:
		case <-silence.C:
			heartbeat := &interceptionv1.InterceptRequest_Heartbeat{Heartbeat: &interceptionv1.Heartbeat{}}
			if stream.Send(&interceptionv1.InterceptRequest{Frame: heartbeat}) != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

func (s *stream) nextFrame() *interceptionv1.InterceptRequest {
	s.mu.Lock()
	if len(s.outbox) > 0 {
		defer s.mu.Unlock()
		frame := s.outbox[0]
		s.outbox = s.outbox[1:]
		return frame
	}
	s.mu.Unlock()
	if results := s.book.results(); results != nil {
		return &interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Results{Results: results}}
	}
	if results := s.tools.next(); results != nil {
		frame := &interceptionv1.InterceptRequest_ToolResults{ToolResults: results}
		return &interceptionv1.InterceptRequest{Frame: frame}
	}
	return nil
}

func (s *stream) receive(frame *interceptionv1.InterceptResponse) {
	s.mu.Lock()
	s.lastReceived = time.Now()
	s.mu.Unlock()
	switch frame := frame.GetFrame().(type) {
	case *interceptionv1.InterceptResponse_Calls:
		s.leased(frame.Calls.GetCalls())
	case *interceptionv1.InterceptResponse_Acknowledged:
		s.book.accepted(frame.Acknowledged.GetAcceptedCallIds()...)
		for _, rejected := range frame.Acknowledged.GetRejected() {
			s.book.rejected(rejected)
		}
	case *interceptionv1.InterceptResponse_Cancelled:
		reason := frame.Cancelled.GetReason()
		if reason == "" {
			reason = "CANCELLED"
		}
		ids := set(frame.Cancelled.GetCallIds())
		s.book.cancelled(reason, func(c *Call) bool { return ids[c.ID()] })
	case *interceptionv1.InterceptResponse_RolloutsClosed:
		ids := set(frame.RolloutsClosed.GetRolloutIds())
		s.prompts.forget(frame.RolloutsClosed.GetRolloutIds()...)
		s.book.cancelled("ROLLOUT_CLOSED", func(c *Call) bool { return ids[c.RolloutID()] })
	case *interceptionv1.InterceptResponse_ToolCalls:
		for _, message := range frame.ToolCalls.GetCalls() {
			s.tools.called(message)
		}
	case *interceptionv1.InterceptResponse_ToolCallsCancelled:
		s.tools.cancelled(frame.ToolCallsCancelled.GetToolCallIds())
	case *interceptionv1.InterceptResponse_ToolResultsAcknowledged:
		s.tools.acknowledged(frame.ToolResultsAcknowledged)
	case *interceptionv1.InterceptResponse_Paused:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.pauses.paused(frame.Paused.GetOpenCalls())
	case *interceptionv1.InterceptResponse_Resumed:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.pauses.resumed()
	case *interceptionv1.InterceptResponse_GoAway:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.goAway = &Error{
			Kind: ErrUnavailable, Reason: "GO_AWAY", Message: frame.GoAway.GetReason(),
			RetryAfter: frame.GoAway.GetRetryAfter().AsDuration(),
		}
	default: // heartbeats, and what a newer gate may say
	}
}

// leased takes calls. Those that were leased before this gate knew of a pause are put back.
func (s *stream) leased(messages []*interceptionv1.ModelCall) {
	var taken []*interceptionv1.ModelCall
	s.mu.Lock()
	for _, message := range messages {
		if !s.pauses.unconfirmed || s.book.has(message.GetCallId()) {
			taken = append(taken, message)
			continue
		}
		s.send(&interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Results{
			Results: &interceptionv1.Results{Results: []*interceptionv1.CallResult{{
				CallId: message.GetCallId(), RolloutId: message.GetRolloutId(), LeaseId: message.GetLeaseId(),
				Result: &interceptionv1.CallResult_Release{Release: &interceptionv1.Release{}},
			}}},
		}})
	}
	s.mu.Unlock()
	s.book.leased(taken...)
}

// send queues a frame; the caller holds the lock.
func (s *stream) send(frame *interceptionv1.InterceptRequest) {
	s.outbox = append(s.outbox, frame)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
