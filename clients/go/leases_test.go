package penstock

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

func TestEveryCallIsHandedOutWhoeverStopsWaiting(t *testing.T) {
	const loops, count = 64, 500
	calls := &inbox{}
	book := newLeases(make(chan struct{}, 1), calls)
	var mu sync.Mutex
	taken := map[string]int{}
	var stay, leave sync.WaitGroup
	take := func(ctx context.Context) bool {
		call, err := calls.next(ctx)
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
	for number := range count {
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
	calls.finish()
	stay.Wait()
	if len(taken) != count {
		t.Fatalf("%d of %d calls were handed out", len(taken), count)
	}
	for id, times := range taken {
		if times != 1 {
			t.Errorf("call %s was handed out %d times", id, times)
		}
	}
	if len(calls.waiting) != 0 {
		t.Errorf("%d wait for calls of a session that has finished", len(calls.waiting))
	}
}

func TestResultsOfLoopsThatAnswerAtOnceShareAFrame(t *testing.T) {
	const loops = 64
	// On one processor a loop that was woken goes on until it has answered, but for the few that the machine interrupts.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	wake := make(chan struct{}, 1)
	calls := &inbox{}
	book := newLeases(wake, calls)
	var answering sync.WaitGroup
	for range loops {
		answering.Add(1)
		go func() {
			defer answering.Done()
			call, err := calls.next(context.Background())
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := book.answer(&interceptionv1.CallResult{CallId: call.ID()}); err != nil {
				t.Error(err)
			}
		}()
	}
	for waiting := 0; waiting < loops; runtime.Gosched() {
		calls.mu.Lock()
		waiting = len(calls.waiting)
		calls.mu.Unlock()
	}
	var messages []*interceptionv1.ModelCall
	for number := range loops {
		messages = append(messages, &interceptionv1.ModelCall{CallId: fmt.Sprint(number), LeaseId: "1"})
	}
	book.leased(messages...)
	<-wake
	if results := len(book.results().GetResults()); results < loops/2 {
		t.Errorf("the first frame has %d results of %d", results, loops)
	}
	answering.Wait()
}
