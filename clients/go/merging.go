package penstock

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// lookAgain is how often a watch looks for new drivers; tests look more often.
var lookAgain = 2 * time.Second

const (
	// endedSent is how many ended rollouts a driver sends at first, unless it is asked for another number.
	endedSent = 1000
	// mostEnded is of how many ended rollouts of a driver the ids are remembered: the most that it sends at first.
	mostEnded  = 10_000
	endedSlack = 1000
)

// newestFirst yields the items of several lists, each newest first, as one. The error of a driver that is away comes after the
// items of all others.
func newestFirst[T any](lists []iter.Seq2[T, error], created func(T) *timestamppb.Timestamp) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		type head struct {
			next func() (T, error, bool)
			item T
			err  error
			some bool
		}
		heads := make([]head, len(lists))
		var first sync.WaitGroup
		for at, list := range lists {
			next, stop := iter.Pull2(list)
			defer stop()
			heads[at].next = next
			first.Add(1)
			go func() {
				defer first.Done()
				heads[at].item, heads[at].err, heads[at].some = next()
			}()
		}
		first.Wait()
		var none T
		var away error
		for {
			newest := -1
			for at := range heads {
				one := &heads[at]
				switch {
				case one.some && one.err != nil && !isAway(one.err):
					yield(none, one.err)
					return
				case one.some && one.err != nil:
					away, one.some = cmp.Or(away, one.err), false
				case one.some && (newest < 0 || later(created(one.item), created(heads[newest].item))):
					newest = at
				}
			}
			if newest < 0 {
				break
			}
			one := &heads[newest]
			if !yield(one.item, nil) {
				return
			}
			one.item, one.err, one.some = one.next()
		}
		if away != nil {
			yield(none, away)
		}
	}
}

func later(one, other *timestamppb.Timestamp) bool {
	if one.GetSeconds() != other.GetSeconds() {
		return one.GetSeconds() > other.GetSeconds()
	}
	return one.GetNanos() > other.GetNanos()
}

// oneAfterAnother yields the items of several lists, list by list. The error of a driver that is away comes at the end.
func oneAfterAnother[T any](lists []iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		var away error
		for _, list := range lists {
			for item, err := range list {
				if err != nil && isAway(err) {
					away = cmp.Or(away, err)
					break
				}
				if !yield(item, err) || err != nil {
					return
				}
			}
		}
		if away != nil {
			yield(none, away)
		}
	}
}

// failing is a list that is its error only.
func failing[T any](err error) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		yield(none, err)
	}
}

// RolloutChanges are states of rollouts at one moment. SnapshotComplete is true from when each driver that can be watched has
// given all that it had.
//
// GoneRolloutIds names also what a driver that was away has no more: deleted ones, and what ended meanwhile and is beyond the
// request's EndedLimit. When a driver leaves the installation, it names all of its rollouts.
type RolloutChanges struct {
	*driverv1.WatchRolloutsResponse
	// Away are the names of the drivers that cannot be watched now: what these have is not known.
	Away []string
}

// watched is what one driver's watch gives: a message, or why it broke.
type watched struct {
	address string
	message *driverv1.WatchRolloutsResponse
	err     error
}

// watchAll yields the changes of all drivers, those that come later included. A driver that goes away is watched again.
func (c *Client) watchAll(
	ctx context.Context, request *driverv1.WatchRolloutsRequest,
) iter.Seq2[*RolloutChanges, error] {
	return func(yield func(*RolloutChanges, error) bool) {
		drivers, err := c.drivers(ctx)
		if err != nil {
			yield(nil, err)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		var pumps sync.WaitGroup
		defer pumps.Wait()
		defer cancel()
		given, found := make(chan watched), make(chan []*driver)
		names, stops := map[string]string{}, map[string]context.CancelFunc{}
		broken, complete := map[string]bool{}, map[string]bool{}
		has := map[string]*rolloutsGiven{}
		nowhere := func(id string) bool { // a driver that changed its address is a new one here
			for _, other := range has {
				if other.has(id) {
					return false
				}
			}
			return true
		}
		follow := func(drivers []*driver) (gone []string) {
			present := map[string]bool{}
			for _, one := range drivers {
				address := one.service().address
				present[address] = true
				if stops[address] != nil {
					continue
				}
				own, stop := context.WithCancel(ctx)
				names[address], stops[address] = cmp.Or(one.name, address), stop
				has[address] = newRolloutsGiven(request)
				pumps.Add(1)
				go func() {
					defer pumps.Done()
					defer stop()
					one.watch(own, request, given)
				}()
			}
			for address, stop := range stops {
				if !present[address] {
					gone = append(gone, has[address].all()...)
					stop()
					delete(stops, address)
					delete(names, address)
					delete(broken, address)
					delete(complete, address)
					delete(has, address)
				}
			}
			return filter(gone, nowhere)
		}
		follow(drivers)
		pumps.Add(1)
		go func() {
			defer pumps.Done()
			for sleep(ctx, lookAgain) == nil {
				if drivers, err := c.drivers(ctx); err == nil { // else a driver's own stream says more
					select {
					case found <- drivers:
					case <-ctx.Done():
					}
				}
			}
		}()
		for {
			var one watched
			select {
			case drivers := <-found:
				gone := follow(drivers)
				if len(gone) == 0 {
					continue
				}
				one.message = &driverv1.WatchRolloutsResponse{GoneRolloutIds: gone}
			case one = <-given:
				if names[one.address] == "" {
					continue // it is no driver any more
				}
			case <-ctx.Done():
				yield(nil, fromRPC(ctx, ctx.Err(), anyone))
				return
			}
			changes := &RolloutChanges{WatchRolloutsResponse: one.message}
			if one.err != nil {
				broken[one.address] = true
				has[one.address].broke()
				if !isAway(one.err) || len(broken) == len(names) {
					yield(nil, one.err)
					return
				}
				changes.WatchRolloutsResponse = &driverv1.WatchRolloutsResponse{}
			} else if one.address != "" {
				delete(broken, one.address)
				complete[one.address] = complete[one.address] || one.message.GetSnapshotComplete()
				lost := filter(has[one.address].taken(one.message), nowhere)
				changes.GoneRolloutIds = append(changes.GoneRolloutIds, lost...)
			}
			changes.SnapshotComplete = true
			for address, name := range names {
				changes.SnapshotComplete = changes.SnapshotComplete && (complete[address] || broken[address])
				if broken[address] {
					changes.Away = append(changes.Away, name)
				}
			}
			slices.Sort(changes.Away)
			if !yield(changes, nil) {
				return
			}
		}
	}
}

// watch gives what one driver says, again and again, until the context is over.
func (d *driver) watch(ctx context.Context, request *driverv1.WatchRolloutsRequest, given chan<- watched) {
	var wait delays
	give := func(one watched) bool {
		one.address = d.service().address
		select {
		case given <- one:
			return true
		case <-ctx.Done():
			return false
		}
	}
	for ctx.Err() == nil {
		failure := &Error{Kind: ErrUnavailable, Reason: "STREAM_ENDED", Message: d.service().peer + " ended the stream"}
		each := func(message *driverv1.WatchRolloutsResponse) bool {
			wait.reset()
			return give(watched{message: message})
		}
		if err := receive(ctx, d.stub().WatchRollouts, request, each); err != nil {
			failure = fromRPC(ctx, err, d.service())
		}
		if !give(watched{err: failure}) || sleep(ctx, wait.next(failure)) != nil {
			return
		}
	}
}

// rolloutsGiven are the rollouts that a driver's watch has given: what it has no more after a broken stream, it does not say
// itself.
//
// Invariant: it holds the ids of running rollouts, and of no more than mostEnded + endedSlack ended ones.
type rolloutsGiven struct {
	endedLimit int
	// Of this stream, and of those before it what this one has not sent: when each was created, if it has ended; else nil.
	now, earlier map[string]*timestamppb.Timestamp
	most         int
}

func newRolloutsGiven(request *driverv1.WatchRolloutsRequest) *rolloutsGiven {
	limit := endedSent
	if request != nil && request.EndedLimit != nil {
		limit = int(request.GetEndedLimit())
	}
	return &rolloutsGiven{
		endedLimit: limit, now: map[string]*timestamppb.Timestamp{}, earlier: map[string]*timestamppb.Timestamp{},
		most: mostEnded + endedSlack,
	}
}

func (g *rolloutsGiven) has(id string) bool {
	_, now := g.now[id]
	_, earlier := g.earlier[id]
	return now || earlier
}

func (g *rolloutsGiven) all() []string {
	return slices.AppendSeq(slices.Collect(maps.Keys(g.now)), maps.Keys(g.earlier))
}

// broke: the next stream begins with what there is then.
func (g *rolloutsGiven) broke() {
	maps.Copy(g.earlier, g.now)
	dropOldest(g.earlier)
	clear(g.now)
}

// taken notes a message. It returns the rollouts that the driver had before the stream broke and no longer has.
func (g *rolloutsGiven) taken(message *driverv1.WatchRolloutsResponse) (lost []string) {
	for _, row := range message.GetRollouts() {
		delete(g.earlier, row.GetRolloutId())
		g.now[row.GetRolloutId()] = nil
		if row.GetPhase() == driverv1.Phase_PHASE_ENDED {
			g.now[row.GetRolloutId()] = cmp.Or(row.GetCreateTime(), &timestamppb.Timestamp{})
		}
	}
	for _, id := range message.GetGoneRolloutIds() {
		delete(g.earlier, id)
		delete(g.now, id)
	}
	if message.GetSnapshotComplete() && len(g.earlier) > 0 {
		lost = g.lost()
	}
	if len(g.now) > g.most {
		dropOldest(g.now)
		g.most = max(mostEnded, len(g.now)) + endedSlack
	}
	return lost
}

// lost are the earlier ones that a whole snapshot would have; the others stay.
func (g *rolloutsGiven) lost() (lost []string) {
	sent := 0
	var oldest *timestamppb.Timestamp
	for _, created := range g.now {
		if created != nil {
			sent++
			if oldest == nil || later(oldest, created) {
				oldest = created
			}
		}
	}
	// With as many ended ones as were asked for, older ones were left out. One that ran is in every snapshot while it runs; if
	// it ended and was left out, it would seem to run for ever.
	for id, created := range g.earlier {
		if created == nil || sent < g.endedLimit || oldest != nil && later(created, oldest) {
			lost = append(lost, id)
		} else {
			g.now[id] = created
		}
	}
	clear(g.earlier)
	return lost
}

// dropOldest leaves the newest ended ones, and all that run.
func dropOldest(known map[string]*timestamppb.Timestamp) {
	var ended []string
	for id, created := range known {
		if created != nil {
			ended = append(ended, id)
		}
	}
	slices.SortFunc(ended, func(one, other string) int {
		switch {
		case later(known[one], known[other]):
			return -1
		case later(known[other], known[one]):
			return 1
		default:
			return 0
		}
	})
	for at := mostEnded; at < len(ended); at++ {
		delete(known, ended[at])
	}
}

// filter gives those that satisfy a condition.
func filter(ids []string, satisfies func(string) bool) []string {
	return slices.DeleteFunc(ids, func(id string) bool { return !satisfies(id) })
}
