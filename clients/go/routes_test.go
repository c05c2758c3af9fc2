package penstock

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// recorder serves every method and answers nothing; it keeps the metadata of each request.
type recorder struct {
	address string

	mu   sync.Mutex
	sent []metadata.MD
}

func record(t *testing.T) *recorder {
	t.Helper()
	r := &recorder{}
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		sent, _ := metadata.FromIncomingContext(stream.Context())
		r.mu.Lock()
		defer r.mu.Unlock()
		r.sent = append(r.sent, sent)
		return status.Error(codes.Unimplemented, "recorded")
	}))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	r.address = listener.Addr().String()
	return r
}

func (r *recorder) last() metadata.MD {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sent[len(r.sent)-1]
}

func filled(message protoreflect.Message, path []string, value string) {
	field := message.Descriptor().Fields().ByName(protoreflect.Name(path[0]))
	switch {
	case len(path) > 1 && field.IsList():
		filled(message.Mutable(field).List().AppendMutable().Message(), path[1:], value)
	case len(path) > 1:
		filled(message.Mutable(field).Message(), path[1:], value)
	case field.IsList():
		message.Mutable(field).List().Append(protoreflect.ValueOfString(value))
	default:
		message.Set(field, protoreflect.ValueOfString(value))
	}
}

// Every RPC is sent with the headers that the protos name for it (R113).
func TestEveryRPCCarriesTheHeadersThatRouteIt(t *testing.T) {
	r := record(t)
	ps := connectTo(t, r.address)
	conn, ctx, routes := ps.services["driver"].conn, bounded(t), 0
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		for at := range file.Services().Len() {
			service := file.Services().Get(at)
			for at := range service.Methods().Len() {
				method := service.Methods().Get(at)
				path := "/" + string(service.FullName()) + "/" + string(method.Name())
				for _, route := range routesOf(path) {
					request := dynamicpb.NewMessage(method.Input())
					filled(request, strings.Split(route.GetField(), "."), "id-1")
					routes++
					if err := sendOnce(ctx, conn, method, path, request); status.Convert(err).Message() != "recorded" {
						t.Fatalf("%s: %v", path, err)
					}
					if sent := r.last().Get(route.GetHeader()); len(sent) != 1 || sent[0] != "id-1" {
						t.Errorf("%s sent %v as %s", path, sent, route.GetHeader())
					}
				}
			}
		}
		return true
	})
	if routes < 70 {
		t.Errorf("only %d routes were found", routes)
	}
}

func sendOnce(
	ctx context.Context, conn grpc.ClientConnInterface, method protoreflect.MethodDescriptor, path string,
	request *dynamicpb.Message,
) error {
	answer := dynamicpb.NewMessage(method.Output())
	if !method.IsStreamingClient() && !method.IsStreamingServer() {
		return conn.Invoke(ctx, path, request, answer)
	}
	desc := &grpc.StreamDesc{ClientStreams: method.IsStreamingClient(), ServerStreams: method.IsStreamingServer()}
	stream, err := conn.NewStream(ctx, desc, path)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(request); err != nil && !errors.Is(err, io.EOF) { // refused already, and RecvMsg says why
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(answer)
}

// An id that does not fit into a header is sent in the request alone (R113).
func TestAnIDThatFitsNoHeaderIsSentInTheRequestAlone(t *testing.T) {
	r := record(t)
	ps := connectTo(t, r.address)
	for _, odd := range []string{"Größe", "a\nb", "\x00", strings.Repeat("x", 256), "a\tb", "\x7f"} {
		_, err := givenDriver(ps).stub().GetRollout(bounded(t), &driverv1.GetRolloutRequest{RolloutId: odd})
		if status.Convert(err).Message() != "recorded" {
			t.Fatal(err)
		}
		if sent := r.last().Get("x-penstock-rollout-id"); len(sent) != 0 {
			t.Errorf("%q was sent as %q", odd, sent)
		}
	}
}
