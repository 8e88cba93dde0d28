"""The store, as somebody who should not be there sees it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import redis.asyncio
from cases_kit import Stack

from kvloop.metastore import codec
from kvloop.v1alpha1 import lease_pb2


class Entries:
    """Reads and forges directory entries."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client

    async def key_of(self, lease_id: str) -> bytes:
        """Return the key under which a lease is published."""
        async for key in self._client.scan_iter(match="kvloop:*:lease"):
            entry = codec.decode(await self._client.get(key))
            if entry is not None and entry.lease_id == lease_id:
                return bytes(key)
        raise AssertionError("the lease is not in the directory")

    async def published(self, lease_id: str) -> bool:
        """Tell whether the directory names a lease."""
        try:
            await self.key_of(lease_id)
        except AssertionError:
            return False
        return True

    async def entry(self, lease_id: str) -> lease_pb2.DirectoryEntry:
        """Return a lease's entry."""
        entry = codec.decode(await self.raw(await self.key_of(lease_id)))
        assert entry is not None
        return entry

    async def raw(self, key: bytes) -> bytes:
        """Return an entry's value."""
        value = await self._client.get(key)
        assert value is not None
        return bytes(value)

    async def outlive(self, lease_id: str) -> bytes:
        """Let a lease's entry last a minute, whatever the lease does, unless somebody removes it.

        Returns its key.
        """
        key = await self.key_of(lease_id)
        assert await self._client.pexpire(key, 60_000)
        return key

    async def standing(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return which of these keys are there."""
        values = await self._client.mget(keys)
        return {key for key, value in zip(keys, values, strict=True) if value is not None}

    async def put(self, key: bytes, value: bytes) -> None:
        """Write a value that lasts a minute."""
        await self._client.set(key, value, px=60_000)

    async def forge(self, key: bytes, change: Callable[[lease_pb2.DirectoryEntry], None]) -> None:
        """Change an entry's fields and write it back with a minute's time."""
        entry = codec.decode(await self.raw(key))
        assert entry is not None
        change(entry)
        await self.put(key, codec.encode(entry))

    async def lose(self, key: bytes) -> None:
        """Delete an entry."""
        assert await self._client.delete(key) == 1


@asynccontextmanager
async def open_entries(stack: Stack) -> AsyncIterator[Entries]:
    """Open the fleet's store."""
    client = redis.asyncio.Redis.from_url(stack.fleet.store_url)
    try:
        yield Entries(client)
    finally:
        await client.aclose()
