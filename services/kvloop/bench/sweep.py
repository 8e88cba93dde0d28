"""The prompt-length sweep: legs in turns on identical prompts.

A leg is one way of coming by the KV of a prompt. A sample is two turns of a new conversation; the second one
is measured. Every leg plays every sample with a cache salt of its own, so that no prefix cache of one serves
another, and back to back, so that what is held for one leg is gone before the next. Which leg comes first
changes from sample to sample.

In all legs the decode worker computed the first turn and may have it in its own prefix cache, as in the
article; what differs is what the prefill worker does.

A turn counts for its leg by its verdict and by what P's own prefix cache had of the prompt: a leg that is
named for a cache without the history measures nothing where the cache had it.
"""

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from kvloop.bench.records import Record
from kvloop.bench.target import Outcome, Request, Target, TargetFailed
from kvloop.bench.workload.lengths import LengthSample, LengthSweep
from kvloop.bench.workload.model import Encoder
from kvloop.bench.workload.words import rng_of, words

OVERRUN_SHARE = 0.05
"""Share of a prompt that a P's cache may still have of it after it was overrun."""


class Cached(Enum):
    """What P's own prefix cache has of a measured turn's prompt."""

    ANYTHING = "anything"
    """Or P has no part in it."""
    NOTHING = "nothing"
    REMAINS = "at most OVERRUN_SHARE of it"
    SOMETHING = "something"

    def fits(self, p_local: int, prompt_tokens: int) -> bool:
        """Tell whether so many tokens of a prompt are what it says."""
        if self is Cached.NOTHING:
            return p_local == 0
        if self is Cached.REMAINS:
            return p_local <= OVERRUN_SHARE * prompt_tokens
        return self is Cached.ANYTHING or p_local > 0


@dataclass(frozen=True, slots=True)
class Leg:
    """One way of coming by the KV of a prompt."""

    name: str
    route: str
    """Name of the target that serves it."""
    reuse: bool
    line: str
    """What it is, for people."""
    first_route: str = ""
    """Where the first turn is served; empty: where the second is."""
    evicted: bool = False
    """Whether other prompts fill the caches between the turns."""
    verdict: str = ""
    """What the measured turn must come to, or it was no turn of this leg; empty: it may go as it goes."""
    cached: Cached = Cached.ANYTHING
    """What P's prefix cache must have had of the measured turn's prompt, or it was no turn of this leg."""

    @property
    def routes(self) -> tuple[str, str]:
        """Return the targets of both turns."""
        return self.first_route or self.route, self.route


OFF_COLD = Leg(
    "off-cold",
    "cold",
    reuse=False,
    line="P computes the whole prompt (no prefix cache on P)",
    verdict="RECOMPUTE",
    cached=Cached.NOTHING,
)
OFF_HOT = Leg(
    "off-hot",
    "hot",
    reuse=False,
    line="P computes what its own prefix cache does not hold",
    verdict="RECOMPUTE",
    cached=Cached.SOMETHING,
)
READBACK = Leg(
    "readback",
    "cold",
    reuse=True,
    line="P reads the history back from D (no prefix cache on P)",
    verdict="READBACK",
    cached=Cached.NOTHING,
)
DIRECT = Leg("direct", "direct", reuse=True, line="D goes on by itself; no prefill leg", verdict="DIRECT")

STANDARD = (OFF_COLD, OFF_HOT, READBACK, DIRECT)

# Why P's own cache misses in practice: another P, or too many conversations.
OFF_MOVED = Leg(
    "off-moved",
    "other",
    reuse=False,
    line="another P with prefix cache; it never saw the history",
    first_route="hot",
    verdict="RECOMPUTE",
    cached=Cached.NOTHING,
)
READBACK_MOVED = Leg(
    "readback-moved",
    "other",
    reuse=True,
    line="another P reads the history back from D",
    first_route="hot",
    verdict="READBACK",
    cached=Cached.NOTHING,
)
OFF_EVICTED = Leg(
    "off-evicted",
    "hot",
    reuse=False,
    line="P's prefix cache was overrun between the turns",
    evicted=True,
    verdict="RECOMPUTE",
    cached=Cached.REMAINS,
)
READBACK_EVICTED = Leg(
    "readback-evicted",
    "hot",
    reuse=True,
    line="the same, and P reads the history back from D",
    evicted=True,
    verdict="READBACK",
    cached=Cached.REMAINS,
)

LEGS = {leg.name: leg for leg in (*STANDARD, OFF_MOVED, READBACK_MOVED, OFF_EVICTED, READBACK_EVICTED)}
BASELINE = OFF_COLD.name


def stray(record: Record) -> str:
    """Return why a measured turn is none of its leg's; empty where it counts.

    A retried turn took its time for two. Records of a load count, and what a record does not tell is not held
    against it.
    """
    leg = LEGS.get(record.leg)
    if leg is None or not record.nominal_tokens:
        return ""
    way = ", ".join(filter(None, (record.verdict, record.reason)))
    if leg.verdict and record.verdict and record.verdict != leg.verdict:
        return way
    had = record.tokens.get("p_local")
    if had is not None and not leg.cached.fits(had, record.input_num_tokens):
        return f"{way}, P's cache had {had:,} tokens"
    return f"{way}, retried" if record.retried else ""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What is measured."""

    legs: tuple[Leg, ...]
    lengths: tuple[int, ...]
    """Prompt lengths of the measured turn, in tokens."""
    samples: int
    """Samples per length and leg."""
    shape: LengthSweep = field(default_factory=LengthSweep)
    output_tokens: int = 16
    """Length of the measured turn's answer."""
    seed: int = 0
    filler_tokens: int = 0
    """Tokens of other prompts that overrun the caches, for the legs that want it."""
    warm_up: int = 1
    """Rounds that do not count, over all legs."""
    warm_up_all: bool = False
    """Whether they go over all lengths; otherwise over the shortest."""

    @property
    def requests(self) -> int:
        """Return the number of requests, warm-up included."""
        lengths = len(self.lengths) * self.samples + len(self.warm_up_lengths) * self.warm_up
        fillers = len(self.fillers) * sum(leg.evicted for leg in self.legs)
        return (2 * len(self.legs) + fillers) * lengths

    @property
    def fillers(self) -> list[int]:
        """Return the lengths of the prompts that overrun the caches."""
        longest = max(self.lengths)
        return [min(longest, self.filler_tokens - done) for done in range(0, self.filler_tokens, longest)]

    @property
    def warm_up_lengths(self) -> tuple[int, ...]:
        """Return the prompt lengths of the rounds that do not count."""
        return self.lengths if self.warm_up_all else (min(self.lengths),)

    def check(self) -> None:
        """Raise ValueError for lengths that leave no history."""
        for length in self.lengths:
            self.shape.sample(self.seed, length, 0)


Told = Callable[[Record], None]
T = TypeVar("T")


class Sweep:
    """Plays a plan."""

    def __init__(self, plan: SweepPlan, targets: Mapping[str, Target], encoder: Encoder, told: Told) -> None:
        """Prepare. targets: by route. told: gets every request's record as soon as there is one."""
        self._plan = plan
        self._targets = targets
        self._encoder = encoder
        self._told = told
        self._rng = random.Random(plan.seed)
        # Salts and ids of a run meet nothing that an earlier run left on the same workers.
        self._run = secrets.token_hex(6)
        self._begun = time.perf_counter()

    async def play(self) -> None:
        """Play everything. Failed requests are records too; their conversation ends there."""
        plan = self._plan
        for round_number in range(plan.warm_up + plan.samples):
            measured = round_number >= plan.warm_up
            repetition = round_number - plan.warm_up if measured else -1 - round_number
            for length in self._shuffled(plan.lengths if measured else plan.warm_up_lengths):
                sample = plan.shape.sample(plan.seed, length, repetition)
                for leg in self._shuffled(plan.legs):
                    await self._play(leg, sample, measured)

    async def _play(self, leg: Leg, sample: LengthSample, measured: bool) -> None:
        name = f"sweep-{self._run}-{leg.name}-{sample.nominal_tokens}-{sample.repetition}"
        before, target = (self._targets[route] for route in leg.routes)
        blank = Record(
            leg=leg.name,
            nominal_tokens=sample.nominal_tokens,
            conversation_id=name,
            turn=1,
            measured=False,
            repetition=sample.repetition,
        )
        first = Request(
            prompt=self._encoder.encode(sample.opening),
            max_tokens=self._plan.shape.answer_tokens,
            conversation_id=name,
            cache_salt=name,
            reuse=leg.reuse,
        )
        answer = await self._send(before, first, blank)
        if answer is not None:
            if leg.evicted:
                await self._fill(before, name, blank)
            history = [*first.prompt, *answer.token_ids, *self._encoder.encode(sample.suffix)]
            second = replace(first, prompt=history, max_tokens=self._plan.output_tokens)
            await self._send(target, second, replace(blank, turn=2, measured=measured))
        if leg.reuse:
            await self._let_go(target, name)

    async def _fill(self, target: Target, name: str, blank: Record) -> None:
        for number, length in enumerate(self._plan.fillers):
            filler = Request(
                prompt=self._encoder.encode(words(rng_of(self._plan.seed, name, number), length)),
                max_tokens=1,
                conversation_id=f"{name}-filler-{number}",
                cache_salt=f"{name}-filler",
                reuse=False,
            )
            await self._send(target, filler, replace(blank, conversation_id=filler.conversation_id))

    async def _send(self, target: Target, request: Request, blank: Record) -> Outcome | None:
        start_ms = (time.perf_counter() - self._begun) * 1e3
        own = {name: getattr(blank, name) for name in _OWN} | {"start_time_ms": round(start_ms, 3)}
        try:
            outcome = await target.send(request)
        except TargetFailed as failure:
            self._told(Record(**own, error=str(failure)))
            return None
        self._told(Record.of(outcome, request.prompt, **own))
        return outcome

    async def _let_go(self, target: Target, name: str) -> None:
        # What can't be released lapses by itself; the next sample does not depend on it.
        try:
            await target.end(name, name)
        except TargetFailed:
            return

    def _shuffled(self, things: Sequence[T]) -> list[T]:
        return self._rng.sample(list(things), len(things))


_OWN = ("leg", "nominal_tokens", "conversation_id", "turn", "measured", "repetition")
