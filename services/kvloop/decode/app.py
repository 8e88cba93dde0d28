"""The decode worker, wired together."""

import asyncio
import contextlib

from kvloop.decode.direct import Direct, DirectPolicy
from kvloop.decode.keeper import Keeper, Policy
from kvloop.decode.prolonging import LivePolicy, Prolonger
from kvloop.decode.publishing import Publisher
from kvloop.decode.reading import Reading, ReadPolicy
from kvloop.decode.servicer import SERVICE_NAME, DecodeServicer, Parts
from kvloop.decode.settings import DecodeSettings
from kvloop.decode.turns import Turns
from kvloop.decode.watching import watch_leases
from kvloop.engine.port import Engine
from kvloop.engine.reloading import Reloading
from kvloop.engine.worker import WorkerLife
from kvloop.metastore.factory import Store
from kvloop.metastore.tracing import traced
from kvloop.runtime.clock import Clock, SystemClock
from kvloop.v1alpha1 import decode_service_pb2_grpc

DRAIN_POLL_S = 0.05
REVOKE_S = 5.0


class DecodeApp:
    """One decode worker; implements runtime.server.App. Engine, store and clock can be given, for tests."""

    def __init__(
        self,
        settings: DecodeSettings,
        *,
        engine: Engine | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._life = WorkerLife(settings, "decode", SERVICE_NAME, engine=engine, store=store)
        self._servicer = DecodeServicer()
        self._servicer.guard(self._life.server.admits)
        self._parts: Parts | None = None
        self._stopped = False
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self._servicer, self._life.server.server)

    @property
    def endpoint(self) -> str:
        """Return host:port under which others reach the service; valid once started."""
        return self._life.endpoint

    @property
    def worker_id(self) -> str:
        """Return the worker's name; valid once started."""
        return self._life.worker_id

    @property
    def metrics_endpoint(self) -> str:
        """Return host:port of /metrics; "" without one."""
        return self._life.metrics_endpoint

    @property
    def parts(self) -> Parts:
        """Return what the service works with; valid once started."""
        assert self._parts is not None
        return self._parts

    async def start(self) -> None:
        """Listen, start the engine, be ready. Raises ServerError, Failure."""
        await self._life.start_engine()
        self._parts = parts = self._wire()
        self._life.spawn(parts.keeper.watch())
        self._life.spawn(parts.prolonger.run())
        self._life.metrics.probe(self._probe)
        self._servicer.open(parts)
        await self._life.open(load=lambda: float(len(parts.turns)))

    async def lost(self) -> None:
        """Return once the engine is dead for good."""
        await self._life.lost()

    async def drain(self) -> None:
        """Refuse new turns, serve leases up to the drain limit, then let go of what is left."""
        self._servicer.drain()
        await self._life.drain()
        parts = self._parts
        if parts is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_limit_s):
                await parts.turns.finished()
                while len(parts.keeper.table):
                    parts.keeper.table.sweep(self._clock.monotonic())
                    await asyncio.sleep(DRAIN_POLL_S)
        await parts.keeper.revoke_all()

    async def stop(self) -> None:
        """End: calls, turns, leases and their entries, engine. Idempotent; also after a failed start."""
        if self._stopped:
            return
        self._stopped = True
        self._servicer.drain()
        await self._life.close_door()
        if self._parts is not None:
            await self._parts.turns.close()
            await self._parts.keeper.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REVOKE_S):
                    await self._parts.keeper.revoke_all()
            await self._parts.keeper.close()
        await self._life.stop()

    async def _probe(self) -> None:
        watch_leases(self._life.metrics, self.parts)

    def _wire(self) -> Parts:
        settings, clock, engine = self._settings, self._clock, self._life.engine
        publisher = Publisher(
            traced(self._life.store.directory),
            self._life.endpoint,
            lambda: engine.facts,
            clock,
            settings.directory_margin_s,
            hints=settings.prefix_hints,
        )
        policy = Policy(
            ttl_s=settings.decoder_kv_blocks_ttl,
            max_ttl_s=settings.max_ttl_s,
            publish_bound_s=settings.publish_bound_s,
            soft_hints=settings.soft_hints,
        )
        keeper = Keeper(engine, publisher, clock, policy)
        metrics = self._life.metrics
        keeper.table.tell_gap = lambda gap_s: metrics.observe("kvloop_turn_gap_seconds", value=gap_s)
        keeper.tell_published = lambda took_s: metrics.observe("kvloop_lease_publish_seconds", value=took_s)
        prolonger = Prolonger(engine, keeper, publisher, clock, LivePolicy(max_ttl_s=settings.max_ttl_s))
        keeper.on_lease = prolonger.add
        direct = Direct(engine, keeper, clock, DirectPolicy(budget=settings.direct_budget_tokens))
        turns = Turns(
            engine, keeper, direct, clock, worker_id=self._life.worker_id, metrics=self._life.metrics
        )
        off = frozenset(settings.guards_off)

        async def let_go() -> None:
            await turns.finished()
            await keeper.revoke_all()

        return Parts(
            engine=engine,
            keeper=keeper,
            prolonger=prolonger,
            reading=Reading(engine, keeper, clock, ReadPolicy(settings.pin_s, settings.max_pin_s), off),
            turns=turns,
            reloading=Reloading(engine, let_go, self._life.spawn),
            clock=clock,
            worker_id=self._life.worker_id,
        )
