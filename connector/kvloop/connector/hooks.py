"""What tests may break inside one engine. All off at first; out of reach unless the engine allows it.

A guard is proven by what happens without it, and most of what a guard is for can't be waited for: so single
guards can be switched off, reads can be made to wait, and handles can be made to lie.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvloop.connector.guard import SEAL

Stall = Literal["start", "end"]
Spoil = Literal["short", "range", "twice", "other", "elsewhere"]

STALLS: frozenset[str] = frozenset(get_args(Stall))
SPOILS: frozenset[str] = frozenset(get_args(Spoil))

_FAR = 1 << 20
"""A block number that no pool has."""
_ELSEWHERE = "127.0.0.9"
"""Loopback as well, but not where engines listen."""


@dataclass(slots=True)
class Hooks:
    """One engine's hooks. Set by the control socket's thread, looked at by the engine's."""

    guards_off: set[str] = field(default_factory=set)
    stall: Stall | None = None
    """Reads by this engine wait before they start ("start"), or are not seen to end ("end")."""
    spoil: Spoil | None = None
    """What is wrong with the handles of decode turns: a block too few ("short"), one that does not exist
    ("range"), one twice ("twice"), all of them those of other tokens, truthfully sealed ("other"), or another
    host ("elsewhere")."""


def spoiled(params: dict[str, Any], how: Spoil) -> dict[str, Any]:
    """Return kv_transfer_params with one thing wrong."""
    if how == "elsewhere":
        return params | {"remote_host": _ELSEWHERE}
    (blocks,) = params["remote_block_ids"]
    if how == "short":
        return params | {"remote_block_ids": [blocks[:-1]]}
    if how == "range":
        return params | {"remote_block_ids": [[*blocks[:-1], _FAR]]}
    if how == "twice":
        return params | {"remote_block_ids": [[blocks[0], *blocks[:-1]]]}
    seal = params[SEAL] | {"hash": "00" * 32}
    return params | {"remote_block_ids": [[*blocks[1:], blocks[0]]], SEAL: seal}
