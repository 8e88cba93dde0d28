"""Decode workers as a prefill worker reaches them: which may be dialled, over which channel, and whether.

A request names the endpoint, so what it may be is settled here: host:port by form, and known by the
settings or the registry. A worker that did not answer is left alone for a moment, doubling up to a limit,
so that a dead one costs one timeout rather than one per turn.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvloop.metastore.port import DirectoryUnavailable
from kvloop.runtime import endpoints
from kvloop.runtime.clock import Clock
from kvloop.runtime.security import PLAIN, Security
from kvloop.v1alpha1.decode_service_pb2_grpc import DecodeServiceStub

if TYPE_CHECKING:
    from kvloop.v1alpha1.decode_service_pb2_grpc import DecodeServiceAsyncStub

ANY_LOOPBACK = "loopback"
FIRST_REST_S = 0.5
LONGEST_REST_S = 10.0
CLOSE_GRACE_S = 5.0
KNOWN_FOR_S = 60.0
"""A worker that has left the registry may be dialled for so long."""
ASK_AGAIN_S = 0.5
"""Endpoints that nobody knows have the registry read no more often than this."""


class Registered:
    """The decode workers that the registry knows, read when a request names one that is not known here:
    their endpoints, and where their engines' reads begin.

    Workers that read it all the time would have the store send every worker to every other: a prefill worker
    needs few of them, and its reads are far between.
    """

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, Mapping[str, str]]]], clock: Clock) -> None:
        """Take what returns side channels by endpoint and epoch; it may raise DirectoryUnavailable."""
        self._read = read
        self._clock = clock
        self._known: Mapping[str, Mapping[str, str]] = {}
        self._fresh_until = self._again_at = float("-inf")
        self._reading = asyncio.Lock()

    async def has(self, endpoint: str) -> bool:
        """Tell whether an endpoint is a decode worker's, by a reading that is not too old."""
        async with self._reading:
            await self._refresh(known=endpoint in self._known)
            return endpoint in self._known

    async def side_channel(self, endpoint: str, epoch: str) -> str:
        """Return the side channel of an engine in that life; "" while it has not announced it."""
        async with self._reading:
            await self._refresh(known=epoch in self._known.get(endpoint, {}))
            return self._known.get(endpoint, {}).get(epoch, "")

    async def _refresh(self, *, known: bool) -> None:
        now = self._clock.monotonic()
        if now >= (self._fresh_until if known else self._again_at):
            self._fresh_until = self._again_at = now + ASK_AGAIN_S
            # While the store is away, the last known ones may still serve.
            with contextlib.suppress(DirectoryUnavailable):
                self._known = dict(await self._read())
                self._fresh_until = now + KNOWN_FOR_S


class EndpointRule:
    """Which endpoints may be dialled."""

    def __init__(self, allowed: Collection[str], registered: Callable[[str], Awaitable[bool]]) -> None:
        self._loopback = ANY_LOOPBACK in allowed
        self._allowed = {endpoints.parse(text) for text in allowed if text != ANY_LOOPBACK}
        self._registered = registered

    async def admit(self, text: str) -> str | None:
        """Return the endpoint in its one written form, or None when it may not be dialled."""
        try:
            endpoint = endpoints.parse(text)
        except ValueError:
            return None
        if endpoint.port == 0:
            return None
        if (self._loopback and endpoint.is_loopback) or endpoint in self._allowed:
            return str(endpoint)
        return str(endpoint) if await self._registered(str(endpoint)) else None


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    stub: "DecodeServiceAsyncStub"
    failures: int = 0
    resting_until: float = 0.0


class Peers:
    """A bounded pool of channels, least recently used first to go, with a memory of failures."""

    def __init__(self, clock: Clock, limit: int, security: Security = PLAIN) -> None:
        self._security = security
        self._clock = clock
        self._limit = limit
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._peers)

    def is_resting(self, endpoint: str) -> bool:
        """Tell whether an endpoint has just failed. The first call after its rest tries it again."""
        peer = self._peers.get(endpoint)
        return peer is not None and self._clock.monotonic() < peer.resting_until

    def stub(self, endpoint: str) -> "DecodeServiceAsyncStub":
        """Return the stub of an admitted endpoint."""
        peer = self._peers.get(endpoint)
        if peer is None:
            channel = self._security.channel(endpoint)
            peer = self._peers[endpoint] = _Peer(channel, DecodeServiceStub(channel))
            while len(self._peers) > self._limit:
                _, oldest = self._peers.popitem(last=False)
                task = asyncio.create_task(oldest.channel.close(CLOSE_GRACE_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._peers.move_to_end(endpoint)
        return peer.stub

    def answered(self, endpoint: str) -> None:
        """Note that an endpoint answers, whatever it said."""
        peer = self._peers.get(endpoint)
        if peer is not None:
            peer.failures, peer.resting_until = 0, 0.0

    def failed(self, endpoint: str) -> None:
        """Note that an endpoint did not answer."""
        peer = self._peers.get(endpoint)
        if peer is not None:
            rest = min(FIRST_REST_S * 2**peer.failures, LONGEST_REST_S)
            peer.failures = min(peer.failures + 1, 16)
            peer.resting_until = self._clock.monotonic() + rest

    async def close(self) -> None:
        """Close all channels."""
        for peer in self._peers.values():
            await peer.channel.close(None)
        self._peers.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)
