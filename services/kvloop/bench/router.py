"""What a router costs: time added to the first chunk, CPU per turn and chunk, memory, questions to the store.

Everything is compared within one run, in alternation, so that whatever else the machine does hits all alike.
The router is a process of its own, and so is everything that it talks to; its CPU time and memory are the
kernel's figures for that process.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
from redis.asyncio import Redis

from kvloop.bench.router_traffic import Played, Talk, Way, talk
from kvloop.bench.statistics import slope

VOCABULARY = 32_000
SHORT, LONG = 500, 24_000
CHUNKS = 32
WARM_UP = 20
RSS_EVERY = 250
# Memory before the first so many turns is the filling of buffers and of what is remembered of turns.
SETTLED_AT = 0.2
TARGETS: Mapping[str, tuple[str, float]] = {
    "added_first_chunk_ms.24k.p50": ("at most", 1.5),
    "added_first_chunk_ms.500.p50": ("at most", 1.5),
    "cpu_per_turn_vs_passthrough": ("at most", 1.0),
    "chunks_per_cpu_second": ("at least", 15_000),
    "lookups_per_turn": ("at most", 1.0),
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as the kernel accounts for it."""

    pid: int

    def cpu_s(self) -> float:
        """Return the CPU time spent so far, in seconds, to a hundredth."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def rss(self) -> int:
        """Return the memory that is resident, in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def ports_to(self, port: int) -> set[int]:
        """Return the local ports of its connections to a port."""
        connections = psutil.Process(self.pid).net_connections(kind="tcp")
        return {c.laddr.port for c in connections if c.raddr and c.raddr.port == port}


@dataclass(frozen=True, slots=True)
class Measured:
    """One stretch of turns, all by one way."""

    way: str
    turns: int
    chunks: int
    cpu_s: float
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "way": self.way,
            "turns": self.turns,
            "chunks": self.chunks,
            "cpu_s": round(self.cpu_s, 3),
            "wall_s": round(self.wall_s, 3),
        }


def percentile(samples: Sequence[float], share: float) -> float:
    """Return a percentile of samples."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


async def first_chunks(
    ways: Mapping[str, Way], prompt_tokens: int, *, rounds: int, limit_s: float
) -> dict[str, list[float]]:
    """Return milliseconds to the first chunk by way, one turn at a time, in changing order."""
    until = time.monotonic() + limit_s
    talks = {name: talk(prompt_tokens, 4, VOCABULARY) for name in ways}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + WARM_UP):
        if number > 2 * WARM_UP and time.monotonic() > until:
            break
        for name in order:
            played = await ways[name].play(talks[name])
            if number >= WARM_UP:
                samples[name].append(round(played.first_ms, 4))
        order.reverse()
    return samples


def added(samples: Mapping[str, Sequence[float]], way: str = "router") -> dict[str, float]:
    """Return by how much a way's percentiles are later than those of calling P and D directly."""
    return {
        name: round(percentile(samples[way], share) - percentile(samples["direct"], share), 3)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


async def play_many(way: Way, talks: Sequence[Talk], turns: int) -> tuple[int, int]:
    """Play turns, one at a time of each conversation; return how many, and their chunks."""
    left, chunks = turns, 0

    async def client(mine: Talk) -> None:
        nonlocal left, chunks
        while left > 0:
            left -= 1
            played: Played = await way.play(mine)
            chunks += played.chunks

    async with asyncio.TaskGroup() as clients:
        for mine in talks:
            clients.create_task(client(mine))
    return turns, chunks


async def cpu(
    ways: Mapping[str, tuple[Way, Process]],
    prompt_tokens: int,
    *,
    conversations: int,
    turns: int,
    rounds: int,
    limit_s: float,
) -> list[Measured]:
    """Return the CPU time of each way's process over turns of 32 chunks, stretch by stretch.

    On a busy machine there are fewer rounds: an even number, so that no way is favoured by the order.
    """
    until = time.monotonic() + limit_s
    talks = {name: [talk(prompt_tokens, CHUNKS, VOCABULARY) for _ in range(conversations)] for name in ways}
    for name, (way, _) in ways.items():
        await play_many(way, talks[name], 2 * conversations)
    measured = []
    order = list(ways)
    for number in range(rounds):
        if number and number % 2 == 0 and time.monotonic() > until:
            break
        for name in order:
            way, process = ways[name]
            cpu_before, begun = process.cpu_s(), time.perf_counter()
            played, chunks = await play_many(way, talks[name], turns // rounds)
            spent, wall = process.cpu_s() - cpu_before, time.perf_counter() - begun
            measured.append(Measured(name, played, chunks, spent, wall))
        order.reverse()
    return measured


def chunks_per_turn(measured: Sequence[Measured], way: str) -> float:
    """Return how many chunks a client got of a turn."""
    mine = [m for m in measured if m.way == way]
    return sum(m.chunks for m in mine) / sum(m.turns for m in mine)


def per_turn_ms(measured: Sequence[Measured], way: str) -> float:
    """Return the CPU milliseconds of a turn."""
    mine = [m for m in measured if m.way == way]
    return 1000 * sum(m.cpu_s for m in mine) / sum(m.turns for m in mine)


def chunks_per_cpu_second(measured: Sequence[Measured], way: str) -> float:
    """Return how many chunks reached clients for each second of CPU."""
    mine = [m for m in measured if m.way == way]
    return sum(m.chunks for m in mine) / sum(m.cpu_s for m in mine)


async def memory(way: Way, process: Process, *, turns: int, limit_s: float) -> dict[str, Any]:
    """Return the slope of resident memory over turns, in bytes per turn, with its interval."""
    talks = [talk(64, 4, VOCABULARY) for _ in range(32)]
    at: list[int] = []
    rss: list[int] = []
    done = 0
    until = time.monotonic() + limit_s
    while done < turns and time.monotonic() < until:
        played, _ = await play_many(way, talks, RSS_EVERY)
        done += played
        at.append(done)
        rss.append(process.rss())
    start = int(SETTLED_AT * len(at))
    found = slope(at[start:], rss[start:])
    assert found.low is not None
    assert found.high is not None
    return {
        "bytes_per_turn": round(found.value, 2),
        "ci_low": round(found.low, 2),
        "ci_high": round(found.high, 2),
        "turns": done,
        "turns_measured": done - at[start],
        "growth_bytes": rss[-1] - rss[start],
        "samples": {"turns": at, "rss": rss},
    }


@asynccontextmanager
async def _monitored(url: str) -> AsyncIterator[list[tuple[int, str]]]:
    """Yield a list that fills with (client's port, command) of everything that a store is asked."""
    seen: list[tuple[int, str]] = []
    client = Redis.from_url(url)

    async def follow(monitor: Any) -> None:
        async for command in monitor.listen():
            if command["client_type"] != "lua":
                text = str(command["command"])
                verb = "lookup" if ":lease" in text else text.split(" ", 1)[0].lower()
                seen.append((int(command["client_port"]), verb))

    async with client, client.monitor() as monitor:
        following = asyncio.create_task(follow(monitor))
        try:
            yield seen
        finally:
            following.cancel()
            await asyncio.wait({following})


async def lookups(way: Way, process: Process, store_url: str, turns: int) -> dict[str, Any]:
    """Return what the router's process asks the store for over so many turns.

    By command; commands that name a lease are lookups, the others are not on any turn's way.
    """
    mine = talk(SHORT, 4, VOCABULARY)
    await way.play(mine)
    port = urlsplit(store_url).port or 6379
    async with _monitored(store_url) as seen:
        for _ in range(turns):
            await way.play(mine)
        ports = process.ports_to(port)
        # The last turn's commands are seen no later than those of one more.
        await way.play(mine)
        asked = [command for client, command in seen if client in ports]
    counts = {command: asked.count(command) for command in sorted(set(asked))}
    return {"turns": turns + 1, "commands": counts}


def found(record: Mapping[str, Any], name: str) -> float:
    """Return a value of the record by its dotted name."""
    value: Any = record
    for part in name.split("."):
        value = value[part]
    return float(value)


def missed(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every target that the record misses."""
    sentences = []
    for name, (bound, target) in TARGETS.items():
        value = found(record, name)
        if value > target if bound == "at most" else value < target:
            sentences.append(f"{name} is {value:,.3g}, {bound} {target:,} wanted")
    rates = record["turns_per_cpu_second"]
    if rates["router"] <= rates.get("vllm-router", 0):
        sentences.append(
            f"vllm-router serves {rates['vllm-router']} turns of 24k per CPU second, we {rates['router']}"
        )
    slope_of = record["memory_slope"]
    if slope_of["ci_low"] > 0:
        sentences.append(f"memory grows by {slope_of['bytes_per_turn']} bytes per turn")
    return sentences


def median_ms(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return medians by way."""
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}
