"""What every servicer method is wrapped in: failures become statuses, cancellation passes through."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from kvloop.runtime import logs, tracing
from kvloop.runtime.errors import Failure, Reason, invalid, to_status

_log = logs.get("servicing")

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]


_OURS = "/kvloop."


class Unparsable:
    """Stands for a request whose bytes are no message of its type."""


class ParseGuard(grpc.aio.ServerInterceptor):
    """Lets bytes that do not parse reach our handlers, which refuse them with a reason.

    grpcio's own answer is UNKNOWN without one.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace the parser of our own methods."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        return handler._replace(request_deserializer=lenient(handler.request_deserializer))


def lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser that gives Unparsable for what it can't parse."""

    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Unparsable()

    return parse_or_mark


def check_parsed(request: object) -> None:
    """Raise the Failure of bytes that did not parse; for requests that come in a stream."""
    if isinstance(request, Unparsable):
        raise invalid("request", "the bytes are no message of this method's request type")


async def abort(context: Context, failure: Failure) -> NoReturn:
    """End the call with the failure's status."""
    await context.abort_with_status(rpc_status.to_status(to_status(failure)))
    raise AssertionError("abort_with_status returned")


def _internal(method: str, error: Exception) -> Failure:
    _log.error("unexpected_failure", method=method, error=type(error).__name__, exc_info=error)
    return Failure(Reason.ERROR_REASON_INTERNAL, f"unexpected {type(error).__name__}")


def unary(method: Callable[[S, Q, Context], Awaitable[A]]) -> Callable[[S, Q, Context], Awaitable[A]]:
    """Wrap a unary handler."""

    @functools.wraps(method)
    async def wrapped(self: S, request: Q, context: Context) -> A:
        try:
            check_parsed(request)
            with tracing.serving(method.__name__, context.invocation_metadata()):
                return await method(self, request, context)
        except Failure as failure:
            await abort(context, failure)
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            await abort(context, _internal(method.__qualname__, error))

    return wrapped


def stream(
    method: Callable[[S, Q, Context], AsyncIterator[A]],
) -> Callable[[S, Q, Context], AsyncIterator[A]]:
    """Wrap a server-streaming handler, written as an async generator."""

    @functools.wraps(method)
    async def wrapped(self: S, request: Q, context: Context) -> AsyncIterator[A]:
        answers = method(self, request, context)
        try:
            check_parsed(request)
            async for answer in answers:
                yield answer
        except Failure as failure:
            await abort(context, failure)
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            await abort(context, _internal(method.__qualname__, error))
        finally:
            await answers.aclose()  # type: ignore[attr-defined]

    return wrapped


def written(method: Callable[[S, Q, Context], Awaitable[None]]) -> Callable[[S, Q, Context], Awaitable[None]]:
    """Wrap a server-streaming handler that writes its answers to the context itself.

    Many small answers cost less so than through async generators.
    """

    @functools.wraps(method)
    async def wrapped(self: S, request: Q, context: Context) -> None:
        try:
            check_parsed(request)
            await method(self, request, context)
        except Failure as failure:
            await abort(context, failure)
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            await abort(context, _internal(method.__qualname__, error))

    return wrapped


def time_left_s(context: Context) -> float | None:
    """Return the seconds until the call's deadline, or None when it has none."""
    left = context.time_remaining()
    # Without a deadline, grpcio answers None or, on some versions, a time beyond any deadline.
    return None if left is None or left > 10 * 365 * 86400 else left
