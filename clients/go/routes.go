package penstock

import (
	"context"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	optionsv1 "penstock.example/penstock/gen/options/v1"
)

// The headers that route each method, as the protos declare them.
var declared sync.Map // method -> []*optionsv1.Route

func routesOf(method string) []*optionsv1.Route {
	if known, ok := declared.Load(method); ok {
		return known.([]*optionsv1.Route)
	}
	var found []*optionsv1.Route
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	if descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(name); err == nil {
		found, _ = proto.GetExtension(descriptor.Options(), optionsv1.E_Route).([]*optionsv1.Route)
	}
	declared.Store(method, found)
	return found
}

// routed is the context with the headers that route a request; of a stream, the first request decides.
func routed(ctx context.Context, method string, request any) context.Context {
	message, ok := request.(proto.Message)
	if !ok {
		return ctx
	}
	sent := map[string]string{}
	for _, route := range routesOf(method) {
		if _, done := sent[route.GetHeader()]; done {
			continue
		}
		values := map[string]bool{}
		collectValues(message.ProtoReflect(), strings.Split(route.GetField(), "."), values)
		for value := range values {
			if len(values) == 1 && fitsHeader(value) {
				sent[route.GetHeader()] = value
				ctx = metadata.AppendToOutgoingContext(ctx, route.GetHeader(), value)
			}
		}
	}
	return ctx
}

func collectValues(message protoreflect.Message, path []string, values map[string]bool) {
	field := message.Descriptor().Fields().ByName(protoreflect.Name(path[0]))
	if field == nil || !message.Has(field) {
		return
	}
	take := func(value protoreflect.Value) {
		if len(path) > 1 {
			collectValues(value.Message(), path[1:], values)
		} else if value.String() != "" {
			values[value.String()] = true
		}
	}
	if value := message.Get(field); field.IsList() {
		for index := range value.List().Len() {
			take(value.List().Get(index))
		}
	} else {
		take(value)
	}
}

func fitsHeader(value string) bool {
	for _, char := range []byte(value) {
		if char < ' ' || char > '~' {
			return false
		}
	}
	return len(value) <= 128
}

// routedStream begins its call with the first message, whose headers it sends. What is asked of it before begins it too.
// One with a single request begins it again where its home is, if the first answer is HOME_ELSEWHERE.
type routedStream struct {
	grpc.ClientStream
	ctx     context.Context
	begin   func(request any) (grpc.ClientStream, error)
	again   func(err error, request any) (grpc.ClientStream, error) // nil, nil = the error stands; unset = more requests
	request any
	once    sync.Once
	err     error
}

func (s *routedStream) start(request any) error {
	s.once.Do(func() { s.ClientStream, s.err = s.begin(request) })
	return s.err
}

func (s *routedStream) SendMsg(message any) error {
	if err := s.start(message); err != nil {
		return err
	}
	s.request = message
	return s.ClientStream.SendMsg(message)
}

func (s *routedStream) RecvMsg(message any) error {
	if err := s.start(nil); err != nil {
		return err
	}
	err := s.ClientStream.RecvMsg(message)
	again := s.again
	s.again = nil // what follows a message is never sent twice
	if err == nil || again == nil {
		return err
	}
	home, failure := again(err, s.request)
	switch {
	case failure != nil:
		return failure
	case home == nil:
		return err
	}
	s.ClientStream = home
	return home.RecvMsg(message)
}

func (s *routedStream) CloseSend() error {
	if err := s.start(nil); err != nil {
		return err
	}
	return s.ClientStream.CloseSend()
}

func (s *routedStream) Header() (metadata.MD, error) {
	if err := s.start(nil); err != nil {
		return nil, err
	}
	return s.ClientStream.Header()
}

func (s *routedStream) Context() context.Context { return s.ctx }

func (s *routedStream) Trailer() metadata.MD {
	if s.start(nil) != nil {
		return nil
	}
	return s.ClientStream.Trailer()
}
