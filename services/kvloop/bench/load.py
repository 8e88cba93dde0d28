"""Playing sessions under load.

Closed loop: so many clients, each with one session at a time. Open loop: sessions arrive at a rate, as a
Poisson process, however slowly the earlier ones are served. In both, the turns of a conversation follow each
other with the pauses that the workload names; forks of a session run at the same time while their parent
waits.

A failed request ends its conversation, as it would end an agent's. So does a prompt that leaves no room for
its answer; what is not played because of that is counted.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvloop.bench.records import Record
from kvloop.bench.target import Request, Target, TargetFailed
from kvloop.bench.workload.model import Conversation, Encoder, History, Kind, Session, Step

Told = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How sessions are played."""

    leg: str = "load"
    """Name of the run in its records."""
    clients: int | None = 1
    """Closed loop; None: open loop."""
    rate: float | None = None
    """Sessions per second; open loop."""
    warm_up: int = 0
    """The first so many requests do not count."""
    max_requests: int | None = None
    """After so many requests no further one is begun."""
    exact: bool = True
    """Whether answers are as long as the workload says, whatever ends them in between."""
    max_model_len: int | None = None
    """Longest prompt plus answer; a conversation that outgrows it ends."""
    reuse: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.rate is None):
            raise ValueError("give either clients (closed loop) or a rate (open loop)")


@dataclass(slots=True)
class Outgrown:
    """What was not played because conversations outgrew the model."""

    conversations: int = 0
    """That ended early, or, forks, had no room to begin."""
    turns: int = 0
    """Of these and of the forks that were never come to."""
    forks: int = 0
    """That were never begun."""
    compactions: int = 0
    """Among the turns."""

    def add(self, conversation: Conversation, number: int, session: Session | None) -> None:
        """Count a conversation whose step of a number (from 1) had no room, and what would have followed."""
        rest = [conversation.steps[number - 1 :]]
        lost = [] if session is None else [fork for fork in session.forks if fork.fork_after >= number]
        rest += [fork.steps for fork in lost]
        self.conversations += 1
        self.forks += len(lost) + (session is None and number == 1)
        self.turns += sum(map(len, rest))
        self.compactions += sum(step.kind is Kind.COMPACT for steps in rest for step in steps)


class Load:
    """Plays a plan against one target."""

    def __init__(self, plan: LoadPlan, target: Target, encoder: Encoder, told: Told) -> None:
        """Prepare. told: gets every request's record as soon as there is one."""
        self._plan = plan
        self._target = target
        self._encoder = encoder
        self._told = told
        self._run = secrets.token_hex(4)
        self._begun = time.perf_counter()
        self._sent = 0
        self.outgrown = Outgrown()

    async def play(self, sessions: Sequence[Session]) -> None:
        """Play all sessions, or as many as the plan's limit lets begin."""
        if self._plan.clients is not None:
            await self._closed(sessions, self._plan.clients)
        else:
            await self._open(sessions, self._plan.rate or 1.0)

    async def _closed(self, sessions: Sequence[Session], clients: int) -> None:
        waiting = iter(sessions)

        async def client() -> None:
            for session in waiting:
                await self._session(session)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, len(sessions))):
                group.create_task(client())

    async def _open(self, sessions: Iterable[Session], rate: float) -> None:
        rng = random.Random(self._plan.seed)
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                if self._over:
                    return
                group.create_task(self._session(session))
                await asyncio.sleep(rng.expovariate(rate))

    @property
    def _over(self) -> bool:
        return self._plan.max_requests is not None and self._sent >= self._plan.max_requests

    async def _session(self, session: Session) -> None:
        history = History.open(self._encoder, session.main.opening)
        await self._conversation(session.main, history, "", session)

    async def _conversation(
        self, conversation: Conversation, history: History, parent: str, session: Session | None
    ) -> None:
        name = f"{conversation.conversation_id}-{self._run}"
        begun = False
        try:
            for number, step in enumerate(conversation.steps, start=1):
                await asyncio.sleep(step.gap_s)
                if self._over:
                    return
                begun = True
                prompt = history.ask(step)
                limit = self._plan.max_model_len
                if limit is not None and len(prompt) + step.output_tokens > limit:
                    self.outgrown.add(conversation, number, session)
                    return
                if not prompt or not await self._step(name, parent, number, step, history):
                    return
                if session is not None:
                    await self._forks(session, number, name, history)
        finally:
            if begun and self._plan.reuse:
                await self._let_go(name)

    async def _forks(self, session: Session, number: int, parent: str, history: History) -> None:
        async with asyncio.TaskGroup() as group:
            for fork in session.forks_after(number):
                group.create_task(self._conversation(fork, history.fork(), parent, None))

    async def _step(self, name: str, parent: str, number: int, step: Step, history: History) -> bool:
        """Play one step, whose prompt the history has; False ends the conversation."""
        prompt = history.prompt
        self._sent += 1
        own: dict[str, Any] = {
            "leg": self._plan.leg,
            "nominal_tokens": 0,
            "conversation_id": name,
            "turn": number,
            "measured": self._sent > self._plan.warm_up,
            "stop_asked": bool(step.stop),
            "start_time_ms": round((time.perf_counter() - self._begun) * 1e3, 3),
        }
        request = Request(
            prompt=prompt,
            max_tokens=step.output_tokens,
            conversation_id=name,
            # Later turns of a fork have a history of their own.
            parent_conversation_id=parent if number == 1 else "",
            stop=step.stop,
            exact=self._plan.exact,
            reuse=self._plan.reuse,
        )
        try:
            outcome = await self._target.send(request)
        except TargetFailed as failure:
            self._told(Record(**own, error=str(failure)))
            return False
        own["stop_hit"] = outcome.stopped_by(request)
        self._told(Record.of(outcome, prompt, **own))
        # A trace that holds its answers goes on with those.
        history.answered(outcome.token_ids if step.answer is None else self._encoder.encode(step.answer))
        return True

    async def _let_go(self, name: str) -> None:
        # What can't be released lapses by itself.
        try:
            await self._target.end(name)
        except TargetFailed:
            return
