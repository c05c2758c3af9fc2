package penstock

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"regexp"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	opsv1 "penstock.example/penstock/gen/ops/v1"
)

// fresh is how long a list of members is used before the driver is asked again; tests ask more often.
var fresh = 5 * time.Second

const (
	askTimeout = 5 * time.Second
	// defaultPool is a gate's name for its engines without a name.
	defaultPool = "default"
	// freshForNew is the greatest age of the list for a creation. A service that has begun to drain since refuses, and the
	// client asks another one.
	freshForNew = time.Second
)

// allDrainFor is how long a creation waits while all of several services drain; tests wait less.
var allDrainFor = time.Minute

var (
	withHome = regexp.MustCompile(`^(r|g|t|sb|ss)\.([a-z0-9][a-z0-9-]{0,31})\.[0-9a-f]{32}(?:-[0-9]+)?$`)
	makers   = map[string]string{"r": "driver", "g": "driver", "t": "driver", "sb": "sandbox", "ss": "sandbox"}
)

// homeIn is the name of the service of a kind that made an id; empty where the id names none.
func homeIn(id, kind string) string {
	parts := withHome.FindStringSubmatch(id)
	if parts == nil || makers[parts[1]] != kind {
		return ""
	}
	return parts[2]
}

// isAway reports whether a service is away, as far as one call of it says.
func isAway(err error) bool {
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded)
}

// member is a service of a kind. Its name is empty where it is not known.
type member struct {
	name      string
	service   *service
	lost      bool // the driver that was asked cannot reach it
	takesWork bool
}

// cannotBeAsked reports whether a service cannot be asked for others. A token that it refuses may be valid at the given service.
func cannotBeAsked(err error) bool {
	return isAway(err) || errors.Is(err, ErrUnauthenticated) || errors.Is(err, ErrPermissionDenied)
}

// cluster is all drivers, gates and sandbox services, found from one address: a driver says which there are, and a gate says so of
// engines. A member gets
// the connection's own token. So a driver is asked, and its members are used, only where decision 033 lets the token go: over
// TLS with the caller's own CA, or from this machine to this machine.
type cluster struct {
	endpoints *endpoints
	dialing   []grpc.DialOption
	given     map[string]*service

	mu      sync.Mutex
	asking  map[bool]*question // the requests for the list that run, by whether they wait for a driver that is away
	opened  map[memberKey]*service
	pools   []*pool
	listed  []*opsv1.Member
	engines []*opsv1.Member   // of the gates' default pool, as the last gate that answered has them
	names   map[string]string // of the services at the connection's own addresses, by kind, as far as they were asked
	turns   map[string]uint64 // by kind, which member is the next for something new
	askedAt time.Time         // zero = never
	mayAsk  bool
	closed  bool
}

type memberKey struct{ kind, address, certifiedName string }

// newCluster is a cluster of the given services, which the caller closes.
func newCluster(found *endpoints, dialing []grpc.DialOption, given map[string]*service) *cluster {
	driver := found.addresses.Driver
	return &cluster{
		endpoints: found, dialing: dialing, given: given, asking: map[bool]*question{}, opened: map[memberKey]*service{},
		names: map[string]string{}, turns: map[string]uint64{},
		mayAsk: found.discover && driver != "" && mayReceiveToken(driver, driver, found.tls),
	}
}

// members are all of a kind, at least one: of a kind of which no driver has a list, the service of the connection. The list
// is no older than `age`. With `patient`, it waits for a driver that is away, ten
// seconds at most.
//
// Errors: ErrUnavailable, no driver can be asked and none ever was; ErrConfiguration, MEMBER_NOT_TRUSTED: the token must not
// be sent to a member.
func (c *cluster) members(ctx context.Context, kind string, age time.Duration, patient bool) ([]member, error) {
	if err := c.refresh(ctx, age, patient); err != nil {
		return nil, err
	}
	c.mu.Lock()
	listed := c.listed
	c.mu.Unlock()
	listed = slices.DeleteFunc(slices.Clone(listed), func(item *opsv1.Member) bool { return item.GetService() != kind })
	if len(listed) == 1 && c.isGiven(ctx, kind, listed[0]) {
		return []member{newMember(listed[0], c.given[kind])}, nil
	}
	var found []member
	for _, item := range listed {
		one, err := c.member(kind, item)
		if err != nil {
			return nil, err
		}
		found = append(found, one)
	}
	if len(found) == 0 {
		found = []member{c.givenMember(kind)}
	}
	return found, nil
}

// membersOrGiven are members, where the service of the connection is enough if no driver can be asked: a token that the driver
// refuses may be valid there.
func (c *cluster) membersOrGiven(ctx context.Context, kind string, age time.Duration) ([]member, error) {
	found, err := c.members(ctx, kind, age, false)
	if err != nil && ctx.Err() == nil && cannotBeAsked(err) {
		return []member{c.givenMember(kind)}, nil
	}
	return found, err
}

func (c *cluster) membersFor(ctx context.Context, kind string, age time.Duration) ([]member, error) {
	if kind == "driver" {
		return c.members(ctx, kind, age, true)
	}
	return c.membersOrGiven(ctx, kind, age)
}

// givenMember is the service of the connection.
func (c *cluster) givenMember(kind string) member {
	return member{service: c.given[kind], takesWork: true}
}

// isGiven is whether the only member of a kind is the service at the connection's own address. That address is then used: the
// driver's may be of a network that this client is not in.
func (c *cluster) isGiven(ctx context.Context, kind string, only *opsv1.Member) bool {
	given := c.given[kind]
	if given.address == "" || only.GetName() == "" || !c.mayAskNow() {
		return false
	}
	if given.address == only.GetAddress() {
		return true
	}
	c.mu.Lock()
	name, known := c.names[kind]
	c.mu.Unlock()
	if !known {
		stub := opsv1.NewOperationsServiceClient(given.conn)
		answer, err := call(ctx, given, stub.GetServerInfo, &opsv1.GetServerInfoRequest{}, askTimeout, false)
		if err != nil {
			return false // a call to the member has the error
		}
		name = answer.GetServer().GetName()
		c.mu.Lock()
		c.names[kind] = name
		c.mu.Unlock()
	}
	return name == only.GetName()
}

// listerOfEngines is the address that a list of engines comes from: a gate's, or that of a driver, which names the gates.
func (c *cluster) listerOfEngines() string {
	if gate := c.endpoints.addresses.Interception; gate != "" {
		return gate
	}
	return c.endpoints.addresses.Driver
}

// enginesOfGates are the engines of the gates' default pool, at least one: the inference service of the connection, where no gate
// has a list.
//
// Errors: ErrConfiguration, MEMBER_NOT_TRUSTED: the token must not be sent to an engine; a gate's error, but not of one that is
// away.
func (c *cluster) enginesOfGates(ctx context.Context) ([]member, error) {
	var gates []member
	if lister := c.listerOfEngines(); c.endpoints.discover && lister != "" && mayReceiveToken(lister, lister, c.endpoints.tls) {
		found, err := c.membersOrGiven(ctx, "interception", fresh)
		if err != nil {
			return nil, err
		}
		gates = found
	}
	for _, gate := range gates {
		if gate.service.address == "" { // no gate was given, and the driver that names them is away
			continue
		}
		stub := opsv1.NewOperationsServiceClient(gate.service.conn)
		answer, err := call(ctx, gate.service, stub.GetServerInfo, &opsv1.GetServerInfoRequest{}, askTimeout, false)
		if err == nil {
			ofPool := slices.DeleteFunc(slices.Clone(answer.GetMembers()), func(item *opsv1.Member) bool {
				return item.GetPool() != defaultPool
			})
			c.mu.Lock()
			c.engines = ofPool
			c.mu.Unlock()
			break
		}
		if ctx.Err() != nil || !cannotBeAsked(err) && !errors.Is(err, ErrUnsupported) {
			return nil, err
		}
	}
	c.mu.Lock()
	listed := c.engines
	c.mu.Unlock()
	var found []member
	for _, item := range listed {
		one, err := c.member("inference", item)
		if err != nil {
			return nil, err
		}
		found = append(found, one)
	}
	if len(found) == 0 {
		found = []member{c.givenMember("inference")}
	}
	return found, nil
}

// home is the member that has something: the one that its id names. Of an id without a home, or of one of an unknown member, it
// is the service of the connection, which may answer HOME_ELSEWHERE.
func (c *cluster) home(ctx context.Context, kind, id string) (member, error) {
	if home := homeIn(id, kind); home != "" {
		for _, age := range []time.Duration{fresh, 0} {
			members, err := c.membersFor(ctx, kind, age)
			if err != nil {
				return member{}, err
			}
			if at := slices.IndexFunc(members, func(m member) bool { return m.name == home }); at >= 0 {
				return members[at], nil
			}
		}
	}
	return c.givenMember(kind), nil
}

// create makes something new at a member of a kind that takes work. What is chosen, such as an id, goes to the same member from
// every client; else they take turns. A member that drains has not made it, so another one is asked; while all of several drain,
// for a minute at most. `make` sends the request, and repeats it after the errors that `again` is true of.
func create[T any](
	ctx context.Context, c *cluster, kind, chosen string,
	make func(ctx context.Context, at member, again func(*Error) bool) (T, error),
) (member, T, error) {
	drained, wait, until := map[string]bool{}, delays{}, time.Now().Add(allDrainFor)
	for age := freshForNew; ; age = 0 {
		at, only, err := c.memberForNew(ctx, kind, chosen, drained, age)
		if err != nil {
			var none T
			return member{}, none, err
		}
		again := unlessDraining
		if only {
			again = func(failure *Error) bool { return failure.Kind == ErrUnavailable }
		}
		made, err := make(ctx, at, again)
		var failure *Error
		isDraining := errors.As(err, &failure) && failure.Kind == ErrUnavailable && failure.Reason == draining
		if !isDraining || only || time.Now().After(until) {
			return at, made, err
		}
		if drained[at.service.address] { // all drain, as where they are restarted in turn
			clear(drained)
			if err := sleep(ctx, wait.next(nil)); err != nil {
				return at, made, fromRPC(ctx, err, at.service)
			}
		}
		drained[at.service.address] = true
	}
}

// memberForNew is the member for something new, and whether there is no other.
func (c *cluster) memberForNew(
	ctx context.Context, kind, chosen string, drained map[string]bool, age time.Duration,
) (member, bool, error) {
	members, err := c.membersFor(ctx, kind, fresh)
	if err == nil && len(members) > 1 {
		members, err = c.membersFor(ctx, kind, age)
	}
	if err != nil {
		return member{}, false, err
	}
	only := len(members) == 1
	taking := slices.DeleteFunc(slices.Clone(members), func(m member) bool {
		return !m.takesWork || drained[m.service.address]
	})
	if len(taking) > 0 {
		members = taking
	}
	if chosen != "" {
		// Rendezvous hashing, alike in every language: each id ranks all members.
		best := slices.MaxFunc(members, func(a, b member) int { return cmp.Compare(rank(chosen, a), rank(chosen, b)) })
		return best, only, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, begun := c.turns[kind]; !begun {
		c.turns[kind] = rand.Uint64N(1 << 16) // clients do not all begin with one member
	}
	c.turns[kind]++
	return members[c.turns[kind]%uint64(len(members))], only, nil
}

func rank(chosen string, m member) string {
	digest := sha256.Sum256([]byte(chosen + "\x00" + m.name))
	return hex.EncodeToString(digest[:])
}

func (c *cluster) mayAskNow() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mayAsk
}

// question is a request for the list. Many calls at once find it stale: they share one, and its error.
type question struct {
	waiting int // calls that wait for it; the cluster's lock guards it
	stop    context.CancelFunc
	ended   chan struct{} // closed at its end
	err     error         // from then on
}

// refresh makes the list no older than `age`, by the request that runs or a new one.
func (c *cluster) refresh(ctx context.Context, age time.Duration, patient bool) error {
	c.mu.Lock()
	if !c.mayAsk || !c.askedAt.IsZero() && time.Since(c.askedAt) < age {
		c.mu.Unlock()
		return nil
	}
	running := c.asking[patient]
	if running == nil {
		running = &question{ended: make(chan struct{})}
		// The request goes on for the other callers when one of them stops waiting.
		asking, stop := context.WithCancel(context.WithoutCancel(ctx))
		running.stop, c.asking[patient] = stop, running
		go func() {
			running.err = c.ask(asking, patient)
			c.mu.Lock()
			defer c.mu.Unlock()
			c.forget(running, patient)
			close(running.ended)
		}()
	}
	running.waiting++
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if running.waiting--; running.waiting == 0 {
			c.forget(running, patient)
		}
	}()
	select {
	case <-running.ended:
		return running.err
	case <-ctx.Done():
		return fromRPC(ctx, ctx.Err(), anyone)
	}
}

// forget stops a request for the list, if it runs; later calls begin another one. The caller holds the lock.
func (c *cluster) forget(running *question, patient bool) {
	running.stop()
	if c.asking[patient] == running {
		delete(c.asking, patient)
	}
}

// ask asks the connection's driver, or another one that is known.
func (c *cluster) ask(ctx context.Context, patient bool) error {
	c.mu.Lock()
	listed, first := c.listed, c.askedAt.IsZero()
	c.mu.Unlock()
	drivers := []*service{c.given["driver"]}
	for _, item := range listed {
		if item.GetService() == "driver" {
			one, err := c.member("driver", item)
			if err != nil {
				return err
			}
			if !slices.Contains(drivers, one.service) {
				drivers = append(drivers, one.service)
			}
		}
	}
	for _, driver := range drivers {
		stub := opsv1.NewOperationsServiceClient(driver.conn)
		request := &opsv1.GetServerInfoRequest{}
		answer, err := call(ctx, driver, stub.GetServerInfo, request, askTimeout, patient && first)
		switch {
		case err == nil:
			c.take(answer, driver)
			return nil
		case errors.Is(err, ErrUnsupported): // an older driver
			c.mu.Lock()
			c.mayAsk = false
			c.mu.Unlock()
			return nil
		case first || !isAway(err):
			return err
		}
	}
	// All are away. The list stays, and a call to a member that is away fails with an error that names it. They are asked again
	// as after an answer: else each call would wait for them.
	c.mu.Lock()
	defer c.mu.Unlock()
	c.askedAt = time.Now()
	return nil
}

func (c *cluster) take(answer *opsv1.GetServerInfoResponse, asked *service) {
	listed, own := answer.GetMembers(), answer.GetServer().GetName()
	isDriver := func(item *opsv1.Member) bool { return item.GetService() == "driver" }
	isOwn := func(item *opsv1.Member) bool { return isDriver(item) && item.GetName() == own }
	if slices.ContainsFunc(listed, isDriver) && !slices.ContainsFunc(listed, isOwn) {
		// Its list of drivers lacks itself.
		listed = append(slices.Clone(listed), &opsv1.Member{Service: "driver", Name: own, Address: asked.address})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listed, c.askedAt = listed, time.Now()
}

func (c *cluster) member(kind string, item *opsv1.Member) (member, error) {
	found, err := c.service(kind, item)
	return newMember(item, found), err
}

// ofSeveral are the members for a question to all of them: its answer names one that is away, and does not wait for it.
func ofSeveral(members []member) []member {
	if len(members) == 1 {
		return members
	}
	asked := slices.Clone(members)
	for at := range asked {
		asked[at].service = asked[at].service.briefly()
	}
	return asked
}

func newMember(item *opsv1.Member, at *service) member {
	state := item.GetState()
	return member{
		name: item.GetName(), service: at, lost: state == opsv1.MemberState_MEMBER_STATE_LOST,
		takesWork: state == opsv1.MemberState_MEMBER_STATE_UP || state == opsv1.MemberState_MEMBER_STATE_UNSPECIFIED,
	}
}

func (c *cluster) service(kind string, item *opsv1.Member) (*service, error) {
	key := memberKey{kind, item.GetAddress(), item.GetCertifiedName()}
	if *c.endpoints.addresses.of(kind) == key.address && key.certifiedName == "" {
		return c.given[kind], nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if found := c.opened[key]; found != nil {
		return found, nil
	}
	if c.closed {
		return nil, &Error{Kind: ErrCancelled, Reason: "TRANSPORT_CANCELLED", Message: "The client is closed"}
	}
	lister := c.endpoints.addresses.Driver
	if kind == "inference" {
		lister = c.listerOfEngines()
	}
	if !mayReceiveToken(lister, key.address, c.endpoints.tls) {
		return nil, configuration("MEMBER_NOT_TRUSTED",
			"The %s service %s is at %s, where the token must not be sent: use TLS with your own CA, or WithoutDiscovery for the"+
				" given addresses only", kind, item.GetName(), key.address)
	}
	if len(c.opened) >= maxHomes {
		return nil, configuration("MEMBER_LIMIT", "More than %d services are listed", maxHomes)
	}
	dialing := c.dialing
	if key.certifiedName != "" {
		dialing = append(slices.Clone(dialing), grpc.WithAuthority(key.certifiedName))
	}
	conn, err := newPool(key.address, c.endpoints.tls, dialing)
	if err != nil {
		return nil, configuration("TARGET", "The address of the %s service %s is invalid: %v", kind, item.GetName(), err)
	}
	peer := "the " + kind + " service at " + key.address
	if item.GetName() != "" {
		peer = "the " + kind + " service " + item.GetName() + " at " + key.address
	}
	found := &service{conn: conn, peer: peer, token: c.endpoints.token, address: key.address}
	c.opened[key], c.pools = found, append(c.pools, conn)
	return found, nil
}

// close closes the connections to members; calls that are open end.
func (c *cluster) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var failures []error
	for _, pool := range c.pools {
		failures = append(failures, pool.Close())
	}
	return errors.Join(failures...)
}
