"""The Engine port over a simulated core."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

from kvloop.engine.port import (
    DecodeDelta,
    DecodeJob,
    EngineFacts,
    Hold,
    HoldEnded,
    PrefillJob,
    PrefillOutcome,
    ReadGrant,
)
from kvloop.engine.settings import EngineSettings, Role
from kvloop.engine.simulated.answer import Answer, Sampling
from kvloop.engine.simulated.clock import LoopClock, ShiftedClock, TimerClock
from kvloop.engine.simulated.core import Core, gone
from kvloop.engine.simulated.door import Door
from kvloop.engine.simulated.fabric import DEFAULT, Fabric
from kvloop.engine.simulated.faults import Faults
from kvloop.engine.simulated.handle import Handle, Refused, check, parse
from kvloop.engine.simulated.probabilities import MAX_LOGPROBS
from kvloop.engine.simulated.request import Outbox, Request
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime import checks
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import sampling_pb2, worker_pb2

VERSION = "1"


class SimulatedEngine:
    """One engine that computes nothing. `faults` breaks it on order."""

    def __init__(
        self,
        settings: SimulatedSettings | EngineSettings,
        role: Role,
        *,
        clock: TimerClock | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        if isinstance(settings, EngineSettings):
            settings = SimulatedSettings.from_engine_settings(settings)
        self.settings = settings
        self.faults = Faults()
        self._role = role
        self._fabric = fabric if fabric is not None else DEFAULT
        self._clock = ShiftedClock(clock if clock is not None else LoopClock())
        self._compatibility = _compatibility(settings, settings.weights_version)
        self._core: Core | None = None
        self._door: Door | None = None
        if settings.test_hooks and settings.control_path is not None:
            self._door = Door(settings.control_path, lambda: self.core, self.faults)
        self._turns: dict[str, Request] = {}
        self._events: asyncio.Queue[HoldEnded | None] = asyncio.Queue()
        self.faults.wire(
            kill=self._kill, pause=self._pause, resume=self._resume, jump=self._jump, evict=self._evict
        )

    @property
    def facts(self) -> EngineFacts:
        """Return the facts; valid once started."""
        if self._core is None:
            raise gone()
        s = self.settings
        return EngineFacts(
            engine="simulated",
            version=VERSION,
            epoch=self._core.epoch,
            model_name=s.model_name,
            model_revision=s.revision,
            adapters=s.adapters,
            max_model_len=s.max_model_len,
            vocab_size=s.vocab_size,
            block_size=s.block_size,
            compatibility=self._compatibility,
            bidirectional_kv_xfer=s.bidirectional_kv_xfer,
            kv_recompute_threshold=s.kv_recompute_threshold,
            hold_s=s.decoder_kv_blocks_ttl,
            side_channel=self._core.side_channel,
            prefix_caching=s.enable_prefix_caching,
            max_num_seqs=s.max_num_seqs,
        )

    @property
    def core(self) -> Core:
        """The insides of this life, for tests. Raises Failure WORKER_FAILED without one."""
        if self._core is None or not self._core.alive:
            raise gone()
        return self._core

    @property
    def alive(self) -> bool:
        """Whether the engine has been started and neither stopped nor killed."""
        return self._core is not None and self._core.alive

    async def start(self) -> None:
        """Begin a life: a new epoch, an empty pool."""
        if self._core is not None and self._core.alive:
            return
        self._events = asyncio.Queue()
        self._core = Core(
            self.settings,
            self._role,
            self._clock,
            self._fabric,
            self.faults,
            compatibility=self._compatibility,
            hold_ended=self._hold_ended,
        )
        await self._core.start()
        if self._door is not None:
            await self._door.open()

    async def stop(self) -> None:
        """End the engine. Idempotent."""
        if self._door is not None:
            self._door.close()
        if self._core is not None:
            self._kill()
            await self._core.wait_ended()

    async def check_health(self) -> None:
        """Return when the engine can serve; raise Failure WORKER_FAILED when it can't."""
        await self._live()

    async def prefill(self, job: PrefillJob) -> PrefillOutcome:
        """Compute, or read, the prompt's KV and hold it for one decode engine."""
        core = await self._live()
        if self.faults.take("fail_prefills"):
            raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the prefill failed")
        handle = self._read_handle(job.read)
        request = self._request(core, job, handle)
        core.submit(request)
        try:
            return await request.out.take_outcome()
        except asyncio.CancelledError:
            core.abort(request)
            if request.out.outcome is not None:
                core.outcomes.release(request.request_id)
            raise

    async def prefill_ended(self, request_id: str, patience_s: float) -> bool:
        """Return True: what is cancelled is over at once."""
        await self._live()
        return True

    async def release_prefill(self, request_id: str) -> bool:
        """Let go of a prefill outcome that nobody will read; False when nothing was held."""
        core = await self._live()
        core.reap()
        released = core.outcomes.release(request_id)
        core.poke()
        return released

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeDelta]:
        """Generate. Closing the iterator before the finish cancels the turn."""
        core = await self._live()
        if self.faults.take("fail_decodes"):
            raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the decode failed")
        try:
            handle = parse(job.handle_json) if job.handle_json is not None else None
        except Refused as refused:
            raise refused.failure() from None
        request = self._request(core, job, handle)
        core.submit(request)
        lease_id = job.hold.lease_id if job.hold is not None else None
        if lease_id is not None:
            self._turns[lease_id] = request
        try:
            while True:
                delta = await request.out.take()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            core.abort(request)
            if lease_id is not None and self._turns.get(lease_id) is request:
                del self._turns[lease_id]

    async def settle(self, lease_id: str, patience_s: float | None = None) -> Hold | None:
        """Return the hold of a cancelled turn once the engine has it, or None when it keeps nothing."""
        core = await self._live()
        request = self._turns.get(lease_id)
        if request is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await request.ended.wait()
        core.reap()
        now = self._clock.monotonic()
        held = core.table.live(lease_id, now)
        return held.view(now) if held is not None else None

    async def begin_read(self, lease_id: str, num_tokens: int, pin_s: float) -> ReadGrant:
        """Pin a hold and return a handle cut to its first num_tokens tokens."""
        core = await self._live()
        if not self.settings.bidirectional_kv_xfer:
            raise Failure(Reason.ERROR_REASON_INCOMPATIBLE_ENGINES, "this engine's blocks are not read back")
        if pin_s <= 0:
            raise invalid("pin_time", "must be greater than zero")
        core.reap()
        held = core.table.live(lease_id, self._clock.monotonic())
        if held is None:
            raise Failure(Reason.ERROR_REASON_LEASE_NOT_FOUND, "no such hold")
        if not 0 < num_tokens <= held.num_tokens:
            raise invalid("num_tokens", f"must be between 1 and {held.num_tokens}")
        return core.begin_read(lease_id, held, num_tokens, pin_s)

    async def end_read(self, lease_id: str, read_id: str) -> None:
        """Take a pin off. Unknown pins are ignored."""
        core = await self._live()
        core.table.unpin(lease_id, read_id)
        core.poke()

    async def release(self, lease_id: str) -> bool:
        """End a hold; while pinned it is doomed instead. False when there is none."""
        core = await self._live()
        core.reap()
        released = core.table.release(lease_id)
        core.poke()
        return released

    async def revoke_all(self) -> None:
        """End every decode turn's hold, known to the services or not; pinned ones are doomed instead."""
        core = await self._live()
        core.table.revoke_all()
        core.poke()

    async def extend(self, lease_id: str, ttl_s: float) -> bool:
        """Move a live hold's deadline to ttl_s from now, never earlier; False when there is none."""
        core = await self._live()
        core.reap()
        now = self._clock.monotonic()
        held = core.table.live(lease_id, now)
        if held is None:
            return False
        core.table.extend(held, now + ttl_s)
        core.poke()
        return True

    async def holds(self) -> list[Hold]:
        """Return the table, soonest deadline first, expired ones left out."""
        core = await self._live()
        core.reap()
        now = self._clock.monotonic()
        held = [held for held in core.table.all if held.deadline > now]
        return [one.view(now) for one in sorted(held, key=lambda one: one.deadline)]

    async def hold_events(self) -> AsyncIterator[HoldEnded]:
        """Yield holds that ended by deadline or eviction. One consumer.

        Ends with the engine when it is stopped or killed.
        """
        events = self._events
        while (event := await events.get()) is not None:
            yield event

    async def pool(self) -> worker_pb2.PoolState:
        """Return the state of the block pool."""
        core = await self._live()
        core.reap()
        return worker_pb2.PoolState(
            total_blocks=core.pool.total,
            free_blocks=core.pool.free,
            held_blocks=core.pool.held,
            leases=sum(not held.doomed for held in core.table.all),
        )

    async def counters(self) -> worker_pb2.EngineCounters:
        """Return the engine's own counters since its start."""
        return (await self._live()).counted()

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while blocks are in use."""
        core = await self._live()
        core.reap()
        return core.pool.reset_cache()

    async def reload_weights(self, version: str) -> None:
        """Take other weights under the same name, in a new epoch.

        As in vLLM, nothing else is done: holds and caches of the old weights are the caller's affair.
        """
        core = await self._live()
        core.model.reload(version)
        self._compatibility = core.compatibility = _compatibility(self.settings, version)
        core.renew_epoch()

    async def _live(self) -> Core:
        core = self.core
        if core.paused:
            await core.running()
            core = self.core
        return core

    def _read_handle(self, read: ReadGrant | None) -> Handle | None:
        if read is None:
            return None
        try:
            if not self.settings.bidirectional_kv_xfer:
                raise Refused("fields")
            handle = parse(read.handle_json)
            if read.side_channel not in {"", handle.address.place}:
                raise Refused("place")
            return handle
        except Refused as refused:
            raise refused.failure() from None

    def _request(self, core: Core, job: PrefillJob | DecodeJob, handle: Handle | None) -> Request:
        """Check a job and make a request of it."""
        s = self.settings
        prompt_len = checks.check_prompt(job.prompt, max_model_len=s.max_model_len, vocab_size=s.vocab_size)
        self._check_parameters(job.sampling, job.adapter)
        prefill = isinstance(job, PrefillJob)
        left = 1 if prefill else checks.check_lengths(prompt_len, job.sampling, s.max_model_len)
        prompt_logprobs = job.sampling.prompt_logprobs if job.sampling.HasField("prompt_logprobs") else None
        root = core.model.root(job.adapter, job.cache_salt)
        keys = core.model.chain(root, job.prompt)
        corrupt = False
        if handle is not None and self.faults.take("corrupt_reads"):
            corrupt = True
            handle = handle.of_other_tokens()
        if handle is not None:
            try:
                check(
                    self.faults.guard,
                    handle,
                    packed=job.prompt,
                    keys=keys,
                    none_hash=core.model.none_hash,
                    block_size=s.block_size,
                )
            except Refused as refused:
                raise refused.failure() from None
        first_token = isinstance(job, PrefillJob) and job.first_token
        sampling = Sampling.of(job.sampling, left=left, eos=s.eos_token_id, dice=core.dice)
        return Request(
            request_id=job.request_id,
            prefill=prefill,
            ids=bytearray(job.prompt),
            prompt_len=prompt_len,
            length=prompt_len,
            root=root,
            keys=keys,
            adapter=job.adapter,
            sampling=sampling,
            handle=handle,
            hold=job.hold if isinstance(job, DecodeJob) else None,
            out=Outbox(),
            answer=Answer(sampling, core.model.lexicon),
            skip_cache=prompt_logprobs is not None,
            prompt_logprobs=prompt_logprobs,
            first_token=first_token,
            corrupt=corrupt,
        )

    def _check_parameters(self, sampling: sampling_pb2.SamplingParams, adapter: str) -> None:
        checks.check_sampling(sampling, vocab_size=self.settings.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if not -1 < getattr(sampling, name) <= MAX_LOGPROBS:
                raise invalid(f"sampling.{name}", f"must be in [0, {MAX_LOGPROBS}]")
        if adapter and adapter not in self.settings.adapters:
            raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such adapter is served", field="adapter")

    def _hold_ended(self, lease_id: str, reason: str) -> None:
        if not self.faults.take("drop_hold_events"):
            self._events.put_nowait(HoldEnded(lease_id, reason))

    def _kill(self) -> None:
        if self._core is not None and self._core.alive:
            self._core.die()
            self._events.put_nowait(None)

    def _pause(self) -> None:
        self.core.pause()

    def _resume(self) -> None:
        self.core.unpause()

    def _jump(self, seconds: float) -> None:
        self._clock.jump(seconds)
        if self._core is not None:
            self._core.poke()

    def _evict(self, lease_id: str) -> bool:
        return self.core.table.evict(lease_id)


def _compatibility(settings: SimulatedSettings, weights_version: str) -> str:
    parts = (
        VERSION,
        settings.model_name,
        settings.revision,
        str(settings.block_size),
        str(settings.vocab_size),
        settings.hash_seed,
        settings.preset,
        weights_version,
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
