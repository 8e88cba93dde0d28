"""A connection to any kind of Redis or Valkey: what scripts run on, and nothing of leases.

Links raise redis-py's errors, and TimeoutError; guard.py turns them into DirectoryUnavailable. Nothing is
retried here but what a cluster redirects.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio import ConnectionPool, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, SSLConnection
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection
from redis.exceptions import AskError, ClusterError, MovedError, NoScriptError

from kvloop.metastore.mux import Command, Mux
from kvloop.metastore.scripts import Script

MAX_REDIRECTS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds."""

    deadline_s: float
    """One operation."""
    connect_s: float
    """Connecting, and reading the map of slots."""

    def until(self) -> float:
        """Return the loop's time by which an operation that begins now is over."""
        return asyncio.get_running_loop().time() + self.deadline_s

    def until_connected(self) -> float:
        """Return the loop's time by which an operation that connects first is over."""
        return asyncio.get_running_loop().time() + self.connect_s


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
        """Return True when the node answers in time over a new connection, False when it is no longer one."""
        ...

    async def facts(self) -> list[dict[str, str]]:
        """Return INFO of every primary."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class _Secured(SSLConnection):
    """Takes a finished TLS context: redis-py makes one per connection, which takes 100 ms of the loop."""

    def __init__(self, *, tls_context: ssl.SSLContext, **settings: Any) -> None:
        super().__init__(**settings)
        self.ssl_context.context = tls_context


class TlsConnection(_Secured):
    """TLS over TCP."""


class SentinelTlsConnection(SentinelManagedConnection, _Secured):
    """TLS to whichever server Sentinel names."""


class SingleLink:
    """One primary: a standalone server, or whichever one Sentinel names."""

    clustered = False

    def __init__(self, pool: ConnectionPool, limits: Limits, sentinel: Sentinel | None = None) -> None:
        """Take a pool, of which only the settings are used, and the sentinels to close with it."""
        self._pool = pool
        self._limits = limits
        self._mux = Mux(pool.make_connection, limits.connect_s)
        self._sentinel = sentinel

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a script; EVAL when the server doesn't know it, which also makes it known."""
        until = self._limits.until()
        try:
            return await self._mux.execute(("EVALSHA", script.sha, len(keys), *keys, *args), until)
        except NoScriptError:
            return await self._mux.execute(("EVAL", script.source, len(keys), *keys, *args), until)

    async def command(self, name: str, key: bytes, *args: bytes | int | str) -> Any:
        """Run a command."""
        return await self._mux.execute((name, key, *args), self._limits.until())

    def route(self, key: bytes) -> str:
        """Return the one name."""
        return ""

    async def probe(self, route: str) -> bool:
        """Ping over a new connection."""
        await self._mux.reset()
        await self._mux.execute(("PING",), self._limits.until())
        return True

    async def facts(self) -> list[dict[str, str]]:
        """Return INFO of the primary."""
        return [_info(await self._mux.execute(("INFO",), self._limits.until_connected()))]

    async def close(self) -> None:
        """Close the connection, and those to sentinels."""
        await self._mux.close()
        if self._sentinel is not None:
            await self._sentinel.aclose()


class ClusterLink:
    """Several primaries, each owning some of the slots. redis-py reads who owns which."""

    clustered = True

    def __init__(self, client: RedisCluster, limits: Limits) -> None:
        """Take a cluster client, of which only the map of slots is used."""
        self._slots = client.nodes_manager
        self._client = client
        self._limits = limits
        self._muxes: dict[str, Mux] = {}
        self._mapping: asyncio.Task[None] | None = None

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a script; EVAL when that node doesn't know it, which also makes it known there."""
        until = self._limits.until()
        try:
            return await self._execute(keys[0], ("EVALSHA", script.sha, len(keys), *keys, *args), until)
        except NoScriptError:
            return await self._execute(keys[0], ("EVAL", script.source, len(keys), *keys, *args), until)

    async def command(self, name: str, key: bytes, *args: bytes | int | str) -> Any:
        """Run a command."""
        return await self._execute(key, (name, key, *args), self._limits.until())

    async def _execute(self, key: bytes, command: Command, until: float) -> Any:
        if not self._slots.slots_cache:
            async with asyncio.timeout_at(until):
                await self._map()
        node = self._slots.get_node_from_slot(self._client.keyslot(key))
        asking = False
        for _ in range(MAX_REDIRECTS):
            try:
                return await self._mux(node).execute(command, until, asking=asking)
            except MovedError as error:
                await self._slots.move_slot(error)
                node = self._slots.get_node_from_slot(error.slot_id)
                asking = False
            except AskError as error:
                moving_to = self._slots.get_node(error.host, error.port)
                if moving_to is None:
                    raise
                node, asking = moving_to, True
        raise ClusterError("too many redirections")

    def _mux(self, node: ClusterNode) -> Mux:
        mux = self._muxes.get(node.name)
        if mux is None:
            mux = self._muxes[node.name] = Mux(lambda: _connection_to(node), self._limits.connect_s)
        return mux

    async def _map(self) -> None:
        """Read the map of slots, one reading at a time, which nobody's deadline ends."""
        if self._mapping is None or self._mapping.done():
            self._mapping = asyncio.create_task(self._read_map(), name="store-slots")
            self._mapping.add_done_callback(_retrieve)
        await asyncio.shield(self._mapping)

    async def _read_map(self) -> None:
        async with asyncio.timeout(self._limits.connect_s):
            await self._slots.initialize()

    def route(self, key: bytes) -> str:
        """Return the name of the slot's primary; "" before the slots are known."""
        nodes = self._slots.slots_cache.get(self._client.keyslot(key))
        return nodes[0].name if nodes else ""

    async def probe(self, route: str) -> bool:
        """Read the map of slots again and ping the node over a new connection, or all of them for ""."""
        await self._map()
        muxes = [self._mux(node) for node in self._client.get_primaries() if route in {"", node.name}]
        await asyncio.gather(*(mux.reset() for mux in muxes))
        await asyncio.gather(*(mux.execute(("PING",), self._limits.until()) for mux in muxes))
        return bool(muxes)

    async def facts(self) -> list[dict[str, str]]:
        """Return INFO of every primary."""
        until = self._limits.until_connected()
        await self._map()
        muxes = [self._mux(node) for node in self._client.get_primaries()]
        return [_info(await mux.execute(("INFO",), until)) for mux in muxes]

    async def close(self) -> None:
        """Close every node's connections."""
        if self._mapping is not None:
            self._mapping.cancel()
            await asyncio.gather(self._mapping, return_exceptions=True)
        for mux in self._muxes.values():
            await mux.close()
        await self._slots.aclose()
        await self._slots.aclose("startup_nodes")


def _connection_to(node: ClusterNode) -> AbstractConnection:
    # The timeout per socket is for reading the map of slots; a connection of ours waits for answers at rest.
    return node.connection_class(**{**node.connection_kwargs, "socket_timeout": None})


def _info(answer: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: value for name, separator, value in lines if separator}


def _retrieve(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        # Retrieved here, since nobody may be left to do so.
        task.exception()
