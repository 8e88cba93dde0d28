"""What a sweep's records say: summary.json and summary.md. Only measured requests count."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvloop.bench import statistics
from kvloop.bench.article import TABLES, ArticleTable
from kvloop.bench.records import Record
from kvloop.bench.sweep import BASELINE, LEGS, stray

_TIMES = ("ttft_ms", "tpot_ms", "latency_ms", "prefill_ms", "transfer_ms", "handoff_ms")
_SOURCES = ("p_local", "readback", "d_local", "computed")


def summarise(records: Sequence[Record], settings: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
    """Return a sweep's summary. complete: whether the run came to its end."""
    cells, left_out = _cells(records)
    failures = [record.error for record in records if record.error]
    return {
        "complete": complete,
        "settings": dict(settings),
        "legs": {leg: _leg(leg, cells) for leg in _legs([*cells, *left_out])},
        "speedup": _speedups(cells),
        "identical_answers": _identical(records, "answer_digest"),
        "identical_prompts": _identical(records, "prompt_digest"),
        "requests": len(records),
        "measured": sum(len(cell) for cell in cells.values()),
        "left_out": _left_out(left_out),
        "failures": {"count": len(failures), "first": failures[0] if failures else ""},
        "article": [_theirs(table) for table in TABLES],
    }


Cells = dict[tuple[str, int], list[Record]]


def _cells(records: Sequence[Record]) -> tuple[Cells, Cells]:
    """Return the measured turns by leg and length: those that count, and those that went another way."""
    counted: Cells = {}
    others: Cells = {}
    for record in records:
        if record.measured and not record.error:
            cells = others if stray(record) else counted
            cells.setdefault((record.leg, record.nominal_tokens), []).append(record)
    return counted, others


def _left_out(cells: Cells) -> dict[str, Any]:
    """Return how many turns do not count and what they were, by leg and length."""
    found: dict[str, Any] = {}
    for (leg, length), cell in sorted(cells.items()):
        found.setdefault(leg, {})[str(length)] = dict(sorted(Counter(map(stray, cell)).items()))
    return found


def lacking(summary: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each leg and length of which every measured turn went another way."""
    return [
        f"{leg} at {int(length):,} tokens: none of its {sum(ways.values())} turns counts ({_ways(ways)})"
        for leg, lengths in summary["left_out"].items()
        for length, ways in lengths.items()
        if length not in summary["legs"][leg]
    ]


def _ways(ways: Mapping[str, int]) -> str:
    return "; ".join(f"{way} x{count}" for way, count in ways.items())


def _legs(places: Iterable[tuple[str, int]]) -> list[str]:
    found = {leg for leg, _ in places}
    return [leg for leg in LEGS if leg in found] + sorted(found - set(LEGS))


def _leg(leg: str, cells: Cells) -> dict[str, Any]:
    return {str(length): _cell(cell) for (name, length), cell in sorted(cells.items()) if name == leg}


def _cell(cell: Sequence[Record]) -> dict[str, Any]:
    verdicts: dict[str, int] = {}
    for record in cell:
        verdicts[record.verdict] = verdicts.get(record.verdict, 0) + 1
    times = {name: statistics.median([getattr(record, name) for record in cell]).as_dict() for name in _TIMES}
    return {
        **times,
        "verdicts": verdicts,
        "tokens": {
            source: statistics.median([record.tokens.get(source, 0) for record in cell]).value
            for source in _SOURCES
        },
        "bytes": statistics.median([record.bytes for record in cell]).value,
        "descriptors": statistics.median([record.descriptors for record in cell]).value,
    }


def _speedups(cells: Cells) -> dict[str, Any]:
    """Return TTFT of the baseline over that of every other leg, by length."""
    found: dict[str, Any] = {}
    for (leg, length), cell in sorted(cells.items()):
        baseline = cells.get((BASELINE, length))
        if leg == BASELINE or baseline is None:
            continue
        ratio = statistics.ratio([r.ttft_ms for r in baseline], [r.ttft_ms for r in cell])
        found.setdefault(leg, {})[str(length)] = ratio.as_dict()
    return found


def _identical(records: Sequence[Record], digest: str) -> dict[str, int]:
    """Return in how many samples all legs have the same digest, of those that more than one leg measured."""
    groups: dict[tuple[int, int], list[str]] = {}
    for record in records:
        if record.measured and not record.error:
            groups.setdefault((record.nominal_tokens, record.repetition), []).append(getattr(record, digest))
    shared = [group for group in groups.values() if len(group) > 1]
    return {"samples": len(shared), "identical": sum(len(set(group)) == 1 for group in shared)}


def _theirs(table: ArticleTable) -> dict[str, Any]:
    def ends(name: str) -> dict[str, float]:
        value = getattr(table, name)
        return {str(table.short_tokens): value.short, str(table.long_tokens): value.long}

    names = ("ttft_off", "ttft_on", "prefill_off", "prefill_on", "transfer")
    return {"label": table.label, **{f"{name}_ms": ends(name) for name in names}}


def markdown(summary: Mapping[str, Any]) -> str:
    """Return a summary for people."""
    settings = summary["settings"]
    lines = ["# Sweep over prompt lengths", ""]
    if not summary["complete"]:
        lines += ["**The run was ended early; this is what it had measured until then.**", ""]
    if settings.get("engine") == "simulated":
        lines += ["**Simulated engines: times come from a cost model, not from a measurement.**", ""]
    lines += [f"TTFT of the second turn at the client, in ms: median and {spread(summary)}.", ""]
    lines += _ttft_table(summary)
    lines += ["", "Where the time of the prefill leg goes, in ms (medians), and what was read:", ""]
    lines += _prefill_table(summary)
    lines += ["", "## Checks", ""]
    for what in ("prompts", "answers"):
        same = summary[f"identical_{what}"]
        lines.append(f"- {what} identical in all legs: {same['identical']} of {same['samples']} samples")
    failures = summary["failures"]
    first = f"; the first: {failures['first']}" if failures["count"] else ""
    lines.append(f"- failed requests: {failures['count']}{first}")
    lines += [
        f"- left out of {leg} at {int(length):,} tokens, not what the leg is: {_ways(ways)}"
        for leg, lengths in summary["left_out"].items()
        for length, ways in lengths.items()
    ]
    lines += ["", "## The article's figures", ""]
    lines += ["Theirs, other hardware: two p5en, TP8, EFA. Only the ends of their curves are published.", ""]
    lines += [
        "| | tokens | TTFT off | TTFT on | prefill off | prefill on | of it transfer |",
        "|---|" + "---:|" * 6,
    ]
    for table in summary["article"]:
        for tokens in table["ttft_off_ms"]:
            row = [table[f"{name}_ms"][tokens] for name in _ARTICLE_ROW]
            lines.append(
                f"| {table['label']} | {int(tokens):,} | " + " | ".join(f"{v:,}" for v in row) + " |"
            )
    lines += ["", "## Settings", ""]
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


_ARTICLE_ROW = ("ttft_off", "ttft_on", "prefill_off", "prefill_on", "transfer")


def _ttft_table(summary: Mapping[str, Any]) -> list[str]:
    legs, speedup = summary["legs"], summary["speedup"]
    lines = ["| tokens | " + " | ".join(legs) + " |", "|---:|" + "---:|" * len(legs)]
    for length in lengths_of(summary):
        row = []
        for leg, cells in legs.items():
            cell = cells.get(length)
            text = "" if cell is None else _estimate(cell["ttft_ms"])
            gain = speedup.get(leg, {}).get(length)
            row.append(text if gain is None else f"{text}, **x{gain['value']:.1f}**")
        lines.append(f"| {int(length):,} | " + " | ".join(row) + " |")
    return lines


def _prefill_table(summary: Mapping[str, Any]) -> list[str]:
    lines = [
        "| tokens | leg | verdict | prefill | of it D to P | MiB | descriptors"
        " | computed | read | P's cache | D's cache |",
        "|---:|---|---|" + "---:|" * 8,
    ]
    for length in lengths_of(summary):
        for leg, cells in summary["legs"].items():
            if length not in cells:
                continue
            cell = cells[length]
            tokens = cell["tokens"]
            counted = [tokens[source] for source in ("computed", "readback", "p_local", "d_local")]
            figures = [f"{cell['prefill_ms']['value']:.1f}", f"{cell['transfer_ms']['value']:.1f}"]
            figures += [f"{cell['bytes'] / 2**20:.1f}", f"{cell['descriptors']:.0f}"]
            figures += [f"{value:.0f}" for value in counted]
            verdicts = ", ".join(f"{name} x{count}" for name, count in cell["verdicts"].items())
            lines.append(f"| {int(length):,} | {leg} | {verdicts} | " + " | ".join(figures) + " |")
    return lines


def lengths_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the prompt lengths of a summary, ascending, as its keys."""
    return sorted({length for cells in summary["legs"].values() for length in cells}, key=int)


def spread(summary: Mapping[str, Any]) -> str:
    """Return what stands beside the medians of a summary's TTFT, for people."""
    counts = [cell["ttft_ms"]["n"] for cells in summary["legs"].values() for cell in cells.values()]
    if counts and max(counts) < statistics.ENOUGH:
        return "range (least to most)"
    few = any(count < statistics.ENOUGH for count in counts)
    return "95% interval (bootstrap)" + (f", range of fewer than {statistics.ENOUGH} samples" if few else "")


def _estimate(value: Mapping[str, Any]) -> str:
    text, found = f"{value['value']:.1f}", statistics.bounds(value)
    if found is None:
        return text
    return f"{text} ({'range ' if 'range_low' in value else ''}{found[0]:.1f} to {found[1]:.1f})"


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json and summary.md."""
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(markdown(summary), encoding="utf-8")
