"""Telling a change between two runs from noise.

Legs are compared over all prompt lengths that both runs measured, by a permutation test within lengths,
adjusted for the number of legs. A leg has changed when its p is below 5% and the change is at least
min_change; by how much is the geometric mean of the ratios of medians, B over A. Too few samples to reach 5%
are said to be too few, which is not the same as no change. At lengths with fewer than statistics.ENOUGH
samples only ranges that do not overlap tell anything: where some do, the lengths with more samples decide.

Loads have no lengths; what is permuted there are whole conversations (kvloop.bench.conversations).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvloop.bench import conversations, statistics
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
    tests: dict[_Name, _Test] = {}
    for (leg, is_load), samples in _shared(first, second, metric).items():
        if is_load:
            tests[leg, True] = _test_load(_load(first, second, leg, metric))
        else:
            tests[leg, False] = _test_sweep(samples)
    adjusted = statistics.holm({name: test.p for name, test in tests.items()})
    compared = []
    for name, test in tests.items():
        change = math.exp(sum(math.log(cell.ratio.value) for cell in test.cells) / len(test.cells))
        finding = _finding(change, adjusted[name], test.smallest_p * len(tests), min_change)
        compared.append(Comparison(name[0], change, adjusted[name], finding, test.cells))
    return compared


_Name = tuple[str, bool]
"""A leg, and whether it is a load."""
_Samples = tuple[int, Sequence[float], Sequence[float]]
"""A prompt length, and what both runs measured at it."""


@dataclass(frozen=True, slots=True)
class _Test:
    """What was found for a leg, by itself."""

    cells: tuple[Cell, ...]
    p: float
    smallest_p: float
    """The smallest that so many samples can reach."""


def _test_sweep(samples: Sequence[_Samples]) -> _Test:
    cells = tuple(_cell(*of_a_length) for of_a_length in samples)
    decisive = _evidence(cells)
    strata = [(first, second) for length, first, second in samples if length in decisive]
    # As many arrangements as labels can change places in.
    reachable = math.prod(statistics.smallest_p(len(first), len(second)) / 2 for first, second in strata)
    return _Test(cells, statistics.stratified_test(strata), 2 * reachable)


def _test_load(load: conversations.Pairs | conversations.Others) -> _Test:
    p = load.p()
    # So few conversations can't tell a change, however far apart their turns are.
    smallest_p = load.smallest_p if load.count >= statistics.ENOUGH else 1.0
    return _Test((Cell(0, load.ratio(), p, apart=False),), p, smallest_p)


def _load(
    first: Sequence[Record], second: Sequence[Record], leg: str, metric: str
) -> conversations.Pairs | conversations.Others:
    runs = (conversations.turns_of(run, leg, metric) for run in (first, second))
    return conversations.put_together(*runs)


def loads(
    first: Sequence[Record], second: Sequence[Record], *, metric: str = "ttft_ms"
) -> list[tuple[str, str]]:
    """Return the loads that compare() compares, and which of their turns, for people."""
    legs = [leg for leg, is_load in _shared(first, second, metric) if is_load]
    return [(leg, _load(first, second, leg, metric).line()) for leg in legs]


def _shared(first: Sequence[Record], second: Sequence[Record], metric: str) -> dict[_Name, list[_Samples]]:
    """Return what can be compared, lengths ascending."""
    before, after = samples_of(first, metric), samples_of(second, metric)
    shared: dict[_Name, list[_Samples]] = {}
    for leg, length in before:
        of_a, of_b = before[leg, length], after.get((leg, length), [])
        if not _why_dropped(of_a, of_b):
            shared.setdefault((leg, not length), []).append((length, of_a, of_b))
    return {name: sorted(samples, key=lambda of_a_length: of_a_length[0]) for name, samples in shared.items()}


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
