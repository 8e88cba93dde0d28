"""Leave to read: who may read which lease, and how much of it.

The reader sends digests of prefixes of its new prompt; the lease's own tokens say how far they agree. What
the engine then hands out is cut to that length and pinned. No queue, no engine step: one comparison and
one message to the engine's table.
"""

import hmac
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from kvloop.decode.keeper import Keeper
from kvloop.decode.lease import Ended, Lease
from kvloop.engine.port import Engine, ReadGrant
from kvloop.runtime import checks
from kvloop.runtime.clock import Clock
from kvloop.runtime.digests import DIGEST_BYTES, common_prefix
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import decode_service_pb2

MAX_PROOF_LENGTHS = 1 << 17
MAX_SUCCESSIONS = 3


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """Bounds of reads. Seconds."""

    pin_s: float = 30.0
    """When the reader names none."""
    max_pin_s: float = 120.0
    margin_s: float = 0.2
    """A lease with less time left is over."""


class Reading:
    """BeginRead and EndRead of one decode worker."""

    def __init__(
        self,
        engine: Engine,
        keeper: Keeper,
        clock: Clock,
        policy: ReadPolicy = ReadPolicy(),
        guards_off: Collection[str] = (),
    ) -> None:
        """guards_off: "epoch", "scope"; tests only."""
        self._guards_off = guards_off
        self._engine = engine
        self._keeper = keeper
        self._clock = clock
        self._policy = policy
        self.granted = 0
        self.refused: Counter[str] = Counter()
        """By reason."""

    async def begin(self, request: decode_service_pb2.BeginReadRequest) -> ReadGrant:
        """Pin a lease for a reader and return its handle, cut to what is proven.

        Failures: INVALID_FIELD, LEASE_EPOCH, INCOMPATIBLE_ENGINES, LEASE_NOT_FOUND, LEASE_EXPIRED,
        PREFIX_DIVERGED.
        """
        try:
            grant = await self._begin(request)
        except Failure as failure:
            self.refused[failure.reason_name.lower()] += 1
            raise
        self.granted += 1
        return grant

    async def _begin(self, request: decode_service_pb2.BeginReadRequest) -> ReadGrant:
        claimed = _claimed(request)
        facts = self._engine.facts
        if request.epoch != facts.epoch and "epoch" not in self._guards_off:
            raise Failure(Reason.ERROR_REASON_LEASE_EPOCH, "the lease is of another epoch")
        if not facts.bidirectional_kv_xfer or request.compatibility != facts.compatibility:
            raise Failure(Reason.ERROR_REASON_INCOMPATIBLE_ENGINES, "the engines can't exchange KV")
        pin_s = self._pin_s(request)
        failure = _not_found()
        for _ in range(MAX_SUCCESSIONS):
            lease = self._readable(request)
            proven = common_prefix(request.scope.digest_key, lease.tokens, request.prefix_lengths, claimed)
            if proven == 0:
                raise Failure(
                    Reason.ERROR_REASON_PREFIX_DIVERGED, "the prompt shares no block with the lease"
                )
            try:
                grant = await self._engine.begin_read(lease.lease_id, proven, pin_s)
            except Failure as refused:
                if refused.reason != Reason.ERROR_REASON_LEASE_NOT_FOUND:
                    raise
                failure = refused
                # Superseded while asking, or gone without a word: a newer lease serves as well.
                if lease.is_live():
                    await self._keeper.lost(lease)
                continue
            self._keeper.table.pin(lease, grant.read_id, self._clock.monotonic(), grant.pin_s)
            return grant
        raise failure

    async def end(self, request: decode_service_pb2.EndReadRequest) -> None:
        """Take a pin off; unknown ones are ignored."""
        lease = self._keeper.table.unpin(request.read_id, self._clock.monotonic())
        # A read of a superseded lease was served by its successor: the pin knows which.
        lease_id = lease.lease_id if lease is not None else request.lease_id
        await self._engine.end_read(lease_id, request.read_id)

    def _pin_s(self, request: decode_service_pb2.BeginReadRequest) -> float:
        if not request.HasField("pin_time"):
            return self._policy.pin_s
        asked = checks.seconds(request.pin_time, "pin_time")
        if asked <= 0:
            raise invalid("pin_time", "must be greater than zero")
        return min(asked, self._policy.max_pin_s)

    def _readable(self, request: decode_service_pb2.BeginReadRequest) -> Lease:
        lease = self._keeper.table.get(request.lease_id)
        if lease is None or not self._is_in_scope(lease, request.scope.digest_key):
            raise _not_found()
        if not lease.is_live():
            ended = lease.ended
            lease = self._keeper.table.newest(lease.scope)
            if lease is None:
                raise _expired() if ended is Ended.EXPIRED else _not_found()
        if lease.remaining_s(self._clock.monotonic()) <= self._policy.margin_s:
            raise _expired()
        return lease

    def _is_in_scope(self, lease: Lease, digest_key: bytes) -> bool:
        return hmac.compare_digest(lease.digest_key, digest_key) or "scope" in self._guards_off


def _claimed(request: decode_service_pb2.BeginReadRequest) -> list[bytes]:
    lengths, digests = request.prefix_lengths, request.prefix_digests
    if not request.lease_id:
        raise invalid("lease_id", "must not be empty")
    if not request.scope.digest_key:
        raise invalid("scope.digest_key", "must not be empty")
    checks.check_scope(request.scope)
    if not 0 < len(lengths) <= MAX_PROOF_LENGTHS:
        raise invalid("prefix_lengths", f"must have 1 to {MAX_PROOF_LENGTHS} entries")
    if lengths[0] == 0 or any(a >= b for a, b in pairwise(lengths)):
        raise invalid("prefix_lengths", "must ascend from 1")
    if len(digests) != DIGEST_BYTES * len(lengths):
        raise invalid("prefix_digests", f"must have {DIGEST_BYTES} bytes for each length")
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]


def _not_found() -> Failure:
    return Failure(Reason.ERROR_REASON_LEASE_NOT_FOUND, "no such lease")


def _expired() -> Failure:
    return Failure(Reason.ERROR_REASON_LEASE_EXPIRED, "the lease's time is over")
