package penstock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Kind is what sort of thing went wrong; errors.Is compares an error of this package with it:
//
//	if errors.Is(err, penstock.ErrNotFound) { ... }
type Kind string

// Error makes a Kind a target of errors.Is.
func (k Kind) Error() string { return string(k) }

// What a service, or the way to it, says.
const (
	// ErrInvalidArgument: the request is wrong whatever the state; Violations name the fields.
	ErrInvalidArgument Kind = "invalid argument"
	// ErrUnauthenticated: no token was sent, or one that the service does not know.
	ErrUnauthenticated Kind = "unauthenticated"
	// ErrPermissionDenied: the token's role may not do this.
	ErrPermissionDenied Kind = "permission denied"
	// ErrNotFound: there is no such thing.
	ErrNotFound Kind = "not found"
	// ErrAlreadyExists: the id is taken by something with other content.
	ErrAlreadyExists Kind = "already exists"
	// ErrFailedPrecondition: not possible in the present state.
	ErrFailedPrecondition Kind = "failed precondition"
	// ErrAborted: a concurrent change came first.
	ErrAborted Kind = "aborted"
	// ErrCancelled: the context of the call was cancelled, or the service says so. A call that was dropped without a word is ErrUnavailable.
	ErrCancelled Kind = "cancelled"
	// ErrResourceExhausted: a limit is reached; RetryAfter says when to try again where that helps.
	ErrResourceExhausted Kind = "resource exhausted"
	// ErrUnavailable: the service cannot be reached or cannot answer now.
	ErrUnavailable Kind = "unavailable"
	// ErrDeadlineExceeded: the time allowed for the call is over.
	ErrDeadlineExceeded Kind = "deadline exceeded"
	// ErrUnsupported: the service or its backend cannot do it at all.
	ErrUnsupported Kind = "unsupported"
	// ErrDataLoss: data arrived damaged.
	ErrDataLoss Kind = "data loss"
	// ErrInternal: a fault of the service; its log has the details.
	ErrInternal Kind = "internal"
)

// What the client says by itself.
const (
	// ErrConfiguration: the client is set up wrongly: an address, a token, a file.
	ErrConfiguration Kind = "configuration"
	// ErrEnginesFailed: some of several engines did not do what all were asked; errors.As finds an *EnginesFailed, which says
	// which. Repeat it: those that have done it do nothing.
	ErrEnginesFailed Kind = "engines failed"
	// ErrSessionLost: a session ended and could not be taken up again.
	ErrSessionLost Kind = "session lost"
)

// Why the gate did not take a result. All of them are ErrRejected too.
const (
	// ErrRejected: a result was not taken.
	ErrRejected Kind = "result rejected"
	// ErrUnknownCall: the session has no such call.
	ErrUnknownCall Kind = "unknown call"
	// ErrAlreadyDelivered: another result came first.
	ErrAlreadyDelivered Kind = "already delivered"
	// ErrCallEnded: the call was cancelled or expired, or its rollout is closed.
	ErrCallEnded Kind = "call ended"
	// ErrNotLeased: the call is leased to another session now.
	ErrNotLeased Kind = "not leased"
	// ErrInvalidCompletion: the completion breaks a rule, which Violations names. The call may be answered again.
	ErrInvalidCompletion Kind = "invalid completion"
	// ErrStalePolicy: it was sampled by weights that the rollout does not accept. The call may be answered again.
	ErrStalePolicy Kind = "stale policy"
)

// Violation is one field of a request that is invalid.
type Violation struct {
	// Field is its path from the root of the request.
	Field string
	// Description says what is wrong with it.
	Description string
}

// Error is every error that this package returns on purpose. Get at it with errors.As:
//
//	var failure *penstock.Error
//	if errors.As(err, &failure) { log.Print(failure.Reason, failure.Advice()) }
type Error struct {
	// Kind is what sort of thing went wrong.
	Kind Kind
	// Reason is the stable UPPER_SNAKE name that a program may compare; docs/errors.md has all of them. It is
	// TRANSPORT_ and the code where no service spoke.
	Reason string
	// Message is for people.
	Message string
	// Metadata are small facts that the service added.
	Metadata map[string]string
	// Violations are the fields that are invalid.
	Violations []Violation
	// RetryAfter is how long to wait before a retry may help; 0 = not known.
	RetryAfter time.Duration
	cause      error
}

// Error is the message, with the fields that are invalid.
func (e *Error) Error() string {
	fields := make([]string, len(e.Violations))
	for i, item := range e.Violations {
		fields[i] = item.Field + ": " + item.Description
	}
	all := strings.Join(fields, "; ")
	if all == "" || strings.Contains(e.Message, all) {
		return e.Message
	}
	return e.Message + " (" + all + ")"
}

// Unwrap gives what lies beneath: the status of the call, or the context's error.
func (e *Error) Unwrap() error { return e.cause }

// Is reports whether the error is of a Kind.
func (e *Error) Is(target error) bool {
	kind, ok := target.(Kind)
	return ok && (kind == e.Kind || kind == ErrRejected && rejections[e.Kind])
}

// Advice says what to do about an error of this kind; empty where the message is all that is known.
func (e *Error) Advice() string {
	if e.RetryAfter > 0 {
		return fmt.Sprintf("Try again after %v.", e.RetryAfter)
	}
	return advice[e.Kind]
}

// AnswerAgain reports whether the call that the result was for is still leased, so that another one may be given.
func (e *Error) AnswerAgain() bool { return e.Kind == ErrInvalidCompletion || e.Kind == ErrStalePolicy }

var rejections = map[Kind]bool{
	ErrRejected: true, ErrUnknownCall: true, ErrAlreadyDelivered: true, ErrCallEnded: true, ErrNotLeased: true,
	ErrInvalidCompletion: true, ErrStalePolicy: true,
}

var advice = map[Kind]string{
	ErrInvalidArgument:    "Correct the fields that are named.",
	ErrUnauthenticated:    "Use the token of a role of this service: WithToken, PENSTOCK_TOKEN or the connection file.",
	ErrPermissionDenied:   "Use the token of a role that may do this.",
	ErrNotFound:           "Check the id.",
	ErrAlreadyExists:      "Choose another id.",
	ErrFailedPrecondition: "Change the state first; docs/errors.md says how, by reason.",
	ErrAborted:            "Read the state again, then repeat the call.",
	ErrUnavailable:        "Start the service if it is down (`penstock up` starts all), then try again.",
	ErrUnsupported:        "Ask for less, or use a service of this client's version.",
	ErrInternal:           "Look into the service's log.",
	ErrAlreadyDelivered:   "Nothing: the call is answered.",
	ErrCallEnded:          "Nothing: the answer is no longer needed.",
	ErrNotLeased:          "Nothing: another session answers the call.",
	ErrInvalidCompletion:  "Answer again with a valid completion.",
	ErrStalePolicy:        "Answer again with newer weights.",
}

var kinds = map[codes.Code]Kind{
	codes.InvalidArgument:    ErrInvalidArgument,
	codes.OutOfRange:         ErrInvalidArgument,
	codes.Unauthenticated:    ErrUnauthenticated,
	codes.PermissionDenied:   ErrPermissionDenied,
	codes.NotFound:           ErrNotFound,
	codes.AlreadyExists:      ErrAlreadyExists,
	codes.FailedPrecondition: ErrFailedPrecondition,
	codes.Aborted:            ErrAborted,
	codes.Canceled:           ErrCancelled,
	codes.ResourceExhausted:  ErrResourceExhausted,
	codes.Unavailable:        ErrUnavailable,
	codes.DeadlineExceeded:   ErrDeadlineExceeded,
	codes.Unimplemented:      ErrUnsupported,
	codes.DataLoss:           ErrDataLoss,
	codes.Internal:           ErrInternal,
	codes.Unknown:            ErrInternal,
}

// names are the codes as every language of ours writes them behind TRANSPORT_.
var names = map[codes.Code]string{
	codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
	codes.PermissionDenied: "PERMISSION_DENIED", codes.ResourceExhausted: "RESOURCE_EXHAUSTED",
	codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED", codes.OutOfRange: "OUT_OF_RANGE",
	codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
	codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
}

// connClosing is what grpc says of a connection that this client closed.
const connClosing = "grpc: the client connection is closing"

// fromRPC is the error that a failed call stands for. The context is the caller's own: where that is over, errors.Is
// finds context.Canceled or context.DeadlineExceeded too. One whose token the service does not take says where that is from.
func fromRPC(ctx context.Context, err error, from *service) *Error {
	if own := (*Error)(nil); errors.As(err, &own) {
		return own
	}
	said, _ := status.FromError(err)
	failure := &Error{
		Kind: kinds[said.Code()], Reason: "TRANSPORT_" + names[said.Code()], Message: said.Message(), cause: err,
	}
	if failure.Kind == "" {
		failure.Kind = ErrInternal
	}
	for _, detail := range said.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			failure.Reason, failure.Metadata = detail.GetReason(), detail.GetMetadata()
		case *errdetails.BadRequest:
			for _, item := range detail.GetFieldViolations() {
				violation := Violation{Field: item.GetField(), Description: item.GetDescription()}
				failure.Violations = append(failure.Violations, violation)
			}
		case *errdetails.RetryInfo:
			failure.RetryAfter = max(0, detail.GetRetryDelay().AsDuration())
		}
	}
	if failure.Message == "" {
		failure.Message = fmt.Sprintf("The call to %s failed with %s.", from.peer, said.Code())
	}
	switch {
	case ctx.Err() != nil || failure.Reason == "TRANSPORT_DEADLINE_EXCEEDED" && almostOver(ctx):
		failure.cause = ctx.Err()
		if failure.cause == nil {
			failure.cause = context.DeadlineExceeded
		}
		failure.Kind, failure.Reason = ErrCancelled, "TRANSPORT_CANCELLED"
		if errors.Is(failure.cause, context.DeadlineExceeded) {
			failure.Kind, failure.Reason = ErrDeadlineExceeded, "TRANSPORT_DEADLINE_EXCEEDED"
		}
	case failure.Reason == "TRANSPORT_UNAVAILABLE":
		failure.Message = fmt.Sprintf(
			"Cannot reach %s. Is it running? `penstock up` starts all services. (%s)", from.peer, said.Message(),
		)
	case failure.Reason == "TRANSPORT_CANCELLED" && said.Message() != connClosing:
		// Not by us: it was the server's core, which drops calls under a flood.
		failure.Kind = ErrUnavailable
		failure.Message = fmt.Sprintf(
			"%s dropped the call before it was answered: it is overloaded or shutting down. Try again; if it continues,"+
				" check which programs connect to it. (%s)", from.peer, said.Message(),
		)
	case failure.Reason == "TRANSPORT_UNIMPLEMENTED":
		failure.Message = fmt.Sprintf("This is not implemented by %s: %s", from.peer, said.Message())
	case failure.Kind == ErrUnauthenticated && from != anyone:
		failure.Message = fmt.Sprintf(
			"%s, says %s. %s", strings.TrimSuffix(failure.Message, "."), from.peer, from.token.advice(),
		)
	case failure.Reason == "ROLE_NOT_ALLOWED" && from != anyone:
		failure.Message += fmt.Sprintf(" The token that was sent is from %s.", from.token.origin)
	}
	return failure
}

// almostOver reports whether the context's deadline is so near that a service may have seen it pass first: the deadline
// is sent with the call, and the service counts it by its own clock.
func almostOver(ctx context.Context) bool {
	deadline, has := ctx.Deadline()
	return has && time.Until(deadline) < time.Second
}

// broken reports whether a stream ended that can be taken up where it was: the service went away, or it was not read.
func broken(failure *Error) bool {
	return failure.Kind == ErrUnavailable || failure.Reason == "READER_TOO_SLOW"
}
