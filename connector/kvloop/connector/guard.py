"""The guard on the reading side: what must hold of a handle before its KV may enter this engine.

vLLM's reader takes any handle at its word, and what it reads enters the prefix cache under the hash of the
reader's own tokens. So the handle carries a seal: the chained hash of the last full block (one hash proves
the whole prefix: tokens, adapter, salt), the ids of the tokens after it, and a digest of the seed of the
hash chain, which tells engines with different seeds from prompts that differ. Tokens after the last full
block, all of them in a short prompt, are outside the hash, so salt and adapter have a digest too. Hashes say
what the blocks were; the deadline, checked by the worker when a read has completed, says that they still
were.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SEAL = "kvloop_seal"
"""Key of the seal in kv_transfer_params."""

_MAX_EXPIRY = 1e15

Refusal = Literal["fields", "counts", "hash", "deadline", "transfer"]
Switch = Literal["counts", "hash", "deadline"]
SWITCHES: frozenset[str] = frozenset(("counts", "hash", "deadline"))


class RefusedError(Exception):
    """A handle that must not be read."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason)
        self.reason: Refusal = reason


@dataclass(frozen=True, slots=True)
class Rules:
    """What the reading engine compares with."""

    block_size: int
    """Tokens per KV block."""
    hash_unit: int
    """Tokens per block hash."""
    seed_digest: str
    """Digest of the seed of this engine's hash chain."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens with what makes their KV, on either side."""

    tokens: Sequence[int]
    hashes: Sequence[bytes]
    """Chained hashes of the full blocks."""
    scope: str
    """See scope_digest."""


def seed_digest(seed: bytes) -> str:
    """Return what of a hash chain's seed may travel."""
    return hashlib.sha256(seed).hexdigest()[:16]


def scope_digest(salt: str | None, adapter: str | None) -> str:
    """Return a digest of what, besides tokens, makes KV differ."""
    return hashlib.sha256(repr((salt or "", adapter or "")).encode()).hexdigest()[:16]


def seal(rules: Rules, num_tokens: int, held: Text) -> dict[str, Any]:
    """Return the seal of the first num_tokens of the held tokens."""
    full = num_tokens // rules.hash_unit
    return {
        "num_tokens": num_tokens,
        "block_size": rules.block_size,
        "hash_unit": rules.hash_unit,
        "seed": rules.seed_digest,
        "scope": held.scope,
        "hash": bytes(held.hashes[full - 1]).hex() if full else "",
        "tail": list(held.tokens[full * rules.hash_unit : num_tokens]),
    }


def examine(params: Mapping[str, Any], rules: Rules, prompt: Text, off: Collection[str] = ()) -> int:
    """Return how many leading tokens of the prompt the handle may serve; raise RefusedError.

    `off` names guards that a test switched off.
    """
    _check_fields(params)
    num_tokens: int = params["remote_num_tokens"]
    if "counts" not in off:
        _check_counts(params, rules, len(prompt.tokens))
    if "hash" not in off:
        _check_hash(params[SEAL], rules, num_tokens, prompt)
    return min(num_tokens, len(prompt.tokens))


def _check_fields(params: Mapping[str, Any]) -> None:
    groups, mark, expiry = (params.get(k) for k in ("remote_block_ids", SEAL, "remote_blocks_expiry_time"))
    good = (
        all(isinstance(params.get(k), str) for k in ("remote_engine_id", "remote_request_id", "remote_host"))
        and all(_natural(params.get(k)) for k in ("remote_port", "tp_size", "remote_num_tokens"))
        and params.get("transfer_mode", "pull") == "pull"
        and isinstance(expiry, int | float)
        # No bool, no NaN, no infinity, and no integer too large for a float.
        and not isinstance(expiry, bool)
        and -_MAX_EXPIRY < expiry < _MAX_EXPIRY
        and isinstance(groups, list | tuple)
        and all(isinstance(group, list | tuple) for group in groups)
        and isinstance(mark, Mapping)
        and all(_natural(mark.get(k)) for k in ("num_tokens", "block_size", "hash_unit"))
        and all(isinstance(mark.get(k), str) for k in ("seed", "scope", "hash"))
        and isinstance(mark.get("tail"), list | tuple)
    )
    if not good:
        raise RefusedError("fields")


def _check_counts(params: Mapping[str, Any], rules: Rules, prompt_tokens: int) -> None:
    num_tokens, groups, mark = params["remote_num_tokens"], params["remote_block_ids"], params[SEAL]
    blocks = groups[0] if len(groups) == 1 else ()
    good = (
        mark["block_size"] == rules.block_size
        and mark["hash_unit"] == rules.hash_unit
        and mark["num_tokens"] == num_tokens
        and num_tokens <= prompt_tokens
        and len(blocks) == -(-num_tokens // rules.block_size)
        and all(_natural(block) for block in blocks)
        and len(set(blocks)) == len(blocks)
    )
    if not good:
        raise RefusedError("counts")


def _check_hash(mark: Mapping[str, Any], rules: Rules, num_tokens: int, prompt: Text) -> None:
    full = num_tokens // rules.hash_unit
    good = (
        mark["seed"] == rules.seed_digest
        and mark["scope"] == prompt.scope
        and full <= len(prompt.hashes)
        and mark["hash"] == (bytes(prompt.hashes[full - 1]).hex() if full else "")
        and list(mark["tail"]) == list(prompt.tokens[full * rules.hash_unit : num_tokens])
    )
    if not good:
        raise RefusedError("hash")


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
