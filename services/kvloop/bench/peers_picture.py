"""Peers in one picture: what each adds to the first chunk, what a turn costs, TTFT over a conversation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvloop.bench.picture_style import DPI, STYLE

# Okabe and Ito's colours, which colour-blind people tell apart.
_COLOURS = {
    "kvloop": "#0072B2",
    "kvloop-grpc": "#56B4E9",
    "kvloop-direct": "#009E73",
    "proxy": "#D55E00",
    "toy-proxy": "#E69F00",
    "vllm-router": "#CC79A7",
    "floor": "#999999",
    "prefill-alone": "#000000",
}
_CELLS = (("500", "at_once_1"), ("500", "at_once_8"), ("24000", "at_once_1"), ("24000", "at_once_8"))


def draw(stem: Path, record: Mapping[str, Any]) -> list[Path]:
    """Write the record's picture as stem.png and stem.svg and return the files."""
    files = []
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(14, 4.8))
        added, cost, ttft = figure.subplots(1, 3)
        _added(added, record["peers"])
        _cost(cost, record["peers"])
        _ttft(ttft, record["peers"])
        figure.suptitle(f"{record['machine']}, {record['when']}", fontsize=10)
        kinds: tuple[tuple[str, Any], ...] = (("png", {"Software": None}), ("svg", {"Date": None}))
        for kind, extra in kinds:
            file = stem.with_suffix(f".{kind}")
            figure.savefig(file, dpi=DPI, metadata=extra)
            files.append(file)
    return files


def _added(axes: Axes, peers: Mapping[str, Any]) -> None:
    shown = {}
    for name, peer in peers.items():
        cells = [peer["overhead"].get(tokens, {}).get(cell, {}).get("added_ms") for tokens, cell in _CELLS]
        if any(cells):
            shown[name] = [cell["p50"] if cell else 0.0 for cell in cells]
    _bars(axes, shown)
    labels = [f"{int(tokens):,} ids\n{cell.removeprefix('at_once_')} at once" for tokens, cell in _CELLS]
    axes.set_xticks(range(len(_CELLS)), labels)
    axes.set(title="added to the first chunk, median", ylabel="ms over calling P and D")


def _cost(axes: Axes, peers: Mapping[str, Any]) -> None:
    shown = {}
    for name, peer in peers.items():
        costs = [peer["overhead"].get(tokens, {}).get("cost") for tokens in ("500", "24000")]
        if any(costs):
            shown[name] = [cost["turns_per_cpu_s"] if cost else 0.0 for cost in costs]
    _bars(axes, shown)
    axes.set_xticks(range(2), ["500 ids", "24,000 ids"])
    axes.set(title="turns of 32 chunks per CPU second", ylabel="turns")


def _bars(axes: Axes, shown: Mapping[str, list[float]]) -> None:
    width = 0.84 / max(1, len(shown))
    for number, (name, values) in enumerate(shown.items()):
        places = [at + (number - (len(shown) - 1) / 2) * width for at in range(len(values))]
        axes.bar(places, values, width * 0.92, color=_COLOURS.get(name), label=name)
    axes.grid(axis="x", visible=False)
    if shown:
        axes.legend(fontsize=8)


def _ttft(axes: Axes, peers: Mapping[str, Any]) -> None:
    axes.set(title="TTFT over a conversation, real vLLM", xlabel="prompt, tokens", ylabel="ms (log scale)")
    for name, peer in peers.items():
        turns = (peer.get("real") or {}).get("turns")
        if not turns:
            continue
        places = [turn["prompt_tokens"] for turn in turns.values()]
        axes.plot(
            places,
            [turn["ttft_ms"]["value"] for turn in turns.values()],
            marker="o",
            ms=4,
            color=_COLOURS.get(name),
            label=name,
        )
        axes.set_yscale("log")
    if axes.lines:
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="#777777")
