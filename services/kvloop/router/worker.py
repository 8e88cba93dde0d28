"""One worker, as a router sees it: its facts, whether it answers, and how its legs went."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from kvloop.metastore.ttl import ANNOUNCEMENTS_PER_TTL, WORKER_TTL_S
from kvloop.router.legs import DecodeLink, PrefillLink
from kvloop.runtime import logs
from kvloop.runtime.clock import Clock
from kvloop.v1alpha1 import worker_pb2

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_SOON_S = 2 * _FIRST_PAUSE_S
"""What is left of a pause that is not worth another worker's computing a history anew."""
_SLOW_ANSWERS = 3
"""So many unanswered questions in a row mean that a worker is gone; a busy one may miss one or two."""

_SAID_EVERY_S = WORKER_TTL_S / ANNOUNCEMENTS_PER_TTL
"""Within so long, the same load read again was said once."""

_LOOKS = 4
"""How often silence is looked for in the time that it may last."""

_log = logs.get("router")


class Link(Protocol):
    """What every link has."""

    async def info(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        """Return the worker's facts. Raises LegFailed."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


L = TypeVar("L", bound=Link)


class Calling:
    """A call under way at a worker: an asynchronous context."""

    __slots__ = ("_before", "_calls", "_every_s", "_heard", "_looked", "_scope", "_seen", "_silent", "_timer")

    def __init__(self, calls: "set[Calling]", limit_s: float | None, heard: Callable[[], int]) -> None:
        self._calls = calls
        self._scope = asyncio.timeout(limit_s)
        self._heard = heard
        self._before: int | None = None
        self._seen = heard()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "Calling":
        self._calls.add(self)
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def check(self) -> None:
        """End the call if nothing was heard since the last check."""
        heard = self._heard()
        if heard == self._before:
            self._end()
        self._before = heard

    def bound_silence(self, limit_s: float) -> None:
        """From now on, end the call when nothing was heard for so long (or a quarter longer).

        What is heard costs nothing: now and then is looked how much it was. A look counts once, however long
        this process stood still before it.
        """
        if self._scope.expired():
            return
        self._scope.reschedule(None)
        self._every_s, self._looked, self._silent = limit_s / _LOOKS, self._heard(), 0
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)

    def _look(self) -> None:
        heard = self._heard()
        self._silent = self._silent + 1 if heard == self._looked else 0
        self._looked = heard
        if self._silent >= _LOOKS:
            self._end()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)

    def _end(self) -> None:
        if not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def went_on(self) -> bool:
        """Tell whether something was heard since this was last asked."""
        before, self._seen = self._seen, self._heard()
        return self._seen != before


class Worker(Generic[L]):
    """One worker, as seen from here."""

    def __init__(self, endpoint: str, link: L, clock: Clock) -> None:
        self.endpoint = endpoint
        self.link = link
        self.info: worker_pb2.WorkerInfo | None = None
        self.in_flight = 0
        """Legs of this router's."""
        self.places = 0
        """Turns of this router's that have a place there, their legs begun or not."""
        self.draining = False
        """Has said that it takes no new turns; what it holds can still be read."""
        self.unlisted = False
        """Whether the name that led to it leads elsewhere by now; the same follows."""
        self.capacity = 0.0
        """Turns that it takes at a time, as it says; 0: not known."""
        self.pending_ms = 0.0
        """Work sent there that has not ended yet, as it was expected to take."""
        self.direct_tokens = 0
        """Suffix tokens of DIRECT turns sent there that have no first token yet."""
        self._clock = clock
        self._reported_load = self._others = 0.0
        self._reported_at = self._confirmed_at = float("-inf")
        self._answers = False
        self._unanswered = 0
        self._failures = 0
        self._paused_until = 0.0
        self.ask_now = asyncio.Event()
        self.on_facts: Callable[[], None] = lambda: None
        """Called when the worker's facts have changed."""
        self._calls: set[Calling] = set()
        self._told_at = float("-inf")
        """When it last told its facts."""
        self._did_well = False
        """Whether a leg has ended well since the last look."""

    @property
    def present(self) -> bool:
        """Tell whether the worker answers questions."""
        return self.info is not None and self._answers

    @property
    def ready(self) -> bool:
        """Tell whether turns may be sent there: reachable, and not going away."""
        return self.reachable and not self.leaving

    @property
    def leaving(self) -> bool:
        """Tell whether it is to have no new turns, by its own word or its name's."""
        return self.draining or self.unlisted

    @property
    def soon_ready(self) -> bool:
        """Tell whether the worker is ready, or will be as soon as a short pause is over."""
        return self.present and not self.leaving and self._clock.monotonic() >= self._paused_until - _SOON_S

    @property
    def reachable(self) -> bool:
        """Tell whether the worker is present, and no leg has failed there just now."""
        return self.present and self._clock.monotonic() >= self._paused_until

    @property
    def others(self) -> float:
        """Return how many turns of others it had when it said so; none once that is as old as it can be."""
        if self._others and self._clock.monotonic() - self._confirmed_at > WORKER_TTL_S:
            self._others = 0.0
        return self._others

    def others_ms(self, each_ms: float) -> float:
        """Return what is left of the others' turns, if it does one after the other and each takes so long."""
        others = self.others
        if not others:
            return 0.0
        return max(0.0, others * each_ms - (self._clock.monotonic() - self._reported_at) * 1000)

    @property
    def load(self) -> float:
        """Return how many turns it has, as far as known."""
        return self.in_flight + self.others

    @property
    def name(self) -> str:
        """Return the worker's own name, or its endpoint while that is unknown."""
        return self.info.worker_id if self.info is not None and self.info.worker_id else self.endpoint

    def learned(self, info: worker_pb2.WorkerInfo) -> bool:
        """Take in fresh facts; True when they change whom the worker can serve."""
        before, answered = self.info, self._answers
        self._told_at = self._clock.monotonic()
        self.info, self._answers, self._unanswered = info, True, 0
        if before is not None and before.epoch != info.epoch:
            # A new life: what the former one did wrong says nothing about it.
            self._failures, self._paused_until = 0, 0.0
            self._reported_load, self._others, self.capacity, self.draining = 0.0, 0.0, 0.0, False
            _log.info("worker_restarted", worker=self.name, endpoint=self.endpoint)
        if info.HasField("draining"):
            self.draining = info.draining
        changed = before is None or _facts(before) != _facts(info)
        if changed:
            self.on_facts()
        return changed or not answered

    def announced(self, epoch: str, load: float, *, draining: bool, capacity: float = 0) -> None:
        """Take in what the worker says of itself in the registry, if it is this life that said it.

        Another life is asked for its facts. What is read twice was not said twice: the load was what it was.
        """
        if self.info is not None and self.info.epoch == epoch:
            now = self._clock.monotonic()
            # The registry may be behind what the worker says itself.
            self.draining = draining or (self.draining and self.info.HasField("draining"))
            if load != self._reported_load or now - self._reported_at >= _SAID_EVERY_S:
                # Its own legs this router knows better, now and later.
                self._others = max(0.0, load - self.in_flight)
                self._reported_load, self._reported_at = load, now
            self._confirmed_at = now
            if capacity >= 0 and capacity != self.capacity:
                self.capacity = capacity
                self.on_facts()
        elif self.info is not None:
            self.ask_now.set()

    def worth_asking(self, good_for_s: float) -> bool:
        """Tell whether a look at the worker should end in a question: facts are good for some seconds.

        They are, while the worker has answered the last question and its calls, if it has any, go on: it
        would not do so if it were gone. What a call asks of a worker that is another one by now is refused.
        """
        went_on, self._did_well = self._did_well, False
        for call in self._calls:
            went_on = call.went_on() or went_on
        if not self._answers or self._unanswered or (self._calls and not went_on):
            return True
        return self._clock.monotonic() - self._told_at >= good_for_s

    def not_answered(self, *, slow: bool) -> bool:
        """Note an unanswered question; True when the worker counts as gone from now on."""
        self._unanswered += 1
        if slow and self._unanswered < _SLOW_ANSWERS:
            return False
        for call in list(self._calls):
            call.check()
        if not self._answers:
            return False
        self._answers = False
        _log.warning("worker_gone", worker=self.name, endpoint=self.endpoint)
        return True

    def calling(self, limit_s: float | None, heard: Callable[[], int] = lambda: 0) -> "Calling":
        """Bound a call: TimeoutError after limit_s, or when the worker is gone and heard() no longer grows.

        A worker that was stopped keeps its connections, so nothing else would tell.
        """
        return Calling(self._calls, limit_s, heard)

    def drains(self) -> None:
        """Note that the worker refused a leg because it is going away."""
        self.draining = True
        self.ask_now.set()

    def failed(self) -> None:
        """Note a failed leg: no turns for a while, longer each time in a row.

        Legs that fail during a pause began before it: one broken connection fails them all.
        """
        self.ask_now.set()
        if self._clock.monotonic() < self._paused_until:
            return
        pause = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        self._paused_until = self._clock.monotonic() + pause

    def succeeded(self) -> None:
        """Note a leg that did its work."""
        self._did_well = True
        self._failures, self._paused_until = 0, 0.0


PrefillWorker = Worker[PrefillLink]
DecodeWorker = Worker[DecodeLink]
AnyWorker = Worker[Any]


def _facts(info: worker_pb2.WorkerInfo) -> tuple[object, ...]:
    return (
        info.epoch,
        info.model.name,
        info.model.revision,
        info.compatibility,
        info.max_model_len,
        info.vocab_size,
        info.kv_recompute_threshold,
        info.bidirectional_kv_xfer,
        tuple(info.adapters),
    )
