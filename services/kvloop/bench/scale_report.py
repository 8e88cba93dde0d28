"""A run of `kvloop bench scale` as text."""

from collections.abc import Mapping
from typing import Any

from kvloop.bench.scale import AXES, FLAT

_NEEDS = {
    "turns_per_s": "turns per second",
    "router_cpu_ms_per_turn": "router CPU per turn, ms",
    "routers": "routers, a core each",
    "router_gbit_per_s": "network of all routers, Gbit/s",
    "store_gb": "store memory, GB",
    "store_requests_per_s": "store requests per second",
    "store_cores": "store, cores",
    "store_mbit_per_s": "network of the store, Mbit/s",
}


def table(record: Mapping[str, Any]) -> str:
    """Return what was measured along each axis, and what a million conversations need."""
    lines = []
    for axis in AXES:
        grown = record["growth"].get(axis, {})
        if not grown:
            continue
        places = max((found["at"] for found in grown.values()), key=len)
        lines.append(_row(axis, [f"{place:,}" for place in places], "flat to"))
        for name, found in grown.items():
            what, unit = FLAT[name]
            values = [figure(value) for value in found["values"]]
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
            row = [f"{what}, {unit}" if unit else what, *map(figure, found["values"])]
            lines.append(_line([*row, f"{found['flat_to']:,}"]))
        lines.append("")
    cpu, last = record["router_cpu"], record["all"]
    lines += [
        f"A turn's parts: {cpu['turn_ms']:.2f} ms, {cpu['chunk_ms']:.3f} ms per chunk,"
        f" {cpu['kilotoken_ms']:.3f} ms per thousand prompt tokens, of a router's CPU. With {last['routers']}"
        f" routers and {last['workers']:,} workers a turn takes {figure(last['turn']['router_cpu_ms'])} ms.",
        "",
    ]
    took = record["million_conversations"]["measured"]
    lines += [
        f"Reckoned with {took['turn_ms']:.2f} ms of a turn besides chunks and prompt, as with"
        f" {took['workers']:,} workers, and {took['routers_factor']:.2f} times all of it, as with"
        f" {took['routers']} routers.",
        "",
    ]
    needed = record["million_conversations"]["needs"]
    lines += _table(["gap, s", *(figure(need["gap_s"]) for need in needed)])
    lines += [_line([what, *(figure(need[name]) for need in needed)]) for name, what in _NEEDS.items()]
    return "\n".join(lines) + "\n"


def _table(head: list[str]) -> list[str]:
    return [_line(head), "|" + "---|" * len(head)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def figure(value: float) -> str:
    """Return a number in few digits."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _row(name: str, values: list[str], last: str = "") -> str:
    return f"{name:<44}" + "".join(f"{value:>10}" for value in values) + (f"   {last}" if last else "")
