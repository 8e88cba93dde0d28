"""A run of `kvloop bench scale` as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvloop.bench.scale import AXES, FLAT

_NEEDS = {
    "turns_per_s": "turns per second",
    "router_cpu_ms_per_turn": "router CPU per turn, ms",
    "routers": "routers, a core each",
    "router_gbit_per_s": "prompts and answers through all routers, Gbit/s",
    "store_gb": "store memory, GB",
    "store_requests_per_s": "store requests per second",
    "store_requests_per_s_of_turns": "of them for turns",
    "store_cores": "store, cores",
    "store_cores_of_turns": "of them for turns",
    "store_gbit_per_s": "network of the store, Gbit/s",
    "store_gbit_per_s_of_turns": "of it for turns",
}
NOT_MEASURED = "not measured"


def table(record: Mapping[str, Any]) -> str:
    """Return what was measured along each axis, and what a million conversations need."""
    lines = []
    for axis in AXES:
        grown = record["growth"].get(axis, {})
        if not grown:
            continue
        places = [point[axis] for point in record["points"][axis]]
        lines.append(_row(axis, [f"{place:,}" for place in places], "flat to"))
        for name, found in grown.items():
            what, unit = FLAT[name]
            values = _along(places, found)
            lines.append(_row(f"  {what}{f', {unit}' if unit else ''}", values, f"{found['flat_to']:,}"))
        lines.append("")
    needed = record["million_conversations"]["needs"]
    many = record["million_conversations"]["assumed"]["conversations"]
    lines.append(_row(f"{many:,} conversations, gap in s", [figure(need["gap_s"]) for need in needed]))
    lines += [_row(f"  {what}", [figure(need[name]) for need in needed]) for name, what in _NEEDS.items()]
    return "\n".join(lines)


def markdown(record: Mapping[str, Any]) -> str:
    """Return the tables of docs/scale.md: what was found along each axis, then the needs."""
    low, high = record["load_average"]
    lines = [f"{record['when'][:10]}, {record['machine']}, load average {low} to {high}.", ""]
    for axis in AXES:
        grown = record["growth"].get(axis, {})
        places = [point[axis] for point in record["points"][axis]]
        if not grown or len(places) < 2:
            continue
        lines += _table([axis, *(f"{place:,}" for place in places), "flat to"])
        for name, found in grown.items():
            what, unit = FLAT[name]
            row = [f"{what}, {unit}" if unit else what, *_along(places, found)]
            lines.append(_line([*row, f"{found['flat_to']:,}"]))
        lines.append("")
    cpu, last = record["router_cpu"], record["all"]
    whole = figure(last["turn"]["router_cpu_ms"])
    lines += [
        f"A turn's parts: {_fixed(cpu['turn_ms'], 2)} ms, {_fixed(cpu['chunk_ms'])} ms per chunk,"
        f" {_fixed(cpu['kilotoken_ms'])} ms per thousand prompt tokens, of a router's CPU."
        f" With {last['routers']} routers and {last['workers']:,} workers a turn takes {whole} ms.",
        "",
        *_reckoned_with(record["million_conversations"]["measured"]),
        "",
    ]
    needed = record["million_conversations"]["needs"]
    lines += _table(["gap, s", *(figure(need["gap_s"]) for need in needed)])
    lines += [_line([what, *(figure(need[name]) for need in needed)]) for name, what in _NEEDS.items()]
    return "\n".join(lines) + "\n"


def _reckoned_with(took: Mapping[str, Any]) -> list[str]:
    """Return what the needs follow from, one line each for routers and store."""
    lines = [
        f"Reckoned with {_fixed(took['turn_ms'], 2)} ms of a turn besides chunks and prompt, as with"
        f" {took['turn_workers']:,} workers, and {took['routers_factor']:.2f} times all of it, as with"
        f" {took['routers']} routers."
    ]
    background = [
        f"{what} {figure(idle['workers'])} and {figure(idle['router'])}" if idle else f"{what} {NOT_MEASURED}"
        for what, idle in (
            ("ms of CPU", took["store_idle_ms"]),
            ("requests", took["store_idle_requests"]),
            ("bytes", took["store_idle_bytes"]),
        )
    ]
    lines.append(
        f"The store without turns, per second, for {took['workers']:,} workers and for each router:"
        f" {', '.join(background)}."
    )
    return lines


def _along(places: Sequence[int], found: Mapping[str, Any]) -> list[str]:
    """Return a cost at each place of its axis."""
    values = dict(zip(found["at"], found["values"], strict=True))
    return [figure(values.get(place)) for place in places]


def _fixed(value: float | None, digits: int = 3) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def _table(head: list[str]) -> list[str]:
    return [_line(head), "|" + "---|" * len(head)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def figure(value: float | None) -> str:
    """Return a number in few digits."""
    if value is None:
        return NOT_MEASURED
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _row(name: str, values: list[str], last: str = "") -> str:
    return f"{name:<44}" + "".join(f"{value:>13}" for value in values) + (f"   {last}" if last else "")
