"""What became of turns: reports and announced cancellations, kept for a while for those who ask late."""

import threading
from collections import OrderedDict

from kvloop.connector.control import Report

_KEPT = 4096


class TurnLog:
    """Reports by turn id, oldest forgotten first. Any thread."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._reports: OrderedDict[str, Report] = OrderedDict()
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def cancel(self, turn_id: str) -> None:
        """Note that the coming abort of a turn is its client's wish."""
        with self._lock:
            self._cancelled[turn_id] = None
            while len(self._cancelled) > self._kept:
                self._cancelled.popitem(last=False)

    def take_cancelled(self, turn_id: str) -> bool:
        """Return, once, whether a turn's abort was announced as a cancellation."""
        with self._lock:
            return self._cancelled.pop(turn_id, self) is not self

    def settle(self, turn_id: str, report: Report) -> None:
        """Keep a turn's report."""
        with self._lock:
            self._reports.pop(turn_id, None)
            self._reports[turn_id] = report
            while len(self._reports) > self._kept:
                self._reports.popitem(last=False)

    def report(self, turn_id: str) -> Report | None:
        """Return a turn's report once it has ended."""
        with self._lock:
            return self._reports.get(turn_id)
