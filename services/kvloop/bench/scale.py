"""What a turn costs as workers, conversations and routers become many: measured along one axis at a time.

Costs are the kernel's CPU times of the router's and the store's processes, so that a machine that is busy
with other things makes a run longer, not dearer. What goes on without any turn (watching workers, reading
the registry, telling what was learnt) is measured by itself and taken off a turn's share.
"""

import asyncio
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
from redis.asyncio import Redis

from kvloop.bench.router import percentile
from kvloop.bench.router_traffic import Talk, TurnLost, Way
from kvloop.bench.store import TOKENS, TTL_S, sample_entry
from kvloop.metastore.factory import Store
from kvloop.metastore.hints import written_lengths

BEGINS_TO_GROW = 1.25
"""A cost is flat as long as it is at most so many times that of the axis's first point."""
_FILLED_TOGETHER = 256
_SCOPE_BYTES = 32
_DIGEST_BYTES = 16
_GROUP = b"kvloop bench hints"

_REQUESTS = ("evalsha", "eval", "ping")
"""What clients of ours send; everything else is done by scripts."""


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has spent, threads that ended included, in seconds."""
    # The clock of another process, as clock_getcpuclockid(3) names it.
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def rss(pid: int) -> int:
    """Return a process's resident memory, in bytes."""
    return int(psutil.Process(pid).memory_info().rss)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a turn is like."""

    prompt_tokens: int = 500
    output_tokens: int = 8

    def as_dict(self) -> dict[str, int]:
        """Return it as JSON has it."""
        return {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done for each point."""

    turns: int = 1200
    talks: int = 128
    """Conversations that are played, each in turn; more only stand in the store."""
    at_once: int = 64
    idle_s: float = 4.0
    lookups: int = 2000
    limit_s: float = 25.0
    """A busy machine gets fewer turns rather than more time."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What the processes have spent up to a moment."""

    at: float
    router_s: float
    store_s: float
    requests: int
    """Commands that clients sent to the store."""
    received: int
    sent: int
    """Bytes that the store received and sent."""

    def since(self, before: "Spent") -> "Spent":
        """Return what was spent in between; at: for how long."""
        return Spent(
            self.at - before.at,
            self.router_s - before.router_s,
            self.store_s - before.store_s,
            self.requests - before.requests,
            self.received - before.received,
            self.sent - before.sent,
        )


class Meters:
    """The processes that are measured. The store's own figures are asked over a link of their own."""

    def __init__(self, store_url: str, store_pid: int) -> None:
        self.router_pids: Sequence[int] = ()
        self.store_pid = store_pid
        self.raw = Redis.from_url(store_url)

    async def close(self) -> None:
        """Close the link."""
        await self.raw.aclose()

    async def read(self) -> Spent:
        """Return what was spent so far."""
        stats = await self.raw.info("stats")
        commands = await self.raw.info("commandstats")
        # What a script does is counted as commands too; its caller sent one.
        asked = sum(commands.get(f"cmdstat_{name}", {}).get("calls", 0) for name in _REQUESTS)
        return Spent(
            at=time.monotonic(),
            router_s=sum(map(cpu_s, self.router_pids)),
            store_s=cpu_s(self.store_pid),
            requests=asked,
            received=int(stats["total_net_input_bytes"]),
            sent=int(stats["total_net_output_bytes"]),
        )

    async def used_memory(self) -> int:
        """Return the bytes that the store's data takes."""
        return int((await self.raw.info("memory"))["used_memory"])


@dataclass
class Filled:
    """Conversations that stand in the store without being played."""

    scopes: list[bytes] = field(default_factory=list)
    bytes_each: float = 0.0


async def fill(store: Store, meters: Meters, filled: Filled, count: int) -> None:
    """Publish leases through the directory, hints included, up to so many in all."""
    before, had = await meters.used_memory(), len(filled.scopes)
    group = _GROUP[:_DIGEST_BYTES]
    hinted = len(written_lengths(TOKENS))

    async def publish(scope: bytes) -> None:
        entry = sample_entry()
        entry.lease_id, entry.conversation_id = secrets.token_hex(16), secrets.token_hex(16)
        await store.directory.publish(scope, entry, TTL_S)
        names = [os.urandom(_DIGEST_BYTES) for _ in range(hinted)]
        await store.directory.publish_hints(group, names, scope, TTL_S)

    while len(filled.scopes) < count:
        fresh = [os.urandom(_SCOPE_BYTES) for _ in range(min(_FILLED_TOGETHER, count - len(filled.scopes)))]
        await asyncio.gather(*map(publish, fresh))
        filled.scopes += fresh
    if count > had:
        filled.bytes_each = (await meters.used_memory() - before) / (count - had)


async def lookups(store: Store, scopes: Sequence[bytes], count: int) -> dict[str, float]:
    """Return microseconds of lookups of random conversations, one after the other."""
    samples = []
    for scope in random.choices(scopes, k=count):
        begun = time.perf_counter_ns()
        found = await store.directory.lookup(scope)
        samples.append((time.perf_counter_ns() - begun) / 1000)
        if found.entry is None:
            raise RuntimeError("leases were lost while they were measured")
    return {name: round(percentile(samples, share), 1) for name, share in (("p50", 0.5), ("p99", 0.99))}


async def registry_reading(store: Store, count: int = 10) -> dict[str, float]:
    """Return how long one reading of the whole registry takes here, and how many workers it found."""
    samples, found = [], 0
    for _ in range(count):
        begun = time.perf_counter()
        found = len(await store.registry.workers())
        samples.append(1000 * (time.perf_counter() - begun))
    return {"p50_ms": round(percentile(samples, 0.5), 2), "workers": found}


@dataclass
class Players:
    """Plays conversations in turn, so many at once, each turn through the next router."""

    ways: Sequence[Way]
    at_once: int
    firsts_ms: list[float] = field(default_factory=list)
    chunks: int = 0
    lost: int = 0
    """Turns that failed."""

    async def play(self, talks: Sequence[Talk], turns: int, until: float = float("inf")) -> int:
        """Play turns, fewer when the monotonic time `until` comes first; return how many."""
        waiting, played = deque(talks), 0

        async def client() -> None:
            nonlocal played
            while played < turns and waiting and time.monotonic() < until:
                mine = waiting.popleft()
                way = self.ways[played % len(self.ways)]
                played += 1
                try:
                    done = await way.play(mine)
                except (grpc.aio.AioRpcError, TurnLost):
                    self.lost += 1
                else:
                    self.firsts_ms.append(done.first_ms)
                    self.chunks += done.chunks
                waiting.append(mine)

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(self.at_once, len(talks))):
                clients.create_task(client())
        return played


async def idle(meters: Meters, seconds: float) -> Spent:
    """Return what is spent while nobody asks for anything."""
    before = await meters.read()
    await asyncio.sleep(seconds)
    return (await meters.read()).since(before)


def per_turn(busy: Spent, quiet: Spent, turns: int) -> dict[str, float | None]:
    """Return what a turn adds to what goes on without any.

    None where there was less with turns than without: that was not measured.
    """

    def share(name: str, unit: float = 1.0, digits: int | None = None) -> float | None:
        more = float(getattr(busy, name)) - float(getattr(quiet, name)) / quiet.at * busy.at
        return None if more < 0 else round(unit * more / turns, digits)

    return {
        "router_cpu_ms": share("router_s", 1e3, 4),
        "router_cpu_ms_gross": round(1000 * busy.router_s / turns, 4),
        "store_cpu_us": share("store_s", 1e6, 1),
        "store_requests": share("requests", digits=2),
        "store_received_bytes": share("received"),
        "store_sent_bytes": share("sent"),
    }


def per_second(quiet: Spent, routers: int) -> dict[str, float]:
    """Return what goes on without any turn, per second; of the routers, each one's."""
    return {
        "router_cpu_ms": round(1000 * quiet.router_s / quiet.at / routers, 3),
        "store_cpu_ms": round(1000 * quiet.store_s / quiet.at, 3),
        "store_requests": round(quiet.requests / quiet.at, 1),
        "store_received_bytes": round(quiet.received / quiet.at),
        "store_sent_bytes": round(quiet.sent / quiet.at),
    }


AXES = ("workers", "conversations", "routers")
FLAT: Mapping[str, tuple[str, str]] = {
    "turn.router_cpu_ms": ("router CPU per turn", "ms"),
    "turn.store_cpu_us": ("store CPU per turn", "us"),
    "turn.store_requests": ("store requests per turn", ""),
    "steps_ms.place": ("placing a turn", "ms"),
    "steps_ms.lookup": ("lookup, in the router", "ms"),
    "lookup_us.p50": ("lookup, nothing else going on, p50", "us"),
    "lookup_us.p99": ("lookup, nothing else going on, p99", "us"),
    "bytes_per_conversation": ("store bytes per conversation", "bytes"),
    "idle.router_cpu_ms": ("a router without turns, CPU per second", "ms"),
    "idle.store_cpu_ms": ("the store without turns, CPU per second", "ms"),
    "router_rss_mb": ("router memory", "MB"),
}
"""What is looked at along each axis: name, what it is, unit."""


def value_of(point: Mapping[str, Any], name: str) -> float | None:
    """Return a point's value by its dotted name; None where it was not measured."""
    value: Any = point
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def growth(points: Sequence[Mapping[str, Any]], axis: str) -> dict[str, dict[str, Any]]:
    """Return for each cost how it grows along an axis, and up to where it is flat.

    "flat_to" is the last place up to which no value is more than BEGINS_TO_GROW times the first.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in FLAT:
        along = [(point[axis], value) for point in points if (value := value_of(point, name)) is not None]
        if not along or along[0][1] <= 0:
            continue
        flat_to = along[0][0]
        for place, value in along[1:]:
            if value > BEGINS_TO_GROW * along[0][1]:
                break
            flat_to = place
        found[name] = {
            "at": [place for place, _ in along],
            "values": [value for _, value in along],
            "ratio": round(along[-1][1] / along[0][1], 2),
            "flat_to": flat_to,
        }
    return found


def slopes(
    base: Mapping[str, Any], longer: Mapping[str, Any], wordier: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return a router's CPU of a turn as a sum: what every turn takes, and per prompt token and chunk.

    base and wordier differ in chunks, base and longer in prompt tokens, and in nothing else. What comes out
    below zero was not measured: None.
    """
    costs = [value_of(point, "turn.router_cpu_ms") for point in (base, longer, wordier)]
    turn = chunk = token = None
    if (at_base := costs[0]) is not None and (at_longer := costs[1]) is not None:
        if (at_wordier := costs[2]) is not None:
            more_chunks = wordier["chunks_per_turn"] - base["chunks_per_turn"]
            chunk = _unless_negative((at_wordier - at_base) / more_chunks)
        if chunk is not None:
            more = longer["shape"]["prompt_tokens"] - base["shape"]["prompt_tokens"]
            # The longer prompt's answer may have come in other chunks.
            same = (longer["chunks_per_turn"] - base["chunks_per_turn"]) * chunk
            token = _unless_negative((at_longer - same - at_base) / more)
        if chunk is not None and token is not None:
            parts = chunk * base["chunks_per_turn"] + token * base["shape"]["prompt_tokens"]
            turn = _unless_negative(at_base - parts)
    return {
        "turn_ms": None if turn is None else round(turn, 4),
        "chunk_ms": None if chunk is None else round(chunk, 5),
        "kilotoken_ms": None if token is None else round(1000 * token, 5),
    }


def _unless_negative(value: float) -> float | None:
    return None if value < 0 else value


def shares(samples: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile."""
    return {name: round(percentile(samples, share), 3) for name, share in (("p50", 0.5), ("p99", 0.99))}
