"""The directory in Redis or Valkey: the port, said in scripts."""

import asyncio
from collections.abc import Sequence

from kvloop.metastore import codec, keys, scripts
from kvloop.metastore.fitness import report
from kvloop.metastore.guard import GuardedLink
from kvloop.metastore.port import (
    DirectoryUnavailable,
    FitnessReport,
    Found,
    Outage,
    PrefixFound,
    Published,
    Renewal,
    Standing,
)
from kvloop.metastore.ttl import milliseconds, positive_milliseconds
from kvloop.v1alpha1 import lease_pb2

_NOWHERE = -1
_RENEWED_TOGETHER = 128
"""Renewals on their way at once, so that turns find room beside them."""
_STANDINGS = (Standing.IDLE, Standing.RENEWED, Standing.MISSING, Standing.REPLACED)


class RedisDirectory:
    """A LeaseDirectory with PrefixHints over a guarded link, which it owns."""

    def __init__(self, link: GuardedLink) -> None:
        self._link = link

    async def lookup(self, scope: bytes) -> Found:
        """See LeaseDirectory."""
        return _found(await scripts.lookup(self._link, keys.lease_key(scope)))

    async def publish(self, scope: bytes, entry: lease_pb2.DirectoryEntry, ttl_s: float) -> Published:
        """See LeaseDirectory."""
        key, value, ttl_ms = keys.lease_key(scope), codec.encode(entry), milliseconds(ttl_s)
        if ttl_ms < 1:
            return Published(won=False, displaced=None)
        won, displaced = await scripts.publish(self._link, key, value, ttl_ms)
        return Published(won=won, displaced=codec.decode(displaced))

    async def remove(self, scope: bytes, lease_id: str) -> bool:
        """See LeaseDirectory."""
        return await scripts.remove(self._link, keys.lease_key(scope), codec.lease_tag(lease_id))

    async def set_alive(self, scope: bytes, ttl_s: float) -> None:
        """See LeaseDirectory."""
        key, ttl_ms = keys.alive_key(scope), positive_milliseconds(ttl_s)
        await self._link.command("SET", key, b"1", "PX", ttl_ms)

    async def is_alive(self, scope: bytes) -> bool:
        """See LeaseDirectory."""
        return bool(await self._link.command("EXISTS", keys.alive_key(scope)) == 1)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Standing]:
        """See LeaseDirectory."""
        standings: list[Standing] = []
        for first in range(0, len(renewals), _RENEWED_TOGETHER):
            # What is asked in one tick of the loop goes out in one write per node, on a cluster too.
            together = renewals[first : first + _RENEWED_TOGETHER]
            standings += await asyncio.gather(*(self._renew(renewal) for renewal in together))
        return standings

    async def _renew(self, renewal: Renewal) -> Standing:
        lease_key, alive_key = keys.lease_key(renewal.scope), keys.alive_key(renewal.scope)
        tag, ttl_ms = codec.lease_tag(renewal.lease_id), milliseconds(renewal.ttl_s)
        try:
            answer = await scripts.renew(self._link, lease_key, alive_key, tag, ttl_ms)
        except DirectoryUnavailable:
            return Standing.UNKNOWN
        return _STANDINGS[answer] if 0 <= answer < len(_STANDINGS) else Standing.UNKNOWN

    async def publish_hints(self, group: bytes, digests: Sequence[bytes], scope: bytes, ttl_s: float) -> None:
        """See PrefixHints."""
        ttl_ms = milliseconds(ttl_s)
        names = [keys.hint_key(group, digest) for digest in digests]
        if names and ttl_ms > 0:
            await scripts.put_hints(self._link, names, keys.tag(scope), ttl_ms)

    async def find_by_prefix(
        self, group: bytes, digests: Sequence[bytes], scopes: Sequence[bytes] = ()
    ) -> PrefixFound:
        """See PrefixHints."""
        if not digests and not scopes:
            raise ValueError("a search needs a digest or a scope")
        leases = [keys.lease_key(scope) for scope in scopes]
        # The longest prefix first.
        prefix, tags = keys.hint_prefix(group), [keys.tag(digest) for digest in reversed(digests)]
        if self._link.clustered:
            hints = [prefix + tag for tag in tags]
            position, scope_tag, found = await self._find_in_two_steps(leases, hints)
        else:
            position, scope_tag, raw = await scripts.find(self._link, leases, prefix, tags)
            found = _found(raw)
        if found.entry is not None and 0 <= position < len(scopes):
            return PrefixFound(scopes[position], _NOWHERE, found)
        scope = _scope(scope_tag)
        if found.entry is None or not scope:
            return PrefixFound(b"", _NOWHERE, Found(None, 0.0, found.turn_start_us))
        return PrefixFound(scope, len(digests) - 1 - (position - len(scopes)), found)

    async def _find_in_two_steps(
        self, leases: Sequence[bytes], hints: Sequence[bytes]
    ) -> tuple[int, bytes, Found]:
        """Return what the one script would: position of the key, tag of a hinted scope, lease."""
        asked = asyncio.gather(*(scripts.lookup(self._link, key) for key in leases))
        named, (now_us, candidates) = await asyncio.gather(asked, self._hinted(hints, needed=not leases))
        for position, answer in enumerate(named):
            found = _found(answer)
            if found.entry is not None:
                return position, b"", found
        # A node that fails takes its own candidates along, not the others'.
        answers = await asyncio.gather(
            *(scripts.lookup(self._link, b"kvloop:{%b}:lease" % tag) for _, tag in candidates),
            return_exceptions=True,
        )
        for (position, scope_tag), raw in zip(candidates, answers, strict=True):
            if isinstance(raw, scripts.RawFound):
                found = _found(raw)
                if found.entry is not None:
                    return len(leases) + position, scope_tag, found
            elif not isinstance(raw, DirectoryUnavailable):
                raise raw
        return _NOWHERE, b"", Found(None, 0.0, named[0].now_us if named else now_us)

    async def _hinted(self, hints: Sequence[bytes], *, needed: bool) -> tuple[int, list[tuple[int, bytes]]]:
        if not hints:
            return 0, []
        try:
            return await scripts.hinted_scopes(self._link, hints)
        except DirectoryUnavailable:
            # Another node than the names'; those were answered.
            if needed:
                raise
            return 0, []

    async def check(self) -> FitnessReport:
        """See LeaseDirectory: reads the settings, then writes and removes an entry of its own."""
        result = report(await self._link.facts())
        if not result.fit:
            raise DirectoryUnavailable(Outage.UNFIT)
        entry = lease_pb2.DirectoryEntry(lease_id="check", decode_endpoint="check")
        await self.publish(keys.CHECK_SCOPE, entry, 1.0)
        await self.lookup(keys.CHECK_SCOPE)
        await self.remove(keys.CHECK_SCOPE, "check")
        return result

    async def close(self) -> None:
        """See LeaseDirectory."""
        await self._link.close()


def _found(raw: scripts.RawFound) -> Found:
    # A key without TTL is none of ours.
    entry = codec.decode(raw.value) if raw.ttl_ms > 0 else None
    return Found(entry, raw.ttl_ms / 1000 if entry is not None else 0.0, raw.now_us)


def _scope(scope_tag: bytes) -> bytes:
    try:
        return keys.untag(scope_tag)
    except ValueError:
        return b""
