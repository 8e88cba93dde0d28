"""The rates a router works with: learnt from its own turns, shared with the other replicas.

Computing, the first step and the size of a token's KV belong to a model's group of workers; transfers to a
pair as well, as soon as that pair has moved something. Reads in both directions use one path, so the hand-
over of every turn also tells what reading back would take, even while nothing is read back.

A way that looks dear is not taken, and so is not measured again. Three things keep odd measurements from
closing a way for good: D counts as fast as P until several DIRECT turns have said otherwise, and again when
none was measured for a while; what is measured after such a silence counts for more than all before it; and
the size of a token's KV is taken from hand-overs until something was read back.

The shared table holds means of what the replicas learnt. It is a seed for whoever has measured little
himself, and never in a turn's way: it is read and written in the background. Pairs are forgotten with their
workers; the table forgets by itself.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from kvloop.metastore.estimates import SharedEstimates
from kvloop.metastore.port import DirectoryUnavailable
from kvloop.router.costs import Rates, Terms, compute_features, transfer_features
from kvloop.router.groups import Served
from kvloop.router.learning import Estimator
from kvloop.router.settings import RouterSettings
from kvloop.router.turn import Turn
from kvloop.router.worker import AnyWorker, DecodeWorker, PrefillWorker
from kvloop.router.workers import WorkerPool
from kvloop.runtime.clock import Clock

SHARE_INTERVAL_S = 5.0
MAX_ESTIMATORS = 2048
_AT_A_TIME = 256
"""Estimates that are taken in before others have their turn."""
EVERY_TURN_UP_TO = 256
"""Turns that are all learnt from; later every fourth is enough."""
_LATER_EVERY = 4
SILENT_S = 60.0
"""When D's computing was not measured for so long, it may be as fast as P again."""
_ONE = (1.0,)


@dataclass(slots=True)
class _Entry:
    estimator: Estimator
    measured_at: float
    """When last, or when it was made."""
    pair: tuple[str, str] | None = None
    """The workers' names, if it is of two of them."""
    shared: int = 0
    """Measurements that the shared table has."""


class CostBook:
    """Estimators by name."""

    def __init__(self, settings: RouterSettings, pool: WorkerPool, clock: Clock) -> None:
        """Take the pool to whose workers a memory of pairs is confined."""
        self._settings = settings
        self._pool = pool
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._known: dict[str, Terms] = {}
        """What the shared table says."""
        self._handed: dict[str, tuple[float, float]] = {}
        """By group, bytes and descriptors per token of the latest hand-over of a prompt that was all new."""
        self._turns = 0
        self._rates: dict[tuple[Served, str, str], Rates] = {}
        """What nothing new has been learnt of since."""

    def __len__(self) -> int:
        """Return of how many pairs something is remembered."""
        return sum(entry.pair is not None for entry in self._entries.values())

    def rates(self, served: Served, prefill: PrefillWorker | None, decode: DecodeWorker | None) -> Rates:
        """Return what a pair needs; workers not known yet are taken for average ones of the group."""
        key = (served, prefill.name if prefill is not None else "", decode.name if decode is not None else "")
        known = self._rates.get(key)
        if known is None:
            if len(self._rates) >= MAX_ESTIMATORS:
                self._rates.clear()
            known = self._rates[key] = self._rates_now(served, prefill, decode)
        return known

    def _rates_now(self, served: Served, prefill: PrefillWorker | None, decode: DecodeWorker | None) -> Rates:
        group, seeds = _group(served), self._settings
        computing = self._at(f"prefill/{group}", Terms(seeds.seed_compute)).terms
        at_decode = self._at(f"decode/{group}", computing)
        known = at_decode.settled or f"decode/{group}" in self._known
        computing_at_decode = at_decode.terms if known else computing
        if self._is_silent(f"decode/{group}"):
            cheaper = map(min, computing_at_decode.values, computing.values)
            computing_at_decode = Terms(tuple(cheaper))
        bytes_, descriptors = self._handed.get(group, seeds.seed_kv)
        return Rates(
            prefill=computing,
            decode=computing_at_decode,
            transfer=self._transfer(group, prefill, decode)[-1].terms,
            first_step_ms=self._one(f"first_step/{group}", seeds.seed_first_step_ms),
            bytes_per_token=self._one(f"bytes/{group}", bytes_),
            descriptors_per_token=self._one(f"descriptors/{group}", descriptors),
        )

    def learn(self, turn: Turn) -> None:
        """Take the measurements of a turn that went well. Legs that waited behind others are left out."""
        if turn.decoded is None or turn.pair is None or turn.decode_first_at is None:
            return
        self._turns += 1
        if self._turns > EVERY_TURN_UP_TO and self._turns % _LATER_EVERY:
            return
        group = _group(turn.served)
        # Also makes the estimators.
        self._rates_now(turn.served, turn.pair.prefill, turn.pair.decode)
        self._rates.clear()
        first_ms = (turn.decode_first_at - turn.decode_started) * 1000
        if turn.prefilled is None:
            if turn.decode_alone:
                features = compute_features(turn.decoded.tokens.d_local, turn.prompt_tokens)
                if self._is_silent(f"decode/{group}"):
                    self._entries[f"decode/{group}"].estimator.start_over()
                self._add(f"decode/{group}", features, first_ms)
            return
        reuse, handoff = turn.prefilled.reuse, turn.decoded.handoff
        # P reads from the holder, which need not be who decodes.
        moved = ((reuse.readback, turn.holder or turn.pair.decode), (handoff, turn.pair.decode))
        for transfer, decode in moved:
            if transfer.bytes and transfer.duration_ms > 0:
                features = transfer_features(transfer.bytes, transfer.descriptors)
                for estimator in self._transfer(group, turn.pair.prefill, decode):
                    estimator.add(features, transfer.duration_ms)
        if handoff.bytes and reuse.tokens.computed == turn.prompt_tokens:
            # D may have had a part already: then this says too little, and a read is tried and measured.
            self._handed[group] = (
                handoff.bytes / turn.prompt_tokens,
                handoff.descriptors / turn.prompt_tokens,
            )
        if reuse.readback.bytes and reuse.tokens.readback:
            self._add(f"bytes/{group}", _ONE, reuse.readback.bytes / reuse.tokens.readback)
            self._add(f"descriptors/{group}", _ONE, reuse.readback.descriptors / reuse.tokens.readback)
        if turn.prefill_alone and not reuse.retried:
            start = turn.prompt_tokens - reuse.tokens.computed
            features = compute_features(start, turn.prompt_tokens)
            self._add(f"prefill/{group}", features, reuse.prefill_ms - reuse.readback.duration_ms)
        if turn.decode_alone:
            self._add(f"first_step/{group}", _ONE, first_ms - handoff.duration_ms)

    async def keep_sharing(self, estimates: SharedEstimates, interval_s: float = SHARE_INTERVAL_S) -> None:
        """Give and take until cancelled; a store that is away is tried again next time."""
        while True:
            with contextlib.suppress(DirectoryUnavailable):
                await self.share(estimates)
            await asyncio.sleep(interval_s)

    async def share(self, estimates: SharedEstimates) -> None:
        """Give what was learnt since the last time, take what others know. Raises DirectoryUnavailable."""
        present = _Present(self._pool)
        for name, entry in list(self._entries.items()):
            if entry.pair is not None and not present.workers.issuperset(entry.pair):
                del self._entries[name]
                continue
            estimator = entry.estimator
            fresh = estimator.count - entry.shared
            if fresh > 0 and estimator.settled:
                entry.shared = estimator.count
                await estimates.merge(name, estimator.terms.values, float(fresh))
        told = await estimates.read()
        # What the table has forgotten is not known any more.
        known: dict[str, Terms] = {}
        for number, (name, estimate) in enumerate(told.items(), 1):
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)
            terms = Terms(estimate.values)
            if min(terms.values) < 0 or not present.needs(name, full=len(known) >= MAX_ESTIMATORS):
                continue
            known[name] = terms
            if name in self._entries:
                self._entries[name].estimator.reseed(terms)
        self._known = known
        self._rates.clear()

    def _transfer(
        self, group: str, prefill: PrefillWorker | None, decode: DecodeWorker | None
    ) -> list[Estimator]:
        """Return the group's estimator and, if there is one, the pair's."""
        of_group = self._at(f"transfer/{group}", Terms(self._settings.seed_transfer))
        if prefill is None or decode is None:
            return [of_group]
        name = f"transfer/{group}/{prefill.name}/{decode.name}"
        if name not in self._entries and len(self._entries) >= MAX_ESTIMATORS:
            return [of_group]
        pair = self._at(name, of_group.terms, (prefill.name, decode.name))
        return [of_group, pair]

    def _add(self, name: str, features: tuple[float, ...], ms: float) -> None:
        entry = self._entries[name]
        entry.estimator.add(features, ms)
        entry.measured_at = self._clock.monotonic()

    def _is_silent(self, name: str) -> bool:
        return self._clock.monotonic() - self._entries[name].measured_at > SILENT_S

    def _one(self, name: str, seed: float) -> float:
        return self._at(name, Terms((seed,))).terms.values[0]

    def _at(self, name: str, seed: Terms, pair: tuple[str, str] | None = None) -> Estimator:
        entry = self._entries.get(name)
        if entry is None:
            known = self._known.get(name)
            fits = known is not None and len(known.values) == len(seed.values)
            estimator = Estimator(known if known is not None and fits else seed)
            entry = self._entries[name] = _Entry(estimator, self._clock.monotonic(), pair)
        elif entry.estimator.count == 0 and name not in self._known:
            entry.estimator.reseed(seed)
        return entry.estimator


class _Present:
    """The workers that are there now, and what may be needed of what the shared table says."""

    def __init__(self, pool: WorkerPool) -> None:
        workers: list[AnyWorker] = [*pool.prefill, *pool.decode]
        self.workers = {worker.name for worker in workers}
        infos = [worker.info for worker in workers if worker.info is not None]
        self._groups = {f"{i.model.name}@{i.model.revision}/{i.compatibility}" for i in infos}

    def needs(self, name: str, *, full: bool) -> bool:
        """Tell whether an estimate is of a group, or of a pair that is there and has room."""
        kind, _, rest = name.partition("/")
        if kind != "transfer" or rest in self._groups:
            return True
        return not full and any(
            self._are_two(rest[len(group) + 1 :]) for group in self._groups if rest.startswith(f"{group}/")
        )

    def _are_two(self, names: str) -> bool:
        # A worker's name may have a slash, too.
        at = [place for place, letter in enumerate(names) if letter == "/"]
        return any(names[:place] in self.workers and names[place + 1 :] in self.workers for place in at)


def _group(served: Served) -> str:
    return f"{served.name}@{served.revision}/{served.compatibility}"
