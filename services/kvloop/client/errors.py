"""How calls fail."""

import grpc

from kvloop.runtime.errors import Reason, code_of, from_rpc_error


class CallFailed(Exception):
    """A call failed, retries included."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        target: str,
        reason: str = "",
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{target}: {reason or code.name}: {message}")
        self.code = code
        self.message = message
        self.target = target
        """host:port of the router asked last."""
        self.reason = reason
        """Reason of the ErrorInfo, as errors.proto lists them; "" when no router of kvloop's said it."""
        self.field = field
        """The request's field at fault, if it is one."""
        self.retry_after_s = retry_after_s
        """When to come back, if that helps."""


def failed(error: grpc.aio.AioRpcError, target: str) -> CallFailed:
    """Return what a status says."""
    failure = from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED)
    named = failure.reason != Reason.ERROR_REASON_UNSPECIFIED
    code = code_of(error)
    return CallFailed(
        code,
        failure.message if named else f"answered {code.name}",
        target=target,
        reason=failure.reason_name if named else "",
        field=failure.field,
        retry_after_s=failure.retry_after_s,
    )


def broken_off(target: str) -> CallFailed:
    """Return the failure of an answer that ended without its summary."""
    return CallFailed(grpc.StatusCode.UNAVAILABLE, "the stream ended without a summary", target=target)
