"""What prefill and decode workers have in common: settings, facts, and the life around an engine.

A worker listens at once (alive, not ready), brings its engine up, then is ready: health says so, and the
registry knows it. An engine that fails takes readiness away until it is well again; one that stays dead ends
the process, since only another process can serve (run_until_signal).
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kvloop.engine.factory import create_engine
from kvloop.engine.port import Engine, EngineFacts
from kvloop.engine.settings import EngineSettings, Role
from kvloop.engine.watching import watch_engine
from kvloop.metastore.factory import Store, StoreOptions, open_store
from kvloop.metastore.port import DirectoryUnavailable
from kvloop.metastore.registry import Worker
from kvloop.metastore.watching import watch_store
from kvloop.runtime import background, endpoints, logs, tracing
from kvloop.runtime.config import ObservedSettings
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.exposition import Exposition
from kvloop.runtime.metrics import Metrics
from kvloop.runtime.security import GuardedSettings, Security
from kvloop.runtime.server import GrpcServer
from kvloop.v1alpha1 import turn_pb2, worker_pb2

HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
DEAD_S = 10.0
"""For how long an engine is dead before its process ends."""
FAREWELL_S = 1.0

_ROLES: dict[Role, "worker_pb2.WorkerRole.ValueType"] = {
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
    "decode": worker_pb2.WORKER_ROLE_DECODE,
}
_log = logs.get("worker")

Health = Literal["well", "unwell", "dead"]


class WorkerSettings(ObservedSettings, GuardedSettings, EngineSettings):  # type: ignore[misc]  # both bases' model_config are merged
    """What every worker may be told. Times are in seconds."""

    listen: str = "127.0.0.1:0"
    """host:port of the service; port 0 takes a free one."""
    advertise: str | None = None
    """host:port under which others reach it; absent: where it listens."""
    worker_id: str | None = None
    """Name in logs and answers; absent: <role>@<endpoint>."""
    directory_url: str = "memory://"
    """URL of the store with the lease directory and the worker registry."""
    directory_timeout_ms: float = Field(25.0, gt=0, le=10_000)
    """How long one operation on the store may take before it is given up."""
    stop_grace_s: float = Field(1.0, ge=0)
    """What calls in progress are given at the end."""

    @model_validator(mode="after")
    def _refuse_unreachable(self) -> Self:
        listen = parse_endpoint("listen", self.listen)
        if self.advertise is not None:
            if parse_endpoint("advertise", self.advertise).port == 0:
                raise ValueError("advertise needs the port that others dial; 0 means nothing to them")
        elif listen.host in {"0.0.0.0", "::"}:
            raise ValueError(
                f"nobody can dial {listen.host}; set advertise to a name or address of this host"
            )
        return self


def parse_endpoint(setting: str, text: str) -> endpoints.Endpoint:
    """Return the endpoint that a setting names. Raises ValueError with the setting's name."""
    try:
        return endpoints.parse(text)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None


def worker_info(facts: EngineFacts, role: Role, worker_id: str) -> worker_pb2.WorkerInfo:
    """Return the facts as routers see them, without pool and counters."""
    info = worker_pb2.WorkerInfo(
        role=_ROLES[role],
        worker_id=worker_id,
        epoch=facts.epoch,
        model=turn_pb2.ModelRef(name=facts.model_name, revision=facts.model_revision),
        adapters=facts.adapters,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        block_size=facts.block_size,
        engine=facts.engine,
        engine_version=facts.version,
        compatibility=facts.compatibility,
        bidirectional_kv_xfer=facts.bidirectional_kv_xfer,
        kv_recompute_threshold=facts.kv_recompute_threshold,
        side_channel=facts.side_channel,
        transfer_backends=facts.transfer_backends,
        prefix_caching=facts.prefix_caching,
        attach=True,
        default_max_tokens=facts.default_max_tokens,
    )
    if role == "decode" and facts.hold_s:
        info.hold_time.FromNanoseconds(int(facts.hold_s * 1e9))
    return info


def _open_store(settings: WorkerSettings) -> Store:
    return open_store(
        settings.directory_url, options=StoreOptions(deadline_s=settings.directory_timeout_ms / 1000)
    )


class WorkerLife:
    """The server, the engine and the store of one worker, from start to end."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: Role,
        service_name: str,
        *,
        engine: Engine | None = None,
        store: Store | None = None,
    ) -> None:
        self.security = Security.load(settings)
        self.server = GrpcServer([service_name], self.security, for_peers=True)
        self.engine = engine if engine is not None else create_engine(settings, role)
        self.store = store if store is not None else _open_store(settings)
        self._own_store = store is None
        self.metrics = Metrics(role)
        self._exposition = Exposition(self.metrics, lambda: self.server.ready)
        self.metrics_endpoint = ""
        self._tracing = tracing.NOTHING
        self.endpoint = ""
        self.worker_id = settings.worker_id or ""
        self._settings = settings
        self._role = role
        self._draining = False
        self._opened = False
        self._started = False
        self._dead = asyncio.Event()
        # Absent while the model loads: only an engine that was up can be down.
        self.metrics.clear("kvloop_engine_up")
        self._tasks: set[asyncio.Task[None]] = set()

    async def start_engine(self) -> None:
        """Listen, then start the engine. Not ready yet. Raises ServerError, Failure."""
        settings = self._settings
        self._tracing = tracing.configure(settings, self._role)
        self.metrics.probe(self._probe_store)
        self.metrics.probe(self._probe_engine)
        self.metrics_endpoint = await self._exposition.start(settings.metrics_listen)
        port = await self.server.start(settings.listen)
        at = settings.advertise or str(endpoints.parse(settings.listen)._replace(port=port))
        self.endpoint = at
        self.worker_id = self.worker_id or f"{self._role}@{at}"
        await self.engine.start()
        self._started = True

    async def lost(self) -> None:
        """Return once the engine has been dead for a while: it does not come back."""
        await self._dead.wait()

    async def open(self, load: Callable[[], float]) -> None:
        """Be ready, stay known to the registry, and watch the engine."""
        self._opened = True
        await self.server.set_ready(True)
        self.spawn(self._watch_health())
        self.spawn(self.store.registry.keep_announcing(lambda: self._worker(load())))
        _log.info("ready", worker_id=self.worker_id, endpoint=self.endpoint, role=self._role)

    async def drain(self) -> None:
        """Be alive, but not ready any more."""
        self._draining = True
        self.metrics.put("kvloop_draining", value=1)
        await self.server.set_ready(False)
        if self._opened:
            with contextlib.suppress(DirectoryUnavailable):
                await self.store.registry.announce(self._worker(0.0))

    async def close_door(self) -> None:
        """Take no calls any more; those in progress have stop_grace_s seconds."""
        self._draining = True
        await self.server.set_ready(False)
        await self.server.stop(self._settings.stop_grace_s)

    async def stop(self) -> None:
        """End tasks, engine and store. Idempotent; also after a failed start."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._opened:
            with contextlib.suppress(DirectoryUnavailable, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self.store.registry.withdraw(self.worker_id, self.engine.facts.epoch)
        await self.engine.stop()
        if self._own_store:
            await self.store.close()
        await self._exposition.stop()
        await self._tracing.stop()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run something until the worker stops; a failure of it is logged."""
        return background.spawn(self._tasks, work)

    def _worker(self, load: float) -> Worker:
        facts = self.engine.facts
        return Worker(
            worker_id=self.worker_id,
            role=self._role,
            endpoint=self.endpoint,
            epoch=facts.epoch,
            capacity=facts.max_num_seqs,
            load=load,
            draining=self._draining,
            info=worker_info(facts, self._role, self.worker_id).SerializeToString(),
        )

    async def _probe_store(self) -> None:
        watch_store(self.metrics, self.store)

    async def _probe_engine(self) -> None:
        if not self._started:
            return
        up = await self._health() == "well"
        self.metrics.put("kvloop_engine_up", value=up)
        if up:
            pool = await self.engine.pool()
            watch_engine(self.metrics, pool, await self.engine.counters())
            may_hold = self._settings.hold_share * pool.total_blocks
            self.metrics.put("kvloop_pool_hold_limit_blocks", value=may_hold)

    async def _watch_health(self) -> None:
        well = True
        now = asyncio.get_running_loop().time
        alive_at = now()
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            health = await self._health()
            if (health == "well") != well and not self._draining:
                well = health == "well"
                _log.warning("engine_health", worker_id=self.worker_id, well=well)
                await self.server.set_ready(well)
            if health != "dead":
                alive_at = now()
            elif now() - alive_at >= DEAD_S and not self._dead.is_set():
                _log.error("engine_dead", worker_id=self.worker_id)
                self._dead.set()

    async def _health(self) -> Health:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.engine.check_health()
        except TimeoutError:
            return "unwell"
        except Failure as failure:
            return "dead" if failure.reason == Reason.ERROR_REASON_WORKER_FAILED else "unwell"
        except Exception as error:  # noqa: BLE001 - whatever it is, the watch must go on
            _log.error("health_unknown", error=type(error).__name__, exc_info=error)
            return "unwell"
        return "well"
