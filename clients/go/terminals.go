package penstock

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

const (
	// A task's first episode prepares the state that the others share.
	openTimeout = 25 * time.Minute
	// An attempt to connect takes at most this long: a step that broke later had reached the driver.
	connectAttempt = 25 * time.Second
)

// Terminals is the driver's terminal episodes, as Client.Terminals: the policy itself types the commands, and its final
// answer is graded.
type Terminals struct{ client *Client }

// Terminal is a handle of one episode. Close it.
type Terminal struct {
	// ID is the episode's id.
	ID string
	// Message is the episode as it was last reported.
	Message *driverv1.Terminal
	service *service
	stub    driverv1.TerminalServiceClient
}

// Open opens an episode at one of the drivers and returns when it is ready for commands. The request has the task and what else is to be set; its
// request id is set here where it is empty. It has no network.
//
// Errors: ErrFailedPrecondition, SETUP_FAILED (`output` in the Metadata), CAPABILITY_MISSING; ErrInvalidArgument,
// TERMINAL_INVALID; ErrResourceExhausted, TERMINAL_LIMIT.
func (t *Terminals) Open(ctx context.Context, request *driverv1.OpenTerminalRequest) (*Terminal, error) {
	named := &driverv1.OpenTerminalRequest{
		RequestId: request.GetRequestId(), Task: request.GetTask(), Sandbox: request.GetSandbox(),
		WallTime: request.GetWallTime(), CommandTimeout: request.GetCommandTimeout(), Labels: request.GetLabels(),
	}
	if request != nil {
		named.OutputLimitBytes, named.MaxSteps = request.OutputLimitBytes, request.MaxSteps
	}
	if named.RequestId == "" {
		named.RequestId = requestID()
	}
	at, answer, err := create(ctx, t.client.cluster, "driver", "", func(
		ctx context.Context, at member, again func(*Error) bool,
	) (*driverv1.OpenTerminalResponse, error) {
		stub := driverv1.NewTerminalServiceClient(at.service.conn)
		return repeated(ctx, at.service, stub.OpenTerminal, named, openTimeout, again)
	})
	if err != nil {
		return nil, err
	}
	return terminalAt(t.client.driverOf(at), answer.GetTerminal()), nil
}

// Attach is a handle of an episode that was opened elsewhere.
//
// Errors: ErrNotFound, TERMINAL_UNKNOWN.
func (t *Terminals) Attach(ctx context.Context, id string) (*Terminal, error) {
	at, message, err := having(ctx, t.client, id, func(ctx context.Context, at *driver) (*driverv1.Terminal, error) {
		return terminalAt(at, &driverv1.Terminal{TerminalId: id}).Refresh(ctx)
	})
	if err != nil {
		return nil, err
	}
	return terminalAt(at, message), nil
}

func terminalAt(at *driver, message *driverv1.Terminal) *Terminal {
	stub := driverv1.NewTerminalServiceClient(at.service().conn)
	return &Terminal{message.GetTerminalId(), message, at.service(), stub}
}

// Run runs one command in the episode's shell, whose working directory, variables and functions persist. It goes on where
// the connection breaks, and the command is not run twice; when the context is over first the command runs on, and the next
// step waits for it.
//
// Errors: ErrFailedPrecondition, EPISODE_ENDED; ErrResourceExhausted, STEP_LIMIT, STEPS_PENDING; ErrInvalidArgument,
// STEP_INVALID.
func (t *Terminal) Run(ctx context.Context, command *sandboxv1.Command) (*driverv1.StepResponse, error) {
	return t.step(ctx, &driverv1.StepRequest{Action: &driverv1.StepRequest_Command{Command: command}})
}

// Answer gives the final answer, at most 1 MiB, which ends the episode: its verifier runs and reads the text from a file.
// The step has the reward; none = not graded, which is not zero.
//
// Errors: ErrFailedPrecondition, EPISODE_ENDED.
func (t *Terminal) Answer(ctx context.Context, text string) (*driverv1.StepResponse, error) {
	return t.step(ctx, &driverv1.StepRequest{Action: &driverv1.StepRequest_FinalAnswer{FinalAnswer: text}})
}

func (t *Terminal) step(ctx context.Context, request *driverv1.StepRequest) (*driverv1.StepResponse, error) {
	request.TerminalId, request.StepId = t.ID, requestID()
	var watch watching
	for {
		began := time.Now()
		step := func(
			ctx context.Context, request *driverv1.StepRequest, _ ...grpc.CallOption,
		) (*driverv1.StepResponse, error) {
			return exchange(ctx, t.stub.Step, request)
		}
		answer, err := atHome(t.service, step)(ctx, request)
		if err == nil {
			return answer, nil
		}
		failure := fromRPC(ctx, err, t.service)
		if time.Since(began) > connectAttempt {
			watch.sign() // the step may take longer than a driver that is down is waited for
		}
		if failure.Kind != ErrUnavailable {
			return nil, failure
		}
		if err := watch.pause(ctx, failure); err != nil {
			return nil, err
		}
	}
}

// Refresh asks how the episode stands, which is Message from then on.
func (t *Terminal) Refresh(ctx context.Context) (*driverv1.Terminal, error) {
	request := &driverv1.GetTerminalRequest{TerminalId: t.ID}
	answer, err := call(ctx, t.service, t.stub.GetTerminal, request, callTimeout, true)
	if err == nil {
		t.Message = answer.GetTerminal()
	}
	return answer.GetTerminal(), err
}

// Close ends it without an answer unless it has ended; it returns when its sandbox is removed, and may be repeated.
func (t *Terminal) Close(ctx context.Context) error {
	request := &driverv1.CloseTerminalRequest{TerminalId: t.ID}
	_, err := call(ctx, t.service, t.stub.CloseTerminal, request, cancelTimeout, true)
	return err
}

type exchanger[Q, A any] interface {
	Send(Q) error
	Recv() (A, error)
	CloseSend() error
}

// exchange sends one message and receives one over a stream of both directions.
func exchange[Q, A any, S exchanger[Q, A]](
	ctx context.Context, m func(context.Context, ...grpc.CallOption) (S, error), request Q,
) (none A, _ error) {
	ctx, cancel := context.WithCancel(ctx) // leaving ends the call
	defer cancel()
	stream, err := m(ctx)
	if err != nil {
		return none, err
	}
	if err := stream.Send(request); err != nil && !errors.Is(err, io.EOF) { // io.EOF: Recv says why
		return none, err
	}
	_ = stream.CloseSend() // it never fails
	answer, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		return none, &Error{Kind: ErrUnavailable, Reason: "STREAM_ENDED", Message: "The driver ended the stream"}
	}
	return answer, err
}
