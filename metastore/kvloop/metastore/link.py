"""A connection to any kind of Redis or Valkey: what scripts run on, and nothing of leases.

Links raise redis-py's errors; guard.py turns them into DirectoryUnavailable and bounds the time. Nothing is
retried here but a connection that broke while idle: every script is safe to run twice.
"""

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any, Protocol

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection
from redis.exceptions import NoScriptError, ReadOnlyError

from kvloop.metastore.scripts import Script


class Link(Protocol):
    """A store's nodes, seen as one."""

    clustered: bool

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a script on the node that owns the first key."""
        ...

    async def command(self, name: str, key: bytes, *args: bytes | int | str) -> Any:
        """Run a command on the node that owns the key."""
        ...

    def route(self, key: bytes) -> str:
        """Return the name of the node that owns the key, as far as known; one name when there is one."""
        ...

    async def probe(self, route: str) -> bool:
        """Return True when the node answers, False when the store no longer has it."""
        ...

    async def facts(self) -> list[dict[str, Any]]:
        """Return INFO of every primary."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class _Unhurried(AbstractConnection):
    """Finishes connecting though the operation that began it ran out of time.

    Operations have milliseconds, a handshake over TLS may take longer: were it cancelled with the operation,
    a pool could never grow.
    """

    _connecting: "asyncio.Task[None] | None" = None

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        if self.is_connected and self._connecting is None:
            return
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(
                super().connect_check_health(check_health, retry_socket_connect)
            )
            self._connecting.add_done_callback(self._connected)
        await asyncio.shield(self._connecting)

    def _connected(self, task: "asyncio.Task[None]") -> None:
        self._connecting = None
        if not task.cancelled():
            # Retrieved here, since nobody may be left to do so.
            task.exception()


class _Secured(SSLConnection):
    """Takes a finished TLS context: redis-py makes one per connection, which takes 100 ms of the loop."""

    def __init__(self, *, tls_context: ssl.SSLContext, **settings: Any) -> None:
        super().__init__(**settings)
        self.ssl_context.context = tls_context


class PlainConnection(_Unhurried, Connection):
    """TCP."""


class TlsConnection(_Unhurried, _Secured):
    """TLS over TCP."""


class SocketConnection(_Unhurried, UnixDomainSocketConnection):
    """Unix socket."""


class SentinelConnection(_Unhurried, SentinelManagedConnection):
    """TCP to whichever server Sentinel names."""


class SentinelTlsConnection(_Unhurried, SentinelManagedConnection, _Secured):
    """TLS to whichever server Sentinel names."""


class SingleLink:
    """One primary: a standalone server, or whichever one Sentinel names."""

    clustered = False

    def __init__(self, client: "Redis", sentinel: Sentinel | None = None) -> None:
        self._client = client
        self._sentinel = sentinel

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a script; EVAL when the server doesn't know it, which also makes it known."""
        try:
            return await self._execute("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self._execute("EVAL", script.source, len(keys), *keys, *args)

    async def command(self, name: str, key: bytes, *args: bytes | int | str) -> Any:
        """Run a command."""
        return await self._execute(name, key, *args)

    async def _execute(self, *args: bytes | int | str) -> Any:
        try:
            return await self._client.execute_command(*args)  # type: ignore[no-untyped-call]
        except ReadOnlyError:
            # The server was demoted: behind a name or a balancer, a new connection finds the new primary.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise

    def route(self, key: bytes) -> str:
        """Return the one name."""
        return ""

    async def probe(self, route: str) -> bool:
        """Ping."""
        await self._client.execute_command("PING")  # type: ignore[no-untyped-call]
        return True

    async def facts(self) -> list[dict[str, Any]]:
        """Return INFO of the primary."""
        return [dict(await self._client.info())]

    async def close(self) -> None:
        """Close the pool, and the connections to sentinels."""
        await self._client.aclose(close_connection_pool=True)
        if self._sentinel is not None:
            await self._sentinel.aclose()


class ClusterLink:
    """Several primaries, each owning some of the slots."""

    clustered = True

    def __init__(self, client: "RedisCluster") -> None:
        self._client = client
        self._opening: asyncio.Task[RedisCluster] | None = None

    async def _open(self) -> None:
        # redis-py drops connections in use when operations meet while it reads the slots for the first time.
        # The reading goes on though the first operation runs out of time.
        if self._opening is None or (self._opening.done() and _failed(self._opening)):
            self._opening = asyncio.ensure_future(self._client.initialize())
            self._opening.add_done_callback(_failed)
        if not self._opening.done():
            await asyncio.shield(self._opening)

    async def _execute(self, *args: bytes | int | str) -> Any:
        await self._open()
        return await self._client.execute_command(*args)

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a script; EVAL when that node doesn't know it, which also makes it known there."""
        try:
            return await self._execute("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self._execute("EVAL", script.source, len(keys), *keys, *args)

    async def command(self, name: str, key: bytes, *args: bytes | int | str) -> Any:
        """Run a command."""
        return await self._execute(name, key, *args)

    def route(self, key: bytes) -> str:
        """Return the name of the slot's primary; "" before the slots are known."""
        nodes = self._client.nodes_manager.slots_cache.get(self._client.keyslot(key))
        return nodes[0].name if nodes else ""

    async def probe(self, route: str) -> bool:
        """Read the slots anew, then ping the node, or all of them for ""."""
        await self._open()
        await self._client.nodes_manager.initialize()
        nodes = [node for node in self._client.get_primaries() if route in {"", node.name}]
        await asyncio.gather(*(node.execute_command("PING") for node in nodes))
        return bool(nodes)

    async def facts(self) -> list[dict[str, Any]]:
        """Return INFO of every primary."""
        await self._open()
        nodes = self._client.get_primaries()
        return [dict(await node.execute_command("INFO")) for node in nodes]

    async def close(self) -> None:
        """Close every node's connections."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._client.aclose()
        # aclose() leaves them open when the slots were to be read again.
        await self._client.nodes_manager.aclose()
        await self._client.nodes_manager.aclose("startup_nodes")


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.cancelled() or task.exception() is not None
