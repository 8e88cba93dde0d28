"""GET /metrics, /livez and /readyz of one process: three answers, no more, over plain HTTP/1.1."""

import asyncio
import contextlib
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from kvloop.runtime import endpoints, logs
from kvloop.runtime.metrics import Metrics
from kvloop.runtime.server import ServerError

REQUEST_S = 5.0
MAX_OPEN = 32
"""Connections at a time; more are closed at once."""
MAX_HEADERS = 100
_LINE_BYTES = 8 * 1024

_log = logs.get("metrics")


class Exposition:
    """Listens while the process lives, and says so: alive from the start, ready when it is."""

    def __init__(self, metrics: Metrics, is_ready: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._is_ready = is_ready
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, listen: str) -> str:
        """Listen on host:port (port 0: any); "" does nothing. Return host:port. Raises ServerError."""
        if not listen:
            return ""
        at = endpoints.parse(listen)
        try:
            self._server = await asyncio.start_server(self._serve, at.host, at.port, limit=_LINE_BYTES)
        except OSError as error:
            raise ServerError(f"can't listen on {listen} for metrics") from error
        endpoint = str(at._replace(port=self._server.sockets[0].getsockname()[1]))
        _log.info("metrics_listening", endpoint=endpoint)
        return endpoint

    async def stop(self) -> None:
        """End. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MAX_OPEN:
            writer.close()
            return
        self._open.add(task)
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(await self._answer(reader))
                await writer.drain()
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            # Whoever asks something else, or nothing, is not answered.
            pass
        finally:
            self._open.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        method, _, rest = (await reader.readline()).decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        for _ in range(MAX_HEADERS):
            if (await reader.readline()) in {b"\r\n", b"\n", b""}:
                break
        else:
            return _response("431 Request Header Fields Too Large", b"")
        if method not in {"GET", "HEAD"}:
            return _response("405 Method Not Allowed", b"")
        status, body, kind = await self._page(path)
        return _response(status, body, kind, with_body=method == "GET")

    async def _page(self, path: str) -> tuple[str, bytes, str]:
        plain = "text/plain; charset=utf-8"
        if path == "/metrics":
            return "200 OK", await self._metrics.exposition(), CONTENT_TYPE_PLAIN_0_0_4
        if path == "/livez":
            return "200 OK", b"alive\n", plain
        if path == "/readyz":
            ready = self._is_ready()
            return (
                ("200 OK", b"ready\n", plain) if ready else ("503 Service Unavailable", b"not ready\n", plain)
            )
        return "404 Not Found", b"", plain


def _response(status: str, body: bytes, kind: str = "text/plain", *, with_body: bool = True) -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body if with_body else b"")
