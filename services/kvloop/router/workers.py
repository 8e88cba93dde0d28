"""The workers a router knows: their facts, whether they answer, and which two serve a turn.

Each worker is asked for its facts in the background. P and D make a pair only when they serve the same
weights and their engines can exchange KV (equal compatibility digests): such workers form a group, and a
turn stays within one.

A conversation has a home among the prefill workers, whose prefix cache then has what the last prompt left:
the one that hashes highest together with the conversation (rendezvous hashing), which every router finds
without asking, and which hardly changes when workers come and go.

Workers are named in the settings, or announce themselves in the store (discovery.py).
"""

import asyncio
import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvloop.router.legs import DecodeLink, LegFailed, PrefillLink
from kvloop.router.pairs import Pairs
from kvloop.router.settings import RouterSettings
from kvloop.router.worker import AnyWorker, DecodeWorker, L, PrefillWorker, Worker
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.runtime.security import PLAIN, Security
from kvloop.v1alpha1 import worker_pb2

_NO_WORKER_RETRY_S = 0.5
_OVERLOADED_BY = 8
"""A preferred decode worker may have so many turns more than twice the least loaded one's."""
_PREFILL_OVERLOADED_BY = 2
"""The same of a prefill worker, where turns wait behind each other."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model as one group of workers serves it."""

    name: str
    revision: str
    adapter: str
    compatibility: str
    max_model_len: int
    vocab_size: int
    kv_recompute_threshold: int

    def fits(self, info: worker_pb2.WorkerInfo | None) -> bool:
        """Tell whether a worker belongs to the group and serves the adapter."""
        return (
            info is not None
            and info.model.name == self.name
            and info.model.revision == self.revision
            and info.compatibility == self.compatibility
            and (not self.adapter or self.adapter in info.adapters)
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """The two workers of one attempt."""

    prefill: PrefillWorker | None
    """None for DIRECT."""
    decode: DecodeWorker


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
        self.changed = asyncio.Event()
        """Set when some worker's facts or presence changed; for one waiter, who clears it."""

    async def start(self) -> None:
        """Ask every worker once, then keep watching."""
        workers = self._all()
        await asyncio.gather(*(self._ask(worker) for worker in workers))
        for worker in workers:
            self._start_watching(worker)

    async def add(self, role: str, endpoint: str) -> AnyWorker:
        """Ask a worker ("prefill" or "decode") for its facts and take it in."""
        prefills = role == "prefill"
        worker: AnyWorker
        if prefills:
            worker = Worker(endpoint, PrefillLink(endpoint, self._security), self._clock)
        else:
            worker = Worker(endpoint, DecodeLink(endpoint, self._security), self._clock)
        try:
            await self._ask(worker)
        except BaseException:
            await worker.link.close()
            raise
        (self.prefill if prefills else self.decode).append(worker)
        self._served.clear()
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
        self._served.clear()
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
        return any(
            _group(p.info) == _group(d.info)
            for p in self.prefill
            if p.present
            for d in self.decode
            if d.present
        )

    def resolve(self, name: str, adapter: str) -> Served:
        """Return the model asked for, in the group best able to serve it now.

        Failures: MODEL_NOT_FOUND, NO_WORKER before any worker is known, INVALID_FIELD for no name where
        several models are served.
        """
        served = self.versions(name, adapter)
        return served[0] if len(served) == 1 else max(served, key=self._pairs_ready)

    def versions(self, name: str, adapter: str) -> list[Served]:
        """Return the model in every group that serves it. Failures as for resolve."""
        known = self._served.get((name, adapter))
        if known is None:
            known = self._served[(name, adapter)] = self._versions(name, adapter)
        return known

    def holder(self, endpoint: str, epoch: str) -> DecodeWorker | None:
        """Return the worker a directory entry speaks of, or None when it is none of ours.

        The epoch names a process surely; the endpoint may be another name of the same host.
        """
        for worker in self.decode:
            if worker.info is not None and worker.info.epoch == epoch:
                return worker
        return self.by_endpoint(endpoint)

    def decode_link(self, endpoint: str) -> DecodeLink:
        """Return a link to a decode worker that is none of ours, for one errand; the caller closes it."""
        return DecodeLink(endpoint, self._security)

    def by_endpoint(self, endpoint: str) -> DecodeWorker | None:
        """Return the decode worker at an endpoint, or None."""
        return next((worker for worker in self.decode if worker.endpoint == endpoint), None)

    def likely_prefill(self, served: Served, home: bytes) -> PrefillWorker | None:
        """Return the prefill worker that a turn would go to, or the least busy one; None without any."""
        able = [worker for worker in self.prefill if worker.ready and served.fits(worker.info)]
        if not able:
            return None
        return _at_home(able, home) or min(able, key=lambda worker: worker.pending_ms)

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
    ) -> Pair:
        """Return the pair for an attempt; workers to avoid only serve when there is no other.

        home: what decides which prefill worker is preferred; empty for none. limit: turns that a worker may
        have a place for. reads_from: whose KV the prefill worker is to read.

        Failures: NO_WORKER (with RetryInfo) when a leg has no ready worker, OVERLOADED when one has no place.
        """
        prefills = [w for w in self.prefill if w.ready and served.fits(w.info)]
        if reads_back:
            prefills = [
                w for w in prefills if w.info is not None and w.info.bidirectional_kv_xfer
            ] or prefills
        decodes = [w for w in self.decode if w.ready and served.fits(w.info)]
        for role, found in (("prefill", prefills), ("decode", decodes)):
            if not found:
                raise Failure(
                    Reason.ERROR_REASON_NO_WORKER,
                    f"no {role} worker is ready",
                    retry_after_s=_NO_WORKER_RETRY_S,
                )
        if limit is not None:
            prefills = [w for w in prefills if w.places < limit]
            decodes = [w for w in decodes if w.places < limit]
            if not prefills or not decodes:
                raise Failure(Reason.ERROR_REASON_OVERLOADED, "every worker has its turns")
        prefills = [w for w in prefills if w not in avoid] or prefills
        if reads_from is not None:
            prefills = [w for w in prefills if not self.pairs.rests(w, reads_from)] or prefills
        prefill = self._place_prefill(prefills, home)
        decodes = [w for w in decodes if w not in avoid] or decodes
        decodes = [w for w in decodes if not self.pairs.rests(w, prefill)] or decodes
        return Pair(prefill, self._place_decode(decodes, prefer_decode))

    def _all(self) -> list[AnyWorker]:
        return [*self.prefill, *self.decode]

    def _place_prefill(self, prefills: Sequence[PrefillWorker], home: bytes) -> PrefillWorker:
        return _at_home(prefills, home) or self._least_loaded(prefills)

    def _place_decode(self, decodes: Sequence[DecodeWorker], prefer: DecodeWorker | None) -> DecodeWorker:
        if prefer is not None and prefer in decodes:
            least = min(worker.load for worker in decodes)
            if prefer.load <= 2 * least + _OVERLOADED_BY:
                return prefer
        return self._least_loaded(decodes)

    def _least_loaded(self, workers: Sequence[Worker[L]]) -> Worker[L]:
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
        if one.load == other.load:
            return self._rng.choice((one, other))
        return one if one.load < other.load else other

    def _pairs_ready(self, served: Served) -> tuple[int, int]:
        prefills = sum(worker.ready and served.fits(worker.info) for worker in self.prefill)
        decodes = sum(worker.ready and served.fits(worker.info) for worker in self.decode)
        return min(prefills, decodes), prefills + decodes

    def _versions(self, name: str, adapter: str) -> list[Served]:
        infos = [worker.info for worker in self._all() if worker.info is not None]
        if not infos:
            raise Failure(
                Reason.ERROR_REASON_NO_WORKER, "no worker has answered yet", retry_after_s=_NO_WORKER_RETRY_S
            )
        names = {info.model.name for info in infos}
        if not name and len(names) > 1:
            raise invalid("model", "several models are served; name one")
        chosen = name or next(iter(names))
        if chosen not in names:
            raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such model is served", field="model")
        able = [i for i in infos if i.model.name == chosen and (not adapter or adapter in i.adapters)]
        if not able:
            raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such adapter is served", field="adapter")
        groups: dict[tuple[str, str, str] | None, list[worker_pb2.WorkerInfo]] = {}
        for info in able:
            groups.setdefault(_group(info), []).append(info)
        return [
            Served(
                name=chosen,
                revision=members[0].model.revision,
                adapter=adapter,
                compatibility=members[0].compatibility,
                max_model_len=min(info.max_model_len for info in members),
                vocab_size=min(info.vocab_size for info in members),
                kv_recompute_threshold=max(info.kv_recompute_threshold for info in members),
            )
            for members in groups.values()
        ]

    async def _watch(self, worker: AnyWorker) -> None:
        # Spread over the interval, so that many workers are not all asked in the same instant.
        interval = self._settings.info_interval_s * self._rng.uniform(0.9, 1.1)
        while True:
            try:
                async with asyncio.timeout(interval):
                    await worker.ask_now.wait()
            except TimeoutError:
                pass
            worker.ask_now.clear()
            await self._ask(worker)

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


def _group(info: worker_pb2.WorkerInfo | None) -> tuple[str, str, str] | None:
    return None if info is None else (info.model.name, info.model.revision, info.compatibility)


def _at_home(workers: Sequence[PrefillWorker], home: bytes) -> PrefillWorker | None:
    """Return the worker that is a conversation's home, or None without one or when it is overloaded."""
    if not home:
        return None
    best = max(workers, key=lambda worker: hashlib.blake2b(worker.endpoint.encode(), key=home).digest())
    least = min(worker.load for worker in workers)
    return best if best.load <= 2 * least + _PREFILL_OVERLOADED_BY else None
