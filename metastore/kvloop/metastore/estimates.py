"""Cost estimates that router replicas share: means of measured rates, by name.

A name is the router's business (model, pair, kind of rate); a value is a short vector. Means are weighted,
and their weight is limited, so that they follow when hardware or load changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.metastore.fields import Fields

TTL_S = 3600.0
MAX_COUNT = 64.0
MAX_VALUES = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and how much it weighs."""

    values: tuple[float, ...]
    count: float


class SharedEstimates:
    """Estimates in a shared table. Methods raise DirectoryUnavailable when the store fails."""

    def __init__(self, table: Fields, *, max_count: float = MAX_COUNT, ttl_s: float = TTL_S) -> None:
        """Take the table, the largest weight of a mean, and how long an estimate outlives its last sample."""
        self._table = table
        self._max_count = max_count
        self._ttl_s = ttl_s

    async def merge(self, name: str, values: Sequence[float], weight: float = 1.0) -> Estimate:
        """Merge a sample and return the mean; a sample of another length begins anew.

        Raises ValueError for values that are not finite, or too many, or a weight that is not positive.
        """
        if not 0 < len(values) <= MAX_VALUES or not all(map(math.isfinite, values)):
            raise ValueError(f"a sample has 1 to {MAX_VALUES} finite values")
        if not 0 < weight < math.inf:
            raise ValueError("a weight is positive")
        sample = " ".join(f"{number:.17g}" for number in (self._max_count, weight, *values))
        merged = _parse(await self._table.merge(name.encode(), sample, self._ttl_s))
        return merged or Estimate(tuple(values), min(weight, self._max_count))

    async def read(self) -> dict[str, Estimate]:
        """Return all estimates by name."""
        found = {}
        for name, value in (await self._table.all()).items():
            estimate = _parse(value.decode(errors="replace"))
            if estimate is not None:
                found[name.decode(errors="replace")] = estimate
        return found


def _parse(text: str) -> Estimate | None:
    try:
        count, *values = (float(word) for word in text.split())
    except ValueError:
        return None
    if not values or len(values) > MAX_VALUES or not all(map(math.isfinite, (count, *values))):
        return None
    return Estimate(tuple(values), count)
