"""The gateway's process, wired together."""

import asyncio
import socket
import time
from typing import Any

from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime import endpoints, logs, tracing
from kvloop.runtime.config import ConfigError
from kvloop.runtime.security import Security
from kvloop.runtime.server import GrpcServer, ServerError

_BACKLOG = 2048
_KEEP_ALIVE_S = 65
_POLL_S = 0.02
_STOP_GRACE_S = 1.0

_log = logs.get("gateway")


class GatewayApp:
    """Implements kvloop.runtime.server.App over uvicorn."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Take the settings; nothing is loaded before start."""
        self._settings = settings
        self._endpoint = ""
        self._chat_endpoint = ""
        self._grpc: GrpcServer | None = None
        self._chat: Any = None
        self._routers: Any = None
        self._client: Any = None
        self._door: Any = None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._tracing = tracing.NOTHING

    @property
    def endpoint(self) -> str:
        """Return host:port of the HTTP door; valid once started."""
        return self._endpoint

    @property
    def chat_endpoint(self) -> str:
        """Return host:port of ChatService, "" without one; valid once started."""
        return self._chat_endpoint

    async def start(self) -> None:
        """Load tokenizer and template, then listen. Raises ConfigError, ServerError."""
        import uvicorn

        from kvloop.gateway import compat
        from kvloop.gateway.client import RouterEngineClient
        from kvloop.gateway.door import Door
        from kvloop.gateway.history import History
        from kvloop.gateway.metrics import Metrics
        from kvloop.gateway.routers import Routers

        settings = self._settings
        security = Security.load(settings)
        listener = _listen(settings.listen)
        try:
            base = compat.load(settings)
        except (OSError, ValueError) as error:
            listener.close()
            raise ConfigError(f"model: {error}") from None
        self._tracing = tracing.configure(settings, "gateway")
        self._routers = Routers(settings.router_endpoints, security, settings.router_streams)
        await self._routers.start()
        metrics = Metrics()
        history = History(base.renderer, settings, metrics)
        client_class = compat.make_client_class(RouterEngineClient)
        self._client = client_class(base, self._routers, settings, history, metrics)
        inner = await compat.build_app(base, self._client, settings.adapters)
        await history.start()
        self._door = Door(inner, settings)
        await self._start_chat(compat.ChatServing(inner, base), security)
        config = uvicorn.Config(
            compat.with_cors(self._door, base),
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            lifespan="on",
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        self._server = uvicorn.Server(config)
        # Signals are the process's affair, not uvicorn's.
        self._serving = asyncio.create_task(self._server._serve([listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise ServerError("the HTTP server ended while it started")
            await asyncio.sleep(_POLL_S)
        host = endpoints.parse(settings.listen)
        self._endpoint = str(host._replace(port=listener.getsockname()[1]))
        _log.info(
            "gateway_listening",
            endpoint=self._endpoint,
            chat=self._chat_endpoint,
            render_cache=history.active,
        )

    async def _start_chat(self, serving: Any, security: Security) -> None:
        if not self._settings.chat_listen:
            return
        from kvloop.gateway.chat_servicer import SERVICE, ChatServicer
        from kvloop.gateway.sessions import Sessions
        from kvloop.v1alpha1 import chat_service_pb2_grpc

        try:
            at = endpoints.parse(self._settings.chat_listen)
        except ValueError as error:
            raise ConfigError(f"chat_listen: {error}") from None
        self._grpc = GrpcServer([SERVICE], security)
        self._chat = ChatServicer(serving, self._settings, Sessions(self._routers))
        chat_service_pb2_grpc.add_ChatServiceServicer_to_server(self._chat, self._grpc.server)
        port = await self._grpc.start(self._settings.chat_listen)
        self._chat_endpoint = str(at._replace(port=port))
        await self._grpc.set_ready(True)

    async def drain(self) -> None:
        """Fail health checks, refuse new turns, and let running requests end."""
        if self._client is None or self._door is None:
            return
        self._client.start_draining()
        self._door.start_draining()
        if self._grpc is not None:
            await self._grpc.set_ready(False)
            self._chat.start_draining()
        limit = time.monotonic() + self._settings.drain_s
        while self._open and time.monotonic() < limit:  # noqa: ASYNC110 - the limit ends it
            await asyncio.sleep(_POLL_S)

    @property
    def _open(self) -> int:
        """Return the requests being served, over HTTP and gRPC."""
        chats: int = self._chat.open_turns if self._chat is not None else 0
        requests: int = self._door.open_exchanges
        return requests + chats

    async def stop(self) -> None:
        """Close the door and the channels. Idempotent."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=_STOP_GRACE_S)
            # What still runs now is cut off.
            self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            self._server = self._serving = None
        if self._grpc is not None:
            await self._grpc.stop(_STOP_GRACE_S)
            self._grpc = None
        if self._routers is not None:
            await self._routers.stop()
            self._routers = None
        tracer, self._tracing = self._tracing, tracing.NOTHING
        await tracer.stop()


def _listen(listen: str) -> socket.socket:
    """Return a listening socket. Raises ConfigError, ServerError."""
    try:
        endpoint = endpoints.parse(listen)
    except ValueError as error:
        raise ConfigError(f"listen: {error}") from None
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((endpoint.host, endpoint.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ServerError(f"can't listen on {listen}") from error
    listener.setblocking(False)
    return listener
