package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

const (
	handshakeTimeout = 20 * time.Second
	goodbyeTimeout   = 5 * time.Second
	settled          = 5 * time.Second
)

// Selector says which rollouts' calls a session wants: those that match every condition that is set; none set = all.
type Selector struct {
	RunID      string
	GroupID    string
	RolloutIDs []string
	Labels     map[string]string
}

// SessionOption is one thing that a session is told.
type SessionOption func(*sessionOptions)

type sessionOptions struct {
	credits       *interceptionv1.Credits
	identity      string
	policyVersion *int64
	view          *interceptionv1.CallView
	reconnect     time.Duration
	toolErrors    func(*HostToolCall, error)
}

// WithCredits bounds the calls that are leased and not answered at once; without it 64.
func WithCredits(calls int) SessionOption {
	return func(o *sessionOptions) { o.credits.Calls = window(calls) }
}

// WithCreditBytes bounds the bytes of the same; without it 32 MiB.
func WithCreditBytes(bytes int64) SessionOption {
	return func(o *sessionOptions) { o.credits.Bytes = &bytes }
}

// WithPolicyVersion says which are the newest weights that the trainer has.
func WithPolicyVersion(version int64) SessionOption {
	return func(o *sessionOptions) { o.policyVersion = &version }
}

// WithIdentity says who this is, for people; without it the machine's name.
func WithIdentity(identity string) SessionOption {
	return func(o *sessionOptions) { o.identity = identity }
}

// WithMessages has calls carry messages and tools beside tokens.
func WithMessages() SessionOption {
	return func(o *sessionOptions) { o.view.Messages = true }
}

// WithBodies has calls carry the agent's request body.
func WithBodies() SessionOption {
	return func(o *sessionOptions) { o.view.Body = true }
}

// WithReconnectTimeout says how long a connection that broke is taken up again; without it 5 min.
func WithReconnectTimeout(timeout time.Duration) SessionOption {
	return func(o *sessionOptions) { o.reconnect = timeout }
}

// Session is a trainer's session at the gate: calls in, results out, over one stream that is taken up again when it
// breaks. Leases stay, results that were not acknowledged are sent again, and no call is handed out twice. It is safe for
// use by many goroutines; Close it.
type Session struct {
	service  *service
	stub     interceptionv1.InterceptServiceClient
	selector *interceptionv1.CallSelector
	options  sessionOptions
	book     *leases
	tools    *hostTools
	prompts  *prompts
	wake     chan struct{}
	closing  chan struct{}
	done     chan struct{} // closed when the session's goroutine has ended
	cancel   context.CancelFunc
	close    sync.Once

	mu           sync.Mutex
	id           string
	outbox       []*interceptionv1.InterceptRequest
	pauses       pauses
	goAway       *Error
	lastReceived time.Time
	failure      *Error
	connected    chan struct{} // closed by the first Welcome
}

// Intercept opens a trainer's session for the calls that the selector wants, before the rollouts are created or later:
// calls wait at the gate. The context bounds the opening; the session lasts until Close.
func (c *Client) Intercept(ctx context.Context, selector Selector, opts ...SessionOption) (*Session, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "a machine without a name"
	}
	s := &Session{
		service:  c.services["interception"],
		stub:     c.intercept,
		selector: selector.message(),
		options: sessionOptions{
			credits: &interceptionv1.Credits{Calls: 64}, identity: host,
			view: &interceptionv1.CallView{SuffixOnly: true}, reconnect: 5 * time.Minute,
		},
		wake: make(chan struct{}, 1), closing: make(chan struct{}), done: make(chan struct{}),
		connected: make(chan struct{}),
	}
	for _, option := range opts {
		option(&s.options)
	}
	if s.options.credits.Calls < 1 {
		return nil, &Error{Kind: ErrInvalidArgument, Reason: "CREDITS", Message: "A session needs at least one credit"}
	}
	s.book, s.tools = newLeases(s.wake), newHostTools(s.wake, s.options.toolErrors)
	s.prompts = newPrompts(s.service, s.stub)
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	go s.run(running)
	select {
	case <-s.connected:
		return s, nil
	case <-s.done:
		return nil, s.err()
	case <-ctx.Done():
		cancel()
		<-s.done
		return nil, fromRPC(ctx, ctx.Err(), s.service)
	}
}

// ID is the session's id; it changes when the gate did not take the old one up again.
func (s *Session) ID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id
}

// Calls yields the calls to answer, oldest first, until the session is closed or finished. Several loops may share it.
// An error is the last thing that it yields: the session broke for good, or the context is over.
func (s *Session) Calls(ctx context.Context) iter.Seq2[*Call, error] {
	return func(yield func(*Call, error) bool) {
		for {
			call, err := s.book.next(ctx)
			switch {
			case err != nil && s.isClosing() && ctx.Err() == nil:
				return
			case err != nil:
				yield(nil, err)
				return
			case call == nil || !yield(call, nil):
				return
			}
		}
	}
}

// Finish ends Calls once those that have come are handed out: nothing more is expected.
func (s *Session) Finish() { s.book.finish() }

// Announce tells the gate which weights are the newest: staleness bounds are judged against it.
func (s *Session) Announce(policyVersion int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options.policyVersion = &policyVersion
	s.send(&interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Policy{
		Policy: &interceptionv1.PolicyAnnounced{PolicyVersion: policyVersion},
	}})
}

// SetCredits replaces the window: at most so many calls are leased and not answered; 0 = none for now.
//
// Errors: ErrInvalidArgument, CREDITS: it is negative.
func (s *Session) SetCredits(calls int) error {
	if calls < 0 {
		return &Error{Kind: ErrInvalidArgument, Reason: "CREDITS", Message: "Credits are not negative"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options.credits = &interceptionv1.Credits{Calls: window(calls), Bytes: s.options.credits.Bytes}
	s.send(creditsFrame(s.options.credits))
	return nil
}

// Pause holds the calls of this selector, for every session and for the model source, while weights are moved; agents see
// keep-alives. They flow again with Resume, or by themselves after `most` (0 = 10 min). It returns how many calls are
// leased or dispatched now; answers to them are still taken.
//
// Errors: ErrInvalidArgument, ARGUMENT_TYPE: the reason is not UTF-8.
func (s *Session) Pause(ctx context.Context, reason string, most time.Duration) (int, error) {
	if !utf8.ValidString(reason) {
		return 0, &Error{Kind: ErrInvalidArgument, Reason: "ARGUMENT_TYPE", Message: "The reason of a pause is not UTF-8"}
	}
	s.mu.Lock()
	if s.failure != nil {
		defer s.mu.Unlock()
		return 0, s.failure
	}
	pause := &interceptionv1.PauseCalls{Reason: reason}
	if most > 0 {
		pause.MaxDuration = durationpb.New(most)
	}
	answer := s.ask(pause)
	s.mu.Unlock()
	calls, err := answer.wait(ctx)
	return int(calls), err
}

// Resume lets calls flow again.
func (s *Session) Resume(ctx context.Context) error {
	s.mu.Lock()
	if s.failure != nil {
		defer s.mu.Unlock()
		return s.failure
	}
	answer := s.ask(nil)
	s.mu.Unlock()
	_, err := answer.wait(ctx)
	return err
}

// ask tells the gate what is wanted of the flow of calls; the caller holds the lock.
func (s *Session) ask(pause *interceptionv1.PauseCalls) *promise {
	answer, isNew := s.pauses.ask(pause)
	if isNew {
		s.send(flowFrame(pause))
	}
	return answer
}

// Close sends what is still to be sent and says goodbye: calls without an answer are queued again at once. It returns
// when nothing of the session runs any more, and may be called again.
func (s *Session) Close() error {
	s.close.Do(func() { close(s.closing) })
	timer := time.NewTimer(goodbyeTimeout)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C: // the gate does not answer: it will notice that we are gone by our silence
	}
	s.cancel()
	<-s.done
	return nil
}

func (s *Session) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

func (s *Session) err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// run connects, converses, and connects again until the session is closed or cannot be saved.
func (s *Session) run(ctx context.Context) {
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
		opened, silent, wish := s.id != "", time.Since(s.lastReceived), s.goAway
		s.goAway = nil
		s.mu.Unlock()
		// A gate that is away is waited for, at first and later; at first nothing else that may pass is.
		if !passes(failure) || !opened && (failure.Kind != ErrUnavailable || silent > s.options.reconnect) {
			s.end(failure)
			return
		}
		if silent > s.options.reconnect {
			s.end(&Error{
				Kind: ErrSessionLost, Reason: "SESSION_LOST", cause: failure,
				Message: fmt.Sprintf("The session could not be resumed in %v: %v", s.options.reconnect, failure),
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

// passes tells whether connecting again may help: the transport broke, or the gate restarts or lost our heartbeats.
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

// end: nothing comes or goes any more, and everybody who waits is told.
func (s *Session) end(failure *Error) {
	s.mu.Lock()
	s.failure = failure
	s.pauses.end(failure)
	s.mu.Unlock()
	s.book.end(failure)
}

// converse is one stream from Hello to its end; nil when it ended with our Goodbye.
func (s *Session) converse(parent context.Context) *Error {
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
	if err := stream.Send(hello); err != nil && !errors.Is(err, io.EOF) { // io.EOF: refused already, and Recv tells why
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
	if !welcome.GetResumed() {
		for _, request := range s.tools.registrations(welcome.GetSessionId()) {
			if _, err := call(ctx, s.service, s.stub.RegisterTools, request, handshakeTimeout, false); err != nil {
				return broke(err)
			}
		}
	}
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
	}
}

// hello says what the session wants now. The outbox begins anew with it: what is queued from here on goes out after
// Welcome.
func (s *Session) hello() *interceptionv1.Hello {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.outbox = nil
	if s.options.credits.Calls == 0 {
		s.send(creditsFrame(s.options.credits))
	}
	for _, question := range s.pauses.asked {
		s.send(flowFrame(question.pause))
	}
	largest := int64(MaxMessageBytes)
	hello := &interceptionv1.Hello{
		Selector: s.selector,
		// None for now is said by a frame of its own, after Welcome.
		Credits:       &interceptionv1.Credits{Calls: max(1, s.options.credits.Calls), Bytes: s.options.credits.Bytes},
		Identity:      s.options.identity,
		PolicyVersion: s.options.policyVersion,
		View:          s.options.view,

		MaxMessageBytes: &largest,
	}
	if s.id != "" {
		hello.ResumeSessionId = some(s.id)
		hello.Held = &interceptionv1.HeldCalls{CallIds: s.book.callIDs()}
	}
	return hello
}

// takeUp, after Welcome: calls that were lost end, what is unanswered is sent again.
func (s *Session) takeUp(welcome *interceptionv1.Welcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.id == ""
	s.id, s.lastReceived = welcome.GetSessionId(), time.Now()
	s.book.takenUp(welcome.GetResumed(), welcome.GetHeldCallIds())
	s.tools.takenUp(welcome.GetResumed())
	s.prompts.clear()
	if pause := s.pauses.forgotten(); pause != nil && !welcome.GetResumed() {
		s.send(flowFrame(pause))
	}
	if first {
		close(s.connected)
	}
}

// write sends what is ready, as soon as it is; heartbeats in between; Goodbye at the end. Where the stream breaks, the
// reader has its status.
func (s *Session) write(
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
			runtime.Gosched() // whoever woke us may be about to answer: one frame more or one result more in this one
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

func (s *Session) nextFrame() *interceptionv1.InterceptRequest {
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

func (s *Session) receive(frame *interceptionv1.InterceptResponse) {
	s.mu.Lock()
	s.lastReceived = time.Now()
	s.mu.Unlock()
	switch frame := frame.GetFrame().(type) {
	case *interceptionv1.InterceptResponse_Calls:
		s.book.leased(frame.Calls.GetCalls()...)
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

// send queues a frame; the caller holds the lock.
func (s *Session) send(frame *interceptionv1.InterceptRequest) {
	s.outbox = append(s.outbox, frame)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// window is a number of calls as it travels: more than fits is as many as fit.
func window(calls int) int32 { return int32(min(max(calls, math.MinInt32), math.MaxInt32)) }

func creditsFrame(credits *interceptionv1.Credits) *interceptionv1.InterceptRequest {
	return &interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Credits{Credits: credits}}
}

// flowFrame asks for a pause; nil = that calls flow.
func flowFrame(pause *interceptionv1.PauseCalls) *interceptionv1.InterceptRequest {
	if pause == nil {
		resume := &interceptionv1.InterceptRequest_Resume{Resume: &interceptionv1.ResumeCalls{}}
		return &interceptionv1.InterceptRequest{Frame: resume}
	}
	return &interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Pause{Pause: pause}}
}

func set(ids []string) map[string]bool {
	all := make(map[string]bool, len(ids))
	for _, id := range ids {
		all[id] = true
	}
	return all
}

// some is a field with presence: empty = unset.
func some(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}
