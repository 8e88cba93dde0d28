"""A prefill and a decode engine, and turns on them the way the services play them. Only the port is used."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvloop.engine.port import (
    DecodeJob,
    Engine,
    Finish,
    Hold,
    HoldTerms,
    PrefillJob,
    PrefillOutcome,
    ReadGrant,
)
from kvloop.runtime import tokens
from kvloop.v1alpha1 import sampling_pb2, turn_pb2, worker_pb2

_numbers = itertools.count()


def name(kind: str) -> str:
    """Return an id that nobody has used."""
    return f"{kind}{next(_numbers)}"


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; pytest's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.01)


def words(count: int, seed: int = 0) -> list[int]:
    """Return ordinary token ids, the same for the same seed."""
    dice = random.Random(seed)
    return [dice.randrange(500, 20_000) for _ in range(count)]


def greedy(max_tokens: int = 8, **more: object) -> sampling_pb2.SamplingParams:
    """Return greedy sampling that does not end by itself."""
    return sampling_pb2.SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more}  # type: ignore[arg-type]
    )


@dataclass
class Said:
    """An answer."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    logprobs: list[turn_pb2.PositionLogprobs] = field(default_factory=list)
    deltas: int = 0

    @property
    def done(self) -> Finish:
        """The finish of an answer that has ended."""
        assert self.finish is not None
        return self.finish

    @property
    def held(self) -> Hold:
        """What is held of the turn."""
        assert self.done.hold is not None
        return self.done.hold


class Pair:
    """P and D."""

    def __init__(self, p: Engine, d: Engine) -> None:
        self.p = p
        self.d = d
        self._prefilled: list[str] = []

    async def start(self) -> None:
        """Start both."""
        await self.p.start()
        await self.d.start()

    async def stop(self) -> None:
        """Stop both."""
        await asyncio.gather(self.p.stop(), self.d.stop())

    async def prefill(
        self,
        ids: Sequence[int],
        read: ReadGrant | None = None,
        sampling: sampling_pb2.SamplingParams | None = None,
        salt: str = "",
        *,
        first_token: bool = False,
    ) -> PrefillOutcome:
        """Prefill on P."""
        job = PrefillJob(
            name("p"),
            tokens.pack(ids),
            sampling or greedy(),
            cache_salt=salt,
            read=read,
            first_token=first_token,
        )
        outcome = await self.p.prefill(job)
        self._prefilled.append(job.request_id)
        return outcome

    async def forget(self) -> None:
        """Empty P's prefix cache, so that what it reuses is what it reads."""
        for request_id in self._prefilled:
            await self.p.release_prefill(request_id)
        self._prefilled.clear()
        while not await self.p.reset_prefix_cache():  # noqa: ASYNC110 - the port has no event for it
            await asyncio.sleep(0.01)

    def job(
        self,
        ids: Sequence[int],
        handle: str | None,
        sampling: sampling_pb2.SamplingParams | None = None,
        lease: str | None = None,
        salt: str = "",
        on_cancel: bool = False,
    ) -> DecodeJob:
        """Return a decode job; with a lease it is held."""
        terms = None if lease is None else HoldTerms(lease, 480.0, on_cancel)
        return DecodeJob(
            name("d"),
            tokens.pack(ids),
            sampling or greedy(),
            cache_salt=salt,
            handle_json=handle,
            hold=terms,
        )

    async def say(self, job: DecodeJob) -> Said:
        """Decode on D to the end."""
        said = Said()
        async for delta in self.d.decode(job):
            assert said.finish is None
            said.ids += delta.token_ids
            said.text += delta.text
            said.logprobs += delta.logprobs
            said.finish = delta.finish
            said.deltas += 1
        return said

    async def turn(
        self,
        ids: Sequence[int],
        sampling: sampling_pb2.SamplingParams | None = None,
        lease: str | None = None,
        salt: str = "",
        read: ReadGrant | None = None,
    ) -> Said:
        """Prefill, then decode."""
        outcome = await self.prefill(ids, read, sampling, salt)
        return await self.say(self.job(ids, outcome.handle_json, sampling, lease, salt))

    async def cold(self, ids: Sequence[int], sampling: sampling_pb2.SamplingParams | None = None) -> Said:
        """Return what D says when nothing is reused: under a salt of its own, without P."""
        return await self.say(self.job(ids, None, sampling, salt=name("cold")))

    async def idle(self, engine: Engine) -> worker_pb2.PoolState:
        """Return the pool once every block that nobody holds is back; pytest's timeout bounds it."""
        while True:
            pool = await engine.pool()
            if pool.free_blocks + pool.held_blocks == pool.total_blocks:
                return pool
            await asyncio.sleep(0.01)
