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

func TestResultsOfLoopsThatAnswerAtOnceShareAFrame(t *testing.T) {
	const loops = 64
	// On one processor a loop that was woken goes on until it has answered, but for the few that the machine interrupts.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	wake := make(chan struct{}, 1)
	book := newLeases(wake)
	var answering sync.WaitGroup
	for range loops {
		answering.Add(1)
		go func() {
			defer answering.Done()
			call, err := book.next(context.Background())
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
		book.mu.Lock()
		waiting = len(book.waiting)
		book.mu.Unlock()
	}
	var calls []*interceptionv1.ModelCall
	for number := range loops {
		calls = append(calls, &interceptionv1.ModelCall{CallId: fmt.Sprint(number), LeaseId: "1"})
	}
	book.leased(calls...)
	<-wake
	if results := len(book.results().GetResults()); results < loops/2 {
		t.Errorf("the first frame has %d results of %d", results, loops)
	}
	answering.Wait()
}
