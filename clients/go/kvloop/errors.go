package kvloop

import (
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Domain is the domain of kvloop's own ErrorInfo.
const Domain = "kvloop"

// Reasons on which a caller may want to act; protos/kvloop/v1alpha1/errors.proto lists all.
const (
	ReasonConversationNotFound = "CONVERSATION_NOT_FOUND"
	ReasonDraining             = "DRAINING"
	ReasonModelNotFound        = "MODEL_NOT_FOUND"
	ReasonOverloaded           = "OVERLOADED"
	ReasonPromptTooLong        = "PROMPT_TOO_LONG"
	ReasonSuperseded           = "SUPERSEDED"
	ReasonUnauthenticated      = "UNAUTHENTICATED"
	ReasonWorkerFailed         = "WORKER_FAILED"
)

// Error is a call that failed, retries included.
type Error struct {
	// Code is the gRPC code.
	Code codes.Code
	// Reason is the ErrorInfo's; empty when no router of kvloop's said it.
	Reason string
	// Message is for people.
	Message string
	// Field is the request's field at fault, if it is one.
	Field string
	// Metadata is the ErrorInfo's, for example limit and actual.
	Metadata map[string]string
	// RetryAfter says when to come back, if that helps.
	RetryAfter time.Duration

	status *status.Status
}

// Error returns the failure as a sentence.
func (e *Error) Error() string {
	name := e.Reason
	if name == "" {
		name = e.Code.String()
	}
	if e.Field != "" {
		name += " (" + e.Field + ")"
	}
	return fmt.Sprintf("kvloop: %s: %s", name, e.Message)
}

// GRPCStatus returns the status behind the failure, for package status.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// failed returns what a status says; nil stays nil, and what is no status stays as it is.
func failed(err error) error {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	e := &Error{Code: s.Code(), Message: s.Message(), status: s}
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == Domain {
				e.Reason, e.Metadata = d.GetReason(), d.GetMetadata()
			}
		case *errdetails.BadRequest:
			if v := d.GetFieldViolations(); len(v) > 0 {
				e.Field = v[0].GetField()
			}
		case *errdetails.RetryInfo:
			delay := d.GetRetryDelay()
			e.RetryAfter = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
		}
	}
	return e
}

// final tells whether no router will ever take a call that failed like this.
func final(err error) bool {
	switch status.Code(err) {
	case codes.FailedPrecondition, codes.InvalidArgument, codes.NotFound, codes.PermissionDenied,
		codes.Unauthenticated, codes.Unimplemented:
		return true
	default:
		return false
	}
}
