"""Turns: what is known of one on its way, and what became of those that ended.

Reports and announced cancellations are kept for a while, for those who ask late.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvloop.connector import guard
from kvloop.connector.control import Report, TransferInfo
from kvloop.connector.tails import Tail
from kvloop.connector.terms import Terms

_KEPT = 4096


@dataclass(slots=True)
class Turn:
    """One request on its way through the engine."""

    terms: Terms
    readable: int | None = None
    """Tokens that the handle may serve, once examined."""
    refused: guard.Refusal | None = None
    admitted: bool = False
    loading: bool = False
    unscheduled: bool = False
    """Whether its read was ordered, and no step has had tokens of it: vLLM asks no more before one has."""
    ranks_read: int = 0
    cached: int = 0
    """Tokens in this engine's prefix cache at the last look."""
    local: int = 0
    external: int = 0
    tail: Tail | None = None
    """What goes on in the middle of a held block, at the last look."""
    transfer: TransferInfo | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What makes a handle of a hold."""

    text: guard.Text
    template: dict[str, Any]
    """kv_transfer_params as this vLLM version writes them."""


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
