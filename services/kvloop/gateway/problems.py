"""Failures as HTTP tells them: a status and an error body in the form of the API that was called."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kvloop.runtime.errors import Failure, Reason

_DRAINING_RETRY_S = 1.0
UNEXPECTED = "unexpected failure"

_STATUS: dict[str, HTTPStatus] = {
    "INVALID_FIELD": HTTPStatus.BAD_REQUEST,
    "EMPTY_PROMPT": HTTPStatus.BAD_REQUEST,
    "PROMPT_TOO_LONG": HTTPStatus.BAD_REQUEST,
    "MULTIPLE_COMPLETIONS": HTTPStatus.BAD_REQUEST,
    "TRANSFER_PARAMS_REFUSED": HTTPStatus.BAD_REQUEST,
    "MODEL_NOT_FOUND": HTTPStatus.NOT_FOUND,
    "CONVERSATION_NOT_FOUND": HTTPStatus.NOT_FOUND,
    "TURN_NOT_FOUND": HTTPStatus.NOT_FOUND,
    "LEASE_NOT_FOUND": HTTPStatus.SERVICE_UNAVAILABLE,
    "LEASE_EPOCH": HTTPStatus.SERVICE_UNAVAILABLE,
    "LEASE_EXPIRED": HTTPStatus.SERVICE_UNAVAILABLE,
    "PREFIX_DIVERGED": HTTPStatus.SERVICE_UNAVAILABLE,
    "INCOMPATIBLE_ENGINES": HTTPStatus.SERVICE_UNAVAILABLE,
    "KV_READ_FAILED": HTTPStatus.SERVICE_UNAVAILABLE,
    "NO_WORKER": HTTPStatus.SERVICE_UNAVAILABLE,
    "WORKER_FAILED": HTTPStatus.SERVICE_UNAVAILABLE,
    "DRAINING": HTTPStatus.SERVICE_UNAVAILABLE,
    "DIRECTORY_UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "OVERLOADED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "SUPERSEDED": HTTPStatus.CONFLICT,
}

# As vLLM names them; other statuses go by their phrase, also as vLLM does.
_OPENAI_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One failed request."""

    status: int
    message: str
    param: str | None = None
    """The field at fault, as the client named it."""
    reason: str | None = None
    """kvloop's reason, as in ErrorInfo."""
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers that go with the error body."""
        headers: dict[str, str] = {}
        if self.reason is not None:
            headers["x-kvloop-reason"] = self.reason.lower()
        if self.retry_after_s is not None:
            # Whole seconds are all that Retry-After can say; 0 would invite a storm.
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers

    def body(self, *, anthropic: bool = False) -> dict[str, Any]:
        """Return the error body in OpenAI's or Anthropic's form."""
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI_TYPES.get(self.status, HTTPStatus(self.status).phrase)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def event(self) -> dict[str, Any]:
        """Return the event by which a stream of OpenAI's Responses API tells it."""
        code = (self.reason or HTTPStatus(self.status).phrase).lower()
        return {"type": "error", "code": code, "message": self.message, "param": self.param}


def draining() -> Failure:
    """Return the failure of a turn that comes when the gateway is about to stop."""
    return Failure(
        Reason.ERROR_REASON_DRAINING, "this gateway is going away", retry_after_s=_DRAINING_RETRY_S
    )


def from_failure(failure: Failure) -> Problem:
    """Return the problem that a failure is to an HTTP client."""
    status = _STATUS.get(failure.reason_name, HTTPStatus.INTERNAL_SERVER_ERROR)
    param = failure.field.removeprefix("sampling.") if failure.field is not None else None
    return Problem(int(status), failure.message, param, failure.reason_name, failure.retry_after_s)


def from_body(status: int, body: Any) -> Problem:
    """Return the problem that somebody else's error body tells, in whichever form.

    Of a server's own fault it tells no more than that: its text is some exception's.
    """
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Problem(status, UNEXPECTED)
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, Mapping):
        message, param = error.get("message"), error.get("param")
        return Problem(
            status,
            message if isinstance(message, str) else HTTPStatus(status).phrase,
            param if isinstance(param, str) else None,
        )
    detail = body.get("detail") if isinstance(body, Mapping) else None
    for text in (error, detail):
        if isinstance(text, str):
            return Problem(status, text)
    return Problem(status, HTTPStatus(status).phrase)
