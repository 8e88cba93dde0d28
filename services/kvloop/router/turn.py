"""The context of one turn: what the steps work with, and what they have worked out so far."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from kvloop.metastore.port import LeaseDirectory
from kvloop.router.admission import Admission, Patience
from kvloop.router.groups import Served
from kvloop.router.identity import Identities, Owner
from kvloop.router.legs import Background
from kvloop.router.migration import Replay, continued, only
from kvloop.router.settings import RouterSettings
from kvloop.router.verdict import Decision
from kvloop.router.watching import TurnWatch
from kvloop.router.worker import AnyWorker, DecodeWorker
from kvloop.router.workers import Pair, WorkerPool
from kvloop.runtime import tokens, tracing
from kvloop.runtime.clock import Clock
from kvloop.runtime.digests import Prefixes
from kvloop.v1alpha1 import (
    decode_service_pb2,
    lease_pb2,
    prefill_service_pb2,
    router_service_pb2,
    sampling_pb2,
    turn_pb2,
)

if TYPE_CHECKING:
    from kvloop.metastore.registry import WorkerRegistry
    from kvloop.router.book import CostBook
    from kvloop.router.canary import Canary
    from kvloop.router.explain import Memory, Weighed

_SLACK_S = 0.02
"""Timers count in milliseconds: a leg may be ended a little before its turn's deadline."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the steps work with."""

    settings: RouterSettings
    pool: WorkerPool
    directory: LeaseDirectory
    identities: Identities
    clock: Clock
    background: Background
    watch: TurnWatch
    book: "CostBook"
    memory: "Memory"
    canary: "Canary"
    admission: Admission
    name: Callable[[], str]
    """Of this router; valid once it listens."""
    registry: "WorkerRegistry | None" = None
    """None where there is only a directory."""


@dataclass(slots=True, eq=False)
class Turn:
    """One Generate call. Times are of the clock's monotonic kind, in seconds; timings in milliseconds."""

    request: router_service_pb2.GenerateRequest
    tenant: str
    deadline: float
    clock: Clock
    request_id: str
    """As given by the client, or minted."""
    started: float
    patience: Patience
    """What it has left of it for lines."""

    # admit
    served: Served
    owner: Owner
    scope: turn_pb2.TurnScope
    prompt: bytes
    """The request's, packed: each look into a message would copy it."""
    prompt_tokens: int
    prefixes: Prefixes
    sampling: sampling_pb2.SamplingParams
    """The request's, made repeatable where a migration would need it."""

    # lookup
    entry: lease_pb2.DirectoryEntry | None = None
    entry_remaining_s: float = 0.0
    directory_failed: bool = False
    found_scope: bytes = b""
    """Whose the entry is."""
    by_prefix: bool = False
    """Whether the entry was found by the prompt's beginning, not by a conversation's name."""
    moves: bool = False
    """Whether so little is held there that the decode leg need not go to the holder."""
    predecessor: lease_pb2.DirectoryEntry | None = None
    """Lease of a turn without a name that this one makes superfluous."""
    home: bytes = b""
    """The conversation whose prompts are prefilled in one place, by its scope; empty for none."""

    # verdict
    decision: Decision | None = None
    weighed: "Weighed | None" = None
    """What the first decision was reached from."""
    holder: DecodeWorker | None = None
    """The decode worker that holds the history, if it still does."""
    looked_again: bool = False
    expected_tokens: int = 0
    """What the first verdict expected to be read back."""
    direct_refused: bool = False
    """Whether the holder would not go on from its lease; the turn is not offered to it again."""

    # legs
    attempt: int = 0
    attempt_id: str = ""
    """request_id of the legs; never used twice."""
    pair: Pair | None = None
    places: list[AnyWorker] = field(default_factory=list)
    """Workers at which the attempt has a place."""
    avoid: set[object] = field(default_factory=set)
    """Workers that failed this turn."""
    prefilled: prefill_service_pb2.PrefillResponse | None = None
    decoded: decode_service_pb2.DecodeSummary | None = None
    first_event_at: float | None = None
    on_first_event: Callable[[], None] | None = None
    """Called once, when D's first event arrives or the attempt ends without one."""
    prefill_alone: bool = False
    """Whether the prefill worker had nothing else, as far as known, when its leg began."""
    decode_alone: bool = False
    decode_started: float = 0.0
    decode_first_at: float | None = None
    """When the decode leg's first event came; first_event_at, when the answer's first token did."""
    sent: list[bytes] = field(default_factory=list)
    """Serialized chunks that were passed on; once there is one, the turn can only go on, not start again."""

    heard: int = 0
    """Events of decode legs so far."""

    # migration
    migrations: int = 0
    carried: bytes = b""
    """Tokens of the answer that stand in the legs' prompt, packed."""
    begun: bool = False
    """Whether the attempt's prefill leg brought a token that was passed on."""
    ending: bytes = b""
    """The token, packed, that ended a sampled answer before the decode leg."""
    replay: Replay | None = None
    """What D gives again is compared and left out."""
    origin: turn_pb2.Reuse | None = None
    """Where the prompt's KV came from when the answer began, if that was in another attempt."""
    origin_logprobs: list[turn_pb2.PositionLogprobs] = field(default_factory=list)

    timings: dict[str, float] = field(default_factory=dict)

    @property
    def decided(self) -> Decision:
        """Return the decision; valid after the verdict."""
        assert self.decision is not None
        return self.decision

    @property
    def streaming(self) -> bool:
        """Tell whether a chunk was passed on."""
        return bool(self.sent)

    @property
    def leg_prompt(self) -> bytes:
        """Return the prompt of the attempt's legs, packed."""
        return self.prompt + self.carried

    @property
    def leg_sampling(self) -> sampling_pb2.SamplingParams:
        """Return the sampling of the attempt's legs."""
        sampling = continued(self.sampling, tokens.count(self.carried)) if self.carried else self.sampling
        return only(sampling, self.ending) if self.ending else sampling

    @property
    def is_direct(self) -> bool:
        """Tell whether the turn goes without a prefill leg, as decided so far."""
        return self.decision is not None and self.decision.verdict == turn_pb2.VERDICT_DIRECT

    @property
    def to_read(self) -> int:
        """Return how many tokens the prefill leg is expected to read back, as decided so far."""
        reads = self.decided.verdict == turn_pb2.VERDICT_READBACK
        return min(self.decided.expected_tokens, self.prompt_tokens) if reads else 0

    def time_left_s(self) -> float:
        """Return the seconds until the caller's deadline; negative when it is over."""
        return self.deadline - self.clock.monotonic()

    @property
    def out_of_time(self) -> bool:
        """Tell whether the caller's deadline is over, or too close for another attempt."""
        return self.time_left_s() <= _SLACK_S

    def first_event(self) -> None:
        """Call what waits for the first event, once."""
        waiting, self.on_first_event = self.on_first_event, None
        if waiting is not None:
            waiting()

    def new_attempt(self) -> None:
        """Forget the former attempt's legs and take a fresh id."""
        self.attempt += 1
        self.attempt_id = secrets.token_hex(16)
        self.pair = None
        self.prefilled = None
        self.decoded = None
        self.begun = False
        self.ending = b""

    def timed(self, step: str) -> "_Timed":
        """Return what adds the time spent inside to a step's timing."""
        return _Timed(self, step)


def leave(turn: Turn, tools: Tools, *workers: AnyWorker) -> None:
    """Give back the places at some workers, or at all."""
    for worker in workers or tuple(turn.places):
        if worker in turn.places:
            turn.places.remove(worker)
            worker.places -= 1
            tools.admission.freed()


class _Timed:
    """A context manager of its own: every step of every turn passes through it."""

    __slots__ = ("_before", "_span", "_step", "_turn")

    def __init__(self, turn: Turn, step: str) -> None:
        self._turn = turn
        self._step = step

    def __enter__(self) -> None:
        self._before = self._turn.clock.monotonic()
        self._span = tracing.span(f"router.{self._step}")
        self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        turn, step = self._turn, self._step
        self._span.__exit__(kind, error, trace)
        spent = (turn.clock.monotonic() - self._before) * 1000
        turn.timings[step] = turn.timings.get(step, 0.0) + spent
