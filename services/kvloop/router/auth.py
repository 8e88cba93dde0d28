"""Tenants from bearer tokens.

The tokens file holds one line per token: the SHA-256 of the token in hex, a space, the tenant's name; "#"
starts a comment. Tokens themselves are nowhere at rest. The file is read again when it changes; a file
that does not parse leaves the former tokens in force and is told in the log.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from kvloop.runtime.clock import Clock
from kvloop.runtime.config import ConfigError
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.watched import WatchedFile

DEFAULT_TENANT = "default"
_MAX_TENANT = 128
_LINE = re.compile(r"([0-9a-fA-F]{64})\s+(\S+)")

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
        self._tenants = (
            None if tokens_file is None else WatchedFile("tokens_file", tokens_file, parse_tokens, clock)
        )

    def tenant(self, metadata: Metadata) -> str:
        """Return the tenant of a call's metadata; "default" when no tokens are configured.

        Failure UNAUTHENTICATED: no token, or an unknown one.
        """
        if self._tenants is None:
            return DEFAULT_TENANT
        tenants = self._tenants.value()
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str):
                scheme, _, token = value.partition(" ")
                tenant = tenants.get(hash_token(token.strip()))
                if scheme.lower() == "bearer" and tenant is not None:
                    return tenant
                raise _refused("the token is not known")
        raise _refused("a bearer token is required")


def _refused(message: str) -> Failure:
    return Failure(Reason.ERROR_REASON_UNAUTHENTICATED, message)
