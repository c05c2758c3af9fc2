package penstock

import (
	"context"
	"errors"
	"iter"
	"syscall"
	"time"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

// ProcessOption is one setting of a command that is run or started.
type ProcessOption func(*processOptions)

type processOptions struct {
	stdin []byte
	open  bool
	limit *int64
	pty   *sandboxv1.PtySize
}

// WithStdin writes this to the command's standard input and closes it. For Run.
func WithStdin(content []byte) ProcessOption {
	return func(o *processOptions) { o.stdin = content }
}

// WithOpenStdin leaves standard input open for Process.Write. For Start.
func WithOpenStdin() ProcessOption {
	return func(o *processOptions) { o.open = true }
}

// WithOutputLimit bounds what is kept of each output: for Run the first half and the last half of this (without it 1 MiB, at
// most 10 MiB), for Start the first bytes (without it 64 MiB).
func WithOutputLimit(bytes int64) ProcessOption {
	return func(o *processOptions) { o.limit = &bytes }
}

// WithPty gives the process a terminal of this size. For Start.
func WithPty(rows, columns int) ProcessOption {
	return func(o *processOptions) { o.pty = &sandboxv1.PtySize{Rows: int32(rows), Columns: int32(columns)} }
}

// Run runs a small command to its end. One that times out exits as TIMED_OUT; cancelling the context kills it. It is not
// repeated.
func (s *Sandbox) Run(
	ctx context.Context, command *sandboxv1.Command, opts ...ProcessOption,
) (*sandboxv1.RunResult, error) {
	var settings processOptions
	for _, option := range opts {
		option(&settings)
	}
	answer, err := s.processes.Run(ctx, &sandboxv1.RunRequest{
		SandboxId: s.ID, Command: command, Stdin: settings.stdin, OutputLimitBytes: settings.limit, ProcessId: requestID(),
	})
	if err != nil {
		return nil, fromRPC(ctx, err, s.data)
	}
	return answer.GetResult(), nil
}

// Process is a handle of a process in a sandbox. It runs on when nobody watches it.
//
// Errors, of all its methods: ErrNotFound, PROCESS_UNKNOWN; ErrFailedPrecondition, SANDBOX_LOST, SANDBOX_PAUSED.
type Process struct {
	// ID is the process's id.
	ID      string
	sandbox *Sandbox
	written *int64 // bytes of input that the service has; nil = not known: it was attached to, or a write runs or failed
}

// Start starts a process and returns when it runs. A program that cannot be started is an Exit with the reason
// START_FAILED. The start is repeated while the service is away, and starts one process all the same.
//
// Errors: ErrFailedPrecondition, CAPABILITY_MISSING: its backend has no terminals.
func (s *Sandbox) Start(ctx context.Context, command *sandboxv1.Command, opts ...ProcessOption) (*Process, error) {
	var settings processOptions
	for _, option := range opts {
		option(&settings)
	}
	request := &sandboxv1.StartProcessRequest{
		SandboxId: s.ID, ProcessId: requestID(), Command: command, Stdin: settings.open, Pty: settings.pty,
		OutputLimitBytes: settings.limit,
	}
	answer, err := call(ctx, s.data, s.processes.StartProcess, request, callTimeout, true)
	if err != nil {
		return nil, err
	}
	offset := answer.GetProcess().GetStdinOffset()
	return &Process{ID: answer.GetProcess().GetProcessId(), sandbox: s, written: &offset}, nil
}

// Process is a handle of a process that was started before.
func (s *Sandbox) Process(id string) *Process { return &Process{ID: id, sandbox: s} }

// Processes yields the sandbox's processes, newest first. An error is the last thing that it yields.
func (s *Sandbox) Processes(ctx context.Context) iter.Seq2[*sandboxv1.Process, error] {
	return paged(func(token string) ([]*sandboxv1.Process, string, error) {
		request := &sandboxv1.ListProcessesRequest{SandboxId: s.ID, PageToken: token}
		answer, err := call(ctx, s.data, s.processes.ListProcesses, request, callTimeout, true)
		return answer.GetProcesses(), answer.GetNextPageToken(), err
	})
}

// Output yields the process's output from the beginning, and its exit as the last message. It goes on where it was when the
// stream breaks. Messages are chunks, gaps (output that was discarded) and the exit. An error is the last thing that it
// yields.
func (p *Process) Output(ctx context.Context) iter.Seq2[*sandboxv1.WatchProcessResponse, error] {
	return func(yield func(*sandboxv1.WatchProcessResponse, error) bool) {
		at, over := map[sandboxv1.OutputStream]int64{}, false
		err := resumed(ctx, func() *service { return p.sandbox.data }, nil, func(sign func()) error {
			request := &sandboxv1.WatchProcessRequest{
				SandboxId: p.sandbox.ID, ProcessId: p.ID,
				StdoutOffset: at[sandboxv1.OutputStream_OUTPUT_STREAM_STDOUT],
				StderrOffset: at[sandboxv1.OutputStream_OUTPUT_STREAM_STDERR],
			}
			each := func(message *sandboxv1.WatchProcessResponse) bool {
				sign()
				switch event := message.GetEvent().(type) {
				case *sandboxv1.WatchProcessResponse_Chunk_:
					at[event.Chunk.GetStream()] = event.Chunk.GetOffset() + int64(len(event.Chunk.GetData()))
				case *sandboxv1.WatchProcessResponse_Gap_:
					at[event.Gap.GetStream()] = event.Gap.GetEnd()
				case *sandboxv1.WatchProcessResponse_Exit:
				default: // the process itself, which comes first, and heartbeats
					return true
				}
				over = !yield(message, nil) || message.GetExit() != nil
				return !over
			}
			return receive(ctx, p.sandbox.processes.WatchProcess, request, each)
		}, func() bool { return over })
		if err != nil {
			yield(nil, err)
		}
	}
}

// Wait is how the process ended, when it has.
func (p *Process) Wait(ctx context.Context) (*sandboxv1.Exit, error) {
	var watch watching
	for {
		asked := time.Now()
		request := &sandboxv1.WaitProcessRequest{SandboxId: p.sandbox.ID, ProcessId: p.ID}
		answer, err := call(ctx, p.sandbox.data, p.sandbox.processes.WaitProcess, request, waitTimeout, false)
		if err = watch.judge(ctx, err); err != nil {
			return nil, err
		}
		if exit := answer.GetProcess().GetExit(); exit != nil {
			return exit, nil
		}
		if answer != nil {
			if err = watch.askAgain(ctx, asked); err != nil {
				return nil, err
			}
		}
	}
}

// Write writes to standard input, which stays open; with `last` it is closed then. One goroutine may write at a time. A
// broken write is taken up where it was, so that no byte is written twice. After one that failed, the next one goes on behind
// what the service took of it.
//
// Errors: ErrFailedPrecondition, STDIN_CLOSED, STDIN_NOT_OPEN.
func (p *Process) Write(ctx context.Context, content []byte, last bool) error {
	type request = sandboxv1.WriteStdinRequest
	offset, err := p.inputOffset(ctx)
	if err != nil {
		return err
	}
	p.written = nil // where this fails
	start := &sandboxv1.WriteStdinRequest_StdinStart{SandboxId: p.sandbox.ID, ProcessId: p.ID, Offset: offset}
	frames := func(yield func(*request) bool) {
		whole := yield(&request{Frame: &sandboxv1.WriteStdinRequest_Start{Start: start}})
		for chunk := range chunked(content) {
			whole = whole && yield(&request{Frame: &sandboxv1.WriteStdinRequest_Data{Data: chunk}})
		}
		if whole && last {
			yield(&request{Frame: &sandboxv1.WriteStdinRequest_End{End: &sandboxv1.WriteStdinRequest_StdinEnd{}}})
		}
	}
	repeat := repeats{began: time.Now()}
	for {
		answer, err := push(ctx, p.sandbox.data, p.sandbox.processes.WriteStdin, frames, noTimeout)
		if err == nil {
			offset = answer.GetOffset()
			p.written = &offset
			return nil
		}
		var failure *Error
		if !errors.As(err, &failure) || failure.Kind != ErrUnavailable {
			return err
		}
		if err := repeat.pause(ctx, p.sandbox.data, failure); err != nil {
			return err
		}
	}
}

// inputOffset is where its input continues. The service takes bytes before that for a repetition, and skips them.
func (p *Process) inputOffset(ctx context.Context) (int64, error) {
	if p.written != nil {
		return *p.written, nil
	}
	request := &sandboxv1.GetProcessRequest{SandboxId: p.sandbox.ID, ProcessId: p.ID}
	answer, err := call(ctx, p.sandbox.data, p.sandbox.processes.GetProcess, request, callTimeout, true)
	return answer.GetProcess().GetStdinOffset(), err
}

// Signal sends a signal to the process's group; one that has ended is a success.
func (p *Process) Signal(ctx context.Context, signal syscall.Signal) error {
	request := &sandboxv1.SignalProcessRequest{SandboxId: p.sandbox.ID, ProcessId: p.ID, Signal: int32(signal)}
	_, err := call(ctx, p.sandbox.data, p.sandbox.processes.SignalProcess, request, callTimeout, false)
	return err
}

// Kill kills the process and all its descendants, and returns when they are dead. It may be repeated.
func (p *Process) Kill(ctx context.Context) (*sandboxv1.Exit, error) {
	request := &sandboxv1.KillProcessRequest{SandboxId: p.sandbox.ID, ProcessId: p.ID}
	answer, err := call(ctx, p.sandbox.data, p.sandbox.processes.KillProcess, request, callTimeout, true)
	return answer.GetExit(), err
}
