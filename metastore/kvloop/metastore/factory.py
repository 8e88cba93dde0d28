"""From a URL to a store: the only place that knows which classes belong together."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff

from kvloop.metastore import guard, keys, link, urls
from kvloop.metastore.estimates import SharedEstimates
from kvloop.metastore.fields import MemoryFields, RedisFields
from kvloop.metastore.memory import MemoryDirectory
from kvloop.metastore.port import LeaseDirectory
from kvloop.metastore.redis_directory import RedisDirectory
from kvloop.metastore.registry import WorkerRegistry
from kvloop.runtime.clock import Clock

DEADLINE_S = 0.025
CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How long things may take, and how many at a time."""

    deadline_s: float = DEADLINE_S
    """Limit of one operation, connecting included."""
    connect_s: float = CONNECT_S
    """Limit of connecting, which goes on in the background when an operation ran out of time."""
    max_concurrent: int = guard.MAX_CONCURRENT
    """Operations on the way at a time; all go over one connection per node."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """How the pauses between attempts to reach the store again pass."""
    rng: random.Random | None = None
    """Source of the jitter of those pauses."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Store:
    """Everything in one store, over one link."""

    directory: MemoryDirectory | RedisDirectory
    """LeaseDirectory and PrefixHints."""
    registry: WorkerRegistry
    estimates: SharedEstimates
    link: guard.GuardedLink | None
    """None in memory. Its degraded and outages are for metrics."""

    @property
    def degraded(self) -> bool:
        """Tell whether turns go cold because the store is away."""
        return self.link is not None and self.link.degraded

    async def close(self) -> None:
        """Close connections. Idempotent."""
        await self.directory.close()


_named: WeakValueDictionary[str, Store] = WeakValueDictionary()


def open_store(url: str, *, options: StoreOptions | None = None, clock: Clock | None = None) -> Store:
    """Return the store of a URL (see urls.py). Connects on first use; directory.check() does so at once.

    memory:// is a store of its own each time, memory://name one per process for as long as somebody uses it.
    clock is the time of memory:// stores. Raises ValueError for a URL that makes no sense.
    """
    target = urls.parse(url)
    if target.kind == "memory":
        store = _named.get(target.path) if target.path else None
        if store is None:
            store = _memory(clock, shared=bool(target.path))
            if target.path:
                _named[target.path] = store
        return store
    guarded = open_link(target, options or StoreOptions())
    return Store(
        directory=RedisDirectory(guarded),
        registry=WorkerRegistry(RedisFields(guarded, keys.WORKERS_KEY)),
        estimates=SharedEstimates(RedisFields(guarded, keys.ESTIMATES_KEY)),
        link=guarded,
    )


def _memory(clock: Clock | None, *, shared: bool) -> Store:
    directory = MemoryDirectory(clock, shared=shared)
    return Store(
        directory=directory,
        registry=WorkerRegistry(MemoryFields(clock, directory.opened)),
        estimates=SharedEstimates(MemoryFields(clock, directory.opened)),
        link=None,
    )


def open_directory(
    url: str, *, options: StoreOptions | None = None, clock: Clock | None = None
) -> LeaseDirectory:
    """Return the directory of a store URL, for whoever needs nothing else of it; see open_store."""
    return open_store(url, options=options, clock=clock).directory


def open_link(target: urls.StoreUrl, options: StoreOptions) -> guard.GuardedLink:
    """Return the guarded link of a Redis or Valkey URL."""
    builders = {"single": _single, "unix": _single, "sentinel": _sentinel, "cluster": _cluster}
    return guard.GuardedLink(
        builders[target.kind](target, options),
        max_concurrent=options.max_concurrent,
        sleep=options.sleep,
        rng=options.rng,
    )


def _limits(options: StoreOptions) -> link.Limits:
    return link.Limits(options.deadline_s, options.connect_s)


def _settings(target: urls.StoreUrl, options: StoreOptions) -> dict[str, Any]:
    """Return the settings that every kind of connection takes.

    RESP2, because RESP3 costs a round trip more per connection and gives scripts nothing. No timeout per
    socket: the deadline is around the whole operation, and redis-py drops a connection left in mid-answer.
    """
    return {
        "protocol": 2,
        "driver_info": None,
        "username": target.username,
        "password": target.password,
        "socket_timeout": None,
        "socket_connect_timeout": options.connect_s,
        "retry": Retry(NoBackoff(), 0),
    }


def _transport(target: urls.StoreUrl, plain: type[Connection], secured: type[Connection]) -> dict[str, Any]:
    if not target.tls:
        return {"connection_class": plain}
    return {"connection_class": secured, "tls_context": urls.tls_context(target)}


def open_raw(url: str, *, options: StoreOptions | None = None) -> Redis:
    """Return redis-py's own client of a single server, one connection made exactly as the directory's.

    It is what the directory is measured against.
    """
    pool = _pool(urls.parse(url), options or StoreOptions())
    return Redis(connection_pool=pool, single_connection_client=True)


def _single(target: urls.StoreUrl, options: StoreOptions) -> link.Link:
    return link.SingleLink(_pool(target, options), _limits(options))


def _pool(target: urls.StoreUrl, options: StoreOptions) -> ConnectionPool:
    settings = _settings(target, options)
    if target.kind == "unix":
        settings.update(connection_class=UnixDomainSocketConnection, path=target.path)
    else:
        host, port = target.hosts[0]
        settings.update(host=host, port=port, socket_keepalive=True)
        settings.update(_transport(target, Connection, link.TlsConnection))
    return ConnectionPool(db=target.db, **settings)


def _sentinel(target: urls.StoreUrl, options: StoreOptions) -> link.Link:
    # Sentinels are asked one after the other: a silent one may use up its share of the time only.
    share = options.connect_s / (len(target.hosts) + 1)
    own = _settings(target, options) | {
        "username": target.options.get("sentinel_username"),
        "password": target.options.get("sentinel_password"),
        "socket_timeout": share,
        "socket_connect_timeout": share,
    }
    own |= _transport(target, Connection, link.TlsConnection)
    sentinel = Sentinel([])  # type: ignore[no-untyped-call]
    sentinel.sentinels = [
        Redis.from_pool(ConnectionPool(host=host, port=port, **own)) for host, port in target.hosts
    ]
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        target.path,
        sentinel,
        db=target.db,
        socket_keepalive=True,
        **_settings(target, options),
        **_transport(target, SentinelManagedConnection, link.SentinelTlsConnection),
    )
    return link.SingleLink(pool, _limits(options), sentinel)


def _cluster(target: urls.StoreUrl, options: StoreOptions) -> link.Link:
    # Nodes are asked for the map of slots one after the other, as sentinels are.
    share = options.connect_s / (len(target.hosts) + 1)
    client = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in target.hosts],
        # Part of the slots is worth having.
        require_full_coverage=False,
        **_settings(target, options) | {"socket_timeout": share, "socket_connect_timeout": share},
    )
    transport = _transport(target, Connection, link.TlsConnection)
    client.connection_kwargs.update(transport)
    for node in client.startup_nodes:
        node.connection_class = transport["connection_class"]
        node.connection_kwargs.update(
            {key: value for key, value in transport.items() if key == "tls_context"}
        )
    return link.ClusterLink(client, _limits(options))
