package penstock

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"testing/quick"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

func refusal(t *testing.T, code codes.Code, message string, details ...protoadapt.MessageV1) error {
	t.Helper()
	said, err := status.New(code, message).WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return said.Err()
}

// A service counts a caller's deadline by its own clock, so it may end the call before the caller's own timer fires.
func TestTheCallersDeadlineIsItsOwnWhoeverSeesItPass(t *testing.T) {
	server, ps := serve(t)
	server.getRollout = func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
		return nil, status.Error(codes.DeadlineExceeded, "Deadline Exceeded")
	}
	for allowed, expected := range map[time.Duration]bool{900 * time.Millisecond: true, time.Hour: false} {
		ctx, cancel := context.WithTimeout(context.Background(), allowed)
		_, err := ps.Rollouts.Get(ctx, "r")
		cancel()
		if !errors.Is(err, ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) != expected {
			t.Errorf("with %v it came as %#v", allowed, err)
		}
	}
}

// What a service says of an error arrives: its reason, the fields, the facts, when to try again (R26, R63).
func TestAnErrorArrivesWithAllThatTheServiceSaid(t *testing.T) {
	server, ps := serve(t)
	server.getRollout = func(ctx context.Context, _ *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
		sent, _ := metadata.FromIncomingContext(ctx)
		if token := sent.Get("authorization"); len(token) != 1 || token[0] != "Bearer secret" {
			t.Errorf("the token came as %v", token)
		}
		return nil, refusal(t, codes.ResourceExhausted, "Too many rollouts",
			&errdetails.ErrorInfo{Reason: "ROLLOUT_LIMIT", Metadata: map[string]string{"limit": "7"}},
			&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
				{Field: "size", Description: "at most 7"},
			}},
			&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)})
	}
	_, err := ps.Rollouts.Get(bounded(t), "r")
	var failure *Error
	if !errors.As(err, &failure) || !errors.Is(err, ErrResourceExhausted) || errors.Is(err, ErrUnavailable) {
		t.Fatalf("it came as %v", err)
	}
	if failure.Reason != "ROLLOUT_LIMIT" || failure.Metadata["limit"] != "7" || failure.RetryAfter != 1500*time.Millisecond {
		t.Fatalf("it came as %+v", failure)
	}
	if failure.Error() != "Too many rollouts (size: at most 7)" || failure.Advice() != "Try again after 1.5s." {
		t.Fatalf("it reads %q, %q", failure, failure.Advice())
	}
	if status.Code(errors.Unwrap(failure)) != codes.ResourceExhausted {
		t.Fatal("the status beneath is lost")
	}
}

// A refused token is told with the service and where the token is from; another error is not (R3, R13).
func TestARefusedTokenNamesTheServiceAndWhereTheTokenIsFrom(t *testing.T) {
	server, ps := serve(t)
	const from = "The token that was sent is from the calling program"
	for _, said := range []struct {
		code         codes.Code
		reason, told string
	}{
		{codes.Unauthenticated, "CREDENTIAL_INVALID", "No, says the driver service at " + server.address + ". " + from + ": the services may have been restarted since"},
		{codes.PermissionDenied, "ROLE_NOT_ALLOWED", "No. " + from + "."},
		{codes.PermissionDenied, "OTHER", "No."},
	} {
		server.getRollout = func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
			return nil, refusal(t, said.code, "No.", &errdetails.ErrorInfo{Reason: said.reason})
		}
		_, err := ps.Rollouts.Get(bounded(t), "r")
		if err == nil || err.Error() != said.told {
			t.Errorf("%s came as %v", said.reason, err)
		}
	}
}

// Reads, and creates under one request id, are repeated while a service is away; a refusal is not (R25, R51).
func TestOnlyWhatIsHarmlessIsRepeated(t *testing.T) {
	server, ps := serve(t)
	asked := map[string]bool{}
	attempt := 0
	server.create = func(
		_ context.Context, request *driverv1.CreateRolloutRequest,
	) (*driverv1.CreateRolloutResponse, error) {
		asked[request.GetRequestId()] = true
		if attempt++; attempt < 3 {
			return nil, status.Error(codes.Unavailable, "one moment")
		}
		if mode := request.GetSpec().GetMode(); mode != interceptionv1.Mode_MODE_INTERCEPTION_GATE {
			t.Errorf("the mode is %v", mode)
		}
		return &driverv1.CreateRolloutResponse{Rollout: &driverv1.Rollout{RolloutId: "r"}}, nil
	}
	spec := &driverv1.RolloutSpec{}
	rollout, err := ps.Rollouts.Create(bounded(t), spec, "")
	if err != nil || rollout.ID != "r" || attempt != 3 || len(asked) != 1 {
		t.Fatalf("%v, %v after %d attempts under %d ids", rollout, err, attempt, len(asked))
	}
	if spec.Mode != interceptionv1.Mode_MODE_UNSPECIFIED {
		t.Fatal("the caller's own spec was changed")
	}
	attempt = 0
	server.getRollout = func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
		attempt++
		return nil, status.Error(codes.Internal, "broken")
	}
	if _, err := rollout.Get(bounded(t)); !errors.Is(err, ErrInternal) || attempt != 1 {
		t.Fatalf("%v after %d attempts", err, attempt)
	}
}

// A service that answered before is waited for while it cannot be reached, longer than one that never answered, than one that is
// there and says no, and than who asks others too can wait (R25).
func TestAServiceThatAnsweredBeforeIsWaitedForLonger(t *testing.T) {
	server, ps := serve(t)
	away := status.Error(codes.Unavailable, "connection refused") // as of a proxy in front, or of gRPC itself: without a reason
	refused := refusal(t, codes.Unavailable, "no", &errdetails.ErrorInfo{Reason: "DRAINING"})
	for _, item := range []struct {
		name     string
		answered bool
		brief    bool
		failure  error
		expected int // attempts
		kind     error
	}{
		{"never answered", false, false, away, attempts, ErrUnavailable},
		{"says no", true, false, refused, attempts, ErrUnavailable},
		{"others are asked", true, true, away, attempts, ErrUnavailable},
		{"answered before", true, false, away, attempts + 1, nil},
	} {
		conn := ps.services["driver"].conn.(*pool)
		conn.answered.Store(item.answered)
		attempt := 0
		server.getRollout = func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
			if attempt++; attempt <= attempts {
				return nil, item.failure
			}
			return &driverv1.GetRolloutResponse{Rollout: &driverv1.Rollout{RolloutId: "r"}}, nil
		}
		at := givenDriver(ps)
		if item.brief {
			at.at.Store(placeOf(at.service().briefly()))
		}
		_, err := (&Rollout{"r", ps, at}).Get(bounded(t))
		if attempt != item.expected || !errors.Is(err, item.kind) && (err != nil || item.kind != nil) {
			t.Errorf("%s: %v after %d attempts", item.name, err, attempt)
		}
		if err == nil && !conn.hasAnswered() || item.name == "never answered" && conn.hasAnswered() {
			t.Errorf("%s: has it answered? %t", item.name, conn.hasAnswered())
		}
	}
}

// A service's wish when to come again is never undercut, and one that is too far off is told at once.
func TestAWishThatIsTooFarOffIsToldInsteadOfWaitedFor(t *testing.T) {
	server, ps := serve(t)
	server.getRollout = func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
		return nil, refusal(t, codes.Unavailable, "later",
			&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Hour)})
	}
	_, err := ps.Rollouts.Get(bounded(t), "r")
	var failure *Error
	if !errors.As(err, &failure) || failure.RetryAfter != time.Hour {
		t.Fatalf("it came as %v", err)
	}
	var wait delays
	for range 20 {
		if delay := wait.next(nil); delay < 50*time.Millisecond || delay > 5*time.Second {
			t.Fatalf("a delay of %v", delay)
		}
	}
	if delay := wait.next(failure); delay != time.Hour {
		t.Fatalf("a delay of %v", delay)
	}
}

// A context that ends a call is told as the context's own error, and the service hears of it (R32, R41).
func TestACallEndsWithItsContext(t *testing.T) {
	server, ps := serve(t)
	gone := make(chan struct{})
	ctx, cancel := context.WithCancel(bounded(t))
	server.getRollout = func(ctx context.Context, _ *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
		cancel()
		<-ctx.Done()
		close(gone)
		return nil, ctx.Err()
	}
	if _, err := ps.Rollouts.Get(ctx, "r"); !errors.Is(err, context.Canceled) || !errors.Is(err, ErrCancelled) {
		t.Fatalf("it ended with %v", err)
	}
	<-gone
}

// A watch that breaks goes on where it was, and ends with the rollout (R41, R71).
func TestAWatchThatBreaksGoesOnWhereItWas(t *testing.T) {
	server, ps := serve(t)
	event := func(sequence int64) *driverv1.WatchRolloutResponse {
		told := &driverv1.RolloutEvent{Sequence: sequence, Event: &driverv1.RolloutEvent_Progress{}}
		if sequence == 4 {
			told.Event = &driverv1.RolloutEvent_Ended{Ended: &driverv1.Outcome{}}
		}
		return &driverv1.WatchRolloutResponse{Message: &driverv1.WatchRolloutResponse_Event{Event: told}}
	}
	server.watch = func(request *driverv1.WatchRolloutRequest, stream driverv1.RolloutService_WatchRolloutServer) error {
		for sequence := request.GetAfterSequence() + 1; sequence <= 4; sequence++ {
			if err := stream.Send(event(sequence)); err != nil {
				return err
			}
			if sequence == 2 {
				return status.Error(codes.Unavailable, "the driver restarts")
			}
			if sequence == 3 {
				return refusal(t, codes.ResourceExhausted, "not read", &errdetails.ErrorInfo{Reason: "READER_TOO_SLOW"})
			}
		}
		return nil
	}
	rollout := &Rollout{"r", ps, givenDriver(ps)}
	var seen []int64
	for event, err := range rollout.Events(bounded(t), 0) {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, event.GetSequence())
	}
	if !slices.Equal(seen, []int64{1, 2, 3, 4}) {
		t.Fatalf("seen were %v", seen)
	}
	for range rollout.Events(bounded(t), 0) {
		break // leaving early leaves nothing behind
	}
}

// Whoever watched a rollout to its end, and goes on later from there, need not wait for an error (R71).
func TestAnEndedRolloutHasNoEventsAfterItsLastOne(t *testing.T) {
	server, ps := serve(t)
	watches := 0
	server.watch = func(*driverv1.WatchRolloutRequest, driverv1.RolloutService_WatchRolloutServer) error {
		watches++
		return nil
	}
	server.getRollout = func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error) {
		over := &driverv1.Rollout{RolloutId: "r", LastSequence: 4, Outcome: &driverv1.Outcome{}}
		return &driverv1.GetRolloutResponse{Rollout: over}, nil
	}
	for event, err := range (&Rollout{"r", ps, givenDriver(ps)}).Events(bounded(t), 4) {
		t.Fatalf("it gave %v, %v", event, err)
	}
	if watches != 1 {
		t.Fatalf("it watched %d times", watches)
	}
}

// A poll that is not answered in its time is asked again: the caller set no deadline.
func TestAWaitOutlastsAPollThatIsNotAnswered(t *testing.T) {
	server, ps := serve(t)
	polls := 0
	server.waitGroup = func(context.Context, *driverv1.WaitGroupRequest) (*driverv1.WaitGroupResponse, error) {
		if polls++; polls == 1 {
			return nil, status.Error(codes.DeadlineExceeded, "context deadline exceeded")
		}
		return &driverv1.WaitGroupResponse{Group: &driverv1.Group{Ended: true}}, nil
	}
	if group, err := (&Group{ID: "g", client: ps, at: givenDriver(ps)}).Wait(bounded(t)); err != nil || !group.GetEnded() || polls != 2 {
		t.Fatalf("%v, %v after %d polls", group, err, polls)
	}
}

// A driver that was away and does not know what it had before has lost its state; one that never was away answers about an
// unknown id (R127).
func TestADriverThatComesBackWithoutItsStateIsNamed(t *testing.T) {
	server, ps := serve(t)
	polls, streams := 0, 0
	unknown := func(reason string) error {
		return refusal(t, codes.NotFound, "there is no r", &errdetails.ErrorInfo{Reason: reason, Domain: "penstock"})
	}
	server.waitGroup = func(context.Context, *driverv1.WaitGroupRequest) (*driverv1.WaitGroupResponse, error) {
		if polls++; polls == 1 {
			return nil, status.Error(codes.Unavailable, "the driver restarts")
		}
		return nil, unknown("GROUP_UNKNOWN")
	}
	server.watch = func(_ *driverv1.WatchRolloutRequest, _ driverv1.RolloutService_WatchRolloutServer) error {
		if streams++; streams == 1 {
			return status.Error(codes.Unavailable, "the driver restarts")
		}
		return unknown("ROLLOUT_UNKNOWN")
	}
	group := &Group{ID: "g", client: ps, at: givenDriver(ps)}
	watched := func() (failure error) {
		for _, err := range (&Rollout{"r", ps, givenDriver(ps)}).Events(bounded(t), 0) {
			failure = err
		}
		return failure
	}
	_, lost := group.Wait(bounded(t))
	_, never := group.Wait(bounded(t))
	for _, item := range []struct {
		err    error
		reason string
	}{{lost, "HOME_LOST"}, {never, "GROUP_UNKNOWN"}, {watched(), "HOME_LOST"}, {watched(), "ROLLOUT_UNKNOWN"}} {
		var failure *Error
		if !errors.As(item.err, &failure) || !errors.Is(item.err, ErrNotFound) || failure.Reason != item.reason {
			t.Fatalf("%v instead of %s", item.err, item.reason)
		}
	}
}

// Arrays survive the way there and back bit for bit, whatever they hold (R82).
func TestArraysSurviveTheWireBitForBit(t *testing.T) {
	same := func(ids []int32, bits []uint32) bool {
		logprobs := make([]float32, len(bits))
		for i, pattern := range bits {
			logprobs[i] = math.Float32frombits(pattern)
		}
		for i, logprob := range Logprobs(EncodeLogprobs(logprobs)) {
			if math.Float32bits(logprob) != bits[i] {
				return false
			}
		}
		return slices.Equal(TokenIDs(EncodeTokenIDs(ids)), ids)
	}
	if err := quick.Check(same, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := Sampled([]int32{1, 2}, []float32{-1}, 0); !errors.Is(err, ErrInvalidArgument) {
		t.Fatalf("arrays of different lengths gave %v", err)
	}
	whole, err := Sampled([]int32{258, -1}, []float32{-1, 0}, 9)
	if err != nil {
		t.Fatal(err)
	}
	span := whole.GetSpan()
	if !slices.Equal(span.GetTokenIds(), []byte{2, 1, 0, 0, 255, 255, 255, 255}) || span.GetVersions()[0].GetEnd() != 2 {
		t.Fatalf("it is %v", whole)
	}
	if none, err := Sampled(nil, nil, 9); err != nil || len(none.GetSpan().GetVersions()) != 0 {
		t.Fatalf("nothing sampled gave %v, %v", none, err)
	}
	if text := Injected("Enough."); text.GetSpan() != nil || text.GetMessage().GetParts()[0].GetText().GetText() != "Enough." {
		t.Fatalf("it is %v", text)
	}
}

// givenDriver is the driver of the connection.
func givenDriver(ps *Client) *driver { return ps.driverOf(member{service: ps.services["driver"]}) }
