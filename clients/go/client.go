package penstock

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	inferencev1 "penstock.example/penstock/gen/inference/v1"
)

// MaxMessageBytes is the largest message either way, as the services have it.
const MaxMessageBytes = 64 << 20

// Client is the four services. Connections are made with the first call and made again when they break. It is safe for
// use by many goroutines; Close it when it is no longer needed.
type Client struct {
	// Rollouts starts, finds and reads rollouts.
	Rollouts *Rollouts
	// Groups does the same for groups of rollouts whose rewards are compared.
	Groups *Groups
	// Runs has the metrics that trainers log of runs.
	Runs *Runs
	// Agents has the agents that rollouts may run.
	Agents *Agents
	// Terminals opens episodes in which the policy itself types the commands.
	Terminals *Terminals
	// Sandboxes makes sandboxes of your own, without agents or models.
	Sandboxes *Sandboxes
	// Inference generates with the inference service, and gives it new weights.
	Inference *Inference

	services    map[string]*service
	connections []*pool
	planes      dataPlanes
	closing     sync.Once
	cluster     *cluster
	inference   inferencev1.InferenceServiceClient
	assays      *Assays
}

type options struct {
	addresses *Addresses
	file      string
	token     string
	tls       *TLS
	namespace string
	alone     bool
	assays    *Assays
	err       error
}

// Option is one setting of Connect.
type Option func(*options)

// WithHost has all services on their default ports on one machine.
func WithHost(host string) Option {
	return func(o *options) {
		if strings.TrimSpace(host) == "" || strings.Contains(host, "/") || strings.Count(host, ":") == 1 {
			o.err = configuration("TARGET", "%q is not a host name: pass one without a port, or use WithAddresses", host)
		}
		all := onHost(host)
		o.addresses = &all
	}
}

// WithAddresses says where each service is.
func WithAddresses(addresses Addresses) Option {
	return func(o *options) { o.addresses = &addresses }
}

// WithConnectionFile reads addresses, token and certificate from a file that `penstock up` or `penstock credentials` wrote.
func WithConnectionFile(path string) Option {
	return func(o *options) { o.file = path }
}

// WithToken sends a token with each call.
func WithToken(token string) Option {
	return func(o *options) {
		if token == "" {
			o.err = configuration("TOKEN", "The token that was given is empty")
		}
		o.token = token
	}
}

// WithTLS speaks TLS.
func WithTLS(files TLS) Option {
	return func(o *options) { o.tls = &files }
}

// WithNamespace names the namespace in which an operator acts; without it, PENSTOCK_NAMESPACE or none. A trainer's token
// belongs to one already.
func WithNamespace(name string) Option {
	return func(o *options) { o.namespace = name }
}

// WithoutDiscovery uses the given addresses only, and asks no driver which other drivers, gates and sandbox services there
// are: for forwarded ports, and for a proxy in front. PENSTOCK_DISCOVER=false does the same.
func WithoutDiscovery() Option {
	return func(o *options) { o.alone = true }
}

// Connect makes a client of the services. What no option says is looked for in the environment
// (PENSTOCK_DRIVER_ADDRESS and its like, PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE, PENSTOCK_CA_FILE), then in the
// connection file of `penstock up`, then on loopback. It calls nobody: the first call shows whether a service is there.
//
// Errors: ErrConfiguration, an address, the token or a file is invalid.
func Connect(opts ...Option) (*Client, error) {
	var said options
	for _, option := range opts {
		option(&said)
	}
	found, err := resolve(&said)
	if err != nil {
		return nil, err
	}
	dialing, err := dialOptions(found)
	if err != nil {
		return nil, err
	}
	c := &Client{services: map[string]*service{}, planes: dataPlanes{tls: found.tls}, assays: said.assays}
	for _, name := range services {
		address := *found.addresses.of(name)
		c.services[name] = &service{conn: nobody(name), peer: "the " + name + " service at " + address, token: found.token, address: address}
		if address == "" {
			continue
		}
		conn, err := newPool(address, found.tls, dialing)
		if err != nil {
			return nil, errors.Join(configuration("TARGET", "The address of %s is invalid: %v", name, err), c.Close())
		}
		c.services[name].conn, c.connections = conn, append(c.connections, conn)
	}
	c.cluster = newCluster(found, dialing, c.services)
	c.inference = inferencev1.NewInferenceServiceClient(c.services["inference"].conn)
	c.Rollouts, c.Groups, c.Runs, c.Inference = &Rollouts{c}, &Groups{c}, &Runs{c}, &Inference{client: c, engines: &engines{cluster: c.cluster}}
	driver := c.services["driver"]
	c.Agents = &Agents{driver, driverv1.NewAgentServiceClient(driver.conn), c.cluster}
	c.Terminals, c.Sandboxes = &Terminals{c}, &Sandboxes{c}
	return c, nil
}

// Close closes the connections; calls that are open end. It may be called again.
func (c *Client) Close() error {
	var failures []error
	c.closing.Do(func() {
		for _, connection := range c.connections {
			failures = append(failures, connection.Close())
		}
		failures = append(failures, c.planes.close(), c.cluster.close())
	})
	return errors.Join(failures...)
}

// Conn is the connection to a service ("sandbox", "driver", "interception", "inference"), with its token and TLS, for
// whatever of the generated clients this package does not wrap; FromRPC makes their errors this package's.
func (c *Client) Conn(service string) grpc.ClientConnInterface {
	found, ok := c.services[service]
	if !ok {
		return nowhere{noService(service)}
	}
	return found.conn
}

func noService(name string) *Error {
	return configuration("TARGET", "There is no service %q; services: sandbox, driver, interception, inference", name)
}

// nobody stands for a service that there is none of.
func nobody(name string) nowhere {
	if name == "inference" {
		return nowhere{configuration("NO_INFERENCE",
			"These services have no inference service: start one with `penstock up --model-dir DIR`")}
	}
	return nowhere{configuration("TARGET", "The %s service has no address: set it", name)}
}

// nowhere answers every call with an error.
type nowhere struct{ err error }

func (n nowhere) Invoke(context.Context, string, any, any, ...grpc.CallOption) error { return n.err }

func (n nowhere) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, n.err
}

// FromRPC is the *Error that an error of a generated client stands for; nil for nil.
func FromRPC(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	return fromRPC(ctx, err, anyone)
}

func dialOptions(found *endpoints) ([]grpc.DialOption, error) {
	secure := insecure.NewCredentials()
	if found.tls != nil {
		config, err := tlsConfig(found.tls)
		if err != nil {
			return nil, err
		}
		secure = credentials.NewTLS(config)
	}
	dialing := []grpc.DialOption{
		grpc.WithTransportCredentials(secure),
		grpc.WithNoProxy(),
		grpc.WithUserAgent("penstock-go/" + Version),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(MaxMessageBytes), grpc.MaxCallSendMsgSize(MaxMessageBytes),
		),
		// The services allow a ping every 10 s; a dead peer is noticed in 40 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 2, Jitter: 0.2, MaxDelay: 5 * time.Second,
			},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
	if found.token.text != "" {
		dialing = append(dialing, grpc.WithPerRPCCredentials(bearer(found.token.text)))
	}
	if found.namespace != "" {
		dialing = append(dialing, grpc.WithPerRPCCredentials(acting(found.namespace)))
	}
	return dialing, nil
}

// bearer sends a token. Where it may go in clear was checked when the endpoints were resolved.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// acting names the namespace in which an operator acts.
type acting string

func (a acting) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"x-penstock-namespace": string(a)}, nil
}

func (acting) RequireTransportSecurity() bool { return false }

func tlsConfig(files *TLS) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if files.CA != "" {
		pem, err := os.ReadFile(files.CA)
		if err != nil {
			return nil, configuration("TLS_FILE", "%s cannot be read: %v", files.CA, err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, configuration("TLS_FILE", "%s has no certificate", files.CA)
		}
	}
	if files.Cert != "" || files.Key != "" {
		pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
		if err != nil {
			return nil, configuration("TLS_FILE", "%s and %s are not a certificate and its key: %v", files.Cert, files.Key, err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
