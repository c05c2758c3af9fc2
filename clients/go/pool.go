package penstock

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"
)

const (
	// A service takes 256 calls at once on a connection (its max_streams); gRPC makes further ones wait without a word.
	callsPerConnection = 200
	maxConnections     = 64
)

// pool is the connections to one service: another is opened when each has as many calls as it should.
type pool struct {
	dial func() (*grpc.ClientConn, error)

	mu     sync.Mutex
	conns  []*grpc.ClientConn
	calls  []int // open ones of each
	closed bool
}

// newPool opens the first connection, so that an invalid address fails at once.
func newPool(dial func() (*grpc.ClientConn, error)) (*pool, error) {
	first, err := dial()
	if err != nil {
		return nil, err
	}
	return &pool{dial: dial, conns: []*grpc.ClientConn{first}, calls: []int{0}}, nil
}

func (p *pool) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	ctx = routed(ctx, method, args)
	conn, ended := p.take()
	defer ended()
	return conn.Invoke(ctx, method, args, reply, opts...)
}

func (p *pool) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if len(routesOf(method)) > 0 {
		begin := func(request any) (grpc.ClientStream, error) {
			return p.stream(routed(ctx, method, request), desc, method, opts)
		}
		return &routedStream{ctx: ctx, begin: begin}, nil
	}
	return p.stream(ctx, desc, method, opts)
}

func (p *pool) stream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts []grpc.CallOption,
) (grpc.ClientStream, error) {
	conn, ended := p.take()
	finished := grpc.OnFinish(func(error) { ended() })
	stream, err := conn.NewStream(ctx, desc, method, append(opts[:len(opts):len(opts)], finished)...)
	if err != nil {
		ended() // gRPC says nothing of a stream that never was
	}
	return stream, err
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
		if another, err := p.dial(); err == nil {
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
	return errors.Join(failures...)
}
