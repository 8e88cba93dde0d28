"""Pairs of workers between which KV did not travel, though both are well.

A worker that fails is left alone as a whole (worker.py). When a read between two of them fails, either may be
fine with everybody else: one keeps stale state of the other, or the network between them is down. Such a pair
is avoided for a while, longer each time in a row, as long as there is another one; in that direction alone.
"""

from kvloop.router.worker import AnyWorker
from kvloop.runtime.clock import Clock

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
_MAX_PAIRS = 4096

_Key = tuple[str, str, str, str]


class Pairs:
    """Memory of failed reads. A worker's next life begins with a clean slate."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: dict[_Key, tuple[int, float]] = {}

    def __len__(self) -> int:
        """Return of how many pairs the last read failed."""
        return len(self._failed)

    def rests(self, reader: AnyWorker, source: AnyWorker) -> bool:
        """Tell whether reads by one worker from another are to be avoided now."""
        if not self._failed:
            return False
        found = self._failed.get(_key(reader, source))
        return found is not None and self._clock.monotonic() < found[1]

    def failed(self, reader: AnyWorker, source: AnyWorker) -> None:
        """Note a read that failed; during a rest it tells nothing new."""
        if self.rests(reader, source):
            return
        if len(self._failed) >= _MAX_PAIRS:
            self._failed.clear()
        key = _key(reader, source)
        times = self._failed.get(key, (0, 0.0))[0]
        rest = min(FIRST_REST_S * 2**times, LONGEST_REST_S)
        self._failed[key] = (min(times + 1, 16), self._clock.monotonic() + rest)

    def succeeded(self, reader: AnyWorker, source: AnyWorker) -> None:
        """Note a read that worked."""
        if self._failed:
            self._failed.pop(_key(reader, source), None)


def _key(reader: AnyWorker, source: AnyWorker) -> _Key:
    return (reader.endpoint, _epoch(reader), source.endpoint, _epoch(source))


def _epoch(worker: AnyWorker) -> str:
    return worker.info.epoch if worker.info is not None else ""
