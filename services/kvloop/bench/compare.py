"""Telling a change between two runs from noise.

Legs are compared over all prompt lengths that both runs measured, by a permutation test within lengths,
adjusted for the number of legs. A leg has changed when its p is below 5% and the change is at least
min_change; by how much is the geometric mean of the ratios of medians, B over A. Too few samples to reach 5%
are said to be too few, which is not the same as no change. At lengths with fewer than statistics.ENOUGH
samples only ranges that do not overlap tell anything: where some do, the lengths with more samples decide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvloop.bench import statistics
from kvloop.bench.records import Record
from kvloop.bench.sweep import stray

ALPHA = 0.05
METRICS = ("ttft_ms", "tpot_ms", "latency_ms", "prefill_ms", "transfer_ms")


class Finding(StrEnum):
    """What came out for a leg."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "noise"
    TOO_FEW = "too few samples"


@dataclass(frozen=True, slots=True)
class Cell:
    """One leg at one prompt length."""

    nominal_tokens: int
    ratio: statistics.Estimate
    p: float
    """By itself, not adjusted."""
    apart: bool
    """Whether the runs' samples do not overlap at all."""

    @property
    def decisive(self) -> bool:
        """Tell whether it may tell a change."""
        return self.apart or not self.ratio.is_range


@dataclass(frozen=True, slots=True)
class Comparison:
    """One leg."""

    leg: str
    ratio: float
    p: float
    finding: Finding
    cells: tuple[Cell, ...]


def compare(
    first: Sequence[Record], second: Sequence[Record], *, metric: str = "ttft_ms", min_change: float = 0.02
) -> list[Comparison]:
    """Return what changed from the first run to the second, by leg, in the first run's order.

    Of legs and lengths that are left out, dropped() tells why.
    """
    before, after = samples_of(first, metric), samples_of(second, metric)
    legs: dict[str, list[int]] = {}
    for leg, length in before:
        if not _why_dropped(before.get((leg, length), ()), after.get((leg, length), ())):
            legs.setdefault(leg, []).append(length)
    cells_of = {
        leg: tuple(_cell(length, before[leg, length], after[leg, length]) for length in sorted(lengths))
        for leg, lengths in legs.items()
    }
    evidence = {leg: _evidence(cells) for leg, cells in cells_of.items()}
    raw = {
        leg: statistics.stratified_test([(before[leg, n], after[leg, n]) for n in lengths])
        for leg, lengths in evidence.items()
    }
    adjusted = statistics.holm(raw)
    found = []
    for leg, cells in cells_of.items():
        change = math.exp(sum(math.log(cell.ratio.value) for cell in cells) / len(cells))
        # As many arrangements as labels can change places in.
        reachable = math.prod(
            statistics.smallest_p(len(before[leg, n]), len(after[leg, n])) / 2 for n in evidence[leg]
        )
        finding = _finding(change, adjusted[leg], 2 * reachable * len(legs), min_change)
        found.append(Comparison(leg, change, adjusted[leg], finding, cells))
    return found


def dropped(first: Sequence[Record], second: Sequence[Record], *, metric: str = "ttft_ms") -> list[str]:
    """Return which legs and lengths of either run compare() leaves out, and why, for people."""
    before, after = samples_of(first, metric), samples_of(second, metric)
    told = []
    for leg, length in dict.fromkeys((*before, *after)):
        if why := _why_dropped(before.get((leg, length), ()), after.get((leg, length), ())):
            told.append(f"{leg}{f' at {length:,} tokens' if length else ''}: {why}")
    return told


def _why_dropped(before: Sequence[float], after: Sequence[float]) -> str:
    """Return why a cell can't be compared; empty when it can."""
    for name, other, samples in (("A", "B", before), ("B", "A", after)):
        if not samples:
            return f"only {other} has it"
        # A zero is no time: nothing of the kind happened (no read, no prefill leg).
        if zeros := sum(sample <= 0 for sample in samples):
            return f"{zeros} of {len(samples)} samples of {name} are 0"
    return ""


def samples_of(records: Sequence[Record], metric: str) -> dict[tuple[str, int], list[float]]:
    """Return the measured values by leg and prompt length; turns that went another way are left out."""
    samples: dict[tuple[str, int], list[float]] = {}
    for record in records:
        if record.measured and not record.error and not stray(record):
            samples.setdefault((record.leg, record.nominal_tokens), []).append(getattr(record, metric))
    return samples


def _cell(length: int, before: Sequence[float], after: Sequence[float]) -> Cell:
    apart = max(before) < min(after) or max(after) < min(before)
    return Cell(length, statistics.ratio(after, before), statistics.rank_test(after, before), apart)


def _evidence(cells: Sequence[Cell]) -> list[int]:
    """Return the lengths that a leg's finding may rest on."""
    chosen = cells if all(cell.decisive for cell in cells) else [c for c in cells if not c.ratio.is_range]
    return [cell.nominal_tokens for cell in chosen]


def _finding(change: float, p: float, reachable: float, min_change: float) -> Finding:
    if reachable > ALPHA:
        return Finding.TOO_FEW
    if p >= ALPHA or abs(change - 1) < min_change:
        return Finding.NOISE
    return Finding.SLOWER if change > 1 else Finding.FASTER
