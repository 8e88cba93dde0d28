"""Handles as vLLM's NIXL connector writes them, and the guard that reads them with suspicion.

The guard runs before a read (counts, block hashes) and around it (deadline): hashes say what the blocks
were, the deadline whether they still are. Its parts can be switched off, one by one, to see wrong answers.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from kvloop.engine.simulated.pool import Block
from kvloop.runtime import tokens
from kvloop.runtime.endpoints import Endpoint
from kvloop.runtime.errors import Failure, Reason

ELSEWHERE = "127.0.0.9"


class Refused(Exception):
    """A read that was refused or that failed: "deadline", "hash", "counts", "fields", "place", "transfer"."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def failure(self) -> Failure:
        """Return the failure that the port promises."""
        return Failure(
            Reason.ERROR_REASON_KV_READ_FAILED,
            f"the read of remote KV failed: {self.why}",
            metadata={"refused": self.why},
        )


@dataclass(slots=True)
class Guard:
    """Which checks are on."""

    deadline: bool = True
    hash: bool = True
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine's blocks can be read."""

    engine_id: str
    host: str
    port: int

    @property
    def place(self) -> str:
        """Return host:port."""
        return str(Endpoint(self.host, self.port))


@dataclass(frozen=True, slots=True)
class Handle:
    """Some tokens' KV at another engine."""

    address: Address
    request_id: str
    """Whose blocks; echoed in the notice that the read is over."""
    block_ids: list[int]
    num_tokens: int
    expiry: float | None
    """By the holder's monotonic clock."""
    last_hash: bytes
    """Hash of the last full block among the tokens; empty without one."""
    tail: list[int]
    """Token ids after it."""
    none_hash: str

    def to_json(self, *, readback: bool) -> str:
        """Return kv_transfer_params; readback: for a prefill engine, else for a decode engine."""
        return json.dumps(
            {
                "do_remote_prefill": not readback,
                "do_remote_decode": readback,
                "remote_block_ids": [self.block_ids],
                "remote_engine_id": self.address.engine_id,
                "remote_request_id": self.request_id,
                "remote_host": self.address.host,
                "remote_port": self.address.port,
                "tp_size": 1,
                "dcp_size": 1,
                "pp_size": 1,
                "remote_num_tokens": self.num_tokens,
                "remote_blocks_expiry_time": self.expiry,
                "transfer_mode": "pull",
                "kvloop_last_hash": self.last_hash.hex(),
                "kvloop_tail": self.tail,
                "kvloop_none_hash": self.none_hash,
            },
            separators=(",", ":"),
        )

    def of_other_tokens(self) -> "Handle":
        """Return the handle as it would be if its blocks were filled with other tokens."""
        if self.last_hash:
            return replace(self, last_hash=bytes(byte ^ 1 for byte in self.last_hash))
        return replace(self, tail=[token ^ 1 for token in self.tail])

    def spoiled(self, how: str) -> "Handle":
        """Return the handle with one thing wrong.

        A block too few ("short"), one that does not exist ("range"), one twice ("twice"), all of them those
        of other tokens, truthfully described ("other"), or another host ("elsewhere").
        """
        ids = self.block_ids
        if how == "elsewhere":
            return replace(self, address=replace(self.address, host=ELSEWHERE))
        if how == "other":
            return replace(self.of_other_tokens(), block_ids=[*ids[1:], ids[0]])
        wrong = {"short": ids[:-1], "range": [*ids[:-1], 1 << 20], "twice": [ids[0], *ids[:-1]]}
        return replace(self, block_ids=wrong[how])


def describe(
    address: Address,
    request_id: str,
    *,
    blocks: list[Block],
    packed: bytes,
    keys: list[bytes],
    num_tokens: int,
    expiry: float,
    block_size: int,
    none_hash: str,
) -> Handle:
    """Return the handle of the first num_tokens tokens of some blocks."""
    full = num_tokens // block_size
    tail = packed[full * block_size * tokens.TOKEN_BYTES : num_tokens * tokens.TOKEN_BYTES]
    return Handle(
        address=address,
        request_id=request_id,
        block_ids=[block.id for block in blocks[: -(-num_tokens // block_size)]],
        num_tokens=num_tokens,
        expiry=expiry,
        last_hash=keys[full - 1] if full else b"",
        tail=tokens.unpack(tail),
        none_hash=none_hash,
    )


def parse(handle_json: str) -> Handle:
    """Return a handle. Raises Refused ("fields") when it is none."""
    try:
        params: dict[str, Any] = json.loads(handle_json)
        if params.get("transfer_mode", "pull") != "pull":
            raise Refused("fields")
        (block_ids,) = params["remote_block_ids"]
        expiry = params.get("remote_blocks_expiry_time")
        return Handle(
            address=Address(
                str(params["remote_engine_id"]), str(params["remote_host"]), int(params["remote_port"])
            ),
            request_id=str(params["remote_request_id"]),
            block_ids=[int(block_id) for block_id in block_ids],
            num_tokens=int(params["remote_num_tokens"]),
            expiry=None if expiry is None else float(expiry),
            last_hash=bytes.fromhex(params.get("kvloop_last_hash", "")),
            tail=[int(token) for token in params.get("kvloop_tail", [])],
            none_hash=str(params.get("kvloop_none_hash", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Refused("fields") from None


def check(
    guard: Guard, handle: Handle, *, packed: bytes, keys: list[bytes], none_hash: str, block_size: int
) -> None:
    """Check counts and hashes against the reader's own prompt. Raises Refused."""
    covered = handle.num_tokens
    if guard.counts:
        if not 0 < covered <= tokens.count(packed) or len(handle.block_ids) != -(-covered // block_size):
            raise Refused("counts")
        if any(block_id < 0 for block_id in handle.block_ids) or len(set(handle.block_ids)) < len(
            handle.block_ids
        ):
            raise Refused("counts")
    if guard.hash:
        full = min(covered, tokens.count(packed)) // block_size
        mine = keys[full - 1] if full else b""
        start = full * block_size * tokens.TOKEN_BYTES
        tail = packed[start : covered * tokens.TOKEN_BYTES]
        if handle.none_hash != none_hash or handle.last_hash != mine or handle.tail != tokens.unpack(tail):
            raise Refused("hash")
