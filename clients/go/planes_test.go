package penstock

import (
	"context"
	"errors"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

// elsewhere is a sandbox service whose sandboxes are served at an address of their own.
type elsewhere struct {
	sandboxv1.UnimplementedSandboxServiceServer
	sandboxv1.UnimplementedProcessServiceServer
	plane *sandboxv1.DataPlane
	seen  metadata.MD
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

func TestASandboxElsewhereIsCalledThereWithItsOwnToken(t *testing.T) {
	service := &elsewhere{}
	listen := func() string {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		sandboxv1.RegisterSandboxServiceServer(server, service)
		sandboxv1.RegisterProcessServiceServer(server, service)
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		return listener.Addr().String()
	}
	there := listen()
	service.plane = &sandboxv1.DataPlane{Address: there, Token: "theirs"}
	ps, err := Connect(WithAddresses(Addresses{Sandbox: listen()}), WithToken("ours"))
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
