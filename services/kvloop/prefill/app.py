"""The prefill worker, wired together."""

import asyncio
import contextlib

from google.protobuf.message import DecodeError

from kvloop.engine.port import Engine
from kvloop.engine.reloading import Reloading
from kvloop.engine.worker import WorkerLife
from kvloop.metastore.factory import Store
from kvloop.metastore.registry import Worker
from kvloop.prefill.leg import Legs
from kvloop.prefill.peers import EndpointRule, Peers, Registered
from kvloop.prefill.reading import Reader, ReaderTimes
from kvloop.prefill.servicer import SERVICE_NAME, Parts, PrefillServicer
from kvloop.prefill.settings import PrefillSettings
from kvloop.runtime.clock import Clock, SystemClock
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import prefill_service_pb2_grpc, worker_pb2

DRAIN_POLL_S = 0.05


class PrefillApp:
    """One prefill worker; implements runtime.server.App. Engine, store and clock can be given, for tests."""

    def __init__(
        self,
        settings: PrefillSettings,
        *,
        engine: Engine | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._life = WorkerLife(settings, "prefill", SERVICE_NAME, engine=engine, store=store)
        self._servicer = PrefillServicer()
        self._servicer.guard(self._life.server.admits)
        clock = clock or SystemClock()
        self._peers = Peers(clock, settings.max_peers, self._life.security)
        registered = Registered(self._decodes, clock)
        rule = EndpointRule(settings.decode_endpoints, registered.has)
        times = ReaderTimes(settings.begin_read_timeout_s, settings.end_read_timeout_s, settings.pin_s)
        self._reader = Reader(self._peers, rule, registered.side_channel, clock, times)
        self._legs = Legs(self._life.engine, self._reader, clock, self._life.metrics)
        self._opened = False
        self._stopped = False
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(
            self._servicer, self._life.server.server
        )

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

    async def start(self) -> None:
        """Listen, start the engine, be ready. Raises ServerError, Failure."""
        await self._life.start_engine()
        self._life.metrics.probe(self._legs.probe)
        # What decode workers are still to fetch is waited for with the blocks.
        reloading = Reloading(self._life.engine, self._legs.finished, self._life.spawn)
        self._servicer.open(Parts(self._life.engine, self._legs, reloading, self._life.worker_id))
        self._opened = True
        await self._life.open(load=lambda: float(self._legs.running))

    async def lost(self) -> None:
        """Return once the engine is dead for good."""
        await self._life.lost()

    async def drain(self) -> None:
        """Refuse new turns; return when what they made was fetched, or can't be any more."""
        self._servicer.drain()
        await self._life.drain()
        if not self._opened:
            return
        with contextlib.suppress(TimeoutError, Failure):
            async with asyncio.timeout(self._settings.drain_limit_s):
                while await self._in_use():  # noqa: ASYNC110 - only asking the pool tells
                    await asyncio.sleep(DRAIN_POLL_S)

    async def _in_use(self) -> bool:
        pool = await self._life.engine.pool()
        return self._legs.running > 0 or pool.free_blocks < pool.total_blocks

    async def stop(self) -> None:
        """End. Idempotent; also after a failed start."""
        if self._stopped:
            return
        self._stopped = True
        self._servicer.drain()
        await self._life.close_door()
        await self._legs.close(self._settings.end_read_timeout_s)
        await self._reader.close(self._settings.end_read_timeout_s)
        await self._life.stop()
        await self._peers.close()

    async def _decodes(self) -> dict[str, dict[str, str]]:
        workers = await self._life.store.registry.workers()
        known: dict[str, dict[str, str]] = {}
        for worker in workers.values():
            if worker.role == "decode":
                known.setdefault(worker.endpoint, {})[worker.epoch] = _side_channel(worker)
        return known


def _side_channel(worker: Worker) -> str:
    try:
        return worker_pb2.WorkerInfo.FromString(worker.info).side_channel
    except DecodeError:
        return ""
