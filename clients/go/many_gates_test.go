package penstock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
	opsv1 "penstock.example/penstock/gen/ops/v1"
)

// listing is a driver that lists gates.
type listing struct {
	opsv1.UnimplementedOperationsServiceServer
	mu      sync.Mutex
	members []*opsv1.Member
}

func (l *listing) GetServerInfo(
	context.Context, *opsv1.GetServerInfoRequest,
) (*opsv1.GetServerInfoResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &opsv1.GetServerInfoResponse{Server: &opsv1.ServerInfo{Name: "d0"}, Members: l.members}, nil
}

func (l *listing) list(members ...*opsv1.Member) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.members = members
}

func gateAt(s *server, name string, state opsv1.MemberState) *opsv1.Member {
	return &opsv1.Member{Service: "interception", Name: name, Address: s.address, State: state}
}

// sessionOfTwo opens a session at the first two gates, which the first one lists, and returns it with its two streams.
func sessionOfTwo(t *testing.T, known *listing, gates []*server) (*Session, *conversation, *conversation) {
	t.Helper()
	up := opsv1.MemberState_MEMBER_STATE_UP
	known.list(gateAt(gates[0], "g0", up), gateAt(gates[1], "g1", up))
	ps := connectTo(t, gates[0].address)
	t.Cleanup(func() {
		for _, gate := range gates {
			gate.grpc.Stop()
		}
	})
	opening := make(chan *Session, 1)
	go func() {
		session, err := ps.Intercept(bounded(t), Selector{}, WithCredits(8))
		if err != nil {
			t.Error(err)
		}
		opening <- session
	}()
	stays, breaks := gates[0].session(t), gates[1].session(t)
	stays.welcome(&interceptionv1.Welcome{SessionId: "stays"})
	breaks.welcome(&interceptionv1.Welcome{SessionId: "breaks"})
	session := <-opening
	if session == nil {
		t.FailNow()
	}
	return session, stays, breaks
}

// A session outlasts a lost gate, whose calls end, and takes in a new one, which has the session's state before its calls are
// handed out (R118, R122).
func TestASessionOutlastsALostGateAndTakesInANewOne(t *testing.T) {
	defer func(gone, look, age time.Duration) { goneAfter, lookForGates, gatesFresh = gone, look, age }(
		goneAfter, lookForGates, gatesFresh)
	goneAfter, lookForGates, gatesFresh = 0, 20*time.Millisecond, 0
	leakFree(t)
	known := &listing{}
	gates := make([]*server, 3)
	for at := range gates {
		gates[at] = &server{sessions: make(chan *conversation, 8)}
		if at == 0 {
			gates[at].operations = known
		}
		gates[at].listen(t, "127.0.0.1:0")
	}
	up, lost := opsv1.MemberState_MEMBER_STATE_UP, opsv1.MemberState_MEMBER_STATE_LOST
	session, stays, breaks := sessionOfTwo(t, known, gates)
	breaks.lease("a")
	call := nextCall(t, session)
	known.list(gateAt(gates[0], "g0", up), gateAt(gates[1], "g1", lost))
	gates[1].grpc.Stop()
	select {
	case <-call.Ended():
	case <-bounded(t).Done():
		t.Fatal("the lost gate's call did not end")
	}
	if err := <-delivering(t, call); !errors.Is(err, ErrCallEnded) {
		t.Fatal(err)
	}
	paused := make(chan error, 1)
	go func() {
		_, err := session.Pause(bounded(t), "weights", 0)
		paused <- err
	}()
	for frame := stays.next(); frame.GetPause() == nil; frame = stays.next() {
	}
	stays.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Paused{
		Paused: &interceptionv1.CallsPaused{},
	}})
	if err := <-paused; err != nil {
		t.Fatal(err)
	}
	session.Announce(7)
	known.list(gateAt(gates[0], "g0", up), gateAt(gates[1], "g1", lost), gateAt(gates[2], "g2", up))
	joins := gates[2].session(t)
	if version := joins.welcome(&interceptionv1.Welcome{SessionId: "joins"}).GetPolicyVersion(); version != 7 {
		t.Fatalf("it joined with version %d", version)
	}
	joins.lease("early")
	frame := joins.next()
	for ; frame.GetPause() == nil; frame = joins.next() {
	}
	for ; frame.GetResults() == nil; frame = joins.next() {
	}
	if released := frame.GetResults().GetResults()[0]; released.GetCallId() != "early" || released.GetRelease() == nil {
		t.Fatalf("it was not put back: %v", released)
	}
	joins.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Paused{
		Paused: &interceptionv1.CallsPaused{},
	}})
	joins.lease("late")
	if call := nextCall(t, session); call.ID() != "late" {
		t.Fatalf("%s was handed out", call.ID())
	}
	for _, talk := range []*conversation{stays, joins} {
		talk.finished <- status.Error(codes.Unavailable, "the test is over")
	}
	session.end(&Error{Kind: ErrSessionLost, Reason: "SESSION_CLOSED", Message: "The test is over"})
	if err := session.Close(); err != nil {
		t.Fatal(err)
	}
}

// A pause that did not wait for a gate which is away holds its calls when it comes back: what it leases before it has read the
// pause is put back (R118, R122).
func TestAPauseThatDidNotWaitForAGateHoldsItsCallsWhenItComesBack(t *testing.T) {
	defer func(look, age time.Duration) { lookForGates, gatesFresh = look, age }(lookForGates, gatesFresh)
	lookForGates, gatesFresh = 20*time.Millisecond, 0
	leakFree(t)
	known := &listing{}
	gates := []*server{
		{sessions: make(chan *conversation, 8), operations: known}, {sessions: make(chan *conversation, 8)},
	}
	for _, gate := range gates {
		gate.listen(t, "127.0.0.1:0")
	}
	session, stays, breaks := sessionOfTwo(t, known, gates)
	up, lost := opsv1.MemberState_MEMBER_STATE_UP, opsv1.MemberState_MEMBER_STATE_LOST
	known.list(gateAt(gates[0], "g0", up), gateAt(gates[1], "g1", lost))
	breaks.finished <- status.Error(codes.Unavailable, "the gate restarts")
	again := gates[1].session(t)
	paused := make(chan error, 1)
	go func() {
		_, err := session.Pause(bounded(t), "weights", 0)
		paused <- err
	}()
	for frame := stays.next(); frame.GetPause() == nil; frame = stays.next() {
	}
	holds := &interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Paused{
		Paused: &interceptionv1.CallsPaused{},
	}}
	stays.say(holds)
	if err := <-paused; err != nil {
		t.Fatal(err)
	}
	again.welcome(&interceptionv1.Welcome{SessionId: "breaks", Resumed: true})
	again.lease("early")
	frame := again.next()
	for ; frame.GetResults() == nil; frame = again.next() {
	}
	if released := frame.GetResults().GetResults()[0]; released.GetCallId() != "early" || released.GetRelease() == nil {
		t.Fatalf("it was not put back: %v", released)
	}
	again.say(holds)
	again.lease("late")
	if call := nextCall(t, session); call.ID() != "late" {
		t.Fatalf("%s was handed out", call.ID())
	}
	for _, talk := range []*conversation{stays, again} {
		talk.finished <- status.Error(codes.Unavailable, "the test is over")
	}
	session.end(&Error{Kind: ErrSessionLost, Reason: "SESSION_CLOSED", Message: "The test is over"})
	if err := session.Close(); err != nil {
		t.Fatal(err)
	}
}

// Tools that are withdrawn while a gate is away are withdrawn there too, once it has resumed the session, which has them still;
// a new session has none (R22).
func TestToolsWithdrawnWhileAGateWasAwayAreWithdrawnThereToo(t *testing.T) {
	withdrawWhileAway(t, true, 1, 0)
}

func TestToolsWithdrawnWhileAGateWasAwayAreUnknownToANewSession(t *testing.T) {
	withdrawWhileAway(t, false, 1)
}

// withdrawWhileAway withdraws a tool while a gate is away; expected has the number of tools in each of its registrations.
func withdrawWhileAway(t *testing.T, resumed bool, expected ...int) {
	t.Helper()
	defer func(look, age time.Duration) { lookForGates, gatesFresh = look, age }(lookForGates, gatesFresh)
	lookForGates, gatesFresh = 20*time.Millisecond, 0
	leakFree(t)
	known := &listing{}
	var away atomic.Bool
	registered := make(chan int, 8) // the number of tools in each registration at the second gate
	register := func(ctx context.Context, request *interceptionv1.RegisterToolsRequest) error {
		if away.Load() && request.GetSessionId() == "breaks" {
			<-ctx.Done() // also when it arrives after the gate came back
			return ctx.Err()
		}
		registered <- len(request.GetTools())
		return nil
	}
	accept := func(context.Context, *interceptionv1.RegisterToolsRequest) error { return nil }
	gates := []*server{
		{sessions: make(chan *conversation, 8), operations: known, register: accept},
		{sessions: make(chan *conversation, 8), register: register},
	}
	for _, gate := range gates {
		gate.listen(t, "127.0.0.1:0")
	}
	up, lost := opsv1.MemberState_MEMBER_STATE_UP, opsv1.MemberState_MEMBER_STATE_LOST
	session, stays, breaks := sessionOfTwo(t, known, gates)
	tool := HostTool{Name: "look_up", Function: func(context.Context, *HostToolCall) (any, error) { return "", nil }}
	if err := session.OfferTools(bounded(t), []HostTool{tool}, nil); err != nil {
		t.Fatal(err)
	}
	away.Store(true)
	known.list(gateAt(gates[0], "g0", up), gateAt(gates[1], "g1", lost))
	breaks.finished <- status.Error(codes.Unavailable, "the gate restarts")
	again := gates[1].session(t)
	if err := session.OfferTools(bounded(t), nil, nil); err != nil {
		t.Fatal(err)
	}
	again.welcome(&interceptionv1.Welcome{SessionId: "new", Resumed: resumed})
	again.lease("late")
	nextCall(t, session)
	close(registered)
	var counts []int
	for count := range registered {
		counts = append(counts, count)
	}
	if !slices.Equal(counts, expected) {
		t.Fatalf("the gate got %v tools, not %v", counts, expected)
	}
	for _, talk := range []*conversation{stays, again} {
		talk.finished <- status.Error(codes.Unavailable, "the test is over")
	}
	session.end(&Error{Kind: ErrSessionLost, Reason: "SESSION_CLOSED", Message: "The test is over"})
	if err := session.Close(); err != nil {
		t.Fatal(err)
	}
}
