package penstock

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
	opsv1 "penstock.example/penstock/gen/ops/v1"
)

// patienceOfTests is a guard against a hang, and no expectation.
const patienceOfTests = time.Minute

// server speaks the services' wire on a port of its own; each test says what it answers. The real services are behind the
// client in tests/conformance/clients.
type server struct {
	options []grpc.ServerOption
	driverv1.UnimplementedRolloutServiceServer
	interceptionv1.UnimplementedInterceptServiceServer
	address    string
	sessions   chan *conversation
	operations opsv1.OperationsServiceServer // of a driver that lists others; else nil
	grpc       *grpc.Server

	getRollout func(context.Context, *driverv1.GetRolloutRequest) (*driverv1.GetRolloutResponse, error)
	create     func(context.Context, *driverv1.CreateRolloutRequest) (*driverv1.CreateRolloutResponse, error)
	watch      func(*driverv1.WatchRolloutRequest, driverv1.RolloutService_WatchRolloutServer) error
	watchAll   func(*driverv1.WatchRolloutsRequest, driverv1.RolloutService_WatchRolloutsServer) error
	waitGroup  func(context.Context, *driverv1.WaitGroupRequest) (*driverv1.WaitGroupResponse, error)
	register   func(context.Context, *interceptionv1.RegisterToolsRequest) error
	getCall    func(context.Context, *interceptionv1.GetCallRequest) (*interceptionv1.GetCallResponse, error)
	lease      func(context.Context, *interceptionv1.LeaseCallsRequest) (*interceptionv1.LeaseCallsResponse, error)
}

func (s *server) LeaseCalls(
	ctx context.Context, request *interceptionv1.LeaseCallsRequest,
) (*interceptionv1.LeaseCallsResponse, error) {
	return s.lease(ctx, request)
}

func (s *server) GetCall(
	ctx context.Context, request *interceptionv1.GetCallRequest,
) (*interceptionv1.GetCallResponse, error) {
	return s.getCall(ctx, request)
}

func (s *server) RegisterTools(
	ctx context.Context, request *interceptionv1.RegisterToolsRequest,
) (*interceptionv1.RegisterToolsResponse, error) {
	return &interceptionv1.RegisterToolsResponse{}, s.register(ctx, request)
}

func (s *server) GetRollout(
	ctx context.Context, request *driverv1.GetRolloutRequest,
) (*driverv1.GetRolloutResponse, error) {
	return s.getRollout(ctx, request)
}

func (s *server) CreateRollout(
	ctx context.Context, request *driverv1.CreateRolloutRequest,
) (*driverv1.CreateRolloutResponse, error) {
	return s.create(ctx, request)
}

func (s *server) WatchRollout(
	request *driverv1.WatchRolloutRequest, stream driverv1.RolloutService_WatchRolloutServer,
) error {
	return s.watch(request, stream)
}

func (s *server) WatchRollouts(
	request *driverv1.WatchRolloutsRequest, stream driverv1.RolloutService_WatchRolloutsServer,
) error {
	return s.watchAll(request, stream)
}

func (s *server) WaitGroup(
	ctx context.Context, request *driverv1.WaitGroupRequest,
) (*driverv1.WaitGroupResponse, error) {
	return s.waitGroup(ctx, request)
}

// conversation is one stream of a session, as the gate sees it.
type conversation struct {
	t        *testing.T
	stream   interceptionv1.InterceptService_InterceptServer
	finished chan error // what the handler returns
}

func (s *server) Intercept(stream interceptionv1.InterceptService_InterceptServer) error {
	talk := &conversation{stream: stream, finished: make(chan error, 1)}
	s.sessions <- talk
	select {
	case err := <-talk.finished:
		return err
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

// serve starts a server, and a client of it, which end with the test; nothing of either runs on after it.
func serve(t *testing.T) (*server, *Client) {
	t.Helper()
	leakFree(t)
	s := &server{sessions: make(chan *conversation, 8)}
	s.listen(t, "127.0.0.1:0")
	ps := connectTo(t, s.address)
	t.Cleanup(func() { s.grpc.Stop() })
	return s, ps
}

func (s *server) listen(t *testing.T, address string) {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s.address, s.grpc = listener.Addr().String(), grpc.NewServer(s.options...)
	driverv1.RegisterRolloutServiceServer(s.grpc, s)
	interceptionv1.RegisterInterceptServiceServer(s.grpc, s)
	if s.operations != nil {
		opsv1.RegisterOperationsServiceServer(s.grpc, s.operations)
	}
	served := s.grpc
	go func() { _ = served.Serve(listener) }()
}

func connectTo(t *testing.T, address string) *Client {
	t.Helper()
	ps, err := Connect(
		WithAddresses(Addresses{Driver: address, Interception: address}), WithToken("secret"),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ps.Close() })
	return ps
}

// leakFree fails the test when goroutines of this package or of gRPC are left after all else was cleaned up.
func leakFree(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		until := time.Now().Add(patienceOfTests)
		for left := goroutines(); left != ""; left = goroutines() {
			if time.Now().After(until) {
				t.Fatalf("left behind:\n%s", left)
			}
			time.Sleep(time.Millisecond)
		}
	})
}

func goroutines() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var left []string
	for i, stack := range strings.Split(string(stacks), "\n\n") {
		ours := strings.Contains(stack, "penstock.example/penstock") || strings.Contains(stack, "google.golang.org/grpc")
		if i > 0 && ours { // the first is this one
			left = append(left, stack)
		}
	}
	return strings.Join(left, "\n\n")
}

func (s *server) session(t *testing.T) *conversation {
	t.Helper()
	select {
	case talk := <-s.sessions:
		talk.t = t
		return talk
	case <-time.After(patienceOfTests):
		t.Fatal("no session came")
		return nil
	}
}

// next is what the client says next, heartbeats apart; nil at the end of the stream.
func (c *conversation) next() *interceptionv1.InterceptRequest {
	c.t.Helper()
	for {
		frame, err := c.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			c.t.Fatalf("the client's stream broke: %v", err)
		}
		if frame.GetHeartbeat() == nil {
			return frame
		}
	}
}

// result is the one result that the client sends next.
func (c *conversation) result() *interceptionv1.CallResult {
	c.t.Helper()
	frame := c.next()
	if len(frame.GetResults().GetResults()) != 1 {
		c.t.Fatalf("one result was expected, not %v", frame)
	}
	return frame.GetResults().GetResults()[0]
}

func (c *conversation) say(frame *interceptionv1.InterceptResponse) {
	c.t.Helper()
	if err := c.stream.Send(frame); err != nil {
		c.t.Fatalf("the client does not listen: %v", err)
	}
}

// welcome reads Hello and answers it.
func (c *conversation) welcome(welcome *interceptionv1.Welcome) *interceptionv1.Hello {
	c.t.Helper()
	hello := c.next().GetHello()
	if hello == nil {
		c.t.Fatal("the client did not begin with Hello")
	}
	if welcome.HeartbeatInterval == nil {
		welcome.HeartbeatInterval = durationpb.New(10 * time.Second)
	}
	c.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Welcome{Welcome: welcome}})
	return hello
}

func (c *conversation) lease(ids ...string) {
	c.t.Helper()
	frame := &interceptionv1.Calls{}
	for _, id := range ids {
		frame.Calls = append(frame.Calls, &interceptionv1.ModelCall{
			CallId: id, LeaseId: "lease-" + id, RolloutId: "rollout", PromptTokenIds: EncodeTokenIDs([]int32{7, -1}),
		})
	}
	c.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Calls{Calls: frame}})
}

func (c *conversation) accept(ids ...string) {
	c.t.Helper()
	c.acknowledge(&interceptionv1.ResultsAcknowledged{AcceptedCallIds: ids})
}

func (c *conversation) acknowledge(frame *interceptionv1.ResultsAcknowledged) {
	c.t.Helper()
	c.say(&interceptionv1.InterceptResponse{Frame: &interceptionv1.InterceptResponse_Acknowledged{Acknowledged: frame}})
}

// goodbye reads to the end of the stream, and ends it.
func (c *conversation) goodbye() {
	c.t.Helper()
	if c.next().GetGoodbye() == nil {
		c.t.Fatal("the client left without Goodbye")
	}
	if c.next() != nil {
		c.t.Fatal("the client went on after Goodbye")
	}
	c.finished <- nil
}

// until waits for what another goroutine does.
func until(t *testing.T, reached func() bool) {
	t.Helper()
	for ctx := bounded(t); !reached(); runtime.Gosched() {
		if ctx.Err() != nil {
			t.Fatal("it never came to it")
		}
	}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patienceOfTests)
	t.Cleanup(cancel)
	return ctx
}

func nowhereElse(t *testing.T) {
	t.Helper()
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); strings.HasPrefix(name, "PENSTOCK_") {
			t.Setenv(name, "") // so that it comes back afterwards
			if err := os.Unsetenv(name); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("XDG_STATE_HOME", t.TempDir())
}

func write(t *testing.T, content string, mode os.FileMode) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, mode); err != nil {
		t.Fatal(err)
	}
	return file
}
