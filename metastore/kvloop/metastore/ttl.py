"""Remaining time as the store takes it."""

import math

MAX_TTL_S = 7 * 24 * 3600.0
WORKER_TTL_S = 10.0
"""For how long what a worker announces stands."""
ANNOUNCEMENTS_PER_TTL = 4
"""How often it announces itself meanwhile."""


def milliseconds(ttl_s: float) -> int:
    """Return a TTL in whole milliseconds, rounded down so that no entry outlives its blocks; 0 when over.

    Raises ValueError for NaN. Longer than a week is a week: no key stays for ever.
    """
    if math.isnan(ttl_s):
        raise ValueError("a TTL is a number of seconds")
    return int(min(max(ttl_s, 0.0), MAX_TTL_S) * 1000)


def positive_milliseconds(ttl_s: float) -> int:
    """Return a TTL in whole milliseconds; raises ValueError when none is left."""
    result = milliseconds(ttl_s)
    if result < 1:
        raise ValueError("a TTL is at least one millisecond")
    return result
