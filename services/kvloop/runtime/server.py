"""A gRPC server's life: engine ready -> SERVING; signal -> NOT_SERVING -> drain -> stop(grace) -> engine.

Health names: "" and the services' own tell readiness and go off when draining starts; "liveness" stays on
until the end.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvloop.runtime import logs
from kvloop.runtime.channels import SERVER_OPTIONS
from kvloop.runtime.security import PLAIN, Security, TokenGuard
from kvloop.runtime.servicing import ParseGuard

LIVENESS = "liveness"

_log = logs.get("server")


class ServerError(Exception):
    """The server can't listen where it was told to."""


class App(Protocol):
    """One process's service, wired together."""

    async def start(self) -> None:
        """Become ready to serve."""
        ...

    async def drain(self) -> None:
        """Stop taking new work; return when what is left may be cut off."""
        ...

    async def stop(self) -> None:
        """End for good. Idempotent; also called after a failed start."""
        ...


class GrpcServer:
    """A grpc.aio server with health and reflection."""

    def __init__(
        self, service_names: Sequence[str], security: Security = PLAIN, *, for_peers: bool = False
    ) -> None:
        """Make the server; one for peers asks callers for certificates and the worker token, where given."""
        guards: list[grpc.aio.ServerInterceptor] = [ParseGuard()]
        self.admits: Callable[[Any], bool] | None = None
        """Tells by its metadata whether a stream may go on carrying calls; None: any may."""
        if for_peers and security.tokens is not None:
            guard = TokenGuard(security.tokens)
            guards.insert(0, guard)
            self.admits = guard.knows
        self.server = grpc.aio.server(interceptors=guards, options=SERVER_OPTIONS)
        self._credentials = security.server_credentials(ask_clients=for_peers)
        self._health = health.aio.HealthServicer()
        self._ready_names = ("", *service_names)
        self.ready = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self, listen: str) -> int:
        """Listen on host:port (port 0: any) and return the port. Not ready yet.

        Raises ServerError.
        """
        try:
            if self._credentials is None:
                port = self.server.add_insecure_port(listen)
            else:
                port = self.server.add_secure_port(listen, self._credentials)
        except RuntimeError as error:
            raise ServerError(f"can't listen on {listen}") from error
        await self.server.start()
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        return port

    async def set_ready(self, ready: bool) -> None:
        """Turn readiness on or off."""
        self.ready = ready
        state = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in self._ready_names:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones grace_s seconds, then cancel them."""
        await self.server.stop(grace_s)


@runtime_checkable
class Perishable(App, Protocol):
    """An app that can lose what it can't serve without."""

    async def lost(self) -> None:
        """Return once nothing but another process can serve."""
        ...


async def run_until_signal(app: App | Perishable) -> None:
    """Start an app, serve until SIGTERM or SIGINT, drain, stop. A second signal cuts the drain short.

    Raises ServerError when the app is lost, so that whoever watches the process starts another.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        starting = asyncio.create_task(app.start())
        waiting = asyncio.create_task(signals.get())
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return
        starting.result()
        if isinstance(app, Perishable):
            losing = asyncio.create_task(app.lost())
            await asyncio.wait({waiting, losing}, return_when=asyncio.FIRST_COMPLETED)
            losing.cancel()
            if not waiting.done():
                raise ServerError("the engine is dead")
        await waiting
        _log.info("draining")
        draining = asyncio.create_task(app.drain())
        again = asyncio.create_task(signals.get())
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        draining.cancel()
    finally:
        await app.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
