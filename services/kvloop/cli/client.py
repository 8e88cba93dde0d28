"""Commands as clients: TLS as the environment says, failed calls as sentences for people."""

import contextlib
from collections.abc import Iterator

import grpc

from kvloop.cli.errors import CommandFailed
from kvloop.client import PATIENT, CallFailed, Client, RetryPolicy
from kvloop.runtime.security import from_environment


def dial(router: str, token: str | None, retry: RetryPolicy = PATIENT) -> Client:
    """Return a client of a router, over TLS where KVLOOP_TLS_CA is set. Raises ConfigError."""
    security = from_environment()
    credentials = security.channel_credentials()
    return Client(
        router, token=token, tls=credentials or False, tls_server_name=security.server_name, retry=retry
    )


@contextlib.contextmanager
def spoken() -> Iterator[None]:
    """Turn a CallFailed inside into a CommandFailed that says what to do about it."""
    try:
        yield
    except CallFailed as failure:
        raise CommandFailed(sentence_of(failure)) from None


def sentence_of(failure: CallFailed) -> str:
    """Return what a failed call means for a person, and what to do about it."""
    target = failure.target
    if not failure.reason:
        if failure.code is grpc.StatusCode.UNAVAILABLE:
            return f"no router answers at {target}; start one with `kvloop up`, or name it with --router"
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{target} did not answer in time"
        if failure.code is grpc.StatusCode.UNIMPLEMENTED:
            return f"{target} is no kvloop router; name the router's endpoint with --router"
        return f"{target} answered {failure.code.name}"
    if failure.reason == "UNAUTHENTICATED":
        return f"the router at {target} refuses the credentials; give the right token with --token"
    field = f" ({failure.field})" if failure.field else ""
    retry = f"; come back in {failure.retry_after_s:.0f} s" if failure.retry_after_s else ""
    return f"{failure.reason}{field}: {failure.message}{retry}"
