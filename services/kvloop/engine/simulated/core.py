"""One life of one simulated engine: from start to stop, or to death."""

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from kvloop.engine.port import Finish, FirstToken, Hold, PrefillOutcome, ReadGrant
from kvloop.engine.simulated import probabilities
from kvloop.engine.simulated.answer import Ending
from kvloop.engine.simulated.clock import ShiftedClock, sleep
from kvloop.engine.simulated.cost import PRESETS
from kvloop.engine.simulated.fabric import Dead, Fabric, Hello
from kvloop.engine.simulated.faults import Faults
from kvloop.engine.simulated.filling import Filler
from kvloop.engine.simulated.handle import Address, Refused, describe
from kvloop.engine.simulated.holds import Held, HoldTable
from kvloop.engine.simulated.kv import Kv
from kvloop.engine.simulated.model import Model
from kvloop.engine.simulated.outcomes import Outcomes
from kvloop.engine.simulated.pool import BlockPool
from kvloop.engine.simulated.reader import Reader, Wanted
from kvloop.engine.simulated.request import Request
from kvloop.engine.simulated.scheduler import Batch, Scheduler
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.engine.simulated.wire import BlockServer
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import turn_pb2, worker_pb2

_PREFILL = "prefill/"
_LEASE = "lease/"


def gone() -> Failure:
    """Return the failure of an engine that is not there."""
    return Failure(Reason.ERROR_REASON_WORKER_FAILED, "the engine is gone")


class Core:
    """Pool, holds, scheduler and reader of one life; its blocks are read by other engines (KvSource)."""

    def __init__(
        self,
        settings: SimulatedSettings,
        role: str,
        clock: ShiftedClock,
        fabric: Fabric,
        faults: Faults,
        *,
        compatibility: str,
        hold_ended: Callable[[str, str], None],
    ) -> None:
        self.settings = settings
        self.epoch = secrets.token_hex(8)
        self.clock = clock
        self.model = Model(settings)
        self.counters = worker_pb2.EngineCounters()
        self.dice = random.Random(self.epoch)
        self.alive = False
        self.paused = False
        self._cost = PRESETS[settings.preset]
        self._faults = faults
        self._fabric = fabric
        self.compatibility = compatibility
        self._address = Address(f"{role}-{self.epoch}", "127.0.0.1", 0)
        self._resumed = asyncio.Event()
        self._wake = asyncio.Event()
        self.requests: set[Request] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: BlockServer | None = None
        self._generated = 0
        self.pool = BlockPool(settings.num_blocks, caching=settings.enable_prefix_caching)
        self.outcomes = Outcomes(self.pool)
        self.table = HoldTable(
            self.pool, budget=int(settings.num_blocks * settings.hold_share), ended=hold_ended
        )
        self._filler = Filler(self.model, self.pool, settings.block_size)
        self.scheduler = Scheduler(
            settings,
            self.pool,
            self.table,
            self._filler,
            start_read=self._start_read,
            read_saved=self._read_saved,
            sample=self._sample,
        )
        self._reader = Reader(
            fabric,
            clock,
            self._cost,
            faults,
            time_scale=settings.time_scale,
            block_size=settings.block_size,
            compatibility=lambda: self.compatibility,
            running=self.running,
        )

    # Life

    @property
    def side_channel(self) -> str:
        """Return host:port where other processes read; "" without such a door."""
        return self._address.place if self._address.port else ""

    async def start(self) -> None:
        """Begin to serve."""
        if self._fabric.tcp:
            self._server = BlockServer(self._address.engine_id, self)
            port = await self._server.start()
            self._address = Address(self._address.engine_id, "127.0.0.1", port)
        self._fabric.join(self._address.engine_id, self)
        self.alive = True
        self._spawn(self._loop())

    def die(self, cause: BaseException | None = None) -> None:
        """End at once; requests meet WORKER_FAILED, readers a dead peer. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        self._fabric.leave(self._address.engine_id)
        if self._server is not None:
            self._server.abort()
        for request in list(self.requests):
            failure = gone()
            failure.__cause__ = cause
            self._end(request)
            request.out.fail(failure)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._resumed.set()

    async def wait_ended(self) -> None:
        """Return once nothing of this life runs any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def pause(self) -> None:
        """Stop computing and answering."""
        self.paused = True
        self._resumed.clear()

    def unpause(self) -> None:
        """Go on."""
        self.paused = False
        self._resumed.set()
        self._wake.set()

    async def running(self) -> None:
        """Wait while paused."""
        while self.paused and self.alive:
            await self._resumed.wait()

    def poke(self) -> None:
        """Let the loop look at the clock again."""
        self._wake.set()

    def reap(self) -> None:
        """End what is due."""
        now = self.clock.monotonic()
        self.table.reap(now)
        self.outcomes.reap(now)

    def renew_epoch(self) -> None:
        """Take a new name for this life."""
        self.epoch = secrets.token_hex(8)

    # Requests

    def submit(self, request: Request) -> None:
        """Take a request in."""
        self.requests.add(request)
        self.scheduler.submit(request)
        self._wake.set()

    def abort(self, request: Request) -> None:
        """End a request unless it is over; a cancelled answer is held when its terms say so."""
        if request.over:
            return
        if request.hold is not None and request.hold.on_cancel and request.length > request.prompt_len:
            self._keep(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        if request.reading is not None:
            request.reading.cancel()
        self.scheduler.leave(request)
        self._end(request)
        self._wake.set()

    def _end(self, request: Request) -> None:
        request.over = True
        request.ended.set()
        self.requests.discard(request)

    def begin_read(self, lease_id: str, held: Held, num_tokens: int, pin_s: float) -> ReadGrant:
        """Pin a live hold for one read."""
        read_id = secrets.token_hex(6)
        deadline = self.clock.monotonic() + pin_s
        self.table.pin(held, read_id, deadline)
        handle = describe(
            self._address,
            f"{_LEASE}{lease_id}#{read_id}",
            blocks=held.blocks,
            packed=held.ids,
            keys=held.keys,
            num_tokens=num_tokens,
            expiry=deadline,
            block_size=self.settings.block_size,
            none_hash=self.model.none_hash,
        )
        if self._faults.spoil is not None:
            handle = handle.spoiled(self._faults.spoil)
        self._wake.set()
        return ReadGrant(read_id, handle.to_json(readback=True), num_tokens, pin_s)

    def counted(self) -> worker_pb2.EngineCounters:
        """Return the counters."""
        self.counters.generated_tokens = self._generated
        self.counters.preemptions = self.scheduler.preemptions
        counters = worker_pb2.EngineCounters()
        counters.CopyFrom(self.counters)
        return counters

    # What other engines ask (KvSource)

    async def hello(self) -> Hello:
        """Shake hands."""
        await self._answering()
        return Hello(self.clock.monotonic(), self.compatibility)

    async def fetch(self, block_ids: list[int]) -> list[Kv] | None:
        """Return what is in the blocks now; None when one of them does not exist."""
        await self._answering()
        at = self.pool.at
        kvs = [kv for block_id in block_ids if (kv := at(block_id)) is not None]
        return kvs if len(kvs) == len(block_ids) else None

    async def done(self, request_id: str) -> None:
        """Take the notice that a read is over; late and unknown ones are ignored."""
        await self._answering()
        if request_id.startswith(_PREFILL):
            self.outcomes.release(request_id.removeprefix(_PREFILL))
        elif request_id.startswith(_LEASE):
            lease_id, _, read_id = request_id.removeprefix(_LEASE).rpartition("#")
            self.table.unpin(lease_id, read_id)
        self._wake.set()

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _answering(self) -> None:
        if self.paused:
            await self.running()
        if not self.alive:
            raise Dead

    # The loop

    async def _loop(self) -> None:
        try:
            while True:
                self.reap()
                batch = self.scheduler.schedule()
                if batch:
                    await sleep(self.clock, self._seconds(batch))
                    await asyncio.sleep(0)
                else:
                    await self._idle()
                if self.paused:
                    await self.running()
                self.scheduler.apply(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine core dies of it
            self.die(error)

    async def _idle(self) -> None:
        self._wake.clear()
        due = [when for when in (self.table.next_due, self.outcomes.next_due) if when is not None]
        if not due:
            await self._wake.wait()
            return
        timer = self.clock.call_later(max(0.0, min(due) - self.clock.monotonic()), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _seconds(self, batch: Batch) -> float:
        cost = self._cost
        spans = [(r.computed, r.computed + count) for r, count in batch if count > 1]
        singles = len(batch) - len(spans)
        seconds = cost.prefill(spans)
        seconds += cost.decode_seq_s * singles if spans else cost.decode(singles)
        if cost.first_step_s:
            seconds += cost.first_step_s * sum(r.after_read for r, _ in batch)
        return seconds * self.settings.time_scale

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Reads

    def _start_read(self, request: Request) -> None:
        request.reading = self._spawn(self._read(request))

    def _read_saved(self, request: Request) -> None:
        if request.handle is not None:
            self._spawn(self._reader.notify(request.handle))

    async def _read(self, request: Request) -> None:
        handle = request.handle
        if handle is None:
            return
        size = self.settings.block_size
        first = request.local // size
        num_tokens = request.local + request.external
        # The list is aligned from its tail, as vLLM does: only an honest count finds the right blocks.
        meant = -(-min(handle.num_tokens, request.prompt_len) // size) - first
        block_ids = handle.block_ids[-meant:]
        if len(block_ids) < meant:
            self.die(AssertionError("fewer remote blocks than tokens"))
            return
        wanted = Wanted(
            handle,
            block_ids[: -(-num_tokens // size) - first],
            margin_s=self.settings.read_margin_s if request.prefill else 0.0,
            corrupt=request.corrupt,
        )
        try:
            await self._faults.stalled("start")
            kvs, request.transfer = await self._reader.read(wanted)
        except Refused as refused:
            if not request.over:
                request.reading = None
                self._drop(request)
                request.out.fail(refused.failure())
            return
        if request.over:
            return
        request.reading = None
        self._filler.copy(request, first, kvs, num_tokens)
        self.counters.transfers += 1
        self.counters.transfer_bytes += request.transfer.bytes
        self.counters.transfer_descriptors += request.transfer.descriptors
        self.scheduler.resume(request, num_tokens)
        self._wake.set()

    # Ends

    def _sample(self, request: Request) -> None:
        if request.length == request.prompt_len and request.sources is not None:
            self.counters.local_tokens += request.sources.local
            self.counters.external_tokens += request.sources.external
            self.counters.computed_tokens += request.sources.computed
        if request.prefill:
            self._finish_prefill(request)
        else:
            self._generate(request)

    def _generate(self, request: Request) -> None:
        token = self._choose(request)
        request.append(token)
        self._generated += 1
        text, ending = request.answer.add(token)
        logprobs = self._logprobs(request, token)
        if ending is not None:
            self._finish_decode(request, ending)
        request.out.put(token, text, logprobs)

    def _choose(self, request: Request) -> int:
        fold = request.fold
        if fold is None:
            fold = self.model.fold(request.blocks, request.length, request.root, request.adapter)
            request.fold = fold
        else:
            fold.update(request.ids[-tokens.TOKEN_BYTES :])
        produced = request.length - request.prompt_len
        return request.sampling.choose(self.model, fold.copy().digest(), produced)

    def _logprobs(self, request: Request, token: int) -> turn_pb2.PositionLogprobs | None:
        count = request.sampling.logprobs
        return None if count is None else probabilities.position(token, count, self.settings.vocab_size)

    def _first_token(self, request: Request) -> FirstToken:
        token = self._choose(request)
        text, ending = request.answer.add(token)
        logprobs = self._logprobs(request, token)
        ends = ending is not None and ending.reason == turn_pb2.FINISH_REASON_STOP
        return FirstToken(token, text, [] if logprobs is None else [logprobs], ends)

    def _finish_decode(self, request: Request, ending: Ending) -> None:
        hold = self._keep(request) if request.hold is not None else None
        self.scheduler.leave(request)
        self._end(request)
        assert request.sources is not None
        request.out.finish(Finish(ending.reason, ending.stop_reason, request.sources, hold, request.transfer))

    def _keep(self, request: Request) -> Hold | None:
        """Hand the blocks of the computed tokens over to the table of holds."""
        terms = request.hold
        if terms is None or not request.computed:
            return None
        now = self.clock.monotonic()
        size = self.settings.block_size
        num_tokens = request.computed
        num_blocks = -(-num_tokens // size)
        held = Held(
            lease_id=terms.lease_id,
            tenant=terms.tenant,
            blocks=request.blocks[:num_blocks],
            ids=bytes(request.ids[: num_tokens * tokens.TOKEN_BYTES]),
            keys=request.keys[: num_tokens // size],
            num_tokens=num_tokens,
            deadline=now + terms.ttl_s,
        )
        if not self.table.keep(held):
            return None
        request.blocks = request.blocks[num_blocks:]
        self._wake.set()
        return held.view(now)

    def _finish_prefill(self, request: Request) -> None:
        settings = self.settings
        first = self._first_token(request) if request.first_token else None
        deadline = self.clock.monotonic() + settings.prefill_hold_s
        handle = describe(
            self._address,
            _PREFILL + request.request_id,
            blocks=request.blocks,
            packed=bytes(request.ids),
            keys=request.keys,
            num_tokens=request.length,
            expiry=deadline,
            block_size=settings.block_size,
            none_hash=self.model.none_hash,
        )
        self.outcomes.keep(request.request_id, request.blocks, deadline)
        request.blocks = []
        self.scheduler.leave(request)
        self._end(request)
        assert request.sources is not None
        request.out.deliver(
            PrefillOutcome(
                handle_json=handle.to_json(readback=False),
                held_s=settings.prefill_hold_s,
                sources=request.sources,
                readback=request.transfer,
                prompt_logprobs=self._prompt_logprobs(request),
                first=first,
            )
        )

    def _prompt_logprobs(self, request: Request) -> list[turn_pb2.PositionLogprobs]:
        if request.prompt_logprobs is None:
            return []
        ids = tokens.unpack(bytes(request.ids))
        return probabilities.prompt(ids, request.prompt_logprobs, self.settings.vocab_size)
