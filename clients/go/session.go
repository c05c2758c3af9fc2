package penstock

import (
	"context"
	"errors"
	"iter"
	"maps"
	"math"
	"os"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

// Times of a session; tests shorten them.
var (
	// goneAfter is how long calls wait for a gate of which the driver, too, says that it is lost: one that restarts keeps its
	// calls.
	goneAfter = 30 * time.Second
	// lookForGates is how often the driver is asked for the gates while one is away; else as often as its answer is not fresh any
	// more.
	lookForGates = time.Second
	gatesFresh   = fresh
)

const longestPause = 10 * time.Minute

// Selector says which rollouts' calls a session wants: those that match every condition that is set; none set = all.
type Selector struct {
	RunID      string
	GroupID    string
	RolloutIDs []string
	Labels     map[string]string
	// PolicyIDs has, of such rollouts, calls for these policies only, at most 64; none = for any.
	PolicyIDs []string
}

// SessionOption is one setting of a session.
type SessionOption func(*sessionOptions)

type sessionOptions struct {
	selector      *interceptionv1.CallSelector
	credits       *interceptionv1.Credits
	identity      string
	policyVersion *int64
	policies      map[string]int64
	view          *interceptionv1.CallView
	reconnect     time.Duration
	toolErrors    func(*HostToolCall, error)
}

// WithCredits bounds the calls of all gates that are leased and not answered at once; without it 64.
func WithCredits(calls int) SessionOption {
	return func(o *sessionOptions) { o.credits.Calls = window(calls) }
}

// WithCreditBytes bounds the bytes of the same; without it 32 MiB.
func WithCreditBytes(bytes int64) SessionOption {
	return func(o *sessionOptions) { o.credits.Bytes = &bytes }
}

// WithPolicyVersion says which are the newest weights that the trainer has: of the only trained policy of each rollout.
func WithPolicyVersion(version int64) SessionOption {
	return func(o *sessionOptions) { o.policyVersion = &version }
}

// WithPolicies says the same by policy, where rollouts have several.
func WithPolicies(versions map[string]int64) SessionOption {
	return func(o *sessionOptions) { o.policies = maps.Clone(versions) }
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

// Session is a trainer's session over all gates that the driver lists: each gate's calls come in, and each result goes to the
// gate of its call. A gate's stream that breaks is taken up again: leases stay, results that were not acknowledged are sent
// again, and no call is handed out twice. A gate that is lost for half a minute is left: its calls end with GATE_LOST, and the
// session goes on at the others. What the session has set goes to all gates; one that comes later or comes back gets it before
// its calls are handed out. A Session is safe for use by many goroutines; Close it.
type Session struct {
	cluster *cluster
	given   member
	inbox   inbox
	offers  *hostTools // what is offered, for gates that come later
	closing chan struct{}
	done    chan struct{} // closed when the session's goroutine has ended
	cancel  context.CancelFunc
	close   sync.Once

	mu      sync.Mutex
	options sessionOptions
	places  []*place
	sharers []*stream
	paused  *interceptionv1.PauseCalls
	until   time.Time // when the pause ends
	failure *Error

	notices sync.Mutex
	changes chan struct{} // closed by the next change at a gate
}

// place is a gate and the session's part there.
type place struct {
	member member
	stream *stream
	// unreachable is closed while the gate answers neither this session nor the driver: nobody waits for it.
	unreachable chan struct{}
	isOut       bool      // whether it is closed
	awaySince   time.Time // zero = its stream stands
}

// Intercept opens a trainer's session at all gates for the calls that the selector wants, before the rollouts are created or
// later: calls wait at the gate. The context bounds the opening; the session lasts until Close.
func (c *Client) Intercept(ctx context.Context, selector Selector, opts ...SessionOption) (*Session, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "a machine without a name"
	}
	s := &Session{
		cluster: c.cluster, given: member{service: c.services["interception"], takesWork: true},
		options: sessionOptions{
			selector: selector.message(), credits: &interceptionv1.Credits{Calls: 64}, identity: host,
			view: &interceptionv1.CallView{SuffixOnly: true}, reconnect: 5 * time.Minute,
		},
		closing: make(chan struct{}), done: make(chan struct{}), changes: make(chan struct{}),
	}
	for _, option := range opts {
		option(&s.options)
	}
	if s.options.credits.Calls < 1 {
		return nil, &Error{Kind: ErrInvalidArgument, Reason: "CREDITS", Message: "A session needs at least one credit"}
	}
	s.offers = newHostTools(make(chan struct{}, 1), nil)
	if err := s.look(ctx); err != nil {
		s.end(&Error{Kind: ErrSessionLost, Reason: "SESSION_CLOSED", Message: "The session was not opened"})
		s.each(func(p *place) { <-p.stream.done })
		return nil, err
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	go s.follow(running)
	for {
		changed := s.change()
		if ready, failure := s.isReady(); failure != nil || ready {
			if failure != nil {
				s.abandon(failure)
				return nil, failure
			}
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			s.abandon(&Error{Kind: ErrSessionLost, Reason: "SESSION_CLOSED", Message: "The session was not opened"})
			return nil, fromRPC(ctx, ctx.Err(), s.given.service)
		}
	}
}

// abandon ends a session that was not opened, at once.
func (s *Session) abandon(failure *Error) {
	s.end(failure)
	_ = s.Close() // it never fails
}

// ID is the session's id at its first gate; it changes when that did not take the old one up again.
func (s *Session) ID() string {
	for _, p := range s.all() {
		if id := p.stream.sessionID(); id != "" {
			return id
		}
	}
	return ""
}

// Calls yields the calls to answer, oldest first, until the session is closed or finished. Several loops may share it.
// An error is the last thing that it yields: the session broke for good, or the context is over.
func (s *Session) Calls(ctx context.Context) iter.Seq2[*Call, error] {
	return func(yield func(*Call, error) bool) {
		for {
			call, err := s.inbox.next(ctx)
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
func (s *Session) Finish() { s.inbox.finish() }

// Announce informs all gates which weights of the only trained policy of each rollout are the newest: staleness bounds are judged
// against it.
func (s *Session) Announce(policyVersion int64) { s.AnnouncePolicy("", policyVersion) }

// AnnouncePolicy is Announce for one of several policies; an empty one is the only trained policy of each rollout.
func (s *Session) AnnouncePolicy(policyID string, policyVersion int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if policyID == "" {
		s.options.policyVersion = &policyVersion
	} else {
		s.options.policies = with(s.options.policies, policyID, policyVersion)
	}
	for _, p := range s.places {
		p.stream.announce(policyID, policyVersion)
	}
}

// with is a copy of the newest versions by policy, with one more: streams read the one that there was.
func with(policies map[string]int64, policyID string, policyVersion int64) map[string]int64 {
	changed := map[string]int64{policyID: policyVersion}
	for id, version := range policies {
		if id != policyID {
			changed[id] = version
		}
	}
	return changed
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
	s.shareOut()
	return nil
}

// Pause holds the calls of this selector at all gates, for every session and for the model source, while weights are moved;
// agents see keep-alives. It returns when every gate that can be reached holds them, with how many calls are leased or
// dispatched now; answers to them are still taken. They flow again with Resume, or by themselves after `most` (0 = 10 min).
//
// Errors: ErrInvalidArgument, ARGUMENT_TYPE: the reason is not UTF-8.
func (s *Session) Pause(ctx context.Context, reason string, most time.Duration) (int, error) {
	if !utf8.ValidString(reason) {
		return 0, &Error{Kind: ErrInvalidArgument, Reason: "ARGUMENT_TYPE", Message: "The reason of a pause is not UTF-8"}
	}
	pause := &interceptionv1.PauseCalls{Reason: reason}
	if most > 0 {
		pause.MaxDuration = durationpb.New(most)
	} else {
		most = longestPause
	}
	return s.steer(ctx, pause, time.Now().Add(most))
}

// Resume lets calls flow again, at all gates.
func (s *Session) Resume(ctx context.Context) error {
	_, err := s.steer(ctx, nil, time.Time{})
	return err
}

func (s *Session) steer(ctx context.Context, pause *interceptionv1.PauseCalls, until time.Time) (int, error) {
	s.mu.Lock()
	if s.failure != nil {
		defer s.mu.Unlock()
		return 0, s.failure
	}
	s.paused, s.until = pause, until
	// Asked at once at every gate, so that what is asked for later is later everywhere.
	asked := map[*stream]*promise{}
	for _, p := range s.places {
		if answer, err := p.stream.ask(pause); err == nil { // else the gate is left, or the session has failed
			asked[p.stream] = answer
		}
	}
	s.mu.Unlock()
	var mu sync.Mutex
	sum := 0
	act := func(ctx context.Context, at *stream) error {
		if asked[at] == nil {
			return nil
		}
		calls, err := asked[at].wait(ctx)
		mu.Lock()
		defer mu.Unlock()
		sum += int(calls)
		return err
	}
	err := s.everywhere(ctx, act, (*stream).beganWithoutIt)
	return sum, err
}

// OfferTools offers tools to the agents of rollouts that are created from now on, in any mode. They replace what this session
// offered to the same selector before; none = withdraw them. A nil selector is the session's own. The calls run here until the
// session ends. It returns when every gate that can be reached has them.
//
// Errors: ErrInvalidArgument (TOOL_NAME_RESERVED, TOOL_NOT_ALLOWED, FIELD_INVALID, HOST_TOOL), ErrResourceExhausted
// (TOOL_OFFER_LIMIT), ErrUnavailable: a gate did not answer.
func (s *Session) OfferTools(ctx context.Context, tools []HostTool, selector *Selector) error {
	whose := proto.Clone(s.options.selector).(*interceptionv1.CallSelector)
	whose.PolicyIds = nil // tools are of rollouts, whichever policy calls them
	if selector != nil {
		whose = selector.message()
	}
	s.mu.Lock()
	if s.failure != nil {
		defer s.mu.Unlock()
		return s.failure
	}
	undo, _, err := s.offers.offer(tools, whose) // first: a gate that comes meanwhile has to get them
	s.mu.Unlock()
	if err != nil {
		return err
	}
	act := func(ctx context.Context, at *stream) error { return at.offerTools(ctx, tools, whose) }
	if err := s.everywhere(ctx, act, func(at *stream) { at.adoptTools(tools, whose) }); err != nil {
		undo()
		return err
	}
	return nil
}

// everywhere does something at every gate. Those that cannot be reached get `later`.
func (s *Session) everywhere(
	ctx context.Context, act func(context.Context, *stream) error, later func(*stream),
) error {
	places := s.all()
	failures := make([]error, len(places))
	var acting sync.WaitGroup
	for at, p := range places {
		acting.Add(1)
		go func() {
			defer acting.Done()
			bounded, cancel := context.WithCancel(ctx)
			defer cancel()
			answer := make(chan error, 1)
			go func() { answer <- act(bounded, p.stream) }()
			select {
			case failures[at] = <-answer:
				_, _, away := p.stream.state()
				if failures[at] == nil || !away || s.err() != nil {
					return
				}
				failures[at] = nil
			case <-p.unreachable:
				cancel()
				<-answer
			}
			later(p.stream)
		}()
	}
	acting.Wait()
	if failure := s.err(); failure != nil {
		return failure
	}
	for _, failure := range failures {
		if failure != nil {
			return failure
		}
	}
	return nil
}

// Close sends what is still to be sent and says goodbye: calls without an answer are queued again at once. It returns
// when nothing of the session runs any more, and may be called again.
func (s *Session) Close() error {
	s.close.Do(func() { close(s.closing) })
	s.cancel()
	<-s.done
	var leaving sync.WaitGroup
	s.each(func(p *place) {
		leaving.Add(1)
		go func() {
			defer leaving.Done()
			p.stream.leave()
		}()
	})
	leaving.Wait()
	s.end(&Error{Kind: ErrSessionLost, Reason: "SESSION_CLOSED", Message: "The session is closed"})
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
	if s.failure == nil {
		return nil
	}
	return s.failure
}

// end ends the session: every waiter gets the error.
func (s *Session) end(failure *Error) {
	s.mu.Lock()
	if s.failure == nil {
		s.failure = failure
		for _, p := range s.places {
			p.stream.fail(failure)
		}
		s.inbox.end(failure)
	}
	s.mu.Unlock()
	s.notify()
}

// The gates.

// all are copies of the places, as they are now.
func (s *Session) all() []place {
	s.mu.Lock()
	defer s.mu.Unlock()
	places := make([]place, len(s.places))
	for at, p := range s.places {
		places[at] = *p
	}
	return places
}

func (s *Session) each(act func(*place)) {
	s.mu.Lock()
	places := slices.Clone(s.places)
	s.mu.Unlock()
	for _, p := range places {
		act(p)
	}
}

// change is closed by the next change at a gate.
func (s *Session) change() <-chan struct{} {
	s.notices.Lock()
	defer s.notices.Unlock()
	return s.changes
}

func (s *Session) notify() {
	s.notices.Lock()
	defer s.notices.Unlock()
	close(s.changes)
	s.changes = make(chan struct{})
}

func (s *Session) isReady() (bool, *Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stands := false
	for _, p := range s.places {
		connected, _, _ := p.stream.state()
		if !connected && !p.isOut {
			return false, s.failure
		}
		stands = stands || connected
	}
	return stands, s.failure
}

// follow keeps the session at all gates, as the driver lists them, until it is closed or has failed.
func (s *Session) follow(ctx context.Context) {
	defer close(s.done)
	defer s.offers.ended()
	lookAt := time.Now().Add(lookForGates)
	for ctx.Err() == nil && s.err() == nil {
		changed := s.change()
		s.notice()
		s.each(func(p *place) {
			if _, failure, _ := p.stream.state(); failure != nil {
				s.ended(p)
			}
		})
		s.mu.Lock()
		if !slices.Equal(s.sharing(), s.sharers) {
			s.shareOut()
		}
		s.mu.Unlock()
		if !time.Now().Before(lookAt) {
			if err := s.look(ctx); err != nil && ctx.Err() == nil {
				// Such as MEMBER_NOT_TRUSTED: without that gate the session would not be whole.
				s.end(fromRPC(ctx, err, anyone))
			}
			lookAt = time.Now().Add(lookForGates)
		}
		timer := time.NewTimer(time.Until(lookAt))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// look asks which gates there are; the session goes to new ones, and leaves lost ones.
func (s *Session) look(ctx context.Context) error {
	age := gatesFresh
	places := s.all()
	for _, p := range places {
		if connected, _, _ := p.stream.state(); !connected {
			age = lookForGates
		}
	}
	members, err := s.cluster.members(ctx, "interception", age, false)
	if err != nil {
		// A token that the driver refuses may be valid at the given gate.
		notAsked := isAway(err) || errors.Is(err, ErrUnauthenticated) || errors.Is(err, ErrPermissionDenied)
		if !notAsked {
			return err
		}
		if len(places) > 0 {
			return nil
		}
		members = []member{s.given}
	}
	for _, one := range members {
		s.mu.Lock()
		at := slices.IndexFunc(s.places, func(p *place) bool { return p.stream.service == one.service })
		if at >= 0 {
			s.places[at].member = one
		} else if s.failure == nil {
			s.add(one, false)
		}
		s.mu.Unlock()
	}
	s.each(func(p *place) {
		stays := slices.ContainsFunc(members, func(m member) bool { return m.service == p.stream.service })
		s.mu.Lock()
		connected, _, _ := p.stream.state()
		if connected || stays && !p.member.lost {
			s.mu.Unlock()
			return
		}
		p.out()
		isGone := !p.awaySince.IsZero() && time.Since(p.awaySince) >= goneAfter && p.stream.sessionID() != ""
		s.mu.Unlock()
		if !stays || isGone {
			s.leave(p, stays)
		}
	})
	s.notify()
	return nil
}

// out: nobody waits for the gate; the caller holds the lock.
func (p *place) out() {
	if !p.isOut {
		p.isOut = true
		close(p.unreachable)
	}
}

// add opens the session at one more gate, with the state that it has; the caller holds the lock.
func (s *Session) add(one member, late bool) *place {
	options := s.options
	if late || one.lost && len(s.places) > 0 {
		options.reconnect = -1
	}
	at := newStream(one.service, &options, &s.inbox, s.notify, s.shareOutIfShort)
	for _, offered := range s.offers.all() {
		at.adoptTools(offered.tools, offered.selector)
	}
	if left := time.Until(s.until); s.paused != nil && left > 0 {
		pause := proto.Clone(s.paused).(*interceptionv1.PauseCalls)
		pause.MaxDuration = durationpb.New(max(left, time.Second))
		at.pauses.want(pause)
	}
	p := &place{member: one, stream: at, unreachable: make(chan struct{})}
	if one.lost {
		p.out()
	}
	s.places = append(s.places, p)
	s.shareOut()
	at.start()
	return p
}

// leave ends what a lost gate had. If it stays a member, the session waits for it without a limit.
func (s *Session) leave(p *place, stays bool) {
	name := p.member.name
	if name == "" {
		name = p.stream.service.address
	}
	p.stream.lose(&Error{
		Kind: ErrCallEnded, Reason: "GATE_LOST", Message: "Gate " + name + " is lost, and the call with it",
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	p.out()
	s.places = slices.DeleteFunc(s.places, func(other *place) bool { return other == p })
	if stays && s.failure == nil && !s.isClosing() {
		s.add(p.member, true).out()
	}
	s.shareOut()
}

// ended: a gate's stream ended for good. Without another gate that can be reached the session has failed.
func (s *Session) ended(p *place) {
	_, failure, away := p.stream.state()
	others := false
	for _, other := range s.all() {
		connected, _, _ := other.stream.state()
		others = others || connected
	}
	if away && others {
		s.leave(p, true)
	} else {
		s.end(failure)
	}
}

// notice notes which gates can be reached.
func (s *Session) notice() {
	s.mu.Lock()
	now, stands, endless := time.Now(), false, len(s.places) > 0
	var since time.Time
	for _, p := range s.places {
		connected, _, _ := p.stream.state()
		switch {
		case connected:
			stands, p.awaySince = true, time.Time{}
			if p.isOut {
				p.isOut, p.unreachable = false, make(chan struct{})
			}
			p.stream.setReconnect(s.options.reconnect)
		case p.awaySince.IsZero():
			p.awaySince = now
		}
		if p.awaySince.After(since) {
			since = p.awaySince
		}
		endless = endless && p.stream.waitsWithoutEnd()
	}
	isLost := !stands && endless && now.Sub(since) > s.options.reconnect
	s.mu.Unlock()
	if isLost {
		s.end(&Error{Kind: ErrSessionLost, Reason: "SESSION_LOST", Message: "No gate came back in time"})
	}
}

// Credits.

// shareOutIfShort shares the window out anew if a gate has used its part up while others have more than they use.
func (s *Session) shareOutIfShort() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sharers) < 2 || s.options.credits.Calls == 0 {
		return
	}
	short, spare := false, false
	for _, at := range s.sharers {
		free := at.window() - at.book.size()
		short, spare = short || free <= 0, spare || free >= 2
	}
	if short && spare {
		s.shareOut()
	}
}

// shareOut gives each gate what it holds and an equal part of the rest, at least one call; the caller holds the lock.
func (s *Session) shareOut() {
	s.sharers = s.sharing()
	total, count := int(s.options.credits.Calls), len(s.sharers)
	held, free := make([]int, count), total
	for at, one := range s.sharers {
		held[at] = one.book.size()
		free -= held[at]
	}
	free = max(0, free)
	for at, one := range s.sharers {
		calls := held[at] + free/count
		if at < free%count {
			calls++
		}
		switch {
		case count == 1 || total == 0:
			calls = total
		default:
			calls = max(1, calls)
		}
		share := &interceptionv1.Credits{Calls: window(calls), Bytes: s.options.credits.Bytes}
		if share.Bytes != nil && total > 0 {
			bytes := max(1, int64(float64(*share.Bytes)*float64(calls)/float64(total)))
			share.Bytes = &bytes
		}
		one.setCredits(share)
	}
}

func (s *Session) sharing() []*stream {
	var sharers []*stream
	for _, p := range s.places {
		if connected, _, _ := p.stream.state(); connected || !p.isOut {
			sharers = append(sharers, p.stream)
		}
	}
	return sharers
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
