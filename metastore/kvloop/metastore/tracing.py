"""Spans around what a turn asks of the directory, as a decorator."""

from collections.abc import Sequence

from kvloop.metastore.port import (
    FitnessReport,
    Found,
    LeaseDirectory,
    PrefixFound,
    Published,
    Renewal,
    Standing,
)
from kvloop.runtime import tracing
from kvloop.v1alpha1 import lease_pb2


def traced(directory: LeaseDirectory) -> LeaseDirectory:
    """Return the directory with spans; itself where nothing is traced."""
    return _Traced(directory) if tracing.on() else directory


class _Traced:
    def __init__(self, inner: LeaseDirectory) -> None:
        self._inner = inner

    async def lookup(self, scope: bytes) -> Found:
        with tracing.span("directory.lookup") as span:
            found = await self._inner.lookup(scope)
            span.note(found=found.entry is not None, remaining_s=found.remaining_s)
            return found

    async def find_by_prefix(
        self, group: bytes, digests: Sequence[bytes], scopes: Sequence[bytes] = ()
    ) -> PrefixFound:
        with tracing.span("directory.lookup") as span:
            found = await self._inner.find_by_prefix(group, digests, scopes)
            lease = found.found
            span.note(
                found=lease.entry is not None, by_prefix=found.position >= 0, remaining_s=lease.remaining_s
            )
            return found

    async def publish_hints(self, group: bytes, digests: Sequence[bytes], scope: bytes, ttl_s: float) -> None:
        with tracing.span("directory.publish_hints") as span:
            span.note(hints=len(digests))
            await self._inner.publish_hints(group, digests, scope, ttl_s)

    async def publish(self, scope: bytes, entry: lease_pb2.DirectoryEntry, ttl_s: float) -> Published:
        with tracing.span("directory.publish") as span:
            published = await self._inner.publish(scope, entry, ttl_s)
            span.note(won=published.won, num_tokens=entry.num_tokens)
            return published

    async def remove(self, scope: bytes, lease_id: str) -> bool:
        with tracing.span("directory.remove"):
            return await self._inner.remove(scope, lease_id)

    async def set_alive(self, scope: bytes, ttl_s: float) -> None:
        await self._inner.set_alive(scope, ttl_s)

    async def is_alive(self, scope: bytes) -> bool:
        return await self._inner.is_alive(scope)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Standing]:
        return await self._inner.renew(renewals)

    async def check(self) -> FitnessReport:
        return await self._inner.check()

    async def close(self) -> None:
        await self._inner.close()
