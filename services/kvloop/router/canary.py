"""Promise 1 watched in production: now and then a reused greedy turn is computed once more without reuse.

The repeat goes through the same workers' doors as any turn, but with reuse forbidden, under a cache salt of
its own and of the lowest priority, and nobody waits for it. It is dropped where it could be in the way, also
when it has begun: an engine's step that computes it would be waited for, whatever its priority. The
cold run also tells how probable the served token was where the two part: on engines whose arithmetic
depends on the batch, two tokens of nearly one probability may change places, and that is no wrong KV.
"""

import asyncio
import contextvars
import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from kvloop.router.relay import Relay
from kvloop.router.watching import TurnWatch
from kvloop.runtime import logs, tokens
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure
from kvloop.runtime.metrics import Metrics
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

if TYPE_CHECKING:
    from kvloop.router.settings import RouterSettings
    from kvloop.router.turn import Tools, Turn

LOWEST_PRIORITY = 2**31 - 1
TIE_NATS = 0.5
"""Where the cold run would have taken another token, but this one is less than this behind, it is a tie."""
_CANDIDATES = 5
_MINUTE_S = 60.0

Result = Literal["match", "tie", "mismatch", "dropped", "failed"]

_log = logs.get("canary")


@dataclass(frozen=True, slots=True)
class Cold:
    """An answer computed without reuse."""

    token_ids: Sequence[int]
    logprobs: Sequence[turn_pb2.PositionLogprobs]


class Recorded(Relay):
    """A relay that remembers an answer as it passes."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[bytes] = []
        self.summary: bytes | None = None

    def put(self, chunk: bytes) -> None:
        """Pass a chunk on."""
        self.chunks.append(chunk)
        super().put(chunk)

    def finish(self, summary: bytes) -> None:
        """Pass the end on."""
        self.summary = summary
        super().finish(summary)


class Limiter:
    """So many a minute, evenly: one is due when the last was long enough ago."""

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self._gap_s = _MINUTE_S / per_minute if per_minute > 0 else None
        self._clock = clock
        self._next = clock.monotonic()

    def due(self) -> bool:
        """Tell whether one may go now."""
        return self._gap_s is not None and self._clock.monotonic() >= self._next

    def took(self) -> None:
        """Count one."""
        if self._gap_s is not None:
            self._next = self._clock.monotonic() + self._gap_s


class Canary:
    """Repeats turns of one router, one at a time."""

    def __init__(self, settings: "RouterSettings", metrics: Metrics, clock: Clock) -> None:
        self._settings = settings
        self._metrics = metrics
        self._limiter = Limiter(settings.canary_per_minute, clock)
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        if settings.canary_per_minute > 0:
            # There from the start: of a counter that begins with a mismatch, no rate would tell.
            for result in get_args(Result):
                metrics.add("kvloop_canary", result, amount=0)

    def relay(self, turn: "Turn", tools: "Tools") -> Relay:
        """Return the relay of a turn; one that remembers, when the turn may be repeated.

        A repeat under way gives way when the turn would find no idle prefill worker.
        """
        if self._task is not None and busy(tools, turn):
            self._task.cancel()
        wanted = self._limiter.due() and self._task is None and not self._stopped and fit(turn)
        wanted = wanted and turn.prompt_tokens <= self._settings.canary_max_prompt_tokens
        return Recorded() if wanted else Relay()

    def answered(self, turn: "Turn", relay: Relay, tools: "Tools") -> None:
        """Take note of a turn that was answered; it is repeated when it reused KV and there is room."""
        if not isinstance(relay, Recorded) or relay.summary is None:
            return
        summary = router_service_pb2.GenerateResponse.FromString(relay.summary).summary
        served = _ids(relay.chunks)[: self._settings.canary_max_tokens]
        if summary.reuse.tokens.computed >= summary.prompt_tokens or not served or not self._limiter.due():
            return
        if self._stopped or self._task is not None:
            return
        self._limiter.took()
        if busy(tools, turn):
            self._count("dropped")
            return
        # In a context of its own: no part of the user's trace.
        work = self._repeat(turn, summary, served, tools)
        self._task = asyncio.create_task(work, context=contextvars.Context())
        self._task.add_done_callback(self._ended)

    async def settle(self) -> None:
        """Wait for the repeat under way."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """End; a repeat under way is cut off. Idempotent."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await self.settle()

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._task = None

    def _count(self, result: Result) -> None:
        self._metrics.add("kvloop_canary", result)

    async def _repeat(
        self, turn: "Turn", summary: turn_pb2.Summary, served: Sequence[int], tools: "Tools"
    ) -> None:
        try:
            cold = await compute(turn, len(served), self._settings.canary_timeout_s, tools)
        except Failure as failure:
            self._count("failed")
            _log.info("canary_failed", request_id=turn.request_id, reason=failure.reason_name)
            return
        except asyncio.CancelledError:
            if not self._stopped:
                self._count("dropped")
            raise
        result, position = compare(served, cold)
        self._count(result)
        if result == "mismatch":
            _log.error(
                "canary_mismatch",
                request_id=turn.request_id,
                position=position,
                verdict=turn_pb2.Verdict.Name(summary.reuse.verdict),
                reused_tokens=summary.prompt_tokens - summary.reuse.tokens.computed,
                prefill_worker=summary.prefill_worker,
                decode_worker=summary.decode_worker,
            )


def fit(turn: "Turn") -> bool:
    """Tell whether a turn's answer is the same each time: greedy, and all of its prompt may be reused."""
    sampling = turn.request.sampling
    greedy = sampling.HasField("temperature") and sampling.temperature == 0
    return greedy and not sampling.HasField("prompt_logprobs")


def busy(tools: "Tools", turn: "Turn") -> bool:
    """Tell whether every prefill worker that could compute the turn has others of this router's turns."""
    workers = [w for w in tools.pool.prefill if w.ready and turn.served.fits(w.info)]
    return not any(worker.in_flight == 0 for worker in workers)


async def compute(turn: "Turn", max_tokens: int, timeout_s: float, tools: "Tools") -> Cold:
    """Answer a turn's prompt anew without any reuse. Raises Failure."""
    from kvloop.router import steps
    from kvloop.router.explain import Memory

    # Not a user's turn: none of their figures counts it, and nobody explains it.
    quiet = dataclasses.replace(tools, watch=TurnWatch(Metrics("router")), memory=Memory(0))
    cold = steps.admit(request(turn.request, max_tokens), turn.tenant, timeout_s, quiet)
    relay = Recorded()
    await steps.serve(cold, quiet, relay)
    parsed = [router_service_pb2.GenerateResponse.FromString(raw).chunk for raw in relay.chunks]
    return Cold(_ids(relay.chunks), [position for chunk in parsed for position in chunk.logprobs])


def request(
    served: router_service_pb2.GenerateRequest, max_tokens: int
) -> router_service_pb2.GenerateRequest:
    """Return the request of a repeat."""
    cold = router_service_pb2.GenerateRequest()
    cold.CopyFrom(served)
    cold.request_id = f"canary-{secrets.token_hex(16)}"
    cold.conversation_id = cold.parent_conversation_id = ""
    cold.ClearField("retention")
    cold.cache_salt = f"kvloop-canary-{secrets.token_hex(16)}"
    cold.reuse_policy = router_service_pb2.REUSE_POLICY_FORBID
    cold.priority = LOWEST_PRIORITY
    cold.sampling.max_tokens = max_tokens
    cold.sampling.min_tokens = min(cold.sampling.min_tokens, max_tokens)
    cold.sampling.logprobs = _CANDIDATES
    return cold


def compare(served: Sequence[int], cold: Cold) -> tuple[Result, int]:
    """Return what two answers say of each other, and where they part (their length, when they don't)."""
    for position, token in enumerate(served):
        if position < len(cold.token_ids) and cold.token_ids[position] == token:
            continue
        if position < len(cold.logprobs) and _nearly(token, cold.logprobs[position]):
            return "tie", position
        return "mismatch", position
    return "match", len(served)


def _nearly(token: int, candidates: turn_pb2.PositionLogprobs) -> bool:
    by_token = {candidate.token_id: candidate.logprob for candidate in candidates.candidates}
    return token in by_token and max(by_token.values()) - by_token[token] < TIE_NATS


def _ids(chunks: Sequence[bytes]) -> list[int]:
    parsed = (router_service_pb2.GenerateResponse.FromString(raw).chunk for raw in chunks)
    return [token for chunk in parsed for token in tokens.unpack(chunk.token_ids)]
