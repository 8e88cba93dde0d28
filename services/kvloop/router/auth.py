"""Tenants from bearer tokens.

The tokens file holds one line per token: the SHA-256 of the token in hex, a space, the tenant's name; "#"
starts a comment. Tokens themselves are nowhere at rest. The file is read again when it changes; a file
that does not parse leaves the former tokens in force and is told in the log.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from kvloop.runtime import logs
from kvloop.runtime.clock import Clock
from kvloop.runtime.config import ConfigError
from kvloop.runtime.errors import Failure, Reason

DEFAULT_TENANT = "default"
_RECHECK_S = 1.0
_MAX_TENANT = 128
_LINE = re.compile(r"([0-9a-fA-F]{64})\s+(\S+)")

_log = logs.get("router")

Metadata = Iterable[tuple[str, str | bytes]]


def hash_token(token: str) -> str:
    """Return what the tokens file holds of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def parse_tokens(text: str) -> dict[str, str]:
    """Return tenants by hashed token. Raises ConfigError with the line's number."""
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None or len(match[2]) > _MAX_TENANT:
            raise ConfigError(f"tokens_file: line {number} is not '<sha256 of the token in hex> <tenant>'")
        digest = match[1].lower()
        if tenants.setdefault(digest, match[2]) != match[2]:
            raise ConfigError(f"tokens_file: line {number} gives a token to a second tenant")
    return tenants


class Authenticator:
    """Tells the tenant of a call."""

    def __init__(self, tokens_file: Path | None, clock: Clock) -> None:
        """Read the tokens. Raises ConfigError when they don't parse at start."""
        self._file = tokens_file
        self._clock = clock
        self._tenants: dict[str, str] = {}
        self._seen: tuple[int, int, int] | None = None
        self._checked = clock.monotonic()
        if tokens_file is not None:
            self._load(tokens_file)

    def tenant(self, metadata: Metadata) -> str:
        """Return the tenant of a call's metadata; "default" when no tokens are configured.

        Failure UNAUTHENTICATED: no token, or an unknown one.
        """
        if self._file is None:
            return DEFAULT_TENANT
        self._refresh(self._file)
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str):
                scheme, _, token = value.partition(" ")
                tenant = self._tenants.get(hash_token(token.strip()))
                if scheme.lower() == "bearer" and tenant is not None:
                    return tenant
                raise _refused("the token is not known")
        raise _refused("a bearer token is required")

    def _refresh(self, file: Path) -> None:
        now = self._clock.monotonic()
        if now - self._checked < _RECHECK_S:
            return
        self._checked = now
        try:
            if self._stamp(file) != self._seen:
                self._load(file)
        except ConfigError as error:
            _log.error("tokens_not_reloaded", error=str(error))
        except OSError as error:
            _log.error("tokens_not_reloaded", error=error.strerror)

    def _load(self, file: Path) -> None:
        try:
            stamp = self._stamp(file)
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"tokens_file: can't be read: {type(error).__name__}: {file}") from None
        # Noted before parsing, so that a broken file is complained of once and not at every call.
        self._seen = stamp
        self._tenants = parse_tokens(text)

    @staticmethod
    def _stamp(file: Path) -> tuple[int, int, int]:
        status = file.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino


def _refused(message: str) -> Failure:
    return Failure(Reason.ERROR_REASON_UNAUTHENTICATED, message)
