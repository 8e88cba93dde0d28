"""Conversations over several routers, with one retry per turn, and what became of every turn."""

import asyncio
import difflib
import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from chaos_fleet import POLL_S, Size

from kvloop.runtime import tokens
from kvloop.runtime.channels import open_channel
from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, router_service_pb2_grpc, sampling_pb2, turn_pb2

if TYPE_CHECKING:
    from chaos_oracle import Oracle

ATTEMPTS = 2
DEADLINE_S = 60.0
SILENCE_S = 30.0
"""A client gives a router up that says nothing for so long."""
_PAUSE_S = 0.3


@dataclass
class Said:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    summary: turn_pb2.Summary | None = None

    @property
    def digest(self) -> str:
        """Return a digest of tokens and text."""
        return hashlib.sha256(tokens.pack(self.token_ids) + self.text.encode()).hexdigest()[:16]


@dataclass
class Record:
    """One turn."""

    id: str
    conversation: str
    router: str
    faults: list[int]
    attempts: int = 0
    outcome: str = ""
    expected_digest: str = ""
    actual_digest: str = ""
    migrated: bool = False
    verdict: str = ""
    reason: str = ""
    """Of the verdict."""


@dataclass
class Conversation:
    """One agent's history."""

    name: str
    history: list[int]
    serial: int = 0


class Routers:
    """A client of several routers, one after the other."""

    def __init__(self, endpoints: dict[str, str]) -> None:
        self._channels = {name: open_channel(endpoint) for name, endpoint in endpoints.items()}
        self.names = list(endpoints)
        self._stubs: dict[str, Any] = {
            name: router_service_pb2_grpc.RouterServiceStub(channel)
            for name, channel in self._channels.items()
        }
        self._next = itertools.count()

    def pick(self, avoid: str = "") -> str:
        """Return the next router's name."""
        while (name := self.names[next(self._next) % len(self.names)]) == avoid and len(self.names) > 1:
            pass
        return name

    async def say(self, router: str, request: router_service_pb2.GenerateRequest) -> Said:
        """Play a turn once. Raises AioRpcError, TimeoutError."""
        said = Said()
        call = self._stubs[router].Generate(request, timeout=DEADLINE_S)
        answers = aiter(call)
        try:
            while said.summary is None:
                async with asyncio.timeout(SILENCE_S):
                    response = await anext(answers)
                if response.WhichOneof("event") == "summary":
                    said.summary = response.summary
                else:
                    said.token_ids += tokens.unpack(response.chunk.token_ids)
                    said.text += response.chunk.text
        except StopAsyncIteration:
            raise TimeoutError from None
        finally:
            call.cancel()
        return said

    async def end(self, conversation: str) -> None:
        """Say that a conversation is over, if some router hears it."""
        request = router_service_pb2.EndConversationRequest(conversation_id=conversation)
        for name in self.names:
            try:
                await self._stubs[name].EndConversation(request, timeout=5)
            except grpc.aio.AioRpcError:
                continue
            return

    async def ready(self) -> None:
        """Return when every router is connected."""
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels.values()))

    async def close(self) -> None:
        """Hang up."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


class Traffic:
    """The turns of a run."""

    def __init__(
        self,
        size: Size,
        routers: Routers,
        oracle: "Oracle",
        *,
        seed: int,
        words: Callable[[random.Random, int], list[int]],
    ) -> None:
        self.size = size
        self.routers = routers
        self.records: list[Record] = []
        self.errors: list[str] = []
        self.active: set[int] = set()
        """Faults that are there now."""
        self.stop = asyncio.Event()
        self.lost = self.duplicated = 0
        self._oracle = oracle
        self._dice = random.Random(seed)
        self._words = words
        self._unchecked: list[tuple[Record, list[int], sampling_pb2.SamplingParams, Said | None]] = []
        self._serial = itertools.count()
        self._idle = [self._begin(f"c{number}") for number in range(size.conversations)]
        self._under_way: dict[str, Record] = {}

    def struck(self, fault: int) -> None:
        """Note a fault in every turn under way."""
        self.active.add(fault)
        for record in self._under_way.values():
            record.faults.append(fault)

    async def ended(self, fault: int) -> None:
        """Return when every turn that a fault could have met has ended."""
        under_way = self._under_way
        while any(fault in turn.faults for turn in under_way.values()):  # noqa: ASYNC110 - of other tasks
            await asyncio.sleep(POLL_S)

    async def run(self) -> None:
        """Play turns until told to stop."""
        async with asyncio.TaskGroup() as users:
            for _ in range(self.size.users):
                users.create_task(self._user())

    async def _user(self) -> None:
        while not self.stop.is_set():
            conversation = self._idle.pop(0)
            await self._turn(conversation)
            if len(conversation.history) > self.size.longest_prompt:
                await self.routers.end(conversation.name)
                conversation = self._begin(f"{conversation.name.partition('.')[0]}.{next(self._serial)}")
            self._idle.append(conversation)

    async def end_all(self) -> None:
        """Say that all conversations are over."""
        for conversation in self._idle:
            await self.routers.end(conversation.name)

    def _begin(self, name: str) -> Conversation:
        return Conversation(name, self._ids(*self.size.prompt_tokens))

    def _ids(self, least: int, most: int) -> list[int]:
        return self._words(self._dice, self._dice.randint(least, most))

    async def _sampling(self, prompt: list[int]) -> sampling_pb2.SamplingParams:
        """Greedy mostly; sometimes with a seed, a stop string from the middle, or log probabilities."""
        sampling = sampling_pb2.SamplingParams(
            temperature=0.0, max_tokens=self._dice.randint(*self.size.answer_tokens)
        )
        kind = self._dice.random()
        if self._oracle.late:
            return sampling
        if kind < 0.15:
            sampling.temperature, sampling.seed = 0.8, self._dice.getrandbits(31)
        elif kind < 0.25:
            words = (await self._oracle.answer(prompt, sampling)).text.split()
            if len(words) > 4:
                sampling.stop.append(words[len(words) // 2])
        elif kind < 0.35:
            sampling.logprobs = 2
        return sampling

    async def _turn(self, conversation: Conversation) -> None:
        prompt = [*conversation.history, *self._ids(*self.size.new_tokens)]
        sampling = await self._sampling(prompt)
        conversation.serial += 1
        record = Record(
            id=f"{conversation.name}-{conversation.serial}",
            conversation=conversation.name,
            router=self.routers.pick(),
            faults=sorted(self.active),
        )
        request = router_service_pb2.GenerateRequest(
            request_id=record.id,
            conversation_id=conversation.name,
            prompt_token_ids=tokens.pack(prompt),
            sampling=sampling,
        )
        self._under_way[record.id] = record
        try:
            said = await self._attempts(record, request)
        finally:
            del self._under_way[record.id]
        self.records.append(record)
        if self._oracle.late:
            self._unchecked.append((record, prompt, sampling, said))
            conversation.history = prompt + (said.token_ids if said is not None else [])
            return
        expected = await self._check(record, prompt, sampling, said)
        # After a turn that failed the agent goes on all the same, with an answer of its own.
        conversation.history = prompt + (said or expected).token_ids

    async def check(self) -> None:
        """Compare what could not be compared before."""
        for waiting in self._unchecked:
            await self._check(*waiting)

    async def _check(
        self, record: Record, prompt: list[int], sampling: sampling_pb2.SamplingParams, said: Said | None
    ) -> Said:
        expected = await self._oracle.answer(prompt, sampling)
        record.expected_digest = expected.digest
        if said is not None and said.summary is not None:
            record.actual_digest = said.digest
            self._compare(expected, said)
        return expected

    def _compare(self, expected: Said, said: Said) -> None:
        assert said.summary is not None
        self.lost += max(0, said.summary.output_tokens - len(said.token_ids))
        self.duplicated += max(0, len(said.token_ids) - said.summary.output_tokens)
        if said.token_ids == expected.token_ids:
            return
        matcher = difflib.SequenceMatcher(None, expected.token_ids, said.token_ids, autojunk=False)
        for operation, i1, i2, j1, j2 in matcher.get_opcodes():
            if operation in {"delete", "replace"}:
                self.lost += i2 - i1
            if operation in {"insert", "replace"}:
                self.duplicated += j2 - j1

    def _note(self, record: Record, what: str) -> None:
        self.errors.append(
            f"{record.id} attempt {record.attempts} at {record.router}: {record.outcome}: {what}"
        )

    async def _attempts(self, record: Record, request: router_service_pb2.GenerateRequest) -> Said | None:
        for attempt in range(1, ATTEMPTS + 1):
            record.attempts = attempt
            try:
                said = await self.routers.say(record.router, request)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED)
                record.outcome = failure.reason_name if failure.reason else error.code().name
                self._note(record, str(failure))
                pause = failure.retry_after_s or _PAUSE_S
            except TimeoutError:
                record.outcome, pause = "SILENCE", 0.0
                self._note(record, "silence")
            else:
                record.outcome = "ok"
                _take_over(record, said)
                return said
            if attempt < ATTEMPTS:
                await asyncio.sleep(pause)
                record.router = self.routers.pick(avoid=record.router)
        return None


def _take_over(record: Record, said: Said) -> None:
    assert said.summary is not None
    reuse = said.summary.reuse
    record.migrated = said.summary.migrated
    record.verdict = turn_pb2.Verdict.Name(reuse.verdict).removeprefix("VERDICT_")
    record.reason = turn_pb2.ReuseReason.Name(reuse.reason).removeprefix("REUSE_REASON_")
