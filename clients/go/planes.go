package penstock

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"

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

// service is where a sandbox's processes and files are served: at `home` where the plane is unset.
func (p *dataPlanes) service(plane *sandboxv1.DataPlane, home *service) (*service, error) {
	if plane == nil {
		return home, nil
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
	return &service{withToken{found, plane.GetToken()}, peer, where.token}, nil
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

// withToken sends a token with each call.
type withToken struct {
	*pool
	token string
}

func (w withToken) with(opts []grpc.CallOption) []grpc.CallOption {
	if w.token == "" {
		return opts
	}
	return append(opts[:len(opts):len(opts)], grpc.PerRPCCredentials(bearer(w.token)))
}

func (w withToken) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return w.pool.Invoke(ctx, method, args, reply, w.with(opts)...)
}

func (w withToken) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return w.pool.NewStream(ctx, desc, method, w.with(opts)...)
}
