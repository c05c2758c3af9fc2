package penstock

import (
	"context"
	"fmt"
	"sync"
	"testing"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

func TestEveryCallIsHandedOutWhoeverStopsWaiting(t *testing.T) {
	const loops, calls = 64, 500
	book := newLeases(make(chan struct{}, 1))
	var mu sync.Mutex
	taken := map[string]int{}
	var stay, leave sync.WaitGroup
	take := func(ctx context.Context) bool {
		call, err := book.next(ctx)
		if call != nil {
			mu.Lock()
			taken[call.ID()]++
			mu.Unlock()
		}
		return call != nil && err == nil
	}
	for range loops {
		stay.Add(1)
		go func() {
			defer stay.Done()
			for take(context.Background()) {
			}
		}()
	}
	for number := range calls {
		ctx, stop := context.WithCancel(context.Background())
		leave.Add(1)
		go func() {
			defer leave.Done()
			take(ctx)
		}()
		book.leased(&interceptionv1.ModelCall{CallId: fmt.Sprint(number), LeaseId: "1"})
		stop()
	}
	leave.Wait()
	book.finish()
	stay.Wait()
	if len(taken) != calls {
		t.Fatalf("%d of %d calls were handed out", len(taken), calls)
	}
	for id, times := range taken {
		if times != 1 {
			t.Errorf("call %s was handed out %d times", id, times)
		}
	}
	if len(book.waiting) != 0 {
		t.Errorf("%d wait for calls of a session that has finished", len(book.waiting))
	}
}
