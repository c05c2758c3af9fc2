package penstock

import (
	"context"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
)

const (
	attempts = 5
	// No attempt is begun later than this: the caller learns soon that a service is away.
	patience = 10 * time.Second
	// How long a wait or a watch that broke is taken up again without any sign of the service, and how long a call of a service
	// that answered before is repeated while it cannot be reached: a restart under load takes longer than a few attempts.
	longPatience   = time.Minute
	callTimeout    = 30 * time.Second
	createTimeout  = 2 * time.Minute
	resultTimeout  = 5 * time.Minute // thousands of rollouts may end at once
	cancelTimeout  = 2 * time.Minute
	pauseTimeout   = time.Minute
	regradeTimeout = time.Hour
)

// service is one service as the client sees it.
type service struct {
	conn  grpc.ClientConnInterface
	peer  string // for people
	token foundToken

	address string
	brief   bool // a call fails soon where it is away, though it answered before
}

// briefly is the same service for a caller that asks several: a call fails soon where it is away.
func (s *service) briefly() *service {
	same := *s
	same.brief = true
	return &same
}

// known is whether the service itself has answered a call of this client.
func (s *service) known() bool {
	conn, ok := s.conn.(interface{ hasAnswered() bool })
	return ok && conn.hasAnswered()
}

// anyone stands for a service that is not known where its error is read.
var anyone = &service{peer: "the service"}

type method[Q, A any] func(context.Context, Q, ...grpc.CallOption) (A, error)

// noTimeout is the timeout of an attempt that takes as long as its content is large: the caller's context alone bounds it.
const noTimeout time.Duration = 0

// call is one unary call, with so much time for each attempt. One that is repeatable (a read, or a create with a request
// id) is tried again while the service is away: see repeats.
func call[Q, A any](
	ctx context.Context, s *service, m method[Q, A], request Q, timeout time.Duration, repeatable bool,
) (A, error) {
	again := func(failure *Error) bool { return repeatable && failure.Kind == ErrUnavailable }
	return repeated(ctx, s, m, request, timeout, again)
}

// unlessDraining says for repeated to repeat while the service is away, and not while it is there and drains: another one
// may take what this one does not.
func unlessDraining(failure *Error) bool {
	return failure.Kind == ErrUnavailable && failure.Reason != draining
}

const draining = "DRAINING"

// repeated is call, tried again after the errors that `again` is true of.
func repeated[Q, A any](
	ctx context.Context, s *service, m method[Q, A], request Q, timeout time.Duration, again func(*Error) bool,
) (A, error) {
	repeat := repeats{began: time.Now()}
	for {
		bounded, cancel := within(ctx, timeout)
		answer, err := m(bounded, request)
		cancel()
		if err == nil {
			return answer, nil
		}
		failure := fromRPC(ctx, err, s)
		if !again(failure) {
			return answer, failure
		}
		if err := repeat.pause(ctx, s, failure); err != nil {
			return answer, err
		}
	}
}

func within(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == noTimeout {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeout)
}

// repeats bounds how often and how long one call is repeated. A service that answers so, and one that never answered, has five
// attempts within ten seconds. One that answered before and cannot be reached now is tried for a minute from when that was seen.
type repeats struct {
	wait  delays
	began time.Time // the first attempt
	broke time.Time // the first failure; zero = none yet
	short int       // failures that are not waited out for long
}

// pause waits before the next attempt; it gives `failure` back where it is enough.
func (r *repeats) pause(ctx context.Context, s *service, failure *Error) error {
	if r.broke.IsZero() {
		r.broke = time.Now()
	}
	until := r.broke.Add(longPatience)
	if failure.Reason != unreachable && failure.Reason != stopping || s.brief || !s.known() {
		r.short++
		until = r.began.Add(patience)
	}
	delay := r.wait.next(failure)
	if r.short == attempts || time.Now().Add(delay).After(until) {
		return failure
	}
	if err := sleep(ctx, delay); err != nil {
		return fromRPC(ctx, err, s)
	}
	return nil
}

// unreachable is the reason of an error that no service spoke of: there was no connection, or it broke.
const unreachable = "TRANSPORT_UNAVAILABLE"

// stopping is the reason of a driver that stops and leaves what runs to its next process.
const stopping = "DRIVER_STOPPING"

type receiver[A any] interface {
	Recv() (A, error)
}

// collect gives the messages of a short server stream; it is asked for again, from its beginning, while the service is away.
func collect[Q, A any, R receiver[A]](
	ctx context.Context, s *service, m func(context.Context, Q, ...grpc.CallOption) (R, error), request Q,
	timeout time.Duration,
) ([]A, error) {
	read := func(ctx context.Context, request Q, _ ...grpc.CallOption) (all []A, err error) {
		err = receive(ctx, m, request, func(message A) bool {
			all = append(all, message)
			return true
		})
		return all, err
	}
	return call(ctx, s, read, request, timeout, true)
}

// receive hands the messages of a server stream on until it ends or `each` says that it is enough; nil is a good end.
func receive[Q, A any, R receiver[A]](
	ctx context.Context, m func(context.Context, Q, ...grpc.CallOption) (R, error), request Q, each func(A) bool,
) error {
	ctx, cancel := context.WithCancel(ctx) // leaving early ends the call
	defer cancel()
	stream, err := m(ctx, request)
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !each(message) {
			return nil
		}
	}
}

// streamed yields the messages of a server stream, which is not asked for again. An error is the last thing that it yields.
func streamed[Q, A any, R receiver[A]](
	ctx context.Context, s *service, m func(context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) iter.Seq2[A, error] {
	return func(yield func(A, error) bool) {
		err := receive(ctx, m, request, func(message A) bool { return yield(message, nil) })
		if err != nil {
			var nothing A
			yield(nothing, fromRPC(ctx, err, s))
		}
	}
}

type sender[Q, A any] interface {
	Send(Q) error
	CloseAndRecv() (A, error)
}

// push sends a client stream and gives its answer. It is not repeated; where another service is the home, all of it is sent
// there, once.
func push[Q, A any, S sender[Q, A]](
	ctx context.Context, s *service, m func(context.Context, ...grpc.CallOption) (S, error), frames iter.Seq[Q],
	timeout time.Duration,
) (A, error) {
	send := func(ctx context.Context, _ struct{}, _ ...grpc.CallOption) (none A, _ error) {
		stream, err := m(ctx)
		if err != nil {
			return none, err
		}
		for frame := range frames {
			if err := stream.Send(frame); errors.Is(err, io.EOF) {
				break // refused already, and CloseAndRecv says why
			} else if err != nil {
				return none, err
			}
		}
		return stream.CloseAndRecv()
	}
	return call(ctx, s, atHome(s, send), struct{}{}, timeout, false)
}

// atHome does what `send` does, and does it again where HOME_ELSEWHERE says that its home is: the service that said so has
// taken nothing of it.
func atHome[Q, A any](s *service, send method[Q, A]) method[Q, A] {
	return func(ctx context.Context, request Q, opts ...grpc.CallOption) (A, error) {
		answer, err := send(ctx, request, opts...)
		if at, ok := s.conn.(interface{ homeOf(error) *grpc.ClientConn }); err != nil && ok {
			if home := at.homeOf(err); home != nil {
				return send(context.WithValue(ctx, homeKey{}, home), request, opts...)
			}
		}
		return answer, err
	}
}

// homeKey is what a context has the connection by that a stream of requests is sent on.
type homeKey struct{}

// delays grow between attempts: 0.1 s, doubled up to 5 s, each drawn from its upper half. The zero value is ready.
type delays struct{ attempt int }

// next says how long to wait; a service's own wish is honoured.
func (d *delays) next(failure *Error) time.Duration {
	ceiling := min(5*time.Second, 100*time.Millisecond<<min(d.attempt, 10))
	d.attempt++
	delay := ceiling/2 + rand.N(ceiling/2)
	if failure != nil {
		delay = max(delay, failure.RetryAfter)
	}
	return delay
}

func (d *delays) reset() { d.attempt = 0 }

// sleep waits, or gives the context's error when that is over first.
func sleep(ctx context.Context, delay time.Duration) error {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// watching bounds how long a watch that breaks is taken up again: a minute from the first failure after the last sign of
// the service. What the caller does between two messages takes nothing of it. The zero value is ready.
type watching struct {
	wait  delays
	early delays
	broke time.Time // zero = it did not since the last sign
	away  bool      // it broke at least once
	// follow goes to where the service is by now, before each further attempt; nil = it does not move.
	follow func(context.Context) error
}

func (w *watching) sign() {
	w.wait.reset()
	w.broke = time.Time{}
}

// pause waits before the next attempt; it gives `failure` back where trying again is no use or it is enough.
func (w *watching) pause(ctx context.Context, failure *Error) error {
	if w.broke.IsZero() {
		w.broke = time.Now()
	}
	if !broken(failure) {
		return w.explained(failure)
	}
	w.away = true
	if time.Since(w.broke) > longPatience {
		return failure
	}
	if err := sleep(ctx, w.wait.next(failure)); err != nil {
		return fromRPC(ctx, err, anyone)
	}
	if w.follow != nil {
		return w.follow(ctx)
	}
	return nil
}

// explained is HOME_LOST instead of an error by which a driver that was away does not know what it had before. Running
// rollouts are never deleted, so its state is gone: its disk is a new one.
func (w *watching) explained(failure *Error) *Error {
	if !w.away || (failure.Reason != "ROLLOUT_UNKNOWN" && failure.Reason != "GROUP_UNKNOWN") {
		return failure
	}
	return &Error{
		Kind: ErrNotFound, Reason: "HOME_LOST", Metadata: failure.Metadata, cause: failure,
		Message: failure.Message + ", which it had before it was away: its state is lost. Create it again",
	}
}

// askAgain waits before what was asked at that time is asked again, though the service answered: not where it held the
// question as long as it should, and longer each time where it answers at once.
func (w *watching) askAgain(ctx context.Context, asked time.Time) error {
	if time.Since(asked) > waitTimeout/2 {
		w.early.reset()
		return nil
	}
	if err := sleep(ctx, w.early.next(nil)); err != nil {
		return fromRPC(ctx, err, anyone)
	}
	return nil
}

// judge takes what one attempt ended with: nil where it may go on, or answered.
func (w *watching) judge(ctx context.Context, err error) error {
	if err == nil {
		w.sign()
		return nil
	}
	failure := fromRPC(ctx, err, anyone)
	if failure.Kind == ErrDeadlineExceeded && !errors.Is(failure, context.DeadlineExceeded) {
		// The attempt's own time passed, and not the caller's.
		failure = &Error{Kind: ErrUnavailable, Reason: failure.Reason, Message: failure.Message, cause: failure.cause}
	}
	return w.pause(ctx, failure)
}
