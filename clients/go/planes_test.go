package penstock

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

// elsewhere is a sandbox service whose sandboxes are served at an address of their own.
type elsewhere struct {
	sandboxv1.UnimplementedSandboxServiceServer
	sandboxv1.UnimplementedProcessServiceServer
	plane *sandboxv1.DataPlane
	seen  metadata.MD

	renew   func() (*sandboxv1.DataPlane, error)
	renewed int
}

func (e *elsewhere) GetDataPlane(
	context.Context, *sandboxv1.GetDataPlaneRequest,
) (*sandboxv1.GetDataPlaneResponse, error) {
	e.renewed++
	plane, err := e.renew()
	return &sandboxv1.GetDataPlaneResponse{DataPlane: plane}, err
}

func (e *elsewhere) CreateSandbox(
	context.Context, *sandboxv1.CreateSandboxRequest,
) (*sandboxv1.CreateSandboxResponse, error) {
	return &sandboxv1.CreateSandboxResponse{Sandbox: &sandboxv1.Sandbox{SandboxId: "sb"}, DataPlane: e.plane}, nil
}

func (e *elsewhere) Run(ctx context.Context, _ *sandboxv1.RunRequest) (*sandboxv1.RunResponse, error) {
	e.seen, _ = metadata.FromIncomingContext(ctx)
	return &sandboxv1.RunResponse{Result: &sandboxv1.RunResult{}}, nil
}

func (e *elsewhere) listen(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	sandboxv1.RegisterSandboxServiceServer(server, e)
	sandboxv1.RegisterProcessServiceServer(server, e)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

// A token that ends within a minute is renewed once, and then used by all calls; while it is in force a service that gives no new
// one stops nobody.
func TestTheTokenOfASandboxElsewhereIsRenewedBeforeItEnds(t *testing.T) {
	service := &elsewhere{}
	there := service.listen(t)
	plane := func(token string, left time.Duration) *sandboxv1.DataPlane {
		return &sandboxv1.DataPlane{Address: there, Token: token, TokenExpireTime: timestamppb.New(time.Now().Add(left))}
	}
	ps, err := Connect(WithAddresses(Addresses{Sandbox: service.listen(t)}), WithToken("ours"))
	if err != nil {
		t.Fatal(err)
	}
	defer ps.Close()
	ctx := bounded(t)
	refused := func() (*sandboxv1.DataPlane, error) { return nil, status.Error(codes.NotFound, "It is gone.") }
	for _, item := range []struct {
		name    string
		left    time.Duration // of the first token
		renew   func() (*sandboxv1.DataPlane, error)
		sent    string
		renewed int
		kind    error
	}{
		{"far off", time.Hour, refused, "first", 0, nil},
		{"near", 30 * time.Second, func() (*sandboxv1.DataPlane, error) { return plane("second", time.Hour), nil }, "second", 1, nil},
		{"near, and there is no new one", 30 * time.Second, refused, "first", 2, nil},
		{"over", -time.Second, func() (*sandboxv1.DataPlane, error) { return plane("second", time.Hour), nil }, "second", 1, nil},
		{"over, and there is no new one", -time.Second, refused, "", 2, ErrNotFound},
	} {
		service.plane, service.renew, service.renewed, service.seen = plane("first", item.left), item.renew, 0, nil
		sandbox, err := ps.Sandboxes.Create(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := sandbox.Run(ctx, Shell("true")); !errors.Is(err, item.kind) && (err != nil || item.kind != nil) {
				t.Fatalf("%s: %v", item.name, err)
			}
		}
		sent := service.seen.Get("authorization")
		if item.sent == "" && sent != nil || item.sent != "" && (len(sent) != 1 || sent[0] != "Bearer "+item.sent) {
			t.Errorf("%s: it was called with %v", item.name, sent)
		}
		if service.renewed != item.renewed {
			t.Errorf("%s: %d tokens were asked for", item.name, service.renewed)
		}
	}
}

func TestASandboxElsewhereIsCalledThereWithItsOwnToken(t *testing.T) {
	service := &elsewhere{}
	there := service.listen(t)
	service.plane = &sandboxv1.DataPlane{Address: there, Token: "theirs"}
	ps, err := Connect(WithAddresses(Addresses{Sandbox: service.listen(t)}), WithToken("ours"))
	if err != nil {
		t.Fatal(err)
	}
	defer ps.Close()
	sandbox, err := ps.Sandboxes.Create(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sandbox.Run(context.Background(), Shell("true")); err != nil {
		t.Fatal(err)
	}
	if where, sent := service.seen.Get(":authority"), service.seen.Get("authorization"); where[0] != there || len(sent) != 1 || sent[0] != "Bearer theirs" {
		t.Errorf("it was called at %v with %v", where, sent)
	}
	if name := service.seen.Get("user-agent"); len(name) != 1 || name[0][:12] != "penstock-go/" {
		t.Errorf("the client named itself %v", name)
	}
	service.plane = &sandboxv1.DataPlane{Address: "10.0.0.1:7701", Token: "theirs"}
	if _, err := ps.Sandboxes.Create(context.Background(), nil); !errors.Is(err, ErrConfiguration) {
		t.Errorf("a token is to go in clear beyond this machine: %v", err)
	}
}
