package penstock

import (
	"context"
	"errors"
	"sync"
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
