"""The router's process, wired together."""

import asyncio

from kvloop.metastore.factory import StoreOptions, open_directory
from kvloop.metastore.port import DirectoryUnavailable, LeaseDirectory
from kvloop.router.auth import Authenticator
from kvloop.router.identity import Identities, load_secret
from kvloop.router.legs import Background
from kvloop.router.servicer import SERVICE, RouterServicer
from kvloop.router.settings import RouterSettings
from kvloop.router.turn import Tools
from kvloop.router.workers import WorkerPool
from kvloop.runtime import endpoints, logs
from kvloop.runtime.clock import Clock, SystemClock
from kvloop.runtime.config import ConfigError
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
        clock: Clock | None = None,
    ) -> None:
        """Wire the router; a directory given here is the caller's to close."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._given = directory
        self._directory: LeaseDirectory | None = None
        self._pool: WorkerPool | None = None
        self._background = Background()
        self._servicer: RouterServicer | None = None
        self._server: GrpcServer | None = None
        self._readiness: asyncio.Task[None] | None = None
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """Return host:port where RouterService listens; valid once started."""
        return self._endpoint

    @property
    def pool(self) -> WorkerPool:
        """Return the workers; valid once started."""
        assert self._pool is not None
        return self._pool

    @property
    def turns(self) -> int:
        """Return how many turns are being served."""
        return self._servicer.turns if self._servicer is not None else 0

    async def start(self) -> None:
        """Open the directory, meet the workers, listen. Raises ConfigError, ServerError."""
        settings = self._settings
        identities = Identities(load_secret(settings))
        authenticator = Authenticator(settings.tokens_file, self._clock)
        self._directory = self._given if self._given is not None else await _open(settings)
        self._pool = WorkerPool(settings, self._clock)
        await self._pool.start()
        tools = Tools(settings, self._pool, self._directory, identities, self._clock, self._background)
        self._servicer = RouterServicer(tools, authenticator)
        self._server = GrpcServer([SERVICE])
        self._server.server.add_generic_rpc_handlers((self._servicer.handler(),))
        port = await self._server.start(settings.listen)
        self._endpoint = str(endpoints.parse(settings.listen)._replace(port=port))
        await self._server.set_ready(self._pool.can_serve())
        self._readiness = asyncio.create_task(self._follow(self._pool, self._server))
        _log.info("router_listening", endpoint=self._endpoint)

    async def drain(self) -> None:
        """Turn readiness off and let running turns end."""
        await self._stop_following()
        if self._server is not None:
            await self._server.set_ready(False)
        if self._servicer is not None:
            await self._servicer.drain(self._settings.drain_limit_s)

    async def stop(self) -> None:
        """End for good: cut off what still runs, tell the workers, close. Idempotent."""
        await self._stop_following()
        if self._servicer is not None:
            await self._servicer.stop()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
        await self._background.settle()
        if self._pool is not None:
            await self._pool.stop()
        if self._directory is not None and self._given is None:
            await self._directory.close()
        self._directory = self._pool = self._servicer = self._server = None

    async def _stop_following(self) -> None:
        if self._readiness is not None:
            self._readiness.cancel()
            await asyncio.wait({self._readiness})
            self._readiness = None

    @staticmethod
    async def _follow(pool: WorkerPool, server: GrpcServer) -> None:
        while True:
            await pool.changed.wait()
            pool.changed.clear()
            await server.set_ready(pool.can_serve())


async def _open(settings: RouterSettings) -> LeaseDirectory:
    if not settings.directory_url:
        raise ConfigError("directory_url is not set; give the redis:// address that the decode workers use")
    try:
        directory = open_directory(
            settings.directory_url, options=StoreOptions(deadline_s=settings.directory_timeout_ms / 1000)
        )
    except ValueError as error:
        raise ConfigError(f"directory_url: {error}") from None
    try:
        # Connects ahead of the first turn. A store that is down is no reason not to serve: turns go on cold.
        await directory.check()
    except DirectoryUnavailable as error:
        _log.warning("directory_unavailable", error=str(error))
    return directory
