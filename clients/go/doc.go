// Package penstock is the Go client of Penstock: rollouts of coding agents whose model calls stop at a gate until a trainer
// answers them.
//
//	ps, err := penstock.Connect()                      // finds what `penstock up` started
//	if err != nil { ... }
//	defer ps.Close()
//
//	group, err := ps.Groups.Create(ctx, &driverv1.RolloutSpec{
//		Task:  task,
//		Agent: &driverv1.AgentChoice{Name: "opencode"},
//	}, 8)
//	for call, err := range group.Calls(ctx, penstock.WithCredits(32)) {
//		if err != nil { ... }
//		go func() {
//			completion, err := ps.Inference.Generate(ctx, call.PromptTokenIDs(), call.Sampling(), call.RolloutID())
//			if err == nil {
//				err = call.Deliver(ctx, completion)
//			}
//			...
//		}()
//	}
//	results, err := group.Results(ctx)                 // rewards, and token-exact samples
//
// Messages are the generated ones of the protos (gen/...): a spec, a task or a completion is written as the protos say, and
// whatever is not wrapped here is reached by a generated client on Client.Conn. Arrays are []int32 and []float32.
//
// # Errors
//
// Every error that this package returns is an *Error with a stable Reason, the Violations, RetryAfter and Advice;
// errors.Is compares it with a Kind such as ErrNotFound. What ended because a context was over is also
// context.Canceled or context.DeadlineExceeded.
//
// # What breaks and comes back
//
// Reads, and creates, which carry a request id, are repeated while a service is away, for ten seconds at most. Waits and
// watches go on where they were for as long as a minute passes without any sign of the driver. A session at the gate is
// taken up again for five minutes (WithReconnectTimeout): leases stay, results that were not acknowledged are sent again,
// no call is handed out twice. A process's output and a terminal's steps go on where they were; new weights are sent twice
// at most. Nothing else is repeated.
package penstock
