"""The article's two pictures from a sweep's summary, with the article's own figures beside them.

TTFT against prompt length, and the prefill leg as grouped stacked bars (compute, transfer). Theirs stands in
panels with axes of their own: other hardware, so only the shapes compare.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvloop.bench.article import TABLES, ArticleTable
from kvloop.bench.picture_style import DPI, STYLE
from kvloop.bench.report import lengths_of, spread
from kvloop.bench.statistics import bounds

# Okabe and Ito's colours, which colour-blind people tell apart.
_COLOURS = {"off-cold": "#D55E00", "off-hot": "#E69F00", "readback": "#0072B2", "direct": "#009E73"}
_OTHER = ("#CC79A7", "#56B4E9", "#999999", "#000000", "#F0E442")
_MARKS = {"off-cold": "s", "off-hot": "^", "readback": "o", "direct": "D"}
_LABELS = {
    "off-cold": "off, P without prefix cache",
    "off-hot": "off, P with prefix cache",
    "readback": "readback (D to P)",
    "direct": "direct (D alone)",
    "off-moved": "off, another P",
    "readback-moved": "readback, another P",
    "off-evicted": "off, P's cache overrun",
    "readback-evicted": "readback, P's cache overrun",
}
_LOG_FROM = 20.0
"""Above this ratio of the largest to the smallest TTFT the axis is logarithmic."""


def draw(folder: Path, summary: Mapping[str, Any], titled: str) -> list[Path]:
    """Write ttft and prefill as PNG and SVG and return the files. titled: what was measured, in a line."""
    files = []
    with mpl.rc_context(STYLE):
        for name, figure in (("ttft", _ttft(summary, titled)), ("prefill", _prefill(summary, titled))):
            for kind, extra in (("png", {"Software": None}), ("svg", {"Date": None})):
                file = folder / f"{name}.{kind}"
                figure.savefig(file, dpi=DPI, metadata=extra)
                files.append(file)
    return files


def _panels(title: str) -> tuple[Figure, Axes, list[Axes]]:
    figure = Figure(figsize=(12.5, 5.2))
    grid = figure.add_gridspec(2, 2, width_ratios=(2.3, 1))
    ours = figure.add_subplot(grid[:, 0])
    theirs = [figure.add_subplot(grid[row, 1]) for row in range(len(TABLES))]
    figure.suptitle(title, fontsize=12.5, fontweight="bold")
    return figure, ours, theirs


def _ttft(summary: Mapping[str, Any], titled: str) -> Figure:
    figure, ours, theirs = _panels("Time to first token against prompt length")
    values: list[float] = []
    ends: list[tuple[float, float, str, str]] = []
    for leg, cells in summary["legs"].items():
        lengths = sorted(cells, key=int)
        if not lengths:
            continue
        places = [int(length) for length in lengths]
        middles = [cells[length]["ttft_ms"]["value"] for length in lengths]
        colour = _colour(leg, summary)
        ours.plot(places, middles, marker=_MARKS.get(leg, "v"), color=colour, label=_label(leg), lw=2, ms=6)
        lows, highs = zip(*(_bounds(cells[length]["ttft_ms"]) for length in lengths), strict=True)
        ours.fill_between(places, lows, highs, color=colour, alpha=0.18, lw=0)
        values += middles
        gain = summary["speedup"].get(leg, {}).get(lengths[-1])
        text = f"{_ms(middles[-1])} ms" + ("" if gain is None else f"  (÷{gain['value']:.1f})")
        ends.append((places[-1], middles[-1], text, colour))
    logarithmic = bool(values) and max(values) > _LOG_FROM * min(values)
    if logarithmic:
        ours.set_yscale("log")
        ours.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ours.yaxis.set_minor_formatter(NullFormatter())
    else:
        ours.set_ylim(bottom=0)
    _thousands(ours)
    _length_axis(ours, [int(length) for length in lengths_of(summary)])
    _name_ends(ours, ends)
    ours.set(xlabel="prompt length, tokens", ylabel=f"TTFT, ms{' (log scale)' if logarithmic else ''}")
    ours.set_title(f"{titled}\nmedian{_samples(summary)}; band: {spread(summary)}", fontsize=10, loc="left")
    ours.legend(loc="upper left")
    for axes, table in zip(theirs, TABLES, strict=True):
        _their_lines(axes, table)
    return figure


def _their_lines(axes: Axes, table: ArticleTable) -> None:
    places = [table.short_tokens, table.long_tokens]
    curves = ((table.ttft_off, "off-cold", "off", 5, "bottom"), (table.ttft_on, "readback", "on", -6, "top"))
    for ends, leg, label, shift, side in curves:
        values = [ends.short, ends.long]
        axes.plot(places, values, ls="--", marker=_MARKS[leg], color=_COLOURS[leg], label=label, lw=1.5)
        for place, value in zip(places, values, strict=True):
            axes.annotate(
                _ms(value),
                (place, value),
                (0, shift),
                textcoords="offset points",
                ha="center",
                va=side,
                fontsize=8,
            )
    axes.set_ylim(0, max(table.ttft_off.long, table.ttft_on.long) * 1.2)
    axes.margins(x=0.12)
    _length_axis(axes, places)
    axes.set_ylabel("TTFT, ms")
    _thousands(axes)
    axes.set_title(f"{table.label}\n(published: ends only)", fontsize=9, loc="left", color="#444444")
    axes.legend(loc="upper left", fontsize=8)


def _prefill(summary: Mapping[str, Any], titled: str) -> Figure:
    figure, ours, theirs = _panels("Prefill leg: computing and transfer from D to P")
    lengths, legs = lengths_of(summary), list(summary["legs"])
    width = 0.84 / max(len(legs), 1)
    tallest = max((_total(c) for cells in summary["legs"].values() for c in cells.values()), default=1.0)
    for number, leg in enumerate(legs):
        cells = summary["legs"][leg]
        for index, length in enumerate(lengths):
            if length not in cells:
                continue
            total, transfer = _total(cells[length]), cells[length]["transfer_ms"]["value"]
            place = index + (number - (len(legs) - 1) / 2) * width
            _bar(
                ours,
                place,
                width * 0.9,
                total=total,
                transfer=min(transfer, total),
                colour=_colour(leg, summary),
                tallest=tallest,
            )
    ours.set_xticks(range(len(lengths)), [_k(int(length)) for length in lengths])
    ours.grid(axis="x", visible=False)
    ours.set_ylim(0, (tallest or 1.0) * 1.12)
    ours.set(xlabel="prompt length, tokens", ylabel="duration of the prefill leg, ms")
    _thousands(ours)
    ours.set_title(f"{titled}\nmedian{_samples(summary)}", fontsize=10, loc="left")
    _bar_legend(ours, legs, summary)
    for axes, table in zip(theirs, TABLES, strict=True):
        _their_bars(axes, table)
    return figure


def _bar(
    axes: Axes, place: float, width: float, *, total: float, transfer: float, colour: str, tallest: float
) -> None:
    """Draw computing below, transfer (hatched) on top, and what both are together."""
    axes.bar(place, total - transfer, width, color=colour)
    if transfer > 0:
        axes.bar(
            place,
            transfer,
            width,
            bottom=total - transfer,
            color="white",
            edgecolor=colour,
            hatch="////",
            lw=0.8,
        )
    axes.text(
        place, total + tallest * 0.01, _ms(total), ha="center", va="bottom", fontsize=7.5, color="#333333"
    )


def _bar_legend(axes: Axes, legs: list[str], summary: Mapping[str, Any]) -> None:
    for leg in legs:
        axes.bar(0, 0, 0, color=_colour(leg, summary), label=f"{_label(leg)}: computing")
    axes.bar(0, 0, 0, color="white", edgecolor="#444444", hatch="////", lw=0.8, label="transfer D to P")
    axes.legend(loc="upper left")


def _their_bars(axes: Axes, table: ArticleTable) -> None:
    tallest = max(table.prefill_off.long, table.prefill_on.long)
    for index, end in enumerate(("short", "long")):
        off, on = getattr(table.prefill_off, end), getattr(table.prefill_on, end)
        _bar(axes, index - 0.2, 0.36, total=off, transfer=0.0, colour=_COLOURS["off-cold"], tallest=tallest)
        _bar(
            axes,
            index + 0.2,
            0.36,
            total=on,
            transfer=getattr(table.transfer, end),
            colour=_COLOURS["readback"],
            tallest=tallest,
        )
    for leg, label in (("off-cold", "off"), ("readback", "on")):
        axes.bar(0, 0, 0, color=_COLOURS[leg], label=label)
    axes.set_xticks((0, 1), [_k(table.short_tokens), _k(table.long_tokens)])
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, tallest * 1.15)
    axes.set_ylabel("prefill, ms")
    _thousands(axes)
    axes.set_title(f"{table.label}\n(published: ends only)", fontsize=9, loc="left", color="#444444")
    axes.legend(loc="upper left", fontsize=8)


def _name_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write values beside the curves' ends, pushed apart where they would overlap."""
    axes.margins(x=0.04)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + (right - left) * 0.17)
    height = axes.get_window_extent().height
    least, last = 13.0 * axes.figure.dpi / 72, -1e9
    for place, value, text, colour in sorted(ends, key=lambda end: end[1]):
        pixels = axes.transData.transform((place, value))[1]
        wanted = max(pixels, last + least)
        last = min(wanted, height * 2)
        shift = (wanted - pixels) * 72 / axes.figure.dpi
        axes.annotate(
            text,
            (place, value),
            (9, shift),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
        )


def _length_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xticks(lengths, [_k(length) for length in lengths])


def _samples(summary: Mapping[str, Any]) -> str:
    counts = {cell["ttft_ms"]["n"] for cells in summary["legs"].values() for cell in cells.values()}
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    return f" of {least}" if least == most else f" of {least} to {most}"


def _thousands(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _ms(value) if value else "0"))


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _total(cell: Mapping[str, Any]) -> float:
    return float(cell["prefill_ms"]["value"])


def _bounds(estimate: Mapping[str, Any]) -> tuple[float, float]:
    return bounds(estimate) or (estimate["value"], estimate["value"])


def _label(leg: str) -> str:
    return _LABELS.get(leg, leg)


def _colour(leg: str, summary: Mapping[str, Any]) -> str:
    others = [name for name in summary["legs"] if name not in _COLOURS]
    return _COLOURS[leg] if leg in _COLOURS else _OTHER[others.index(leg) % len(_OTHER)]
