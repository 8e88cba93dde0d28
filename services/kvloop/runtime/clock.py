"""The clock as a parameter: monotonic for intervals, wall time only to show."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch, for display."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return time.monotonic()."""
        return time.monotonic()

    def wall(self) -> float:
        """Return time.time()."""
        return time.time()
