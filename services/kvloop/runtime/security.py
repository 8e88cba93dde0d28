"""TLS between all parts, and the token that workers ask of those who call them.

A certificate and its key make a server speak TLS. An authority (tls_ca) does two things: peers are dialled
over TLS and must have a certificate of that authority, and workers ask the same of whoever calls them.
Workers can ask for a token besides, which goes over TLS alone.
"""

import contextlib
import hmac
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
from pydantic import model_validator

from kvloop.runtime.channels import open_channel
from kvloop.runtime.clock import SystemClock
from kvloop.runtime.config import ENV_PREFIX, ConfigError, Settings
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.renewal import CertificateFiles
from kvloop.runtime.servicing import abort
from kvloop.runtime.watched import WatchedFile

MIN_TOKEN_CHARS = 16
_OURS = "/kvloop."
_BEARER = "Bearer "


class SecuredSettings(Settings):
    """What every process may be told about TLS."""

    tls_cert: Path | None = None
    """PEM file with this process's certificate (and what it was issued by); its server then speaks TLS."""
    tls_key: Path | None = None
    """PEM file with the certificate's key."""
    tls_ca: Path | None = None
    """PEM file of the authority whose certificates other parts must have; they are then dialled over TLS."""
    tls_server_name: str = ""
    """Name that dialled parts' certificates are for; absent: the host that is dialled."""

    @model_validator(mode="after")
    def _refuse_half_of_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_key", "tls_cert") if self.tls_key is None else ("tls_cert", "tls_key")
            raise ValueError(f"{given} is set without {missing}; set both, or neither")
        if self.tls_server_name and self.tls_ca is None:
            raise ValueError("tls_server_name has no effect without tls_ca; set tls_ca, or remove it")
        return self


class GuardedSettings(SecuredSettings):
    """What workers and those who call them may be told."""

    worker_token_file: Path | None = None
    """File of the token that workers ask for. Its first line is shown to workers; workers take any line's, so
    that tokens can be exchanged without a gap. Read again when it changes."""

    @model_validator(mode="after")
    def _refuse_tokens_in_the_clear(self) -> Self:
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_ca is set without tls_cert and tls_key, but workers ask for a certificate; set all three"
            )
        if self.worker_token_file is not None and self.tls_ca is None:
            raise ValueError(
                "worker_token_file would send a token in the clear; set tls_ca, tls_cert and tls_key too"
            )
        return self


@dataclass(frozen=True, slots=True)
class Security:
    """Certificates and tokens, read."""

    certificate: bytes | None = None
    key: bytes | None = None
    authority: bytes | None = None
    server_name: str = ""
    tokens: "WatchedFile[Sequence[str]] | None" = None
    files: CertificateFiles | None = None
    """Where servers look for a renewed certificate."""

    @classmethod
    def load(cls, settings: SecuredSettings) -> "Security":
        """Read the files that settings name. Raises ConfigError."""
        token_file = getattr(settings, "worker_token_file", None)
        files = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            # Looked at before they are read: what is replaced meanwhile counts as changed.
            with contextlib.suppress(OSError):
                files = CertificateFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
        certificate, key = _read("tls_cert", settings.tls_cert), _read("tls_key", settings.tls_key)
        authority = _read("tls_ca", settings.tls_ca)
        return cls(
            certificate=certificate,
            key=key,
            authority=authority,
            files=files,
            server_name=settings.tls_server_name,
            tokens=None
            if token_file is None
            else WatchedFile("worker_token_file", token_file, parse_tokens, SystemClock()),
        )

    def server_credentials(self, *, ask_clients: bool) -> grpc.ServerCredentials | None:
        """Return the credentials to listen with, None for plain text.

        ask_clients: whether callers must have a certificate, as far as there is an authority to check it.
        """
        if self.certificate is None or self.key is None:
            return None
        ask = ask_clients and self.authority is not None
        now = _configuration(self.key, self.certificate, self.authority if ask else None)

        def renewed() -> Any:  # a configuration, None to go on with the last: gRPC's stubs forget the latter
            found = self.files.renewed() if self.files is not None else None
            if found is None:
                return None
            return _configuration(found.key, found.certificate, found.authority if ask else None)

        return grpc.dynamic_ssl_server_credentials(now, renewed, ask)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials to dial with, None for plain text."""
        if self.authority is None:
            return None
        credentials = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        if self.tokens is None:
            return credentials
        shown = grpc.metadata_call_credentials(_ShowToken(self.tokens))
        return grpc.composite_channel_credentials(credentials, shown)

    def shown_token(self) -> str:
        """Return the token that calls made now show to workers; "" for none."""
        return self.tokens.value()[0] if self.tokens is not None else ""

    def channel(self, endpoint: str, name: str = "") -> grpc.aio.Channel:
        """Return a channel to host:port. Connects on first use.

        name: whose certificate is expected there, unless the settings say so.
        """
        return open_channel(endpoint, self.channel_credentials(), server_name=self.server_name or name)


PLAIN = Security()
"""No TLS, no tokens."""


def from_environment() -> Security:
    """Return what KVLOOP_TLS_CA, KVLOOP_TLS_CERT, KVLOOP_TLS_KEY, KVLOOP_TLS_SERVER_NAME and
    KVLOOP_WORKER_TOKEN_FILE say, for commands that have no settings of their own. Raises ConfigError.
    """
    names = SecuredSettings.model_fields.keys() | GuardedSettings.model_fields.keys()
    if not any(os.environ.get(ENV_PREFIX + name.upper()) for name in names):
        return PLAIN
    token = os.environ.get(f"{ENV_PREFIX}WORKER_TOKEN_FILE")
    return Security.load((GuardedSettings if token else SecuredSettings).load())


def _configuration(key: bytes, certificate: bytes, authority: bytes | None) -> Any:
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def parse_tokens(text: str) -> list[str]:
    """Return a token per line. Raises ConfigError."""
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not tokens:
        raise ConfigError("worker_token_file: is empty; write a token into it")
    for number, token in enumerate(tokens, start=1):
        if len(token) < MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
            raise ConfigError(
                f"worker_token_file: token {number} must have {MIN_TOKEN_CHARS} or more printable"
                " ASCII characters"
            )
    return tokens


class TokenGuard(grpc.aio.ServerInterceptor):
    """Lets calls of our own services through only with a token of the file."""

    def __init__(self, tokens: "WatchedFile[Sequence[str]]") -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace the handler of a call without a token by one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        if self.knows(handler_call_details.invocation_metadata or ()):
            return handler
        return _refusing(handler)

    def knows(self, metadata: Any) -> bool:
        """Tell whether a call with this metadata shows a token that is good now."""
        shown = next((value for key, value in metadata if key == "authorization"), "")
        if not isinstance(shown, str) or not shown.startswith(_BEARER):
            return False
        token = shown.removeprefix(_BEARER).encode()
        # All are compared, whichever fits: the time taken tells nothing.
        return sum(hmac.compare_digest(token, known.encode()) for known in self._tokens.value()) > 0


def unauthenticated() -> Failure:
    """Return the failure of a call that shows no good token."""
    return Failure(Reason.ERROR_REASON_UNAUTHENTICATED, "a worker token is required")


def _refusing(handler: Any) -> Any:
    async def unary(_request: Any, context: Any) -> None:
        await abort(context, unauthenticated())

    async def stream(request: Any, context: Any) -> Any:
        await unary(request, context)
        yield b""

    serve = stream if handler.response_streaming else unary
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(serve)


class _ShowToken(grpc.AuthMetadataPlugin):
    def __init__(self, tokens: "WatchedFile[Sequence[str]]") -> None:
        self._tokens = tokens

    def __call__(self, context: Any, callback: Any) -> None:
        callback((("authorization", _BEARER + self._tokens.value()[0]),), None)


def _read(setting: str, file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {error.strerror}: {file}") from None
