package penstock

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

// inputs is a sandbox service with one process, whose input it takes as the real one does: it skips bytes that it has.
type inputs struct {
	sandboxv1.UnimplementedSandboxServiceServer
	sandboxv1.UnimplementedProcessServiceServer
	sandboxv1.UnimplementedFileServiceServer
	taken  []byte
	asked  int   // how often the process's state was read
	breaks error // what the next write ends with, though its bytes are taken; nil = it succeeds
}

func (i *inputs) StartProcess(
	_ context.Context, request *sandboxv1.StartProcessRequest,
) (*sandboxv1.StartProcessResponse, error) {
	return &sandboxv1.StartProcessResponse{Process: &sandboxv1.Process{ProcessId: request.GetProcessId()}}, nil
}

func (i *inputs) GetProcess(
	_ context.Context, request *sandboxv1.GetProcessRequest,
) (*sandboxv1.GetProcessResponse, error) {
	i.asked++
	return &sandboxv1.GetProcessResponse{
		Process: &sandboxv1.Process{ProcessId: request.GetProcessId(), StdinOffset: int64(len(i.taken))},
	}, nil
}

func (i *inputs) WriteStdin(stream sandboxv1.ProcessService_WriteStdinServer) error {
	var at int64
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if start := request.GetStart(); start != nil {
			at = start.GetOffset()
		}
		data := request.GetData()
		known := int64(len(i.taken)) - at
		if known < 0 {
			return status.Errorf(codes.InvalidArgument, "input continues at %d", at)
		}
		i.taken = append(i.taken, data[min(int64(len(data)), known):]...)
		at += int64(len(data))
	}
	if err := i.breaks; err != nil {
		i.breaks = nil
		return err
	}
	return stream.SendAndClose(&sandboxv1.WriteStdinResponse{Offset: int64(len(i.taken))})
}

// sandbox is a handle of a sandbox of this service, which is served until the test's end.
func (i *inputs) sandbox(t *testing.T, options ...grpc.ServerOption) *Sandbox {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(options...)
	sandboxv1.RegisterSandboxServiceServer(server, i)
	sandboxv1.RegisterProcessServiceServer(server, i)
	sandboxv1.RegisterFileServiceServer(server, i)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	ps, err := Connect(WithAddresses(Addresses{Sandbox: listener.Addr().String()}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ps.Close() })
	made, err := ps.Sandboxes.handle(ps.Sandboxes.given(), &sandboxv1.Sandbox{SandboxId: "sb"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func written(t *testing.T, process *Process, content string) {
	t.Helper()
	if err := process.Write(bounded(t), []byte(content), false); err != nil {
		t.Fatal(err)
	}
}

// A handle of a process that has input already writes behind it: the service skips bytes that it has.
func TestInputOfAProcessThatWasAttachedToIsWrittenBehindWhatItHas(t *testing.T) {
	service := &inputs{taken: []byte("from elsewhere, ")}
	attached := service.sandbox(t).Process("p")
	written(t, attached, "from here, ")
	written(t, attached, "and again")
	if string(service.taken) != "from elsewhere, from here, and again" || service.asked != 1 {
		t.Fatalf("%q after %d questions", service.taken, service.asked)
	}
}

// After a write that failed, the next one goes on behind what the service took of it; a write that breaks is repeated and
// written once.
func TestInputAfterAFailedWriteIsWrittenBehindWhatWasTaken(t *testing.T) {
	service := &inputs{}
	process, err := service.sandbox(t).Start(bounded(t), Argv("cat"), WithOpenStdin())
	if err != nil {
		t.Fatal(err)
	}
	service.breaks = status.Error(codes.Unavailable, "one moment")
	written(t, process, "one, ")
	service.breaks = status.Error(codes.Internal, "broken")
	if err := process.Write(bounded(t), []byte("two, "), false); !errors.Is(err, ErrInternal) {
		t.Fatal(err)
	}
	written(t, process, "three")
	if string(service.taken) != "one, two, three" || service.asked != 1 {
		t.Fatalf("%q after %d questions", service.taken, service.asked)
	}
}
