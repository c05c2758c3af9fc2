package penstock

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

const (
	// MaxResultBytes is the largest result, as the protocol bounds a frame.
	MaxResultBytes = 32 << 20
	frameBytes     = 8 << 20
)

var rejectionKinds = map[interceptionv1.ResultRejected_Reason]Kind{
	interceptionv1.ResultRejected_REASON_UNKNOWN_CALL:      ErrUnknownCall,
	interceptionv1.ResultRejected_REASON_ALREADY_DELIVERED: ErrAlreadyDelivered,
	interceptionv1.ResultRejected_REASON_CALL_ENDED:        ErrCallEnded,
	interceptionv1.ResultRejected_REASON_NOT_LEASED:        ErrNotLeased,
	interceptionv1.ResultRejected_REASON_INVALID:           ErrInvalidCompletion,
	interceptionv1.ResultRejected_REASON_STALE_POLICY:      ErrStalePolicy,
}

// leases are the calls that a session holds at one gate and the results that are under way. It knows no stream: stream.go
// moves the frames.
//
// Invariants: a call is handed out once, also when it is leased to the session anew, and its result goes out under the
// newest lease; a result stays until the gate accepted or rejected it, and is sent again after every break, which the
// gate takes as the repeat that it is; what is held is in memory only as long as it is held.
type leases struct {
	wake  chan<- struct{} // is sent to whenever there is something to send; holds one token
	inbox *inbox

	mu     sync.Mutex
	held   map[string]*held
	unsent []string // ids in the order of their answers
	over   *Error

	// waking are the goroutines that were woken here, by a call or a verdict, and did not run yet. Results go out when all
	// of them did: those that answer at once fill one frame, and not one each, which costs ten times the time.
	waking int
}

// held is a call that is leased to the session; answer is set while one is under way.
type held struct {
	call    *Call
	leaseID string
	answer  *answer
}

// answer is a result that is under way.
type answer struct {
	result  *interceptionv1.CallResult
	bytes   int        // of the result without its lease
	verdict chan error // room for one
	waits   bool       // whether a goroutine waits for the verdict
	woken   bool       // whether that is among the waking
}

func newLeases(wake chan<- struct{}, calls *inbox) *leases {
	return &leases{wake: wake, inbox: calls, held: map[string]*held{}}
}

// woke: one of the waking runs.
func (l *leases) woke() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ran()
}

// ran is woke; the caller holds the lock.
func (l *leases) ran() {
	l.waking--
	if len(l.unsent) > 0 {
		l.nudge()
	}
}

// size is how many calls are here and not over.
func (l *leases) size() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.held)
}

// has reports whether a call is here and not over.
func (l *leases) has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held[id] != nil
}

// answer puts a result under way; its verdict is nil when the gate accepted it, else why not.
func (l *leases) answer(result *interceptionv1.CallResult) (*answer, error) {
	size, err := writable(result)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over != nil {
		return nil, l.over
	}
	item := l.held[result.GetCallId()]
	if item == nil {
		return nil, &Error{
			Kind: ErrCallEnded, Reason: "CALL_ENDED",
			Message: fmt.Sprintf("Call %s needs no answer any more", result.GetCallId()),
		}
	}
	if item.answer != nil {
		return nil, &Error{
			Kind: ErrAlreadyDelivered, Reason: "ANSWER_UNDER_WAY",
			Message: fmt.Sprintf("Call %s is being answered already", result.GetCallId()),
		}
	}
	result.LeaseId = item.leaseID
	item.answer = &answer{result: result, bytes: size, verdict: make(chan error, 1), waits: true}
	l.unsent = append(l.unsent, result.GetCallId())
	l.nudge()
	return item.answer, nil
}

// scratch are buffers for results that are written to see that they can be.
var scratch = sync.Pool{New: func() any { return new([]byte) }}

// writable is the size of a result on the wire.
//
// Errors: ErrInvalidCompletion: RESULT_TOO_LARGE; RESULT_NOT_SENDABLE: it has no form there. A stream ends where one of its
// frames has none, and one result would take all the others with it.
func writable(result *interceptionv1.CallResult) (int, error) {
	buffer := scratch.Get().(*[]byte)
	written, err := proto.MarshalOptions{}.MarshalAppend((*buffer)[:0], result)
	size := len(written)
	if cap(written) <= frameBytes {
		*buffer = written[:0]
		scratch.Put(buffer)
	}
	if err != nil {
		return 0, &Error{
			Kind: ErrInvalidCompletion, Reason: "RESULT_NOT_SENDABLE", cause: err,
			Message: fmt.Sprintf("The result cannot be sent: %v", err),
		}
	}
	if size > MaxResultBytes {
		return 0, &Error{
			Kind: ErrInvalidCompletion, Reason: "RESULT_TOO_LARGE",
			Message: fmt.Sprintf("A result must have at most %d bytes, not %d", MaxResultBytes, size),
		}
	}
	return size, nil
}

// deliver is answer, and waits for its verdict.
func (l *leases) deliver(ctx context.Context, result *interceptionv1.CallResult) error {
	given, err := l.answer(result)
	if err != nil {
		return err
	}
	select {
	case err = <-given.verdict:
	case <-ctx.Done():
		err = fromRPC(ctx, ctx.Err(), anyone)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	given.waits = false
	if given.woken {
		l.ran()
	}
	return err
}

// judge gives an answer its verdict; the caller holds the lock.
func (l *leases) judge(given *answer, verdict error) {
	given.verdict <- verdict
	if given.waits {
		given.woken = true
		l.waking++
	}
}

// callIDs are the calls that are here and not over.
func (l *leases) callIDs() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := make([]string, 0, len(l.held))
	for id := range l.held {
		ids = append(ids, id)
	}
	return ids
}

// leased takes calls that the gate leased: a new one is handed out, one that is held gets its new lease.
func (l *leases) leased(messages ...*interceptionv1.ModelCall) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, message := range messages {
		l.lease(message)
	}
}

func (l *leases) lease(message *interceptionv1.ModelCall) {
	item := l.held[message.GetCallId()]
	if item == nil {
		call := &Call{Message: message, send: l.deliver, ended: make(chan struct{})}
		l.held[message.GetCallId()] = &held{call: call, leaseID: message.GetLeaseId()}
		if l.inbox.put(call, l) {
			l.waking++
		}
		return
	}
	item.leaseID = message.GetLeaseId()
	if item.answer != nil {
		// A copy: the frame that has the old one may be on its way into the stream.
		item.answer.result = proto.Clone(item.answer.result).(*interceptionv1.CallResult)
		item.answer.result.LeaseId = message.GetLeaseId()
		l.send(message.GetCallId())
	}
}

// accepted: results are on the gate's disk.
func (l *leases) accepted(ids ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if item := l.held[id]; item != nil {
			l.forget(item, "ANSWERED", nil)
		}
	}
}

// rejected: a result was not taken; the call may be answered again where it is still leased.
func (l *leases) rejected(message *interceptionv1.ResultRejected) {
	l.mu.Lock()
	defer l.mu.Unlock()
	item := l.held[message.GetCallId()]
	if item == nil {
		return
	}
	failure := rejection(message)
	if !failure.AnswerAgain() || item.call.EndReason() != "" {
		l.forget(item, failure.Reason, failure)
		return
	}
	given := item.answer
	item.answer = nil
	l.unsent = slices.DeleteFunc(l.unsent, func(id string) bool { return id == message.GetCallId() })
	if given != nil {
		l.judge(given, failure)
	}
}

// cancelled: calls need no answer any more. An answer that is under way gets its own verdict from the gate.
func (l *leases) cancelled(reason string, which func(*Call) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cancel(reason, which)
}

func (l *leases) cancel(reason string, which func(*Call) bool) {
	for _, item := range l.held {
		switch {
		case !which(item.call):
		case item.answer == nil:
			l.forget(item, reason, nil)
		default:
			item.call.end(reason)
		}
	}
}

// takenUp: a new stream stands, and what was not acknowledged is sent again. kept are the calls that are still leased to
// the session; where it was not resumed the gate forgot it, and leases them anew.
func (l *leases) takenUp(resumed bool, kept []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unsent = nil
	for id, item := range l.held {
		if item.answer != nil {
			l.send(id)
		}
	}
	if resumed {
		l.cancel("LEASE_LOST", func(c *Call) bool {
			return l.held[c.ID()].answer == nil && !slices.Contains(kept, c.ID())
		})
	}
}

// results wait to be sent, as many as there are up to a bound in bytes; nil where there are none.
func (l *leases) results() *interceptionv1.Results {
	l.mu.Lock()
	defer l.mu.Unlock()
	frame, size := &interceptionv1.Results{}, 0
	for len(l.unsent) > 0 {
		given := l.held[l.unsent[0]].answer
		size += given.bytes
		if len(frame.Results) > 0 && size > frameBytes {
			break
		}
		l.unsent = l.unsent[1:]
		frame.Results = append(frame.Results, given.result)
	}
	if len(frame.Results) == 0 {
		return nil
	}
	return frame
}

// end: nothing comes or goes any more, and waiting calls end.
func (l *leases) end(failure *Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over != nil {
		return
	}
	l.over = failure
	for _, item := range l.held {
		l.forget(item, "SESSION_ENDED", failure)
	}
}

// forget ends a call and ends the wait for its answer to be accepted.
func (l *leases) forget(item *held, reason string, verdict error) {
	id := item.call.ID()
	delete(l.held, id)
	l.unsent = slices.DeleteFunc(l.unsent, func(other string) bool { return other == id })
	item.call.end(reason)
	if item.answer != nil {
		l.judge(item.answer, verdict)
	}
}

func (l *leases) send(id string) {
	if !slices.Contains(l.unsent, id) {
		l.unsent = append(l.unsent, id)
	}
	l.nudge()
}

// nudge has the results sent that wait, once nobody is about to add to them; the caller holds the lock.
func (l *leases) nudge() {
	if l.waking > 0 {
		return
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func rejection(message *interceptionv1.ResultRejected) *Error {
	reason := strings.TrimPrefix(message.GetReason().String(), "REASON_")
	failure := &Error{Kind: rejectionKinds[message.GetReason()], Reason: reason, Message: message.GetMessage()}
	if failure.Kind == "" {
		failure.Kind = ErrRejected
	}
	if failure.Message == "" {
		failure.Message = "The gate refused the result: " + reason
	}
	for _, text := range message.GetViolations() {
		field, description, found := strings.Cut(text, ": ")
		if !found {
			field, description = "completion", text
		}
		failure.Violations = append(failure.Violations, Violation{field, description})
	}
	return failure
}
