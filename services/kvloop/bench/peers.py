"""Routers and proxies in front of the same engines, in one run: what each adds, and what it costs.

A way is one place that a turn can be sent to. Its floor is the same turn with nothing in between: the
client calls the same P and D itself. Ways take turns, round by round, so that whatever else the machine does
hits all alike; one that fails is left out from there on, with the reason.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvloop.bench.router import CHUNKS, LONG, SHORT, VOCABULARY, Measured, Process, percentile, play_many
from kvloop.bench.router_traffic import Talk, TurnLost, Way, talk

LENGTHS = (SHORT, LONG)
AT_ONCE = (1, 8)
FIRST_CHUNK_TOKENS = 4
_WARM_UP = 10
FLOOR, GRPC_FLOOR = "floor", "floor-grpc"
FLOORS = (FLOOR, GRPC_FLOOR)
Failed = (TurnLost, OSError, ValueError, KeyError, grpc.RpcError)
"""What ends a way's part in a measurement."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A way that is measured."""

    way: Way
    floor: str
    """Name of the way with nothing in between."""
    pids: tuple[int, ...] = ()
    """Processes that are between client and engines; none for a floor."""

    def cpu_s(self) -> float:
        """Return the CPU time that they have spent so far, in seconds."""
        return sum(Process(pid).cpu_s() for pid in self.pids)

    def verdicts(self) -> Counter[str]:
        """Return how turns after a conversation's first came by their KV, where the way is told."""
        found: Counter[str] | None = getattr(self.way, "verdicts", None)
        return Counter() if found is None else found


@dataclass(slots=True)
class Field:
    """Who takes part, and why others no longer do."""

    entrants: dict[str, Entrant]
    lost: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, error: BaseException) -> None:
        """Leave an entrant out from here on."""
        # Of gRPC's errors the code alone: details may repeat what was sent.
        said = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
        self.lost[name] = f"{type(error).__name__}: {said}"
        del self.entrants[name]


async def first_chunks(
    field: Field, prompt_tokens: int, at_once: int, *, rounds: int, limit_s: float
) -> dict[str, list[float]]:
    """Return milliseconds to the first chunk by name, of so many turns at once, in changing order."""
    until = time.monotonic() + limit_s
    talks = {name: _talks(prompt_tokens, FIRST_CHUNK_TOKENS, at_once) for name in field.entrants}
    samples: dict[str, list[float]] = {name: [] for name in field.entrants}
    order = list(field.entrants)
    for number in range(rounds + _WARM_UP):
        # An even number of rounds, so that nobody is favoured by the order.
        if number > 2 * _WARM_UP and number % 2 == 0 and time.monotonic() > until:
            break
        for name in [name for name in order if name in field.entrants]:
            way = field.entrants[name].way
            try:
                played = await asyncio.gather(*map(way.play, talks[name]))
            except Failed as error:
                field.drop(name, error)
                continue
            if number >= _WARM_UP:
                samples[name] += [round(one.first_ms, 4) for one in played]
        order.reverse()
    return samples


async def cpu(
    field: Field, prompt_tokens: int, *, at_once: int, turns: int, rounds: int, limit_s: float
) -> list[Measured]:
    """Return what turns of 32 chunks cost each that has processes of its own, stretch by stretch."""
    until = time.monotonic() + limit_s
    names = [name for name, entrant in field.entrants.items() if entrant.pids]
    talks = {name: _talks(prompt_tokens, CHUNKS, at_once) for name in names}
    measured: list[Measured] = []
    # The first stretch of each warms up.
    for number in range(-1, rounds):
        if number > 0 and number % 2 == 0 and time.monotonic() > until:
            break
        for name in [name for name in names if name in field.entrants]:
            entrant = field.entrants[name]
            before, begun = entrant.cpu_s(), time.perf_counter()
            share = at_once if number < 0 else max(1, turns // rounds)
            try:
                played, chunks = await play_many(entrant.way, talks[name], share)
            except BaseExceptionGroup as group:
                if group.split(Failed)[1] is not None:
                    raise
                field.drop(name, _first(group))
                continue
            if number >= 0:
                spent, wall = entrant.cpu_s() - before, time.perf_counter() - begun
                measured.append(Measured(name, played, chunks, spent, wall))
        names.reverse()
    return measured


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _talks(prompt_tokens: int, output_tokens: int, count: int) -> list[Talk]:
    return [talk(prompt_tokens, output_tokens, VOCABULARY) for _ in range(count)]


def astray(verdicts: Mapping[str, int], wanted: str) -> str:
    """Return what turns were that should have had another verdict, for people; empty when all had it."""
    other = {name: count for name, count in verdicts.items() if wanted and name != wanted}
    if not other:
        return ""
    told = ", ".join(f"{name or 'none told'} x{count}" for name, count in sorted(other.items()))
    return f"{sum(other.values())} of {sum(verdicts.values())} later turns not {wanted}: {told}"


Firsts = Mapping[tuple[int, int], Mapping[str, Sequence[float]]]
"""Milliseconds by (prompt tokens, turns at once), then by name."""
Costs = Mapping[int, Sequence[Measured]]
"""Stretches by prompt tokens."""


def figures(name: str, floor: str, firsts: Firsts, costs: Costs) -> dict[str, Any]:
    """Return one entrant's figures: by prompt tokens, then by turns at once, and what a turn costs."""
    record: dict[str, Any] = {}
    for (tokens, at_once), samples in firsts.items():
        mine, theirs = samples.get(name), samples.get(floor)
        if not mine:
            continue
        cell: dict[str, Any] = {"first_chunk_ms": _percentiles(mine), "samples": len(mine)}
        if theirs and name != floor:
            own, other = cell["first_chunk_ms"], _percentiles(theirs)
            cell["added_ms"] = {share: round(own[share] - other[share], 3) for share in own}
        record.setdefault(str(tokens), {})[f"at_once_{at_once}"] = cell
    for tokens, stretches in costs.items():
        mine_too = [one for one in stretches if one.way == name]
        turns, spent = sum(one.turns for one in mine_too), sum(one.cpu_s for one in mine_too)
        if turns and spent:
            record.setdefault(str(tokens), {})["cost"] = {
                "turns_per_cpu_s": round(turns / spent, 1),
                "cpu_ms_per_turn": round(1000 * spent / turns, 3),
                "chunks_per_turn": round(sum(one.chunks for one in mine_too) / turns, 1),
                "samples": turns,
            }
    return record


def samples_of(record: Mapping[str, Any]) -> int:
    """Return how many turns stand behind one entrant's figures."""
    return sum(cell["samples"] for cells in record.values() for cell in cells.values())


def _percentiles(samples: Sequence[float]) -> dict[str, float]:
    return {name: round(percentile(samples, share), 3) for name, share in (("p50", 0.5), ("p99", 0.99))}


def lines(peers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of a record, for people."""
    head = ("first chunk added, ms", *(f"{tokens:,} ids, {n} at once" for tokens in LENGTHS for n in AT_ONCE))
    rows = [(*head, *(f"turns per CPU s, {tokens:,}" for tokens in LENGTHS))]
    for name, peer in peers.items():
        shown = peer.get("overhead") or {}
        cells = [_added(shown, tokens, n) for tokens in LENGTHS for n in AT_ONCE]
        costs = [shown.get(str(tokens), {}).get("cost") for tokens in LENGTHS]
        rates = [f"{cost['turns_per_cpu_s']:,.0f}" if cost else "" for cost in costs]
        reason = [peer["reason"]] if peer.get("reason") else []
        rows.append((name, *cells, *rates, *reason))
    return [" | ".join(row).rstrip(" |") for row in rows]


def _added(shown: Mapping[str, Any], tokens: int, at_once: int) -> str:
    cell = shown.get(str(tokens), {}).get(f"at_once_{at_once}")
    if not cell:
        return ""
    if "added_ms" not in cell:
        return f"({cell['first_chunk_ms']['p50']:.2f} in all)"
    return f"{cell['added_ms']['p50']:+.2f} / {cell['added_ms']['p99']:+.2f}"
