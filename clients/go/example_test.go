package penstock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"penstock.example/penstock"
	driverv1 "penstock.example/penstock/gen/driver/v1"
	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

// A group whose calls are answered by the inference service.
func Example() {
	ctx := context.Background()
	ps, err := penstock.Connect()
	if err != nil {
		log.Fatal(err)
	}
	defer ps.Close()
	spec := &driverv1.RolloutSpec{
		Task:  &driverv1.Task{TaskId: "note", Instruction: "Write a note to note.txt."},
		Agent: &driverv1.AgentChoice{Name: "shell"},
	}
	group, err := ps.Groups.Create(ctx, spec, 4, penstock.WithSpares(1))
	if err != nil {
		log.Fatal(err)
	}
	for call, err := range group.Calls(ctx, penstock.WithCredits(4)) {
		if err != nil {
			log.Fatal(err)
		}
		completion, err := ps.Inference.Generate(ctx, call.PromptTokenIDs(), call.Sampling(), call.RolloutID())
		if err != nil {
			log.Fatal(err)
		}
		if err := call.Deliver(ctx, completion); err != nil {
			log.Print(err)
		}
	}
	results, err := group.Results(ctx)
	fmt.Println(len(results), err)
}

// What an error says, and what to do about it.
func ExampleError() {
	ps, err := penstock.Connect(penstock.WithHost("localhost"))
	if err != nil {
		log.Fatal(err)
	}
	defer ps.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = ps.Rollouts.Get(ctx, "no-such-rollout")
	var failure *penstock.Error
	switch {
	case errors.Is(err, penstock.ErrNotFound):
		fmt.Println("there is no such rollout")
	case errors.Is(err, context.DeadlineExceeded):
		fmt.Println("it took too long")
	case errors.As(err, &failure):
		fmt.Println(failure.Reason, failure.Violations, failure.RetryAfter, failure.Advice())
	}
}

// An RPC that this package does not wrap.
func ExampleClient_Conn() {
	ps, err := penstock.Connect()
	if err != nil {
		log.Fatal(err)
	}
	defer ps.Close()
	ctx := context.Background()
	sandboxes := sandboxv1.NewSandboxServiceClient(ps.Conn("sandbox"))
	backends, err := sandboxes.ListBackends(ctx, &sandboxv1.ListBackendsRequest{})
	fmt.Println(len(backends.GetBackends()), penstock.FromRPC(ctx, err))
}
