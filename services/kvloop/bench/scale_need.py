"""What a million conversations need, reckoned from what one turn and one conversation were measured to take.

    turns per second       T = conversations / gap
    router CPU of a turn   c = (turn + chunks x chunk + prompt tokens x token) x factor of several routers
    routers                R = T x c / (share of a core that is used - a router's background)
    store memory             = conversations x (lease + hints)
    store requests           = T x requests of a turn  + background
    store cores              = T x store CPU of a turn + background
    store network            = T x bytes of a turn     + background
    background of the store  = a + b x R

a is what all workers make of it together, b what one router more does: each reads the whole registry, so
that b grows with the workers. Both are the line through what the store did without turns, with most workers.

What a turn asks of the store is taken where there are fewest workers. With a thousand it is the small
difference of two large figures. A difference or a slope below zero was not measured, nor is what would be
reckoned from it: None.

A conversation counts while its lease stands: between two turns, for no longer than the lease.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression
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
class Background:
    """What the store does in a second without turns."""

    workers: float
    """For all workers."""
    router: float
    """For each router."""

    def of(self, routers: float) -> float:
        """Return it for so many routers."""
        # No number of routers may be enough: infinitely many times nothing is nothing.
        return self.workers + (self.router * routers if self.router else 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one turn, one conversation and one second take; None: not measured."""

    turn_ms: float | None
    """Less its chunks and its prompt, where it was dearest."""
    turn_workers: int
    """Workers that there were then."""
    chunk_ms: float | None
    kilotoken_ms: float | None
    router_idle_ms: float
    """CPU of a router without turns, per second."""
    store_turn_us: float | None
    store_turn_requests: float | None
    store_turn_bytes: float | None
    """Sent and received."""
    store_idle_ms: Background | None
    """CPU of the store."""
    store_idle_requests: Background | None
    store_idle_bytes: Background | None
    """Sent and received."""
    bytes_per_conversation: float
    workers: int
    """Of all that is called idle."""
    routers: int = 1
    routers_factor: float = 1.0
    """What so many routers make of a turn's CPU, with most workers."""


def measured(record: Mapping[str, Any]) -> Measured:
    """Take a run's figures: background with most workers, parts of a turn with fewest."""
    most, cpu = record["points"]["workers"][-1], record["router_cpu"]
    turn_ms, turn_workers = _dearest_turn(record)
    routers, factor = _dearest_routers(record)
    turn = record["points"]["workers"][0]["turn"]
    moved = (turn["store_received_bytes"], turn["store_sent_bytes"])
    return Measured(
        turn_ms=turn_ms,
        turn_workers=turn_workers,
        chunk_ms=cpu["chunk_ms"],
        kilotoken_ms=cpu["kilotoken_ms"],
        router_idle_ms=most["idle"]["router_cpu_ms"],
        store_turn_us=turn["store_cpu_us"],
        store_turn_requests=turn["store_requests"],
        store_turn_bytes=None if None in moved else sum(moved),
        store_idle_ms=_background(record, "store_cpu_ms"),
        store_idle_requests=_background(record, "store_requests"),
        store_idle_bytes=_background(record, "store_received_bytes", "store_sent_bytes"),
        bytes_per_conversation=most["bytes_per_conversation"],
        workers=most["workers"],
        routers=routers,
        routers_factor=factor,
    )


def _dearest_turn(record: Mapping[str, Any]) -> tuple[float | None, int]:
    """Return a turn without its chunks and its prompt, with fewest or with most workers, and how many."""
    first, most, cpu = record["points"]["workers"][0], record["points"]["workers"][-1], record["router_cpu"]
    whole = most["turn"]["router_cpu_ms"]
    if whole is None or None in cpu.values():
        return None, int(most["workers"])
    parts = cpu["chunk_ms"] * most["chunks_per_turn"]
    parts += cpu["kilotoken_ms"] * most["shape"]["prompt_tokens"] / 1000
    return max(
        (float(cpu["turn_ms"]), int(first["workers"])), (round(whole - parts, 4), int(most["workers"]))
    )


def _dearest_routers(record: Mapping[str, Any]) -> tuple[int, float]:
    """Return with how many routers a turn takes most of them, of one and of most, and how much more."""
    one, last = record["points"]["workers"][-1]["turn"]["router_cpu_ms"], record["all"]
    several = last["turn"]["router_cpu_ms"]
    if not one or several is None or several <= one:
        return 1, 1.0
    return int(last["routers"]), round(several / one, 3)


def _background(record: Mapping[str, Any], *names: str) -> Background | None:
    """Fit the sum of the store's figures without turns over the number of routers, with most workers."""
    most = record["points"]["workers"][-1]
    points: Sequence[Mapping[str, Any]] = [most, *record["points"]["routers"], record["all"]]
    by_routers = {
        int(point["routers"]): sum(float(point["idle"][name]) for name in names)
        for point in points
        if point["workers"] == most["workers"]
    }
    if len(by_routers) < 2:
        return None
    line = linear_regression(list(by_routers), list(by_routers.values()))
    if line.slope < 0 or line.intercept < 0:
        return None
    return Background(round(line.intercept, 3), round(line.slope, 3))


def needs(found: Measured, assumed: Assumed, gap_s: float) -> dict[str, float | None]:
    """Return what conversations need whose turns are so many seconds apart; None: not measured."""
    turns = assumed.conversations / gap_s
    turn_ms = _router_turn_ms(found, assumed)
    routers: float | None = None
    if turn_ms is not None:
        # A router is one process on one core; what it does without turns is off its share.
        own = assumed.used - found.router_idle_ms / 1000
        routers = turns * turn_ms / 1000 / own if own > 0 else math.inf
    many = math.ceil(routers) if routers is not None and math.isfinite(routers) else routers
    moved = _LEGS * TOKEN_BYTES * assumed.prompt_tokens + 2 * assumed.chunk_bytes * assumed.chunks
    need: dict[str, float | None] = {
        "gap_s": gap_s,
        "turns_per_s": round(turns),
        "router_cpu_ms_per_turn": None if turn_ms is None else round(turn_ms, 3),
        "routers": many,
        "router_gbit_per_s": round(8 * turns * moved / 1e9, 1),
        "store_gb": round(assumed.conversations * found.bytes_per_conversation / 1e9, 2),
    }
    for name, turn, idle, unit, digits in (
        ("store_requests_per_s", found.store_turn_requests, found.store_idle_requests, 1.0, None),
        ("store_cores", _thousandth(found.store_turn_us), found.store_idle_ms, 1e-3, 2),
        ("store_gbit_per_s", found.store_turn_bytes, found.store_idle_bytes, 8e-9, 2),
    ):
        own_part = None if turn is None else turns * turn * unit
        rest = None if idle is None or many is None else idle.of(many) * unit
        whole = None if own_part is None or rest is None else own_part + rest
        for part, value in (("", whole), ("_of_turns", own_part)):
            need[name + part] = round(value, digits) if value is not None and math.isfinite(value) else value
    return need


def _router_turn_ms(found: Measured, assumed: Assumed) -> float | None:
    if found.turn_ms is None or found.chunk_ms is None or found.kilotoken_ms is None:
        return None
    parts = assumed.chunks * found.chunk_ms + assumed.prompt_tokens / 1000 * found.kilotoken_ms
    return (found.turn_ms + parts) * found.routers_factor


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


def million(record: Mapping[str, Any], assumed: Assumed | None = None) -> dict[str, Any]:
    """Return the needs by gap, what they were reckoned from, and what was assumed."""
    assumed, found = assumed or Assumed(), measured(record)
    return {
        "assumed": asdict(assumed),
        "measured": asdict(found),
        "needs": [needs(found, assumed, gap_s) for gap_s in assumed.gaps_s],
    }
