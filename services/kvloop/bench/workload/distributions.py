"""Distributions that workloads are drawn from. A draw depends on the given generator alone."""

import math
import random
from dataclasses import dataclass
from typing import Protocol


class Distribution(Protocol):
    """Something that non-negative numbers are drawn from."""

    def draw(self, rng: random.Random) -> float:
        """Return one value."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same value."""

    value: float

    def draw(self, rng: random.Random) -> float:
        """Return the value."""
        return self.value


@dataclass(frozen=True, slots=True)
class UniformInt:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> float:
        """Return one value."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal by its mean and the ratio of median to mean, cut off at low and high.

    The ratio (0 < ratio <= 1) says how skewed it is: sigma = sqrt(-2 ln ratio). mean is that of the uncut
    distribution.
    """

    mean: float
    median_ratio: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, rng: random.Random) -> float:
        """Return one value."""
        sigma = math.sqrt(-2 * math.log(self.median_ratio))
        value = rng.lognormvariate(math.log(self.mean) - sigma * sigma / 2, sigma)
        return min(max(value, self.low), self.high)

    @classmethod
    def by_median(cls, median: float, sigma: float, low: float = 0.0, high: float = math.inf) -> "LogNormal":
        """Return the one with a median and the sigma of its logarithm."""
        ratio = math.exp(-sigma * sigma / 2)
        return cls(median / ratio, ratio, low, high)


def whole(distribution: Distribution, rng: random.Random, least: int = 0) -> int:
    """Return a draw as a whole number that is at least `least`."""
    return max(least, round(distribution.draw(rng)))
