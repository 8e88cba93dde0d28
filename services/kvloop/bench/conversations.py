"""What two loads' conversations tell: statistics in which a conversation stays whole.

Turns of a conversation are alike: its prompts grow, it runs beside the same others. So they are no samples
by themselves; the conversation is. Where both runs played the same ones, turns are compared in pairs and the
runs' names change places conversation by conversation; otherwise whole conversations change places between
the runs.

What befell one of the runs as a whole is no noise to such a test: it can't be told from a change by two runs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kvloop.bench import statistics
from kvloop.bench.records import Record

_RUN = re.compile(r"-[0-9a-f]{8}$")
"""What every run of `kvloop bench load` puts behind a conversation's name."""
_RESAMPLES = 4_999
_SEED = 20_260_101
_AT_ONCE = 4_000_000
"""Weights that are in memory at a time."""

Turns = dict[str, dict[int, float]]
"""Values by conversation and turn."""


def turns_of(records: Sequence[Record], leg: str, metric: str) -> Turns:
    """Return what a load measured."""
    found: Turns = {}
    for record in records:
        if record.leg == leg and not record.nominal_tokens and record.measured and not record.error:
            name = _RUN.sub("", record.conversation_id)
            found.setdefault(name, {})[record.turn] = getattr(record, metric)
    return found


@dataclass(frozen=True, slots=True)
class Pairs:
    """The turns that both runs have: an array of values per conversation, the runs' side by side."""

    before: tuple[Any, ...]
    after: tuple[Any, ...]
    rest: tuple[int, int]
    """Turns of either run that the other does not have."""

    @property
    def count(self) -> int:
        """Return the number of samples: conversations."""
        return len(self.before)

    @property
    def smallest_p(self) -> float:
        """Return the smallest p that so many conversations can reach."""
        return float(2.0 ** (1 - self.count))

    def ratio(self) -> statistics.Estimate:
        """Return the median of the turns' ratios, after over before."""
        ratios = [after / before for before, after in zip(self.before, self.after, strict=True)]
        pooled = np.concatenate(ratios)
        value = float(np.median(pooled))
        if self.count < statistics.ENOUGH:
            return _range(value, float(pooled.min()), float(pooled.max()), self.count)
        low, high = np.quantile(np.concatenate(list(_medians(ratios, _rng()))), _TAILS)
        return statistics.Estimate(value, float(low), float(high), self.count)

    def p(self) -> float:
        """Return the two-sided p: the signed ranks of the turns' ratios, signs turned by conversation."""
        ratios = [np.log(after / before) for before, after in zip(self.before, self.after, strict=True)]
        pooled = np.concatenate(ratios)
        ranks = np.sign(pooled) * stats.rankdata(np.abs(pooled))
        scores = _sums(ranks, ratios)
        signs = _rng().choice((-1.0, 1.0), size=(_RESAMPLES, self.count))
        return _p(float(scores.sum()), signs @ scores)

    def line(self) -> str:
        """Return what is compared, for people."""
        turns = sum(map(len, self.before))
        text = f"{turns:,} turns of {self.count:,} conversations that both runs have, turn by turn"
        return text + (
            f"; {self.rest[0]:,} of A and {self.rest[1]:,} of B are in one alone" if any(self.rest) else ""
        )


@dataclass(frozen=True, slots=True)
class Others:
    """Conversations of which the runs have none in common: an array of values for each."""

    before: tuple[Any, ...]
    after: tuple[Any, ...]

    @property
    def count(self) -> int:
        """Return the number of samples: conversations, of the run that has fewer."""
        return min(len(self.before), len(self.after))

    @property
    def smallest_p(self) -> float:
        """Return the smallest p that so many conversations can reach."""
        return statistics.smallest_p(len(self.before), len(self.after))

    def ratio(self) -> statistics.Estimate:
        """Return the ratio of the turns' medians, after over before."""
        first, second = np.concatenate(self.before), np.concatenate(self.after)
        value = float(np.median(second) / np.median(first))
        if self.count < statistics.ENOUGH:
            low, high = second.min() / first.max(), second.max() / first.min()
            return _range(value, float(low), float(high), self.count)
        rng = _rng()
        below = np.concatenate(list(_medians(self.before, rng)))
        low, high = np.quantile(np.concatenate(list(_medians(self.after, rng))) / below, _TAILS)
        return statistics.Estimate(value, float(low), float(high), self.count)

    def p(self) -> float:
        """Return the two-sided p: the turns' rank sums, conversations permuted between the runs."""
        arrays = (*self.before, *self.after)
        ranks = stats.rankdata(np.concatenate(arrays))
        scores = _sums(ranks - ranks.mean(), arrays)
        permuted = _rng().permuted(np.tile(scores, (_RESAMPLES, 1)), axis=1)
        first = len(self.before)
        return _p(float(scores[:first].sum()), permuted[:, :first].sum(axis=1))

    def line(self) -> str:
        """Return what is compared, for people."""
        return (
            f"{len(self.before):,} conversations of A and {len(self.after):,} of B as wholes;"
            " the runs have none in common"
        )


def put_together(before: Turns, after: Turns) -> Pairs | Others:
    """Return the turns of two runs as they are to be compared."""
    shared = {name: sorted(before[name].keys() & after[name].keys()) for name in before if name in after}
    shared = {name: turns for name, turns in shared.items() if turns}
    if not shared:
        return Others(*(tuple(np.asarray(list(t.values())) for t in run.values()) for run in (before, after)))
    arrays = [
        tuple(np.asarray([run[name][turn] for turn in turns]) for name, turns in shared.items())
        for run in (before, after)
    ]
    paired = sum(map(len, shared.values()))
    rest = (_count(before) - paired, _count(after) - paired)
    return Pairs(arrays[0], arrays[1], rest)


def _count(run: Mapping[str, Mapping[int, float]]) -> int:
    return sum(map(len, run.values()))


_TAILS = ((1 - statistics.LEVEL) / 2, (1 + statistics.LEVEL) / 2)


def _rng() -> np.random.Generator:
    return np.random.default_rng(_SEED)


def _range(value: float, low: float, high: float, count: int) -> statistics.Estimate:
    if count < 2:
        return statistics.Estimate(value, None, None, count)
    return statistics.Estimate(value, low, high, count)


def _owners(arrays: Sequence[Any]) -> Any:
    """Return, for every value of the arrays one after the other, which array it is of."""
    return np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])


def _sums(values: Any, arrays: Sequence[Any]) -> Any:
    return np.bincount(_owners(arrays), weights=values, minlength=len(arrays))


def _medians(arrays: Sequence[Any], rng: np.random.Generator) -> Iterator[Any]:
    """Return bootstrapped medians over all values, of arrays that are drawn whole; in parts."""
    values = np.concatenate(arrays)
    order = np.argsort(values)
    values, owners = values[order], _owners(arrays)[order]
    count = len(arrays)
    part = max(1, _AT_ONCE // len(values))
    for begun in range(0, _RESAMPLES, part):
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=min(part, _RESAMPLES - begun))
        # As often as its array was drawn, a value stands in the row of sorted ones; the middle is sought.
        reached = drawn[:, owners].cumsum(axis=1)
        total = reached[:, -1:]
        lower = (reached >= (total + 1) // 2).argmax(axis=1)
        upper = (reached >= total // 2 + 1).argmax(axis=1)
        yield (values[lower] + values[upper]) / 2


def _p(observed: float, permuted: Any) -> float:
    extreme = int(np.count_nonzero(np.abs(permuted) >= abs(observed) - 1e-9))
    return (extreme + 1) / (len(permuted) + 1)
