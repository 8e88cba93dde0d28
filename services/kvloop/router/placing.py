"""Choices among workers that take as long among a thousand as among thirty.

Few workers are looked at one by one. Of many, a few drawn at random stand for all: whoever has less to do
than another one drawn is near the best placement, and a worker is overloaded when it has much more than
the least busy of those drawn. Where nothing drawn will do, all are looked at after all.

A conversation's home is the prefill worker that hashes highest together with it (rendezvous hashing), which
every router finds without asking, and which hardly changes when workers come and go. Conversations share
their hash with others, so that a router remembers the homes of all of them.

What workers have to do is compared in expected milliseconds, so that one long prompt weighs as much as many
short ones. A sum is kept per worker as turns come and go. What other routers gave it is known in turns
alone, as of when the worker said so, and each counts like the turn in question: at P, which does one after
the other, less the time since. What that turn itself takes is the same at all of them, but for a favourite
that has its prefix: it is left when it has more ahead than the prefix is worth.
"""

import hashlib
import heapq
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvloop.router.pairs import Pairs
from kvloop.router.worker import AnyWorker, DecodeWorker, L, PrefillWorker, Worker

FEW = 32
"""So many workers are looked at one by one."""
_NEAR = 0.125
"""What differs by no more than this share is equal. What workers say is some seconds old, and every router
that has heard it would run to the same one."""
_COMPARED = 8
"""Of more, so many are drawn to tell whether one is overloaded."""
_DRAWS = 4
"""Times as often is drawn before all are looked at: some are not ready."""
_SLOT_BYTES = 2
_RANKED = 3
_NO_WEIGHT = 1e-9
_MASK = (1 << 64) - 1

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Measure:
    """How much is ahead of a turn at a worker."""

    of: Callable[[AnyWorker], float]
    one: float
    """What a turn like this one counts."""

    def rank(self, worker: AnyWorker) -> tuple[int, float]:
        """Return what is less for the better one of two workers; what is nearly equal is equal."""
        return round(self.of(worker)), worker.load

    def better(self, one: Worker[L], other: Worker[L], rng: random.Random) -> Worker[L]:
        """Return the one that has less ahead; either of them where that is nearly equal."""
        for here, there in zip(self.rank(one), self.rank(other), strict=True):
            if abs(here - there) > _NEAR * max(here, there):
                return one if here < there else other
        return rng.choice((one, other))


@dataclass(frozen=True, slots=True)
class Ahead:
    """The measures for both workers of a turn."""

    prefill: Measure
    decode: Measure


TURNS = Measure(lambda worker: worker.load, 1.0)
IN_TURNS = Ahead(TURNS, TURNS)
"""For turns of which nothing is known."""


def prefill_ms(own_ms: float) -> Measure:
    """Return the measure for the prefill leg of a turn that is expected to take so long."""
    if own_ms <= 0:
        return TURNS

    return Measure(lambda worker: worker.pending_ms + worker.others_ms(own_ms), own_ms)


def decode_ms(step_ms: float, least_capacity: float = 0.0) -> Measure:
    """Return the measure for a decode leg: a turn there counts a step, a DIRECT one its prompt as well.

    least_capacity: of the workers that are compared; larger ones have as much to do when they are as full. 0:
    not all are known.
    """
    if step_ms <= 0:
        return TURNS
    if least_capacity <= 0:
        return Measure(lambda worker: worker.pending_ms + worker.load * step_ms, step_ms)

    def ahead(worker: AnyWorker) -> float:
        # One that has begun a new life since has not said yet.
        share = least_capacity / (worker.capacity or least_capacity)
        return worker.pending_ms + worker.load * share * step_ms

    return Measure(ahead, step_ms)


class Homes:
    """The prefill workers of a group, ranked for every conversation."""

    def __init__(self, workers: Sequence[PrefillWorker]) -> None:
        self.workers = list(workers)
        self._hashed = [(_number(worker.endpoint.encode()), worker) for worker in workers]
        self._ranked: dict[bytes, list[PrefillWorker]] = {}

    def ranked(self, home: bytes) -> list[PrefillWorker]:
        """Return the workers at which a conversation is at home: the first, or who stands in for it."""
        slot = home[:_SLOT_BYTES]
        found = self._ranked.get(slot)
        if found is None:
            number = _number(slot)
            best = heapq.nlargest(_RANKED, self._hashed, key=lambda pair: _mixed(pair[0] ^ number))
            found = self._ranked[slot] = [worker for _, worker in best]
        return found

    def among(self, workers: Sequence[PrefillWorker], home: bytes) -> PrefillWorker:
        """Return the one of some of the workers that is a conversation's home."""
        first = next((worker for worker in self.ranked(home) if worker in workers), None)
        return first or at_home(workers, home)


def at_home(workers: Sequence[PrefillWorker], home: bytes) -> PrefillWorker:
    """Return the one of some workers that is a conversation's home."""
    number = _number(home[:_SLOT_BYTES])
    return max(workers, key=lambda worker: _mixed(_number(worker.endpoint.encode()) ^ number))


def by_weight(key: bytes, weighed: Sequence[tuple[W, float]], name: Callable[[W], bytes]) -> W:
    """Return the one of some to which a key belongs: to each by its weight, whatever their order.

    As a weight changes, only as many keys move as must (weighted rendezvous hashing).
    """

    def rank(pair: tuple[W, float]) -> tuple[float, bytes]:
        one, weight = pair
        share = ((_number(key + name(one)) >> 12) + 0.5) / (1 << 52)
        return (-max(weight, _NO_WEIGHT) / math.log(share), name(one))

    return max(weighed, key=rank)[0]


def _number(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mixed(number: int) -> int:
    """Return a number of 64 bits that tells nothing of the given one (the end of splitmix64)."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def draw(workers: Sequence[W], wanted: Callable[[W], bool], count: int, rng: random.Random) -> list[W]:
    """Return up to so many of the wanted workers at random, now and then one twice."""
    found: list[W] = []
    size = len(workers)
    for _ in range(count * _DRAWS):
        worker = workers[int(rng.random() * size)]
        if wanted(worker):
            found.append(worker)
            if len(found) == count:
                break
    return found


def unless_overloaded(
    favourite: Worker[L] | None, workers: Sequence[Worker[L]], overloaded_by: int, measure: Measure = TURNS
) -> Worker[L] | None:
    """Return the favourite unless so many turns like this one more are ahead there than twice the least."""
    if favourite is None:
        return None
    least = min(map(measure.of, workers))
    return favourite if measure.of(favourite) <= 2 * least + overloaded_by * measure.one else None


def of_many(
    workers: Sequence[Worker[L]],
    wanted: Callable[[Worker[L]], bool],
    favourite: Worker[L] | None,
    overloaded_by: int,
    *,
    rng: random.Random,
    measure: Measure,
) -> Worker[L] | None:
    """Return the favourite unless it is overloaded, else the better of two; None when none drawn will do.

    favourite: a wanted one, or None. overloaded_by: as for unless_overloaded.
    """
    if favourite is not None:
        if measure.of(favourite) <= overloaded_by * measure.one:
            return favourite
        drawn = draw(workers, wanted, _COMPARED, rng)
        if drawn and unless_overloaded(favourite, drawn, overloaded_by, measure) is not None:
            return favourite
    else:
        drawn = draw(workers, wanted, 2, rng)
    return min(drawn[:2], key=measure.rank, default=None)


class Wanted:
    """Which workers of a group an attempt is given rather than others."""

    def __init__(
        self,
        avoid: Collection[object],
        limit: int | None,
        reads_from: DecodeWorker | None,
        pairs: Pairs,
        *,
        reads_back: bool,
    ) -> None:
        """Take workers to leave out, turns one may have a place for, and whose KV P is to read."""
        self._avoid = avoid
        self._limit = limit
        self._reads_from = reads_from
        self._pairs = pairs
        self._reads_back = reads_back
        self.beside: PrefillWorker | None = None
        """Whose KV the decode worker is to read."""

    def prefill(self, worker: PrefillWorker) -> bool:
        """Tell whether a prefill worker will do."""
        return (
            self._has_place(worker)
            and not (self._reads_back and worker.info is not None and not worker.info.bidirectional_kv_xfer)
            and not (self._reads_from is not None and self._pairs.rests(worker, self._reads_from))
        )

    def decode(self, worker: DecodeWorker) -> bool:
        """Tell whether a decode worker will do."""
        return self._has_place(worker) and not (
            self.beside is not None and self._pairs.rests(worker, self.beside)
        )

    def _has_place(self, worker: AnyWorker) -> bool:
        return (
            worker.ready
            and (self._limit is None or worker.places < self._limit)
            and worker not in self._avoid
        )
