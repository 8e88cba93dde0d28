"""What the directory is told of leases.

The entry's life is the lease's less a margin, so that whoever finds it still has time to read. The store
being away is not this module's affair: DirectoryUnavailable passes through `publish`, and a removal that
fails is left to the key's own TTL, since a reader that follows a stale entry is answered NOT_FOUND.
"""

from collections.abc import Callable, Sequence

from kvloop.decode.lease import Lease
from kvloop.engine.port import EngineFacts
from kvloop.metastore.hints import written_lengths
from kvloop.metastore.port import DirectoryUnavailable, LeaseDirectory, Published, Renewal, Standing
from kvloop.runtime import logs
from kvloop.runtime.clock import Clock
from kvloop.runtime.digests import COARSE_BYTES, coarse_lengths, hint_group, prefix_digests
from kvloop.v1alpha1 import lease_pb2

ENTRY_VERSION = 1

_log = logs.get("decode")


class Publisher:
    """Writes this worker's entries; nobody else does."""

    def __init__(
        self,
        directory: LeaseDirectory,
        endpoint: str,
        facts: Callable[[], EngineFacts],
        clock: Clock,
        margin_s: float,
        *,
        hints: bool = True,
    ) -> None:
        """Take the endpoint under which readers reach the holder, and its facts: the epoch may change.

        hints: whether leases are to be found by their tokens' beginning, too.
        """
        self.endpoint = endpoint
        self._directory = directory
        self._facts = facts
        self._clock = clock
        self._margin_s = margin_s
        self._hints = hints

    def entry(self, lease: Lease) -> lease_pb2.DirectoryEntry:
        """Return the directory's entry of a lease."""
        facts = self._facts()
        lengths = coarse_lengths(lease.num_tokens, facts.block_size)
        digests = prefix_digests(lease.digest_key, lease.tokens, lengths)
        return lease_pb2.DirectoryEntry(
            version=ENTRY_VERSION,
            lease_id=lease.lease_id,
            conversation_id=lease.conversation_id,
            decode_endpoint=self.endpoint,
            epoch=facts.epoch,
            num_tokens=lease.num_tokens,
            block_size=facts.block_size,
            turn_start_us=lease.turn_start_us,
            digests=[
                lease_pb2.CoarseDigest(num_tokens=length, digest=digest[:COARSE_BYTES])
                for length, digest in zip(lengths, digests, strict=True)
            ],
            held=True,
        )

    async def publish(self, lease: Lease) -> Published:
        """Write a lease's entry by compare-and-set, then what hints at it. Raises DirectoryUnavailable."""
        ttl_s = self.entry_ttl_s(lease.remaining_s(self._clock.monotonic()))
        # Ahead of the entry: a lease that ends meanwhile has no tokens any more.
        hints = prefix_digests(lease.digest_key, lease.tokens, self._hinted_lengths(lease))
        published = await self._directory.publish(lease.scope, self.entry(lease), ttl_s)
        if published.won:
            await self._write(lease, hints, ttl_s)
        return published

    async def hint_again(self, lease: Lease, remaining_s: float) -> None:
        """Let what hints at a lease stand as long as its prolonged entry."""
        hints = prefix_digests(lease.digest_key, lease.tokens, self._hinted_lengths(lease))
        await self._write(lease, hints, self.entry_ttl_s(remaining_s))

    async def _write(self, lease: Lease, hints: Sequence[bytes], ttl_s: float) -> None:
        if not hints:
            return
        try:
            await self._directory.publish_hints(hint_group(lease.digest_key), hints, lease.scope, ttl_s)
        except DirectoryUnavailable as error:
            # The conversation's own name still leads to it.
            _log.info("hints_not_written", lease_id=lease.lease_id, outage=str(error))

    async def renew(self, leases: Sequence[tuple[Lease, float]]) -> list[Standing]:
        """Prolong the entries of leases, to so many seconds from now, where a session is open."""
        return await self._directory.renew(
            [Renewal(lease.scope, lease.lease_id, self.entry_ttl_s(remaining)) for lease, remaining in leases]
        )

    def _hinted_lengths(self, lease: Lease) -> list[int]:
        return written_lengths(lease.num_tokens) if self._hints and lease.tokens else []

    async def soften(self, lease: Lease) -> None:
        """Mark a lease's entry as no longer held, if it is still the one that stands."""
        try:
            found = await self._directory.lookup(lease.scope)
            if found.entry is None or found.entry.lease_id != lease.lease_id:
                return
            found.entry.held = False
            await self._directory.publish(lease.scope, found.entry, found.remaining_s)
        except DirectoryUnavailable as error:
            _log.info("entry_not_softened", lease_id=lease.lease_id, outage=str(error))

    async def remove(self, lease: Lease) -> None:
        """Remove a lease's entry if it is still the one that stands."""
        try:
            await self._directory.remove(lease.scope, lease.lease_id)
        except DirectoryUnavailable as error:
            _log.info("entry_not_removed", lease_id=lease.lease_id, outage=str(error))

    async def remove_soft(self, scope: bytes) -> None:
        """Remove a conversation's entry if it is this worker's and names a lease that is no longer held."""
        try:
            entry = (await self._directory.lookup(scope)).entry
            if entry is not None and not entry.held and entry.decode_endpoint == self.endpoint:
                await self._directory.remove(scope, entry.lease_id)
        except DirectoryUnavailable as error:
            _log.info("entry_not_removed", outage=str(error))

    def entry_ttl_s(self, remaining_s: float) -> float:
        """Return how long the entry of a lease with so much time left stands."""
        # A short lease keeps half of its time rather than none.
        return max(remaining_s - self._margin_s, remaining_s / 2)
