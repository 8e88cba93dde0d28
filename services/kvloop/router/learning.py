"""Rates learnt from what the turns themselves report: robust, and never far from what is known.

An estimator keeps the last few measurements of one kind of work. Its coefficients start from a seed; the
seed is scaled by the median of measured over expected, then bent towards the measurements by least squares
of relative errors, in which outliers count little (Huber) and whatever the measurements can't tell apart
stays as the scaled seed says. Turns that waited behind others are not measurements; the caller leaves them
out.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from kvloop.router.costs import Features, Terms

WINDOW = 64
REFIT_EVERY = 8
"""Measurements between two fits, once there are as many and until the window is full. A fit of a full window
takes a millisecond or two, so from then on there is one per window."""
_PRIOR = 0.05
"""Weight of the scaled seed, in measurements."""
_HUBER = 0.2
"""Relative error from which on a measurement counts less."""
_ROUNDS = 3
_TINY = 1e-12


class Estimator:
    """Coefficients of one kind of work."""

    def __init__(self, seed: Terms) -> None:
        self._terms = seed
        self._reseeded = False
        self.count = 0
        """Measurements so far."""
        self._seed = seed
        self._window: deque[tuple[Features, float]] = deque(maxlen=WINDOW)

    @property
    def terms(self) -> Terms:
        """Return the coefficients as last worked out."""
        if self._reseeded:
            self._fit()
        return self._terms

    @property
    def settled(self) -> bool:
        """Tell whether there are measurements enough that a single odd one counts little."""
        return self.count >= REFIT_EVERY

    def reseed(self, seed: Terms) -> None:
        """Take what others have learnt, as long as there are few measurements here."""
        if seed == self._seed:
            return
        if not self.settled and len(seed.values) == len(self._seed.values):
            # Of very many few are asked for before the next one comes.
            self._seed, self._reseeded = seed, True

    def start_over(self) -> None:
        """Have what was measured so far count as a seed alone."""
        self._seed = self.terms
        self._window.clear()

    def add(self, features: Features, ms: float) -> None:
        """Take one measurement; what can't be one is left out."""
        if not (math.isfinite(ms) and ms > 0 and all(math.isfinite(f) and f >= 0 for f in features)):
            return
        self._window.append((features, ms))
        self.count += 1
        held = len(self._window)
        if held < REFIT_EVERY or self.count % (REFIT_EVERY if held < WINDOW else WINDOW) == 0:
            self._fit()

    def _fit(self) -> None:
        self._terms, self._reseeded = fit(self._seed, self._window), False


def fit(seed: Terms, samples: Sequence[tuple[Features, float]]) -> Terms:
    """Return coefficients, none negative, that explain samples (features, milliseconds) from a seed."""
    ratios = [ms / expected for features, ms in samples if (expected := seed.ms(features)) > _TINY]
    if not ratios:
        return seed
    scale = median(ratios)
    start = [value * scale for value in seed.values]
    if len(start) == 1:
        return Terms((start[0],))
    # In units of the scaled seed every coefficient is 1, and an error is a share of what was measured. What
    # the seed says is nothing stays nothing.
    rows = [
        [value * feature / ms for value, feature in zip(start, features, strict=True)]
        for features, ms in samples
    ]
    size = len(start)
    solution = [1.0] * size
    for _ in range(_ROUNDS):
        matrix = [[_PRIOR if i == j else 0.0 for j in range(size)] for i in range(size)]
        right = [_PRIOR] * size
        for row in rows:
            error = abs(sum(x * r for x, r in zip(solution, row, strict=True)) - 1.0)
            weight = 1.0 if error <= _HUBER else _HUBER / error
            for i in range(size):
                right[i] += weight * row[i]
                for j in range(size):
                    matrix[i][j] += weight * row[i] * row[j]
        solution = [max(0.0, x) for x in _solve(matrix, right)]
    return Terms(tuple(value * x for value, x in zip(start, solution, strict=True)))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system (the prior makes it so) by elimination."""
    size = len(right)
    for column in range(size):
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            for k in range(column, size):
                matrix[row][k] -= factor * matrix[column][k]
            right[row] -= factor * right[column]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][k] * solution[k] for k in range(row + 1, size))
        solution[row] = (right[row] - known) / matrix[row][row]
    return solution
