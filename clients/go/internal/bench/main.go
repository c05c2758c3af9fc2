// Command bench takes calls and answers them, by the client or by the generated code alone; benchmarks/clients says what
// is told.
//
//	bench client|stubs ADDRESS CALLS CREDITS
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"penstock.example/penstock"
	chatv1 "penstock.example/penstock/gen/chat/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

var (
	ids      = make([]int32, 100)
	logprobs = make([]float32, 100)
)

var errPrompt = errors.New("another prompt")

func main() {
	for i := range ids {
		ids[i], logprobs[i] = int32(i), -0.5
	}
	if len(os.Args) != 5 {
		fail(errors.New("bench client|stubs ADDRESS CALLS CREDITS"))
	}
	calls, err := strconv.Atoi(os.Args[3])
	fail(err)
	credits, err := strconv.Atoi(os.Args[4])
	fail(err)
	m := &meter{first: calls / 10, calls: calls}
	if os.Args[1] == "client" {
		fail(byClient(os.Args[2], m, credits))
	} else {
		fail(byStubs(os.Args[2], m, credits))
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// meter is what the calls after the first tenth took.
type meter struct {
	first, calls int

	mu       sync.Mutex
	answered int
	began    time.Time
	used     time.Duration
	took     []time.Duration
}

// acknowledged takes a call that came then; whether it was the last.
func (m *meter) acknowledged(came time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answered++
	if m.answered == m.first {
		m.began, m.used = time.Now(), cpu()
	} else if m.answered > m.first {
		m.took = append(m.took, time.Since(came))
	}
	if m.answered < m.calls {
		return false
	}
	counted := float64(len(m.took))
	slices.Sort(m.took)
	fail(json.NewEncoder(os.Stdout).Encode(map[string]float64{
		"cpu_us": float64((cpu() - m.used).Microseconds()) / counted, "wall_us": float64(time.Since(m.began).Microseconds()) / counted,
		"p50_us": float64(m.took[len(m.took)/2].Microseconds()),
	}))
	return true
}

func cpu() time.Duration {
	var used syscall.Rusage
	fail(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// byClient has as many goroutines as there are credits.
func byClient(address string, m *meter, credits int) error {
	ctx := context.Background()
	ps, err := penstock.Connect(penstock.WithAddresses(penstock.Addresses{Interception: address}))
	if err != nil {
		return err
	}
	defer ps.Close()
	session, err := ps.Intercept(ctx, penstock.Selector{}, penstock.WithCredits(credits))
	if err != nil {
		return err
	}
	defer session.Close()
	loops := make(chan error, credits)
	for range credits {
		go func() {
			loops <- func() error {
				for call, err := range session.Calls(ctx) {
					if err != nil {
						return err
					}
					came := time.Now()
					if len(call.PromptTokenIDs()) != 1000 {
						return errPrompt
					}
					completion, err := penstock.Sampled(ids, logprobs, 1)
					if err != nil {
						return err
					}
					if err := call.Deliver(ctx, completion); err != nil {
						return err
					}
					if m.acknowledged(came) {
						session.Finish()
					}
				}
				return nil
			}()
		}()
	}
	var failures []error
	for range credits {
		failures = append(failures, <-loops)
	}
	return errors.Join(failures...)
}

func byStubs(address string, m *meter, credits int) error {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := interceptionv1.NewInterceptServiceClient(conn).Intercept(context.Background())
	if err != nil {
		return err
	}
	send := func(frame *interceptionv1.InterceptRequest) error { return stream.Send(frame) }
	hello := &interceptionv1.Hello{Credits: &interceptionv1.Credits{Calls: int32(credits)}}
	err = send(&interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Hello{Hello: hello}})
	came := map[string]time.Time{}
	for err == nil {
		var response *interceptionv1.InterceptResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		for _, id := range response.GetAcknowledged().GetAcceptedCallIds() {
			if m.acknowledged(came[id]) {
				goodbye := &interceptionv1.InterceptRequest_Goodbye{Goodbye: &interceptionv1.Goodbye{}}
				return send(&interceptionv1.InterceptRequest{Frame: goodbye})
			}
			delete(came, id)
		}
		if calls := response.GetCalls().GetCalls(); len(calls) > 0 {
			err = send(results(calls, came))
		}
	}
	return err
}

func results(calls []*interceptionv1.ModelCall, came map[string]time.Time) *interceptionv1.InterceptRequest {
	now, frame := time.Now(), &interceptionv1.Results{}
	for _, call := range calls {
		came[call.GetCallId()] = now
		if len(call.GetPromptTokenIds()) != 4000 {
			fail(errPrompt)
		}
		frame.Results = append(frame.Results, &interceptionv1.CallResult{
			CallId: call.GetCallId(), LeaseId: call.GetLeaseId(),
			Result: &interceptionv1.CallResult_Completion{Completion: &chatv1.Completion{
				Span: &chatv1.TokenSpan{
					TokenIds: penstock.EncodeTokenIDs(ids), Count: 100, Logprobs: penstock.EncodeLogprobs(logprobs),
					LogprobsMode: chatv1.LogprobsMode_LOGPROBS_MODE_PROCESSED,
					Versions:     []*chatv1.PolicyVersionSpan{{PolicyVersion: 1, End: 100}},
				},
				FinishReason: chatv1.FinishReason_FINISH_REASON_STOP, Engine: "trainer",
			}},
		})
	}
	return &interceptionv1.InterceptRequest{Frame: &interceptionv1.InterceptRequest_Results{Results: frame}}
}
