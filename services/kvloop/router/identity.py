"""What a turn is known by, derived from the fleet's secret.

Scope, digest key and cache salt are HMACs under one secret with distinct labels, so none tells anything
about another. Fields are length-prefixed, so ("ab", "c") and ("a", "bc") differ. Workers get the results
with each turn and never need the secret; a client, who names a conversation and a salt but not its tenant,
can't reach another tenant's scope.
"""

import hmac
import secrets
from dataclasses import dataclass
from functools import lru_cache

from kvloop.router.settings import MIN_SECRET_BYTES, RouterSettings
from kvloop.runtime.config import ConfigError
from kvloop.v1alpha1 import turn_pb2

SCOPE_BYTES = 32

_SCOPE = b"kvloop scope v1"
_DIGEST_KEY = b"kvloop digest key v1"
_CACHE_SALT = b"kvloop cache salt v1"
_OWNERS = 4096
"""Remembered; salts come from clients, so there is no end to them."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose KV it is and what computed it: equal owners may share KV when the tokens are the same."""

    tenant: str
    model: str
    revision: str
    adapter: str
    salt: str


class Identities:
    """Derives what P and D must agree on."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        # The same for every turn of an owner, of whom there are few.
        self._keys = lru_cache(maxsize=_OWNERS)(self._derive_keys)

    def scope(self, owner: Owner, conversation_id: str) -> bytes:
        """Return the directory's key of a conversation, 32 bytes."""
        return self._derive(_SCOPE, *_fields(owner), conversation_id)

    def digest_key(self, owner: Owner) -> bytes:
        """Return the key of the prefix digests, 32 bytes; the same for all conversations of an owner."""
        return self._keys(owner)[0]

    def cache_salt(self, owner: Owner) -> str:
        """Return vLLM's cache_salt; model and adapter are in vLLM's block hashes already."""
        return self._keys(owner)[1]

    def turn_scope(self, owner: Owner, conversation_id: str) -> turn_pb2.TurnScope:
        """Return the scope of a turn without its start; without a conversation nothing can be leased."""
        return turn_pb2.TurnScope(
            scope=self.scope(owner, conversation_id) if conversation_id else b"",
            digest_key=self.digest_key(owner),
            cache_salt=self.cache_salt(owner),
            conversation_id=conversation_id,
            tenant=owner.tenant,
        )

    def _derive_keys(self, owner: Owner) -> tuple[bytes, str]:
        salt = self._derive(_CACHE_SALT, owner.tenant, owner.salt).hex()[:32]
        return self._derive(_DIGEST_KEY, *_fields(owner)), salt

    def _derive(self, label: bytes, *fields: str) -> bytes:
        parts = (label, *(field.encode() for field in fields))
        return hmac.digest(
            self._secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256"
        )


def _fields(owner: Owner) -> tuple[str, ...]:
    return (owner.tenant, owner.model, owner.revision, owner.adapter, owner.salt)


def load_secret(settings: RouterSettings) -> bytes:
    """Return the fleet's secret; without one, a fresh one (the settings allow that on loopback only).

    A fresh secret means that leases of other routers, or of this one's former life, are out of reach.
    Raises ConfigError.
    """
    if settings.fleet_secret is not None:
        secret = settings.fleet_secret.get_secret_value().encode()
    elif settings.fleet_secret_file is not None:
        try:
            secret = settings.fleet_secret_file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"fleet_secret_file: {error.strerror}: {settings.fleet_secret_file}") from None
    else:
        return secrets.token_bytes(32)
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"the fleet secret is too short; use at least {MIN_SECRET_BYTES} random bytes")
    return secret
