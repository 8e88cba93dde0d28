"""Intervals, ratios and tests, on scipy and numpy. All seeded: the same records give the same figures.

Times are skewed and samples few, so everything rests on medians and ranks.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, TypeVar

import numpy as np
from scipy import stats

LEVEL = 0.95
ENOUGH = 6
"""Samples from which least and most cover a median with 95%; five cover it with 94%."""
_RESAMPLES = 4_999
_BATCHES = 10
_SEED = 20_260_101

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its confidence interval (bootstrap, percentiles).

    Of fewer than ENOUGH samples it is the range that they allow, of a single one there is neither.
    """

    value: float
    low: float | None
    high: float | None
    samples: int

    @property
    def is_range(self) -> bool:
        """Tell whether the bounds are a range instead of an interval."""
        return self.samples < ENOUGH

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        kind = "range" if self.is_range else "ci"
        return {"value": self.value, f"{kind}_low": self.low, f"{kind}_high": self.high, "n": self.samples}


def bounds(value: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return interval or range of an estimate as JSON has it."""
    kind = "range" if "range_low" in value else "ci"
    low, high = value[f"{kind}_low"], value[f"{kind}_high"]
    return None if low is None else (float(low), float(high))


def median(samples: Sequence[float]) -> Estimate:
    """Return the median of at least one sample."""
    values = np.asarray(samples, dtype=float)
    middle = float(np.median(values))
    if len(values) < 2:
        return Estimate(middle, None, None, len(values))
    if len(values) < ENOUGH:
        return Estimate(middle, float(values.min()), float(values.max()), len(values))
    found = stats.bootstrap((values,), np.median, vectorized=True, **_options())
    # Percentiles are interpolated, and may round to a hair outside of what they lie between.
    low, high = (float(bound) for bound in np.clip(_bounds(found), values.min(), values.max()))
    return Estimate(middle, min(low, middle), max(high, middle), len(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return median(above) / median(below) of independent samples; below must be positive."""
    first, second = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    value = float(np.median(first) / np.median(second))
    count = min(len(first), len(second))
    if count < 2:
        return Estimate(value, None, None, count)
    if count < ENOUGH:
        least, most = float(first.min() / second.max()), float(first.max() / second.min())
        return Estimate(value, least, most, count)
    found = stats.bootstrap((first, second), _ratio_of_medians, vectorized=True, paired=False, **_options())
    return Estimate(value, *_bounds(found), count)


def slope(at: Sequence[float], values: Sequence[float]) -> Estimate:
    """Return the least-squares slope of values measured one after the other; at least as many as batches.

    Neighbours depend on each other (memory grows in steps), so single values would make the interval far too
    narrow: it rests on the means of ten batches.
    """
    batches = np.array_split(np.asarray(at, dtype=float), _BATCHES)
    means = [part.mean() for part in np.array_split(np.asarray(values, dtype=float), _BATCHES)]
    found = stats.linregress([part.mean() for part in batches], means)
    reach = float(stats.t.ppf(0.5 + LEVEL / 2, _BATCHES - 2) * found.stderr)
    gradient = float(found.slope)
    return Estimate(gradient, gradient - reach, gradient + reach, len(values))


def _ratio_of_medians(first: Any, second: Any, axis: int = -1) -> Any:
    return np.median(first, axis=axis) / np.median(second, axis=axis)


def _options() -> dict[str, Any]:
    return {
        "confidence_level": LEVEL,
        "n_resamples": _RESAMPLES,
        "method": "percentile",
        "rng": np.random.default_rng(_SEED),
    }


def _bounds(found: Any) -> tuple[float, float]:
    interval = found.confidence_interval
    return float(interval.low), float(interval.high)


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p of Mann-Whitney's U: how likely so much difference is by chance."""
    return float(stats.mannwhitneyu(first, second, alternative="two-sided").pvalue)


def smallest_p(first: int, second: int) -> float:
    """Return the smallest p that two samples of these sizes can reach."""
    return 2 / comb(first + second, first)


def stratified_test(strata: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Return the two-sided p that the second samples differ from the first, over several strata at once.

    A permutation test: labels change places within a stratum only. The statistic is van Elteren's, rank sums
    of the first samples weighted by 1 / (stratum's size + 1).
    """
    rng = np.random.default_rng(_SEED)
    observed = 0.0
    permuted = np.zeros(_RESAMPLES)
    for first, second in strata:
        pooled = np.concatenate([np.asarray(first, dtype=float), np.asarray(second, dtype=float)])
        scores = stats.rankdata(pooled) / (len(pooled) + 1) - 0.5
        observed += float(scores[: len(first)].sum())
        shuffled = rng.permuted(np.tile(scores, (_RESAMPLES, 1)), axis=1)
        permuted += shuffled[:, : len(first)].sum(axis=1)
    # A hair of tolerance: equal sums of floats may differ in their last bit.
    extreme = int(np.count_nonzero(np.abs(permuted) >= abs(observed) - 1e-9))
    return (extreme + 1) / (_RESAMPLES + 1)


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Return p values adjusted for there being several (Holm)."""
    adjusted: dict[Name, float] = {}
    highest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, p_values[name] * (len(p_values) - rank)))
        adjusted[name] = highest
    return adjusted


def percentiles(samples: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return percentiles (shares in [0, 1]) of at least one sample."""
    return [float(value) for value in np.quantile(np.asarray(samples, dtype=float), shares)]
