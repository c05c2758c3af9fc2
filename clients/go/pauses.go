package penstock

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

// pauses is what a session wants of the flow of its calls, and what it asked of the gate and is not answered yet. The
// session's lock guards it; nil stands for calls that flow.
//
// The gate answers in the order in which it was asked, and says once more that calls flow when a pause runs out. So an
// answer belongs to the oldest question if it is of its kind, and what is wanted ends only when nothing is asked any more.
//
// A gate that restarts forgets a pause, even of a session that it resumes. So each new stream says it again, for what is left
// of it.
type pauses struct {
	wanted *interceptionv1.PauseCalls
	until  time.Time // when the pause that is wanted ends
	asked  []asked
	// unconfirmed: the session is paused and this gate does not know it yet. Calls that it leases are put back.
	unconfirmed bool
	// begun: the newest question is of a pause that began without this gate. Nobody waits for its answer.
	begun bool
}

// shortestPause is of a pause that is over and still has to be answered.
const shortestPause = time.Millisecond

type asked struct {
	pause  *interceptionv1.PauseCalls
	answer *promise
}

// ask gives what will be the answer, and whether the gate is to be asked. It joins the question that asked the same last: only
// the newest question says what holds in the end.
func (p *pauses) ask(pause *interceptionv1.PauseCalls) (*promise, bool) {
	p.want(pause)
	p.begun = false
	if last := len(p.asked) - 1; last >= 0 && proto.Equal(p.asked[last].pause, pause) {
		return p.asked[last].answer, false
	}
	answer := newPromise()
	p.asked = append(p.asked, asked{pause, answer})
	return answer, true
}

// want takes the session's pause, which lasts from now on; nil = that calls flow.
func (p *pauses) want(pause *interceptionv1.PauseCalls) {
	most := longestPause
	if pause.GetMaxDuration() != nil {
		most = pause.GetMaxDuration().AsDuration()
	}
	p.wanted, p.until = pause, time.Now().Add(most)
}

// again is the pause in force for what is left of it, which a new stream says again: the gate may have forgotten it. It is nil
// where there is none, or where a question that is open decides.
func (p *pauses) again() *interceptionv1.PauseCalls {
	if p.wanted == nil {
		return nil
	}
	if len(p.asked) > 0 {
		p.unconfirmed = true // an older pause may be in force, which this question was to lengthen
		return nil
	}
	left := time.Until(p.until)
	p.unconfirmed = left > 0
	if !p.unconfirmed {
		p.wanted = nil
		return nil
	}
	pause := proto.Clone(p.wanted).(*interceptionv1.PauseCalls)
	pause.MaxDuration = durationpb.New(left)
	return pause
}

// beganWithoutIt: the session's pause has begun, and did not wait for this gate, which could not be reached.
func (p *pauses) beganWithoutIt() {
	if len(p.asked) > 0 && p.wanted != nil {
		p.unconfirmed, p.begun = true, true
	}
}

// unanswered are the open questions, which each stream asks again; nil = that calls flow. A pause that began without this gate
// is asked for what is left of it. One that is over is asked too, for a moment: the gate answers in order.
func (p *pauses) unanswered() []*interceptionv1.PauseCalls {
	var open []*interceptionv1.PauseCalls
	for _, question := range p.asked {
		open = append(open, question.pause)
	}
	if last := len(open) - 1; last >= 0 && p.begun && p.wanted != nil {
		open[last] = proto.Clone(p.wanted).(*interceptionv1.PauseCalls)
		open[last].MaxDuration = durationpb.New(max(time.Until(p.until), shortestPause))
	}
	return open
}

// paused: the gate says that a pause is in force.
func (p *pauses) paused(openCalls int32) {
	p.unconfirmed = false
	p.answered(true, openCalls)
}

// resumed: the gate says that calls flow; it was asked to, or a pause ran out.
func (p *pauses) resumed() {
	p.unconfirmed = false
	p.answered(false, 0)
	if len(p.asked) == 0 {
		p.wanted = nil
	}
}

// end: nothing will be answered any more.
func (p *pauses) end(failure error) {
	for _, question := range p.asked {
		question.answer.settle(0, failure)
	}
	p.asked = nil
}

func (p *pauses) answered(isPause bool, openCalls int32) {
	if len(p.asked) > 0 && (p.asked[0].pause != nil) == isPause {
		p.asked[0].answer.settle(openCalls, nil)
		p.asked = p.asked[1:]
	}
}

// promise is what the gate will say of a frame.
type promise struct {
	done  chan struct{}
	calls int32
	err   error
}

func newPromise() *promise { return &promise{done: make(chan struct{})} }

func (p *promise) settle(calls int32, err error) {
	p.calls, p.err = calls, err
	close(p.done)
}

func (p *promise) wait(ctx context.Context) (int32, error) {
	select {
	case <-p.done:
		return p.calls, p.err
	case <-ctx.Done():
		return 0, fromRPC(ctx, ctx.Err(), anyone)
	}
}
