package penstock

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

// dataPlanes are the connections to addresses other than the sandbox service's, where sandboxes are served. Those of one
// address are shared; each sandbox has a token of its own.
type dataPlanes struct {
	tls *TLS

	mu     sync.Mutex
	pools  map[string]*pool
	closed bool
}

// service is where a sandbox's processes and files are served: where it was made, at `home`, if the plane is unset.
func (p *dataPlanes) service(plane *sandboxv1.DataPlane, home node, sandboxID string) (*service, error) {
	if plane == nil {
		return home.service, nil
	}
	where := &endpoints{
		addresses: Addresses{Sandbox: plane.GetAddress()},
		token:     foundToken{plane.GetToken(), "the sandbox service, with this sandbox"}, tls: p.tls,
	}
	if _, err := checked(where); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	found := p.pools[plane.GetAddress()]
	if found == nil && p.closed {
		return nil, &Error{Kind: ErrCancelled, Reason: "TRANSPORT_CANCELLED", Message: "The client is closed"}
	}
	if found == nil {
		dialing, err := dialOptions(&endpoints{tls: p.tls})
		if err != nil {
			return nil, err
		}
		found, err = newPool(plane.GetAddress(), p.tls, dialing)
		if err != nil {
			return nil, configuration("TARGET", "The address of a sandbox is invalid: %v", err)
		}
		if p.pools == nil {
			p.pools = map[string]*pool{}
		}
		p.pools[plane.GetAddress()] = found
	}
	peer := "the sandbox service at " + plane.GetAddress()
	conn := &withToken{pool: found, home: home, sandboxID: sandboxID, renewing: make(chan struct{}, 1)}
	conn.take(plane)
	return &service{conn: conn, peer: peer, token: where.token, address: plane.GetAddress()}, nil
}

func (p *dataPlanes) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	var failures []error
	for _, pool := range p.pools {
		failures = append(failures, pool.Close())
	}
	return errors.Join(failures...)
}

// renewBefore is how long before its end a token is renewed.
const renewBefore = time.Minute

// withToken sends a sandbox's token with each call, and gets a new one before that ends.
type withToken struct {
	*pool
	home      node // which gives tokens
	sandboxID string
	renewing  chan struct{} // holds one token: one asks, and those that come meanwhile use its answer

	mu    sync.Mutex
	token string
	ends  time.Time // zero = never
}

func (w *withToken) take(plane *sandboxv1.DataPlane) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.token, w.ends = plane.GetToken(), time.Time{}
	if plane.GetTokenExpireTime() != nil {
		w.ends = plane.GetTokenExpireTime().AsTime()
	}
}

func (w *withToken) now() (token string, left time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ends.IsZero() {
		return w.token, math.MaxInt64
	}
	return w.token, time.Until(w.ends)
}

// with is the options of a call with the token that is in force.
func (w *withToken) with(ctx context.Context, opts []grpc.CallOption) ([]grpc.CallOption, error) {
	token, left := w.now()
	if left < renewBefore {
		select {
		case w.renewing <- struct{}{}:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		err := w.renew(ctx)
		<-w.renewing
		if token, left = w.now(); err != nil && left <= 0 {
			return nil, err
		}
	}
	if token == "" {
		return opts, nil
	}
	return append(opts[:len(opts):len(opts)], grpc.PerRPCCredentials(bearer(token))), nil
}

func (w *withToken) renew(ctx context.Context) error {
	_, left := w.now()
	if left >= renewBefore {
		return nil // by another call
	}
	request := &sandboxv1.GetDataPlaneRequest{SandboxId: w.sandboxID}
	// While the token is in force nobody waits for a service that is away.
	answer, err := call(ctx, w.home.service, w.home.stub.GetDataPlane, request, askTimeout, left <= 0)
	if err != nil {
		return err
	}
	w.take(answer.GetDataPlane())
	return nil
}

func (w *withToken) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	opts, err := w.with(ctx, opts)
	if err != nil {
		return err
	}
	return w.pool.Invoke(ctx, method, args, reply, opts...)
}

func (w *withToken) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	opts, err := w.with(ctx, opts)
	if err != nil {
		return nil, err
	}
	return w.pool.NewStream(ctx, desc, method, opts...)
}
