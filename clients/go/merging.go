package penstock

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// lookAgain is how often a watch looks for new drivers.
const lookAgain = 2 * time.Second

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
		follow := func(drivers []*driver) {
			present := map[string]bool{}
			for _, one := range drivers {
				address := one.service().address
				present[address] = true
				if stops[address] != nil {
					continue
				}
				own, stop := context.WithCancel(ctx)
				names[address], stops[address] = cmp.Or(one.name, address), stop
				pumps.Add(1)
				go func() {
					defer pumps.Done()
					defer stop()
					one.watch(own, request, given)
				}()
			}
			for address, stop := range stops {
				if !present[address] {
					stop()
					delete(stops, address)
					delete(names, address)
					delete(broken, address)
					delete(complete, address)
				}
			}
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
				follow(drivers)
				continue
			case one = <-given:
			case <-ctx.Done():
				yield(nil, fromRPC(ctx, ctx.Err(), anyone))
				return
			}
			if names[one.address] == "" {
				continue // it is no driver any more
			}
			changes := &RolloutChanges{WatchRolloutsResponse: one.message}
			if one.err != nil {
				broken[one.address] = true
				if !isAway(one.err) || len(broken) == len(names) {
					yield(nil, one.err)
					return
				}
				changes.WatchRolloutsResponse = &driverv1.WatchRolloutsResponse{}
			} else {
				delete(broken, one.address)
				complete[one.address] = complete[one.address] || one.message.GetSnapshotComplete()
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
