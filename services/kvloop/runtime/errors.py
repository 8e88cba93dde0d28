"""One failure type, one table from reason to gRPC code, one translation in each direction.

Every failed call carries a google.rpc.Status with exactly one ErrorInfo (domain "kvloop"), a BadRequest
when a field is at fault, and a RetryInfo when waiting helps. Texts never hold prompts, tokens or handles.
"""

from collections.abc import Mapping
from typing import overload

import grpc
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvloop.v1alpha1 import errors_pb2

DOMAIN = "kvloop"
_PREFIX = "ERROR_REASON_"

Reason = errors_pb2.ErrorReason
_REASONS = frozenset(Reason.keys())

_WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says of a write that failed; https://github.com/grpc/grpc, cython aio/call.pyx.pxi."""

_CODES: dict[str, grpc.StatusCode] = {
    "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "DEADLINE_REQUIRED": grpc.StatusCode.INVALID_ARGUMENT,
    "EMPTY_PROMPT": grpc.StatusCode.INVALID_ARGUMENT,
    "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "MULTIPLE_COMPLETIONS": grpc.StatusCode.INVALID_ARGUMENT,
    "TRANSFER_PARAMS_REFUSED": grpc.StatusCode.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "CONVERSATION_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "LEASE_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "LEASE_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
    "LEASE_EXPIRED": grpc.StatusCode.FAILED_PRECONDITION,
    "PREFIX_DIVERGED": grpc.StatusCode.FAILED_PRECONDITION,
    "INCOMPATIBLE_ENGINES": grpc.StatusCode.FAILED_PRECONDITION,
    "KV_READ_FAILED": grpc.StatusCode.UNAVAILABLE,
    "NO_WORKER": grpc.StatusCode.UNAVAILABLE,
    "WORKER_FAILED": grpc.StatusCode.UNAVAILABLE,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "SUPERSEDED": grpc.StatusCode.CANCELLED,
    "DIRECTORY_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "TURN_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
}


class Failure(Exception):
    """A call that failed for a reason the caller can act on."""

    def __init__(
        self,
        reason: "errors_pb2.ErrorReason.ValueType",
        message: str,
        *,
        field: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    @property
    def reason_name(self) -> str:
        """Return the reason without its prefix, as in ErrorInfo."""
        return Reason.Name(self.reason).removeprefix(_PREFIX)

    @property
    def code(self) -> grpc.StatusCode:
        """Return the gRPC code that belongs to the reason."""
        return _CODES.get(self.reason_name, grpc.StatusCode.INTERNAL)


def invalid(
    field: str, message: str, reason: "errors_pb2.ErrorReason.ValueType" = Reason.ERROR_REASON_INVALID_FIELD
) -> Failure:
    """Return the failure of one malformed field."""
    return Failure(reason, message, field=field)


def to_status(failure: Failure) -> status_pb2.Status:
    """Return the google.rpc.Status of a failure."""
    status = status_pb2.Status(code=code_pb2.Code.Value(failure.code.name), message=failure.message)
    info = error_details_pb2.ErrorInfo(reason=failure.reason_name, domain=DOMAIN, metadata=failure.metadata)
    status.details.add().Pack(info)
    if failure.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=failure.field, description=failure.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if failure.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(failure.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_rpc_error(error: grpc.RpcError, fallback: "errors_pb2.ErrorReason.ValueType") -> Failure:
    """Return the failure that a peer's status carries; fallback is the reason when it names none.

    A fallback failure keeps only the gRPC code's name: a peer's own text may hold what must not travel.
    """
    status = rpc_status.from_call(error) if hasattr(error, "trailing_metadata") else None
    failure = _from_details(status) if status is not None else None
    if failure is not None:
        return failure
    code = code_of(error)
    return unexplained(code.name if code else "nothing", fallback)


@overload
def code_of(error: grpc.aio.AioRpcError) -> grpc.StatusCode: ...
@overload
def code_of(error: grpc.RpcError) -> grpc.StatusCode | None: ...
def code_of(error: grpc.RpcError) -> grpc.StatusCode | None:
    """Return the code with which a call ended, if it has one.

    A write on a stream that the other end has left makes grpc.aio say INTERNAL, before the status is there:
    that is UNAVAILABLE here.
    """
    if not hasattr(error, "code"):
        return None
    code: grpc.StatusCode | None = error.code()
    if code is grpc.StatusCode.INTERNAL and error.details() == _WRITE_FAILED:
        return grpc.StatusCode.UNAVAILABLE
    return code


def from_status(status: status_pb2.Status, fallback: "errors_pb2.ErrorReason.ValueType") -> Failure:
    """Return the failure that a status means, as from_rpc_error."""
    return _from_details(status) or unexplained(code_pb2.Code.Name(status.code), fallback)


def unexplained(answer: str, reason: "errors_pb2.ErrorReason.ValueType") -> Failure:
    """Return the failure of a call that ended with a gRPC code, or nothing, and no reason."""
    return Failure(reason, f"peer answered {answer}")


def _from_details(status: status_pb2.Status) -> Failure | None:
    field = None
    retry = None
    found: error_details_pb2.ErrorInfo | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            found = error_details_pb2.ErrorInfo()
            detail.Unpack(found)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            retry = info.retry_delay.ToNanoseconds() / 1e9
    if found is None or found.domain != DOMAIN or _PREFIX + found.reason not in _REASONS:
        return None
    return Failure(
        Reason.Value(_PREFIX + found.reason),
        status.message,
        field=field,
        metadata=found.metadata,
        retry_after_s=retry,
    )
