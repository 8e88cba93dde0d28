"""Engines on one virtual clock, and turns played on them the way the services do."""

import itertools
import random
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvloop.engine.port import (
    DecodeJob,
    Finish,
    HoldTerms,
    PrefillJob,
    PrefillOutcome,
    ReadGrant,
)
from kvloop.engine.settings import Role
from kvloop.engine.simulated.clock import VirtualClock
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.fabric import Fabric
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime import tokens
from kvloop.v1alpha1 import sampling_pb2

T = TypeVar("T")

SMALL: dict[str, Any] = {
    "max_model_len": 512,
    "block_size": 4,
    "num_blocks": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "kv_recompute_threshold": 4,
}

_ids = itertools.count()


def some_ids(count: int, seed: int = 0) -> list[int]:
    """Return ordinary token ids."""
    dice = random.Random(seed)
    return [dice.randrange(3, 32_000) for _ in range(count)]


def greedy(max_tokens: int = 8, **more: Any) -> sampling_pb2.SamplingParams:
    """Return greedy sampling that doesn't end by itself."""
    more.setdefault("ignore_eos", True)
    return sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, **more)


@dataclass
class Said:
    """An answer."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    logprobs: list[Any] = field(default_factory=list)

    @property
    def done(self) -> Finish:
        assert self.finish is not None
        return self.finish


async def say(engine: SimulatedEngine, ids: list[int], **job: Any) -> Said:
    """Decode to the end."""
    said = Said()
    job.setdefault("sampling", greedy())
    job.setdefault("request_id", f"d{next(_ids)}")
    async for delta in engine.decode(DecodeJob(prompt=tokens.pack(ids), **job)):
        said.ids += delta.token_ids
        said.text += delta.text
        said.logprobs += delta.logprobs
        said.finish = delta.finish
    return said


async def prefill(
    engine: SimulatedEngine, ids: list[int], read: ReadGrant | None = None, **job: Any
) -> PrefillOutcome:
    """Prefill."""
    job.setdefault("sampling", greedy())
    job.setdefault("request_id", f"p{next(_ids)}")
    return await engine.prefill(PrefillJob(prompt=tokens.pack(ids), read=read, **job))


def terms(lease_id: str, ttl_s: float = 480.0, *, on_cancel: bool = False, tenant: str = "") -> HoldTerms:
    """Return hold terms."""
    return HoldTerms(lease_id=lease_id, ttl_s=ttl_s, on_cancel=on_cancel, tenant=tenant)


class Rig:
    """Engines of one process that share a clock and a fabric."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.fabric = Fabric()
        self.engines: list[SimulatedEngine] = []

    async def engine(
        self, role: Role = "decode", fabric: Fabric | None = None, **settings: Any
    ) -> SimulatedEngine:
        """Return a started engine."""
        engine = SimulatedEngine(
            SimulatedSettings(**{**SMALL, **settings}), role, clock=self.clock, fabric=fabric or self.fabric
        )
        await engine.start()
        self.engines.append(engine)
        return engine

    async def cold(self, ids: list[int], **job: Any) -> list[int]:
        """Return what an engine without any past says."""
        engine = await self.engine(enable_prefix_caching=False, num_blocks=4096, fabric=Fabric())
        said = await say(engine, ids, **job)
        await engine.stop()
        return said.ids

    async def run(self, awaitable: Awaitable[T], quiet: int = 50) -> T:
        """Wait; time passes as needed."""
        return await self.clock.run(awaitable, quiet=quiet)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.stop()


async def free_blocks(engine: SimulatedEngine) -> int:
    """Return the free blocks of a pool."""
    return (await engine.pool()).free_blocks


def audit(engine: SimulatedEngine) -> None:
    """Check that every reference has an owner, and that free + used + held is the whole pool."""
    core = engine.core
    owned: dict[int, int] = {}
    held_ids = set()
    for held in core.table.all:
        held_ids |= {block.id for block in held.blocks}
        for block in held.blocks:
            owned[block.id] = owned.get(block.id, 0) + 1
    for blocks in core.outcomes.blocks + [list(request.blocks) for request in core.requests]:
        for block in blocks:
            owned[block.id] = owned.get(block.id, 0) + 1
    references = core.pool.audit()
    assert references == owned
    used = len(references.keys() - held_ids)
    assert core.pool.free + used + core.pool.held == core.pool.total
    assert core.pool.held == len(held_ids)
