"""The picture of `kvloop bench scale`: each cost along each axis, as a multiple of the axis's first point."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from kvloop.bench.picture_style import DPI, STYLE
from kvloop.bench.scale import AXES, BEGINS_TO_GROW, FLAT
from kvloop.bench.scale_report import figure as few_digits

# Okabe and Ito's colours, which colour-blind people tell apart.
_PANELS = (
    (
        "of a turn",
        {
            "turn.router_cpu_ms": "#0072B2",
            "turn.store_cpu_us": "#D55E00",
            "turn.store_requests": "#E69F00",
            "steps_ms.place": "#009E73",
            "lookup_us.p50": "#CC79A7",
            "bytes_per_conversation": "#000000",
        },
    ),
    (
        "of a router and of the store, with no turn going on",
        {
            "idle.router_cpu_ms": "#0072B2",
            "idle.store_cpu_ms": "#D55E00",
            "router_rss_mb": "#999999",
        },
    ),
)
_MARKS = "osD^vP"


def draw(file: Path, record: Mapping[str, Any]) -> None:
    """Write the picture as PNG."""
    with mpl.rc_context(STYLE):
        sheet_of(record).savefig(file, dpi=DPI, metadata={"Software": None})


def sheet_of(record: Mapping[str, Any]) -> Figure:
    """Return the picture."""
    axes_measured = [axis for axis in AXES if len(record["points"].get(axis, ())) > 1]
    sheet = Figure(figsize=(4.8 * max(1, len(axes_measured)), 10.4))
    panels = sheet.subplots(len(_PANELS), max(1, len(axes_measured)), squeeze=False)
    for row, (title, costs) in enumerate(_PANELS):
        top = max((_top(record, axis, costs) for axis in axes_measured), default=2.0)
        for column, axis in enumerate(axes_measured):
            _panel(panels[row][column], record["growth"][axis], axis, costs, top)
        panels[row][0].set_title(f"costs {title}", loc="left", fontsize=10, fontweight="bold")
        for panel in panels[row]:
            panel.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), fontsize=8)
    load = " to ".join(map(str, record["load_average"]))
    sheet.suptitle(
        f"kvloop: what grows with workers, conversations and routers ({record['when']}, "
        f"{record['machine']}, load {load})\nmultiples of the leftmost point, whose own value is below"
        f" the panel; up to the dotted line ({BEGINS_TO_GROW}) counts as flat",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return sheet


def _multiples(found: Mapping[str, Any]) -> list[float]:
    return [value / found["values"][0] for value in found["values"]]


def _top(record: Mapping[str, Any], axis: str, costs: Mapping[str, str]) -> float:
    grown = record["growth"][axis]
    return max((m for name in costs if name in grown for m in _multiples(grown[name])), default=2.0)


def _panel(axes: Axes, grown: Mapping[str, Any], axis: str, costs: Mapping[str, str], top: float) -> None:
    places: list[float] = []
    for mark, (name, colour) in zip(_MARKS, costs.items(), strict=False):
        if name not in grown:
            continue
        found, (what, unit) = grown[name], FLAT[name]
        places = max(places, found["at"], key=len)
        label = f"{what}: {few_digits(found['values'][0])}{f' {unit}' if unit else ''}"
        axes.plot(found["at"], _multiples(found), marker=mark, color=colour, label=label, lw=1.8, ms=5)
    axes.axhline(BEGINS_TO_GROW, color="#666666", ls=":", lw=1)
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log")
    # From a half to two there is a single power of ten.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_ylim(0.5, max(2.0, 1.3 * top))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(axis)
