"""What a million conversations need, reckoned from what one turn and one conversation were measured to take.

    turns per second       T = conversations / gap
    router CPU of a turn   c = (turn + chunks x chunk + prompt tokens x token) x factor of several routers
    router cores             = T x c / share of a core that is used, and each router's own background
    store memory             = conversations x (lease + hints)
    store requests           = T x requests of a turn, and the background
    store cores              = T x store CPU of a turn, and the background

A conversation counts while its lease stands: between two turns, for no longer than the lease.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TOKEN_BYTES = 4
_LEGS = 3
"""Times that a router moves a prompt: in from the client, out to P, out to D."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is not measured but assumed."""

    conversations: int = 1_000_000
    gaps_s: tuple[float, ...] = (30.0, 120.0, 480.0)
    """Seconds from one turn of a conversation to the next: tool loops, mixed, people."""
    prompt_tokens: int = 24_000
    chunks: int = 300
    """Pieces in which an answer reaches its client."""
    chunk_bytes: int = 64
    """Of one, on the wire."""
    used: float = 0.6
    """Share of a core that a router is given to do; the rest is for peaks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one turn, one conversation and one second take."""

    turn_ms: float
    """With most workers, less its chunks and its prompt."""
    chunk_ms: float
    kilotoken_ms: float
    router_idle_ms: float
    """CPU of a router without turns, per second."""
    store_turn_us: float
    store_turn_requests: float
    store_turn_bytes: float
    """Sent and received."""
    store_idle_ms: float
    """CPU of the store for one router more and for the workers, per second."""
    bytes_per_conversation: float
    workers: int
    routers: int = 1
    routers_factor: float = 1.0
    """What so many routers make of a turn's CPU, with most workers."""


def measured(record: Mapping[str, Any]) -> Measured:
    """Take a run's figures where there are most workers: of one router, and of the store with most routers.

    What a chunk and a prompt take was measured with the fewest workers; the rest of a turn is what is left.
    """
    most, last, cpu = record["points"]["workers"][-1], record["all"], record["router_cpu"]
    turn_ms = most["turn"]["router_cpu_ms"]
    parts_ms = cpu["chunk_ms"] * most["chunks_per_turn"]
    parts_ms += cpu["kilotoken_ms"] * most["shape"]["prompt_tokens"] / 1000
    return Measured(
        turn_ms=round(max(cpu["turn_ms"], turn_ms - parts_ms), 4),
        chunk_ms=cpu["chunk_ms"],
        kilotoken_ms=cpu["kilotoken_ms"],
        router_idle_ms=most["idle"]["router_cpu_ms"],
        store_turn_us=last["turn"]["store_cpu_us"],
        store_turn_requests=last["turn"]["store_requests"],
        store_turn_bytes=last["turn"]["store_received_bytes"] + last["turn"]["store_sent_bytes"],
        store_idle_ms=most["idle"]["store_cpu_ms"],
        bytes_per_conversation=last["bytes_per_conversation"],
        workers=most["workers"],
        routers=last["routers"],
        routers_factor=round(max(1.0, last["turn"]["router_cpu_ms"] / turn_ms), 3) if turn_ms > 0 else 1.0,
    )


def needs(found: Measured, assumed: Assumed, gap_s: float) -> dict[str, float]:
    """Return what conversations need whose turns are so many seconds apart."""
    turns = assumed.conversations / gap_s
    turn_ms = (
        found.turn_ms + assumed.chunks * found.chunk_ms + assumed.prompt_tokens / 1000 * found.kilotoken_ms
    ) * found.routers_factor
    # A router is one process on one core; what it does without turns is off its share.
    own = assumed.used - found.router_idle_ms / 1000
    routers = turns * turn_ms / 1000 / own if own > 0 else math.inf
    moved = _LEGS * TOKEN_BYTES * assumed.prompt_tokens + 2 * assumed.chunk_bytes * assumed.chunks
    return {
        "gap_s": gap_s,
        "turns_per_s": round(turns),
        "router_cpu_ms_per_turn": round(turn_ms, 3),
        "routers": math.ceil(routers) if math.isfinite(routers) else math.inf,
        "router_gbit_per_s": round(8 * turns * moved / 1e9, 1),
        "store_gb": round(assumed.conversations * found.bytes_per_conversation / 1e9, 2),
        "store_requests_per_s": round(turns * found.store_turn_requests),
        "store_cores": round(turns * found.store_turn_us / 1e6 + routers * found.store_idle_ms / 1000, 2),
        "store_mbit_per_s": round(8 * turns * found.store_turn_bytes / 1e6, 1),
    }


def million(record: Mapping[str, Any], assumed: Assumed | None = None) -> dict[str, Any]:
    """Return the needs by gap, what they were reckoned from, and what was assumed."""
    assumed, found = assumed or Assumed(), measured(record)
    return {
        "assumed": asdict(assumed),
        "measured": asdict(found),
        "needs": [needs(found, assumed, gap_s) for gap_s in assumed.gaps_s],
    }
