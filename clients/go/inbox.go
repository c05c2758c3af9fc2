package penstock

import (
	"context"
	"slices"
	"sync"
)

// inbox are the calls of a session that nobody took yet, of all gates.
type inbox struct {
	mu       sync.Mutex
	calls    []*Call
	finished bool
	over     *Error
	waiting  []*waiter // those in next, the first to come first
}

// waiter is one that waits for a call.
type waiter struct {
	woken chan struct{} // closed when it is
	by    *leases       // whose call it was woken for; nil = the end
}

// next is the oldest call that nobody took; nil, with what the session ended with if anything, when there are no more.
func (b *inbox) next(ctx context.Context) (*Call, error) {
	for {
		b.mu.Lock()
		for len(b.calls) > 0 {
			call := b.calls[0]
			b.calls = b.calls[1:]
			if call.EndReason() == "" {
				b.mu.Unlock()
				return call, nil
			}
		}
		switch {
		case b.over != nil:
			defer b.mu.Unlock()
			return nil, b.over
		case b.finished:
			b.mu.Unlock()
			return nil, nil
		}
		own := &waiter{woken: make(chan struct{})}
		b.waiting = append(b.waiting, own)
		b.mu.Unlock()
		select {
		case <-own.woken:
			if own.by != nil {
				own.by.woke()
			}
		case <-ctx.Done():
			b.leave(own)
			return nil, fromRPC(ctx, ctx.Err(), anyone)
		}
	}
}

// leave: one that waited for a call waits no more. Where it was woken already, the call is another's.
func (b *inbox) leave(own *waiter) {
	b.mu.Lock()
	if at := slices.Index(b.waiting, own); at >= 0 {
		b.waiting = slices.Delete(b.waiting, at, at+1)
		b.mu.Unlock()
		return
	}
	handed := own.by != nil && len(b.calls) > 0 && b.rouse(own.by)
	b.mu.Unlock()
	if own.by != nil && !handed { // else the other one runs in its place
		own.by.woke()
	}
}

// put adds a call, and reports whether it woke one that waits, which is then among the waking. Many loops that wait are not
// all woken by each call.
func (b *inbox) put(call *Call, by *leases) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls = append(b.calls, call)
	return b.rouse(by)
}

func (b *inbox) rouse(by *leases) bool {
	if len(b.waiting) == 0 {
		return false
	}
	own := b.waiting[0]
	b.waiting = slices.Delete(b.waiting, 0, 1)
	own.by = by
	close(own.woken)
	return true
}

// finish has no more calls handed out than have come.
func (b *inbox) finish() { b.stop(nil) }

// end: nothing comes any more, and waiting calls end.
func (b *inbox) end(failure *Error) { b.stop(failure) }

func (b *inbox) stop(failure *Error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.finished = true
	if b.over == nil {
		b.over = failure
	}
	for b.rouse(nil) {
	}
}
