package penstock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
)

const (
	// A service takes 256 calls at once on a connection (its max_streams); gRPC makes further ones wait without a word.
	callsPerConnection = 200
	maxConnections     = 64
)

// pool is the connections to one service: another is opened when each has as many calls as it should.
type pool struct {
	address string
	dial    func(address string) (*grpc.ClientConn, error)

	answered atomic.Bool

	mu     sync.Mutex
	conns  []*grpc.ClientConn
	calls  []int // open ones of each
	closed bool
	homes  homes
}

// hasAnswered is whether the service itself has answered a call: with a message, or with an error that has a reason. Errors of
// proxies have none, and one that sends the caller to another service says nothing of that one.
func (p *pool) hasAnswered() bool { return p.answered.Load() }

func (p *pool) noteAnswer(err error) {
	if p.answered.Load() {
		return
	}
	if reason := reasonOf(err); err == nil || reason != nil && reason.GetReason() != homeElsewhere {
		p.answered.Store(true)
	}
}

// newPool opens the first connection, so that an invalid address fails at once.
func newPool(address string, tls *TLS, dialing []grpc.DialOption) (*pool, error) {
	p := &pool{address: address, homes: homes{tls: tls}, calls: []int{0}}
	p.dial = func(address string) (*grpc.ClientConn, error) { return grpc.NewClient(address, dialing...) }
	first, err := p.dial(address)
	p.conns = []*grpc.ClientConn{first}
	return p, err
}

func (p *pool) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	ctx = routed(ctx, method, args)
	conn, ended := p.take()
	defer ended()
	err := conn.Invoke(ctx, method, args, reply, opts...)
	if home := p.homeOf(err); home != nil {
		err = home.Invoke(ctx, method, args, reply, opts...)
	}
	p.noteAnswer(err)
	return err
}

func (p *pool) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if len(routesOf(method)) > 0 {
		begin := func(request any) (grpc.ClientStream, error) {
			return p.stream(routed(ctx, method, request), desc, method, opts)
		}
		stream := &routedStream{ctx: ctx, begin: begin}
		if !desc.ClientStreams {
			stream.again = func(err error, request any) (grpc.ClientStream, error) {
				home := p.homeOf(err)
				if home == nil {
					return nil, nil
				}
				found, err := home.NewStream(routed(ctx, method, request), desc, method, opts...)
				if err == nil {
					err = found.SendMsg(request)
				}
				if err == nil {
					err = found.CloseSend()
				}
				return found, err
			}
		}
		return stream, nil
	}
	return p.stream(ctx, desc, method, opts)
}

func (p *pool) stream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts []grpc.CallOption,
) (grpc.ClientStream, error) {
	if home, ok := ctx.Value(homeKey{}).(*grpc.ClientConn); ok {
		return home.NewStream(ctx, desc, method, opts...)
	}
	conn, ended := p.take()
	finished := grpc.OnFinish(func(error) { ended() })
	stream, err := conn.NewStream(ctx, desc, method, append(opts[:len(opts):len(opts)], finished)...)
	if err != nil {
		ended() // gRPC says nothing of a stream that never was
		return nil, err
	}
	return &notedStream{stream, p}, nil
}

// notedStream notes in its pool that the service answers.
type notedStream struct {
	grpc.ClientStream
	pool *pool
}

func (s *notedStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	s.pool.noteAnswer(err)
	return err
}

// take is a connection for one call, the one with the fewest, and what to call at the call's end, once or more often.
func (p *pool) take() (*grpc.ClientConn, func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := 0
	for other, calls := range p.calls {
		if calls < p.calls[at] {
			at = other
		}
	}
	if p.calls[at] >= callsPerConnection && len(p.conns) < maxConnections && !p.closed {
		// The first was dialled in the same way and held; should this one not, the call goes to the others.
		if another, err := p.dial(p.address); err == nil {
			p.conns, p.calls = append(p.conns, another), append(p.calls, 0)
			at = len(p.conns) - 1
		}
	}
	p.calls[at]++
	return p.conns[at], sync.OnceFunc(func() { p.ended(at) })
}

func (p *pool) ended(at int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls[at]--
}

// Close closes the connections; calls that are open end.
func (p *pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	var failures []error
	for _, conn := range p.conns {
		failures = append(failures, conn.Close())
	}
	for _, conn := range p.homes.conns {
		failures = append(failures, conn.Close())
	}
	return errors.Join(failures...)
}
