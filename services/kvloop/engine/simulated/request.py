"""One leg's request inside the engine, and the box its answer is taken from."""

import asyncio
import hashlib
from dataclasses import dataclass, field

from kvloop.engine.port import DecodeDelta, Finish, HoldTerms, PrefillOutcome, Sources, TransferFacts
from kvloop.engine.simulated.answer import Answer, Sampling
from kvloop.engine.simulated.handle import Handle
from kvloop.engine.simulated.pool import Block
from kvloop.v1alpha1 import turn_pb2


class Outbox:
    """Tokens on their way to the reader; what a slow reader leaves is merged."""

    __slots__ = ("_failure", "_finish", "_ids", "_logprobs", "_text", "_waiter", "outcome")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._text = ""
        self._logprobs: list[turn_pb2.PositionLogprobs] = []
        self._finish: Finish | None = None
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.outcome: PrefillOutcome | None = None

    def put(self, token: int, text: str, logprobs: turn_pb2.PositionLogprobs | None) -> None:
        """Add one token."""
        self._ids.append(token)
        self._text += text
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._wake()

    def finish(self, finish: Finish) -> None:
        """Say how the answer ended."""
        self._finish = finish
        self._wake()

    def deliver(self, outcome: PrefillOutcome) -> None:
        """Say how the prefill ended."""
        self.outcome = outcome
        self._wake()

    def fail(self, failure: Exception) -> None:
        """Let the reader meet an exception after the tokens that are there."""
        self._failure = failure
        self._wake()

    async def take(self) -> DecodeDelta:
        """Return what is there, waiting for something to be."""
        while not self._ids and self._finish is None:
            await self._wait()
        delta = DecodeDelta(self._ids, self._text, self._logprobs, self._finish)
        self._ids, self._text, self._logprobs = [], "", []
        return delta

    async def take_outcome(self) -> PrefillOutcome:
        """Return the prefill's outcome, waiting for it."""
        while self.outcome is None:
            await self._wait()
        return self.outcome

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Request:
    """A request from submission to its end."""

    request_id: str
    prefill: bool
    """Which leg."""
    ids: bytearray
    """Packed: the prompt, then the answer."""
    prompt_len: int
    length: int
    """Tokens in ids."""
    root: bytes
    keys: list[bytes]
    """Hashes of the full blocks of ids."""
    adapter: str
    sampling: Sampling
    handle: Handle | None
    hold: HoldTerms | None
    out: Outbox
    answer: Answer
    skip_cache: bool = False
    """Every prompt position is asked about, so every one is computed."""
    prompt_logprobs: int | None = None
    first_token: bool = False
    """Whether a prefill tells the answer's first token."""
    corrupt: bool = False
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    fold: "hashlib.blake2b | None" = None
    sources: Sources | None = None
    local: int = 0
    external: int = 0
    transfer: TransferFacts | None = None
    after_read: bool = False
    """The next step is the first one on KV that was read."""
    reading: "asyncio.Task[None] | None" = None
    over: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.ids += token.to_bytes(4, "little")
        self.length += 1
