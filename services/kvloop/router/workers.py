"""The workers a router knows: their facts, whether they answer, and which two serve a turn.

Each worker is asked for its facts in the background. P and D make a pair only when they serve the same
weights and their engines can exchange KV (equal compatibility digests): such workers form a group, and a
turn stays within one. While workers are replaced there may be two groups of one model: a conversation then
stays with the one that holds it, and a new one goes where its name hashes to, by the groups' sizes. Every
router comes to the same without asking, so turns behind a balancer do not go to and fro.

A conversation has a home among the prefill workers, whose prefix cache then has what the last prompt left
(placing.py). What a turn costs here does not depend on how many workers there are: who serves a model is
worked out when facts change, not per turn.

Workers are named in the settings, or announce themselves in the store (discovery.py).
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvloop.router import placing
from kvloop.router.groups import NO_WORKER_RETRY_S, Served, group_of, versions
from kvloop.router.legs import DecodeLink, LegFailed, PrefillLink
from kvloop.router.pairs import Pairs
from kvloop.router.settings import RouterSettings
from kvloop.router.worker import AnyWorker, DecodeWorker, L, PrefillWorker, Worker
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.security import PLAIN, Security

_OVERLOADED_BY = 8
"""A preferred decode worker may have so many turns' work more than twice the least loaded one's."""
_PREFILL_OVERLOADED_BY = 2
"""The same of a prefill worker, where turns wait behind each other."""
_ASKED_PER_S = 100
"""Questions that a router asks all its workers in a second, as long as all is well."""
_MAX_HOMES = 64
_COUNTED_FOR_S = 0.25
"""How long a count of the workers of many is good, where several groups serve a model."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two workers of one attempt."""

    prefill: PrefillWorker | None
    """None for DIRECT."""
    decode: DecodeWorker


@dataclass(frozen=True, slots=True)
class _Group:
    """The workers that serve a model, ready or not."""

    prefills: list[PrefillWorker]
    decodes: list[DecodeWorker]
    homes: placing.Homes
    known: frozenset[DecodeWorker]
    least_capacity: float
    """Of a decode worker; 0 unless all have said theirs."""

    @property
    def large(self) -> bool:
        return max(len(self.prefills), len(self.decodes)) > placing.FEW


@dataclass(frozen=True, slots=True)
class _Count:
    """Of a group's workers."""

    standing: int
    """2: both legs have a ready one; 1: one that answers; 0: neither."""
    present: int
    """Those that answer and stay: whether one pauses, each router sees for itself."""


class WorkerPool:
    """Workers, watched."""

    def __init__(
        self,
        settings: RouterSettings,
        clock: Clock,
        *,
        rng: random.Random | None = None,
        security: Security = PLAIN,
    ) -> None:
        self._security = security
        self.pairs = Pairs(clock)
        self._settings = settings
        self._clock = clock
        self._rng = rng or random.Random()
        self.prefill = [Worker(e, PrefillLink(e, security), clock) for e in settings.prefill_endpoints]
        self.decode = [Worker(e, DecodeLink(e, security), clock) for e in settings.decode_endpoints]
        self._watchers: dict[AnyWorker, asyncio.Task[None]] = {}
        self._served: dict[tuple[str, str], list[Served]] = {}
        self._groups: dict[Served, _Group] = {}
        self._homes: dict[Served, placing.Homes] = {}
        """The former ones: a worker that restarts in its place moves nobody."""
        self._by_epoch: dict[str, DecodeWorker] | None = None
        self._counts: dict[Served, tuple[float, _Count]] = {}
        for worker in self._all():
            worker.on_facts = self._forget
        self.changed = asyncio.Event()
        """Set when some worker's facts or presence changed; for one waiter, who clears it."""

    async def start(self) -> None:
        """Ask every worker once, then keep watching."""
        workers = self._all()
        await asyncio.gather(*(self._ask(worker) for worker in workers))
        for worker in workers:
            self._start_watching(worker)

    async def add(self, role: str, endpoint: str, name: str = "") -> AnyWorker:
        """Ask a worker ("prefill" or "decode") for its facts and take it in.

        name: whose certificate is expected there, if not endpoint's.
        """
        prefills = role == "prefill"
        worker: AnyWorker
        if prefills:
            worker = Worker(endpoint, PrefillLink(endpoint, self._security, name), self._clock)
        else:
            worker = Worker(endpoint, DecodeLink(endpoint, self._security, name), self._clock)
        try:
            await self._ask(worker)
        except BaseException:
            await worker.link.close()
            raise
        worker.on_facts = self._forget
        (self.prefill if prefills else self.decode).append(worker)
        self._forget()
        self.changed.set()
        self._start_watching(worker)
        return worker

    async def remove(self, worker: AnyWorker) -> None:
        """Forget a worker."""
        for workers in (self.prefill, self.decode):
            if worker in workers:
                workers.remove(worker)
        watcher = self._watchers.pop(worker, None)
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait({watcher})
        self._forget()
        self.changed.set()
        await worker.link.close()

    def _start_watching(self, worker: AnyWorker) -> None:
        self._watchers[worker] = asyncio.create_task(self._watch(worker))

    async def stop(self) -> None:
        """Stop watching and close the channels. Idempotent."""
        watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            watcher.cancel()
        if watchers:
            await asyncio.wait(watchers)
        await asyncio.gather(*(worker.link.close() for worker in self._all()))

    def can_serve(self) -> bool:
        """Tell whether some pair is present."""
        groups = {group_of(worker.info) for worker in self.prefill if worker.present}
        return any(group_of(worker.info) in groups for worker in self.decode if worker.present)

    def resolve(self, name: str, adapter: str, key: Callable[[], bytes] = bytes) -> Served:
        """Return the model asked for, in the group to which a turn belongs that nobody holds anything of.

        key: what decides, where there are several. Failures: MODEL_NOT_FOUND, NO_WORKER before any worker is
        known, INVALID_FIELD for no name where several models are served.
        """
        served = self.versions(name, adapter)
        if len(served) == 1:
            return served[0]
        counts = {one: self._count(one) for one in served}
        best = max(count.standing for count in counts.values())
        able = [(one, count.present) for one, count in counts.items() if count.standing == best]
        return placing.by_weight(key(), able, lambda one: f"{one.revision}/{one.compatibility}".encode())

    def keeps(self, served: Served) -> bool:
        """Tell whether a group can go on with what it holds: both legs have a worker, or will soon."""
        group = self._group_of(served)
        return any(w.soon_ready for w in group.prefills) and any(w.soon_ready for w in group.decodes)

    def versions(self, name: str, adapter: str) -> list[Served]:
        """Return the model in every group that serves it. Failures as for resolve."""
        known = self._served.get((name, adapter))
        if known is None:
            known = self._served[(name, adapter)] = versions(self._all(), name, adapter)
        return known

    def siblings(self, served: Served) -> list[Served]:
        """Return all groups that serve a group's model now; itself when it is the only one, or gone."""
        try:
            return self.versions(served.name, served.adapter)
        except Failure:
            return [served]

    def holder(self, endpoint: str, epoch: str) -> DecodeWorker | None:
        """Return the worker a directory entry speaks of, or None when it is none of ours.

        The epoch names a process surely; the endpoint may be another name of the same host.
        """
        if self._by_epoch is None:
            # Of two with one epoch the first counts.
            known = ((w.info.epoch, w) for w in reversed(self.decode) if w.info is not None)
            self._by_epoch = dict(known)
        return self._by_epoch.get(epoch) or self.by_endpoint(endpoint)

    def decode_link(self, endpoint: str) -> DecodeLink:
        """Return a link to a decode worker that is none of ours, for one errand; the caller closes it."""
        return DecodeLink(endpoint, self._security)

    def by_endpoint(self, endpoint: str) -> DecodeWorker | None:
        """Return the decode worker at an endpoint, or None."""
        return next((worker for worker in self.decode if worker.endpoint == endpoint), None)

    def likely_prefill(
        self, served: Served, home: bytes, measure: placing.Measure = placing.TURNS
    ) -> PrefillWorker | None:
        """Return the prefill worker that a turn would go to, or the least busy one; None without any."""
        group = self._group_of(served)
        if group.large:
            at_home = next(filter(_is_ready, group.homes.ranked(home)), None) if home else None
            if at_home is not None and measure.of(at_home) <= _PREFILL_OVERLOADED_BY * measure.one:
                return at_home
            drawn = placing.draw(group.prefills, _is_ready, placing.FEW // 4, self._rng)
            if drawn:
                return placing.unless_overloaded(at_home, drawn, _PREFILL_OVERLOADED_BY, measure) or min(
                    drawn, key=measure.rank
                )
        able = [worker for worker in group.prefills if worker.ready]
        if not able:
            return None
        at_home = group.homes.among(able, home) if home else None
        favourite = placing.unless_overloaded(at_home, able, _PREFILL_OVERLOADED_BY, measure)
        return favourite or min(able, key=measure.rank)

    def least_capacity(self, served: Served) -> float:
        """Return the turns that the smallest decode worker takes at a time; 0 unless all have said theirs."""
        return self._group_of(served).least_capacity

    def is_overloaded(self, served: Served, holder: DecodeWorker, measure: placing.Measure) -> bool:
        """Tell whether a turn is rather given to another decode worker than to its holder."""
        if measure.of(holder) <= _OVERLOADED_BY * measure.one:
            return False
        group = self._group_of(served)
        able = (
            placing.draw(group.decodes, _is_ready, placing.FEW // 4, self._rng)
            if group.large
            else [worker for worker in group.decodes if worker.ready]
        )
        return bool(able) and placing.unless_overloaded(holder, able, _OVERLOADED_BY, measure) is None

    def pick(
        self,
        served: Served,
        *,
        prefer_decode: DecodeWorker | None = None,
        avoid: Collection[object] = (),
        reads_back: bool = False,
        home: bytes = b"",
        limit: int | None = None,
        reads_from: DecodeWorker | None = None,
        ahead: placing.Ahead = placing.IN_TURNS,
    ) -> Pair:
        """Return the pair for an attempt; workers to avoid only serve when there is no other.

        home: what decides which prefill worker is preferred; empty for none. limit: turns that a worker may
        have a place for. reads_from: whose KV the prefill worker is to read. ahead: how busy workers are.

        Failures: NO_WORKER (with RetryInfo) when a leg has no ready worker, OVERLOADED when one has no place.
        """
        group = self._group_of(served)
        if group.large:
            wanted = placing.Wanted(avoid, limit, reads_from, self.pairs, reads_back=reads_back)
            pair = self._pick_of_many(group, wanted, home, prefer_decode, ahead)
            if pair is not None:
                return pair
        prefills = [w for w in group.prefills if w.ready]
        if reads_back:
            prefills = [
                w for w in prefills if w.info is not None and w.info.bidirectional_kv_xfer
            ] or prefills
        decodes = [w for w in group.decodes if w.ready]
        for role, found in (("prefill", prefills), ("decode", decodes)):
            if not found:
                raise Failure(
                    Reason.ERROR_REASON_NO_WORKER,
                    f"no {role} worker is ready",
                    retry_after_s=NO_WORKER_RETRY_S,
                )
        if limit is not None:
            prefills = [w for w in prefills if w.places < limit]
            decodes = [w for w in decodes if w.places < limit]
            if not prefills or not decodes:
                raise Failure(Reason.ERROR_REASON_OVERLOADED, "every worker has its turns")
        prefills = [w for w in prefills if w not in avoid] or prefills
        if reads_from is not None:
            prefills = [w for w in prefills if not self.pairs.rests(w, reads_from)] or prefills
        decodes = [w for w in decodes if w not in avoid] or decodes
        if len(self.pairs):
            prefills = [w for w in prefills if not all(self.pairs.rests(d, w) for d in decodes)] or prefills
        favourite = group.homes.among(prefills, home) if home else None
        prefill = self._place_prefill(prefills, favourite, ahead.prefill)
        decodes = [w for w in decodes if not self.pairs.rests(w, prefill)] or decodes
        return Pair(prefill, self._place_decode(decodes, prefer_decode, ahead.decode))

    def _pick_of_many(
        self,
        group: _Group,
        wanted: placing.Wanted,
        home: bytes,
        prefer_decode: DecodeWorker | None,
        ahead: placing.Ahead,
    ) -> Pair | None:
        """Return a pair without looking at all workers; None when that leads to none."""
        at_home = None
        if home:
            at_home = next(filter(wanted.prefill, group.homes.ranked(home)), None)
            if at_home is None:
                return None
        prefill = placing.of_many(
            group.prefills,
            wanted.prefill,
            at_home,
            _PREFILL_OVERLOADED_BY,
            rng=self._rng,
            measure=ahead.prefill,
        )
        if prefill is None:
            return None
        wanted.beside = prefill
        holder = prefer_decode
        if holder is not None and not (holder in group.known and wanted.decode(holder)):
            holder = None
        decode = placing.of_many(
            group.decodes, wanted.decode, holder, _OVERLOADED_BY, rng=self._rng, measure=ahead.decode
        )
        return None if decode is None else Pair(prefill, decode)

    def _group_of(self, served: Served) -> _Group:
        group = self._groups.get(served)
        if group is None:
            prefills = [worker for worker in self.prefill if served.fits(worker.info)]
            decodes = [worker for worker in self.decode if served.fits(worker.info)]
            homes = self._homes.get(served)
            if homes is None or homes.workers != prefills:
                homes = placing.Homes(prefills)
            group = self._groups[served] = _Group(
                prefills,
                decodes,
                homes,
                frozenset(decodes),
                min((worker.capacity for worker in decodes), default=0.0),
            )
            if len(self._homes) >= _MAX_HOMES:
                self._homes.clear()
            self._homes[served] = homes
        return group

    def _forget(self) -> None:
        """Forget what was worked out from the workers' facts."""
        self._served.clear()
        self._groups.clear()
        self._counts.clear()
        self._by_epoch = None

    def _all(self) -> list[AnyWorker]:
        return [*self.prefill, *self.decode]

    def _place_prefill(
        self, prefills: Sequence[PrefillWorker], at_home: PrefillWorker | None, measure: placing.Measure
    ) -> PrefillWorker:
        home_worker = placing.unless_overloaded(at_home, prefills, _PREFILL_OVERLOADED_BY, measure)
        return home_worker or self._least_loaded(prefills, measure)

    def _place_decode(
        self, decodes: Sequence[DecodeWorker], prefer: DecodeWorker | None, measure: placing.Measure
    ) -> DecodeWorker:
        favourite = prefer if prefer in decodes else None
        holder = placing.unless_overloaded(favourite, decodes, _OVERLOADED_BY, measure)
        return holder or self._least_loaded(decodes, measure)

    def _least_loaded(self, workers: Sequence[Worker[L]], measure: placing.Measure) -> Worker[L]:
        # Two at random and the better one: near the best placement, without every router at once
        # running to the same idle worker.
        one, other = (
            (self._rng.choice(workers) for _ in range(2))
            if len(workers) > 2
            else (
                workers[0],
                workers[-1],
            )
        )
        return measure.better(one, other, self._rng)

    def _count(self, served: Served) -> "_Count":
        group, now = self._group_of(served), self._clock.monotonic()
        until, count = self._counts.get(served, (0.0, _Count(0, 0)))
        if not group.large or now >= until:
            roles: tuple[list[AnyWorker], ...] = ([*group.prefills], [*group.decodes])
            standing = sum(all(any(map(test, role)) for role in roles) for test in (_is_ready, _is_present))
            count = _Count(standing, sum(map(_is_present, itertools.chain(*roles))))
            self._counts[served] = (now + _COUNTED_FOR_S, count)
        return count

    async def _watch(self, worker: AnyWorker) -> None:
        # Spread over the interval, so that many workers are not all asked in the same instant.
        interval = self._settings.info_interval_s * self._rng.uniform(0.9, 1.1)
        while True:
            try:
                async with asyncio.timeout(interval):
                    await worker.ask_now.wait()
            except TimeoutError:
                pass
            # Those that have failed are asked at once.
            due = worker.ask_now.is_set() or self.is_due(worker)
            worker.ask_now.clear()
            if due:
                await self._ask(worker)

    def is_due(self, worker: AnyWorker) -> bool:
        """Tell whether a worker is to be asked again: of many, those that are not heard of anyway."""
        good_for_s = (len(self.prefill) + len(self.decode)) / _ASKED_PER_S
        return good_for_s <= self._settings.info_interval_s or worker.worth_asking(good_for_s)

    async def _ask(self, worker: AnyWorker) -> None:
        try:
            info = await worker.link.info(self._settings.info_timeout_s)
        except LegFailed as failed:
            # After a pause of this process gRPC may find a fresh deadline over at once: no clock tells.
            changed = worker.not_answered(slow=failed.late)
        else:
            changed = worker.learned(info)
        if changed:
            self._served.clear()
            self.changed.set()


def _is_ready(worker: AnyWorker) -> bool:
    return worker.ready


def _is_present(worker: AnyWorker) -> bool:
    return worker.present and not worker.leaving
