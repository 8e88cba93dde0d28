"""The router's process, wired together."""

import asyncio

from kvloop.metastore.factory import Store, StoreOptions, open_store
from kvloop.metastore.port import DirectoryUnavailable, LeaseDirectory
from kvloop.metastore.tracing import traced
from kvloop.metastore.watching import watch_store
from kvloop.router.admission import Admission
from kvloop.router.auth import Authenticator
from kvloop.router.book import CostBook
from kvloop.router.canary import Canary
from kvloop.router.discovery import Discovery
from kvloop.router.explain import Memory
from kvloop.router.identity import Identities, load_secret
from kvloop.router.legs import Background
from kvloop.router.naming import Names
from kvloop.router.servicer import SERVICE, RouterServicer
from kvloop.router.settings import RouterSettings
from kvloop.router.turn import Tools
from kvloop.router.watching import TurnWatch, watch_workers
from kvloop.router.workers import WorkerPool
from kvloop.runtime import endpoints, logs, tracing
from kvloop.runtime.clock import Clock, SystemClock
from kvloop.runtime.config import ConfigError
from kvloop.runtime.exposition import Exposition
from kvloop.runtime.metrics import Metrics
from kvloop.runtime.security import Security
from kvloop.runtime.server import GrpcServer

_STOP_GRACE_S = 1.0

_log = logs.get("router")


class RouterApp:
    """Implements kvloop.runtime.server.App. Ready while some pair of workers is present."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        directory: LeaseDirectory | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Wire the router; a store, or a directory alone, given here is the caller's to close."""
        self._settings = settings
        self._store = store
        self._own_store = store is None
        self._clock = clock or SystemClock()
        self._given = directory
        self._metrics = Metrics("router")
        self._exposition = Exposition(self._metrics, lambda: self._server is not None and self._server.ready)
        self._metrics_endpoint = ""
        self._tracing = tracing.NOTHING
        self._pool: WorkerPool | None = None
        self._background = Background()
        self._admission = Admission(settings)
        self._servicer: RouterServicer | None = None
        self._canary: Canary | None = None
        self._server: GrpcServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """Return host:port where RouterService listens; valid once started."""
        return self._endpoint

    @property
    def metrics_endpoint(self) -> str:
        """Return host:port of /metrics; "" without one."""
        return self._metrics_endpoint

    @property
    def pool(self) -> WorkerPool:
        """Return the workers; valid once started."""
        assert self._pool is not None
        return self._pool

    @property
    def canary(self) -> Canary:
        """Return what repeats turns; valid once started."""
        assert self._canary is not None
        return self._canary

    @property
    def turns(self) -> int:
        """Return how many turns are being served."""
        return self._servicer.turns if self._servicer is not None else 0

    @property
    def waiting(self) -> int:
        """Return how many turns wait for room."""
        return self._admission.waiting

    async def start(self) -> None:
        """Open the directory, meet the workers, listen. Raises ConfigError, ServerError."""
        settings = self._settings
        identities = Identities(load_secret(settings))
        authenticator = Authenticator(settings.tokens_file, self._clock)
        security = Security.load(settings)
        self._tracing = tracing.configure(settings, "router")
        self._metrics.probe(self._probe)
        self._metrics_endpoint = await self._exposition.start(settings.metrics_listen)
        if self._store is None and self._given is None:
            self._store = await _open(settings)
        directory = self._given or (self._store.directory if self._store is not None else None)
        assert directory is not None
        self._pool = WorkerPool(settings, self._clock, security=security)
        await self._pool.start()
        book = CostBook(settings, self._pool, self._clock)
        tools = Tools(
            settings=settings,
            pool=self._pool,
            directory=traced(directory),
            identities=identities,
            clock=self._clock,
            background=self._background,
            book=book,
            memory=Memory(settings.explained_turns),
            admission=self._admission,
            name=lambda: settings.router_id or self._endpoint,
            watch=TurnWatch(self._metrics),
            canary=Canary(settings, self._metrics, self._clock),
            registry=self._store.registry if self._store is not None else None,
        )
        self._canary = tools.canary
        self._servicer = RouterServicer(tools, authenticator)
        self._server = GrpcServer([SERVICE], security)
        self._server.server.add_generic_rpc_handlers((self._servicer.handler(),))
        port = await self._server.start(settings.listen)
        self._endpoint = str(endpoints.parse(settings.listen)._replace(port=port))
        await self._server.set_ready(self._pool.can_serve())
        names = Names(self._pool)
        self._tasks = [
            asyncio.create_task(self._follow(self._pool, self._server)),
            asyncio.create_task(names.follow()),
        ]
        if self._store is not None:
            discovery = Discovery(self._pool, names.workers, finds=settings.discovers)
            self._tasks.append(asyncio.create_task(discovery.follow(self._store.registry)))
            self._tasks.append(asyncio.create_task(book.keep_sharing(self._store.estimates)))
        _log.info("router_listening", endpoint=self._endpoint)

    async def drain(self) -> None:
        """Turn readiness off and let running turns end."""
        self._metrics.put("kvloop_draining", value=1)
        await self._stop_following()
        if self._server is not None:
            await self._server.set_ready(False)
        if self._canary is not None:
            await self._canary.stop()
        if self._servicer is not None:
            await self._servicer.drain(self._settings.drain_limit_s)

    async def stop(self) -> None:
        """End for good: cut off what still runs, tell the workers, close. Idempotent."""
        await self._stop_following()
        if self._canary is not None:
            await self._canary.stop()
        if self._servicer is not None:
            await self._servicer.stop()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
        await self._background.settle()
        if self._pool is not None:
            await self._pool.stop()
        if self._store is not None and self._own_store:
            await self._store.close()
            self._store = None
        await self._exposition.stop()
        await self._tracing.stop()
        self._pool = self._servicer = self._server = None

    async def _probe(self) -> None:
        self._metrics.put("kvloop_turns_in_flight", value=self.turns)
        self._metrics.put("kvloop_turns_queued", value=self._admission.waiting)
        sessions = self._servicer.sessions if self._servicer is not None else 0
        self._metrics.put("kvloop_sessions_open", value=sessions)
        self._metrics.put("kvloop_sessions_limit", value=self._settings.max_sessions)
        self._metrics.put("kvloop_turns_limit", value=self._settings.max_concurrent_turns)
        if self._pool is not None:
            watch_workers(self._metrics, self._pool)
        if self._store is not None:
            watch_store(self._metrics, self._store)

    async def _stop_following(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @staticmethod
    async def _follow(pool: WorkerPool, server: GrpcServer) -> None:
        while True:
            await pool.changed.wait()
            pool.changed.clear()
            await server.set_ready(pool.can_serve())


async def _open(settings: RouterSettings) -> Store:
    if not settings.directory_url:
        raise ConfigError("directory_url is not set; give the redis:// address that the decode workers use")
    try:
        store = open_store(
            settings.directory_url, options=StoreOptions(deadline_s=settings.directory_timeout_ms / 1000)
        )
    except ValueError as error:
        raise ConfigError(f"directory_url: {error}") from None
    try:
        # Connects ahead of the first turn. A store that is down is no reason not to serve: turns go on cold.
        await store.directory.check()
    except DirectoryUnavailable as error:
        _log.warning("directory_unavailable", error=str(error))
    return store
