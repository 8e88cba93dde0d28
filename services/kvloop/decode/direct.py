"""DIRECT turns: the prompt goes on from what this worker itself holds, and no prefill worker takes part.

Before anything is submitted, the lease is pinned and its tokens are compared with the prompt's: what is
pinned can't leave the prefix cache, so the engine finds it there. The pin ends with the first token; from
then on the turn has references of its own. Whatever can't be proven or pinned is refused, and the turn goes
through a prefill worker: computing a long prompt here would hold up everybody's streams.

The worker also bounds how many suffix tokens such turns compute at a time, whoever sent them.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from kvloop.decode.keeper import Keeper
from kvloop.decode.lease import Ended, Lease, State
from kvloop.engine.port import DecodeDelta, DecodeJob, Engine
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.runtime.tokens import TOKEN_BYTES, count
from kvloop.v1alpha1 import decode_service_pb2

MAX_SUCCESSIONS = 3
RETRY_AFTER_S = 0.05


@dataclass(frozen=True, slots=True)
class DirectPolicy:
    """Bounds of DIRECT turns."""

    pin_s: float = 30.0
    """Longest time until the first token for which the lease is pinned."""
    margin_s: float = 0.2
    """A lease with less time left is over."""
    budget: int = 1024
    """Suffix tokens computed at a time; a turn that alone has more is only taken when nothing else is."""


class Direct:
    """DIRECT turns of one decode worker."""

    def __init__(
        self, engine: Engine, keeper: Keeper, clock: Clock, policy: DirectPolicy = DirectPolicy()
    ) -> None:
        self._engine = engine
        self._keeper = keeper
        self._clock = clock
        self._policy = policy
        self.tokens = 0
        """Suffix tokens of turns that have no first token yet."""
        self._ending: set[asyncio.Task[None]] = set()

    async def deltas(
        self, terms: decode_service_pb2.DirectTerms, digest_key: bytes, job: DecodeJob
    ) -> AsyncGenerator[DecodeDelta, None]:
        """Yield the answer of a turn that goes on from a lease.

        Failures ahead of the first token: LEASE_NOT_FOUND, LEASE_EPOCH, LEASE_EXPIRED, PREFIX_DIVERGED,
        INCOMPATIBLE_ENGINES, OVERLOADED.
        """
        suffix = max(0, count(job.prompt) - terms.num_tokens)
        async with contextlib.AsyncExitStack() as held, aclosing(self._generate(job)) as deltas:
            held.enter_context(self._budgeted(suffix))
            await held.enter_async_context(self._pinned(terms, digest_key, job.prompt))
            begun = False
            async for delta in deltas:
                if not begun:
                    begun = True
                    await held.aclose()
                yield delta

    async def _generate(self, job: DecodeJob) -> AsyncGenerator[DecodeDelta, None]:
        deltas = self._engine.decode(job)
        try:
            async for delta in deltas:
                yield delta
        finally:
            close = getattr(deltas, "aclose", None)
            if close is not None:
                await close()

    @contextlib.contextmanager
    def _budgeted(self, suffix: int) -> Iterator[None]:
        if self.tokens and self.tokens + suffix > self._policy.budget:
            raise Failure(
                Reason.ERROR_REASON_OVERLOADED,
                "too many suffix tokens at once",
                metadata={"limit": str(self._policy.budget)},
                retry_after_s=RETRY_AFTER_S,
            )
        self.tokens += suffix
        try:
            yield
        finally:
            self.tokens -= suffix

    @asynccontextmanager
    async def _pinned(
        self, terms: decode_service_pb2.DirectTerms, digest_key: bytes, prompt: bytes
    ) -> AsyncIterator[None]:
        facts = self._engine.facts
        if terms.epoch != facts.epoch:
            raise Failure(Reason.ERROR_REASON_LEASE_EPOCH, "the lease is of another epoch")
        if not facts.prefix_caching:
            raise Failure(
                Reason.ERROR_REASON_INCOMPATIBLE_ENGINES, "this engine does not go on from what it holds"
            )
        if terms.soft and self._is_soft(terms, digest_key):
            yield
            return
        lease_id, read_id = await self._pin(terms, digest_key, prompt)
        try:
            yield
        finally:
            self._keeper.table.unpin(read_id, self._clock.monotonic())
            # In the background: the first token does not wait for it.
            ending = asyncio.create_task(self._end_read(lease_id, read_id))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _is_soft(self, terms: decode_service_pb2.DirectTerms, digest_key: bytes) -> bool:
        """Tell whether the lease's blocks, no longer held, may still be in the prefix cache.

        Its tokens are forgotten: what the cache still has is found by the prompt's own block hashes.
        """
        lease = self._keeper.table.get(terms.lease_id)
        return (
            lease is not None
            and hmac.compare_digest(lease.digest_key, digest_key)
            and lease.state is State.SOFT
            and lease.ended is Ended.EVICTED
            and self._keeper.table.newest(lease.scope) is None
        )

    async def _pin(
        self, terms: decode_service_pb2.DirectTerms, digest_key: bytes, prompt: bytes
    ) -> tuple[str, str]:
        failure = _not_found()
        for _ in range(MAX_SUCCESSIONS):
            lease = self._usable(terms, digest_key)
            shared = terms.num_tokens
            if not 0 < shared <= min(lease.num_tokens, count(prompt) - 1) or not _begins_with(
                prompt, lease.tokens, shared
            ):
                raise Failure(Reason.ERROR_REASON_PREFIX_DIVERGED, "the prompt does not go on from the lease")
            try:
                grant = await self._engine.begin_read(lease.lease_id, shared, self._policy.pin_s)
            except Failure as refused:
                if refused.reason != Reason.ERROR_REASON_LEASE_NOT_FOUND:
                    raise
                failure = refused
                # Superseded while asking, or gone without a word: a newer lease serves as well.
                if lease.is_live():
                    await self._keeper.lost(lease)
                continue
            self._keeper.table.pin(lease, grant.read_id, self._clock.monotonic(), grant.pin_s)
            return lease.lease_id, grant.read_id
        raise failure

    async def _end_read(self, lease_id: str, read_id: str) -> None:
        # An engine that is gone holds nothing; otherwise the pin's own deadline ends it.
        with contextlib.suppress(Failure):
            await self._engine.end_read(lease_id, read_id)

    def _usable(self, terms: decode_service_pb2.DirectTerms, digest_key: bytes) -> Lease:
        lease = self._keeper.table.get(terms.lease_id)
        if lease is None or not hmac.compare_digest(lease.digest_key, digest_key):
            raise _not_found()
        if not lease.is_live():
            ended = lease.ended
            lease = self._keeper.table.newest(lease.scope)
            if lease is None:
                raise _expired() if ended is Ended.EXPIRED else _not_found()
        if lease.remaining_s(self._clock.monotonic()) <= self._policy.margin_s:
            raise _expired()
        return lease


def check_terms(request: decode_service_pb2.DecodeRequest) -> None:
    """Raise the Failure of the first thing wrong with a DIRECT request's own fields."""
    if request.HasField("handle"):
        raise invalid("direct", "excludes handle")
    if not request.direct.lease_id:
        raise invalid("direct.lease_id", "must not be empty")
    if not request.direct.num_tokens:
        raise invalid("direct.num_tokens", "must be greater than zero")
    if not request.scope.digest_key:
        raise invalid("scope.digest_key", "must not be empty")
    if request.sampling.HasField("prompt_logprobs"):
        raise invalid("sampling.prompt_logprobs", "needs a full prefill")


def _begins_with(prompt: bytes, held: bytes, shared: int) -> bool:
    end = shared * TOKEN_BYTES
    return memoryview(prompt)[:end] == memoryview(held)[:end]


def _not_found() -> Failure:
    return Failure(Reason.ERROR_REASON_LEASE_NOT_FOUND, "no such lease")


def _expired() -> Failure:
    return Failure(Reason.ERROR_REASON_LEASE_EXPIRED, "the lease's time is over")
