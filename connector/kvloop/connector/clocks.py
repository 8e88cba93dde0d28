"""What a peer's deadline means on this process's clock, though the peer's clock is compared but seldom.

Deadlines are readings of the holder's perf_counter, which the handshake relates to this process's. That
counter stands still while this host is suspended and the holder's goes on, so a deadline would seem to be
later than it is. CLOCK_BOOTTIME counts suspensions; a virtual machine that was stopped from outside sees
them at most as a jump of the wall clock. Two hosts' counters also run apart, slowly. All of it is charged
from the comparison on, until the next one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

DRIFT = 1e-4
"""Seconds per second by which two hosts' clocks may run apart."""
MOST_DRIFT_S = 2.0
"""Clocks that are kept by NTP never get further apart."""
JUMP_S = 0.5
"""Wall-clock time that may pass unseen by perf_counter, as when NTP steps the clock."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment on all clocks, in seconds."""

    counter: float
    """perf_counter, by which everything else here is timed."""
    boot: float
    wall: float


def now() -> Moment:
    """Return this moment."""
    counter = time.perf_counter()
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return Moment(counter, counter if boot is None else time.clock_gettime(boot), time.time())


class PeerClocks:
    """Deadlines of peers' blocks on this process's perf_counter, erring on the early side."""

    def __init__(self, moment: Callable[[], Moment] = now) -> None:
        self.now = moment
        self._compared: dict[str, tuple[float, Moment]] = {}

    def compare(self, engine_id: str, offset: float, moment: Moment) -> None:
        """Take note how far a peer's clock was ahead at a moment; any thread."""
        self._compared[engine_id] = (offset, moment)

    def deadline(self, engine_id: str, expiry: float) -> float:
        """Return when a peer's deadline is; always passed when its clock was never compared."""
        known = self._compared.get(engine_id)
        if known is None:
            return float("-inf")
        offset, compared = known
        current = self.now()
        counted = current.counter - compared.counter
        asleep = max(0.0, current.boot - compared.boot - counted)
        stepped = current.wall - compared.wall - counted
        unseen = max(asleep, stepped if stepped > JUMP_S else 0.0)
        return expiry - offset - unseen - min(MOST_DRIFT_S, DRIFT * max(0.0, counted))

    def jumped(self, since: Moment) -> bool:
        """Tell whether more time has passed than perf_counter counted."""
        current = self.now()
        counted = current.counter - since.counter
        passed = max(current.boot - since.boot, current.wall - since.wall)
        return passed - counted > JUMP_S
