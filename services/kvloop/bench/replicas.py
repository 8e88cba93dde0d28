"""Conversations whose consecutive turns are served by different replicas, and what they reuse.

A load balancer gives the replicas one request after the other, and knows nothing of conversations. One turn
is played at a time, so the next replica is known, and the turn that it gets is one of a conversation that
another replica served last. What really happened is read from the answers.

A turn is *reusable* when its conversation's turn before left enough held, and *reused* when some of its KV
was read back or gone on from. It is *in the outage* when the store was away at any time between the end of
the turn before and its own end: a store that comes back empty has lost what was published before.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from kvloop.bench.records import digest
from kvloop.bench.target import Outcome, Request, Target, TargetFailed
from kvloop.bench.workload.model import Encoder, History, Session

REUSE_AT_LEAST = 0.99

OK = "ok"
WRONG = "wrong"
FAILED = "failed"


class Reference(Protocol):
    """Answers as a cold engine gives them."""

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the greedy answer of exactly max_tokens tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One turn."""

    conversation: str
    turn: int
    """From 1."""
    router: str
    """Who served it; empty when it failed."""
    previous_router: str
    """Who served the turn before; empty for the first one."""
    reusable: bool
    reused: bool
    in_outage: bool
    outcome: str
    """ok, wrong (the answer is not the cold one) or failed."""
    expected_digest: str
    actual_digest: str
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    """Of the prompt, what the turn before left held."""
    reused_tokens: int = 0
    verdict: str = ""
    reason: str = ""
    asked_twice: bool = False
    """Whether the first try was answered UNAVAILABLE before any token."""
    error: str = ""


class Rota:
    """Who serves the next request of a balancer that takes replicas in turn."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self._replicas = list(replicas)
        self._last: str | None = None

    def served(self, replica: str) -> None:
        """Take note of who served a request."""
        self._last = replica

    def lost(self, replica: str) -> None:
        """Take a replica out."""
        at = self._replicas.index(replica)
        if self._last == replica:
            self._last = self._replicas[at - 1]
        del self._replicas[at]

    def due(self, count: int = 1) -> list[str]:
        """Return who serves the next requests; nobody before anything is known."""
        if self._last is None:
            return []
        after = self._replicas.index(self._last) + 1
        return [self._replicas[(after + ahead) % len(self._replicas)] for ahead in range(count)]


class Outage:
    """When the store was away, on the caller's clock."""

    def __init__(self) -> None:
        self._begin = self._end = float("inf")

    def begin(self, now: float) -> None:
        """The store is gone."""
        self._begin, self._end = now, float("inf")

    def end(self, now: float) -> None:
        """The store is back and its clients may have noticed."""
        self._end = now

    def meets(self, begin: float, end: float) -> bool:
        """Tell whether the store was away at any time in between."""
        return begin <= self._end and end >= self._begin


@dataclass(slots=True)
class Talk:
    """A conversation that is being played."""

    name: str
    session: Session
    history: History
    turn: int = 0
    """Turns played."""
    router: str = ""
    held_tokens: int = 0
    ended_at: float = 0.0

    @property
    def over(self) -> bool:
        """Tell whether all turns were played."""
        return self.turn == len(self.session.main.steps)


def choose(talks: Sequence[Talk], due: Sequence[str]) -> Talk:
    """Return the conversation whose turn is sent next: the first that none of the due replicas served last.

    Where there is none, the last ones of the due count less.
    """
    for so_many in range(len(due), 0, -1):
        for talk in talks:
            if talk.router not in due[:so_many]:
                return talk
    return talks[0]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How conversations are played."""

    at_a_time: int = 8
    """Conversations whose turns are interleaved."""
    threshold: int = 64
    """Fewer held tokens than this are not worth reading."""
    prefix: str = ""
    """Of the conversations' names."""


Event = Callable[[Awaitable[Outcome]], Awaitable[Outcome]]
"""Something that happens while a turn is on its way; returns the turn's outcome."""


@dataclass
class Player:
    """Plays sessions turn by turn, and keeps a record of each."""

    plan: ReplicaPlan
    target: Target
    reference: Reference
    encoder: Encoder
    clock: Callable[[], float]
    rota: Rota
    outage: Outage = field(default_factory=Outage)
    events: dict[int, Event] = field(default_factory=dict)
    """By the number of turns that were sent before."""
    told: Callable[[ReplicaRecord], None] = lambda _record: None
    records: list[ReplicaRecord] = field(default_factory=list)

    async def play(self, sessions: Sequence[Session]) -> list[ReplicaRecord]:
        """Play all sessions and return the records."""
        waiting = list(sessions)
        talks: list[Talk] = []
        while waiting or talks:
            while waiting and len(talks) < self.plan.at_a_time:
                talks.append(self._open(waiting.pop(0)))
            # A turn in which something happens may be sent again, to the replica after the one that is due.
            talk = choose(talks, self.rota.due(2 if len(self.records) in self.events else 1))
            talks.remove(talk)
            if await self._turn(talk) and not talk.over:
                talks.append(talk)
        return self.records

    def _open(self, session: Session) -> Talk:
        history = History.open(self.encoder, session.main.opening)
        return Talk(f"{self.plan.prefix}{session.main.conversation_id}", session, history)

    async def _turn(self, talk: Talk) -> bool:
        """Play a turn; False when it failed, which ends the conversation."""
        step = talk.session.main.steps[talk.turn]
        prompt = talk.history.ask(step)
        request = Request(prompt=prompt, max_tokens=step.output_tokens, conversation_id=talk.name)
        begun = talk.ended_at if talk.turn else self.clock()
        talk.turn += 1
        held = min(talk.held_tokens, len(prompt) - 1)
        twice = False
        error = ""
        outcome: Outcome | None = None
        event = self.events.pop(len(self.records), None)
        try:
            sending = self.target.send(request)
            outcome = await (event(sending) if event is not None else sending)
        except TargetFailed as failure:
            error = str(failure)
            if failure.may_move:
                twice = True
                try:
                    outcome = await self.target.send(request)
                    error = ""
                except TargetFailed as again:
                    error = str(again)
        ended = self.clock()
        expected = await self.reference.answer(prompt, step.output_tokens)
        actual = outcome.token_ids if outcome is not None else []
        reused = _reused(outcome)
        record = ReplicaRecord(
            conversation=talk.name,
            turn=talk.turn,
            router=outcome.router if outcome is not None else "",
            previous_router=talk.router,
            reusable=held >= self.plan.threshold,
            reused=reused > 0,
            in_outage=self.outage.meets(begun, ended),
            outcome=FAILED if outcome is None else OK if actual == expected else WRONG,
            expected_digest=digest(expected),
            actual_digest=digest(actual) if outcome is not None else "",
            prompt_tokens=len(prompt),
            reusable_tokens=held if held >= self.plan.threshold else 0,
            reused_tokens=reused,
            verdict=outcome.verdict if outcome is not None else "",
            reason=outcome.reason if outcome is not None else "",
            asked_twice=twice,
            error=error,
        )
        self.records.append(record)
        self.told(record)
        if outcome is None:
            return False
        self.rota.served(outcome.router)
        talk.router, talk.held_tokens, talk.ended_at = outcome.router, outcome.held_tokens, ended
        talk.history.answered(actual)
        return True


def _reused(outcome: Outcome | None) -> int:
    sources = outcome.tokens if outcome is not None else {}
    return sources.get("readback", 0) + sources.get("d_local", 0)


def reuse(records: Sequence[ReplicaRecord]) -> tuple[int, int]:
    """Return how many turns outside the outage were reusable, and how many of those were reused."""
    reusable = [record for record in records if record.reusable and not record.in_outage]
    return len(reusable), sum(record.reused for record in reusable)


def summarise(
    records: Sequence[ReplicaRecord], contrast: Sequence[ReplicaRecord], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return what is written: totals outside the outage, every record, and the run without a shared store."""
    reusable, reused = reuse(records)
    without, reused_without = reuse(contrast)
    outage = [record for record in records if record.in_outage]
    return {
        "reusable": reusable,
        "reused": reused,
        "reuse_rate": _rate(reused, reusable),
        "wrong": _count(records, WRONG),
        "failed": _count(records, FAILED),
        "turns": len(records),
        "same_router_twice": len(_stayed(records)),
        "asked_twice": sum(record.asked_twice for record in records),
        "in_outage": {
            "turns": len(outage),
            "reusable": sum(record.reusable for record in outage),
            "reused": sum(record.reusable and record.reused for record in outage),
        },
        "by_router": {
            name: sum(record.router == name for record in records)
            for name in sorted({record.router for record in records if record.router})
        },
        "contrast_memory": {
            "reuse_rate": _rate(reused_without, without),
            "reusable": without,
            "reused": reused_without,
            "wrong": _count(contrast, WRONG),
            "failed": _count(contrast, FAILED),
            "turns": len(contrast),
        },
        "settings": settings,
        "records": [asdict(record) for record in records],
    }


def missed(records: Sequence[ReplicaRecord], contrast: Sequence[ReplicaRecord]) -> list[str]:
    """Return a sentence for every promise that a run did not keep."""
    said: list[str] = []
    for name, played in (("", records), (" on memory://", contrast)):
        for outcome in (WRONG, FAILED):
            found = [record for record in played if record.outcome == outcome]
            if found:
                first = f"{found[0].conversation}, turn {found[0].turn} {found[0].error}".rstrip()
                said.append(f"{len(found)} turns{name} were {outcome}; the first: {first}")
    reusable, reused = reuse(records)
    if reused < REUSE_AT_LEAST * reusable or not reusable:
        said.append(
            f"{reused} of {reusable} reusable turns were reused, at least {REUSE_AT_LEAST:.0%} wanted"
        )
    if stayed := _stayed(records):
        first = f"{stayed[0].conversation}, turn {stayed[0].turn}, {stayed[0].router}"
        said.append(f"{len(stayed)} turns met the router of the turn before; the first: {first}")
    without, reused_without = reuse(contrast)
    if reusable and without and reused_without / without >= reused / reusable / 2:
        said.append("memory:// reused as much: the run does not show what sharing the directory is worth")
    return said


def _stayed(records: Sequence[ReplicaRecord]) -> list[ReplicaRecord]:
    return [record for record in records if record.router and record.router == record.previous_router]


def _count(records: Sequence[ReplicaRecord], outcome: str) -> int:
    return sum(record.outcome == outcome for record in records)


def _rate(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
