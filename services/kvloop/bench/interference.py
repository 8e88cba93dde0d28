"""What DIRECT turns do to the streams that run where they start, with and without their budget.

    python -m kvloop.bench.interference [out/interference.json]

A decode worker's own rules over a simulated engine on a virtual clock: the cost model of Qwen3-32B on H200,
no measurement, and the same on any machine. Streams run; once a second conversations come back all at once,
each with new tokens after what the worker holds. Turns beyond the budget are refused: they would go through a
prefill worker, and cost the streams nothing more.
"""

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvloop.bench.statistics import percentiles
from kvloop.decode.direct import Direct, DirectPolicy
from kvloop.decode.keeper import Keeper, Policy
from kvloop.decode.publishing import Publisher
from kvloop.engine.port import DecodeJob, HoldTerms
from kvloop.engine.simulated.clock import VirtualClock, sleep
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.metastore.memory import MemoryDirectory
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import decode_service_pb2, sampling_pb2, turn_pb2

UNBOUNDED = 1 << 30
BUDGETS = (512, DirectPolicy().budget, 2048, 4096, UNBOUNDED)
_KEY = b"k" * 32
_FIRST_BURST_S = 0.5


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens at the worker. Lengths in tokens."""

    streams: int = 16
    stream_tokens: int = 120
    returning: int = 12
    """Conversations that come back at once."""
    bursts: int = 2
    """How often, a second apart."""
    history: int = 4096
    suffix: int = 512
    batched: int = 8192
    """max_num_batched_tokens of the engine."""


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds between two tokens of the streams, and what became of the conversations."""

    budget: int | None
    p50_ms: float
    p99_ms: float
    longest_ms: float
    direct: int
    refused: int


class _Worker:
    """One decode worker, without doors."""

    def __init__(self, scene: Scene, budget: int) -> None:
        self.clock = VirtualClock()
        settings = SimulatedSettings(
            preset="qwen3-32b-h200", num_blocks=65_536, max_num_batched_tokens=scene.batched
        )
        self.engine = SimulatedEngine(settings, "decode", clock=self.clock)
        publisher = Publisher(
            MemoryDirectory(self.clock), "127.0.0.1:1", lambda: self.engine.facts, self.clock, margin_s=5.0
        )
        self.keeper = Keeper(self.engine, publisher, self.clock, Policy())
        self.direct = Direct(self.engine, self.keeper, self.clock, DirectPolicy(budget=budget))

    async def keep(self, name: str, prompt: bytes) -> decode_service_pb2.DirectTerms:
        """Play a first turn and make it a lease."""
        job = DecodeJob(name, prompt, _greedy(1), hold=HoldTerms(name, 480.0, on_cancel=False))
        async for delta in self.engine.decode(job):
            if delta.finish is not None and delta.finish.hold is not None:
                scope = turn_pb2.TurnScope(
                    scope=name.encode().ljust(16, b"."), digest_key=_KEY, conversation_id=name
                )
                await self.keeper.keep(scope, prompt, delta.finish.hold)
        return decode_service_pb2.DirectTerms(
            lease_id=name, epoch=self.engine.facts.epoch, num_tokens=tokens.count(prompt)
        )

    async def stream(self, name: str, prompt: bytes, count: int) -> list[float]:
        """Return the seconds between an answer's tokens."""
        job = DecodeJob(name, prompt, _greedy(count))
        at = [self.clock.monotonic() async for _ in self.engine.decode(job)]
        return [later - sooner for sooner, later in itertools.pairwise(at)]

    async def come_back(self, name: str, terms: decode_service_pb2.DirectTerms, prompt: bytes) -> bool:
        """Go on from a lease; False when the budget refuses."""
        job = DecodeJob(name, prompt, _greedy(1))
        try:
            async for _ in self.direct.deltas(terms, _KEY, job):
                pass
        except Failure as failure:
            if failure.reason != Reason.ERROR_REASON_OVERLOADED:
                raise
            return False
        return True


async def measure(scene: Scene, budget: int | None) -> Found:
    """Play a scene. budget: suffix tokens of DIRECT turns at a time; None: nobody comes back."""
    worker, dice = _Worker(scene, budget or UNBOUNDED), random.Random(1)
    await worker.engine.start()
    try:
        return await worker.clock.run(_play(worker, scene, budget, dice), quiet=200)
    finally:
        await worker.engine.stop()


async def _play(worker: _Worker, scene: Scene, budget: int | None, dice: random.Random) -> Found:
    histories = [_some(dice, scene.history) for _ in range(scene.returning if budget else 0)]
    held = [await worker.keep(f"c{number}", history) for number, history in enumerate(histories)]
    streams = [
        asyncio.create_task(worker.stream(f"s{number}", _some(dice, 64), scene.stream_tokens))
        for number in range(scene.streams)
    ]

    async def burst(number: int) -> list[bool]:
        # The streams' own prompts are long computed by then.
        await sleep(worker.clock, _FIRST_BURST_S + number)
        return await asyncio.gather(
            *(
                worker.come_back(f"{number}-{terms.lease_id}", terms, history + _some(dice, scene.suffix))
                for terms, history in zip(held, histories, strict=True)
            )
        )

    came_back = [came for burst in await asyncio.gather(*map(burst, range(scene.bursts))) for came in burst]
    gaps = [gap * 1e3 for gaps in await asyncio.gather(*streams) for gap in gaps]
    p50, p99 = percentiles(gaps, (0.5, 0.99))
    return Found(
        budget=budget,
        p50_ms=round(p50, 1),
        p99_ms=round(p99, 1),
        longest_ms=round(max(gaps), 1),
        direct=sum(came_back),
        refused=len(came_back) - sum(came_back),
    )


def _some(dice: random.Random, count: int) -> bytes:
    return tokens.pack([dice.randrange(3, 32_000) for _ in range(count)])


def _greedy(max_tokens: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


async def _measured(scene: Scene) -> list[Found]:
    return [await measure(scene, budget) for budget in (None, *BUDGETS)]


def main(arguments: Sequence[str]) -> None:
    """Play the scene under every budget, write what came of it and tell."""
    out, scene = Path(arguments[0] if arguments else "out/interference.json"), Scene()
    found = asyncio.run(_measured(scene))
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {"scene": asdict(scene), "found": [asdict(one) for one in found]}
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for one in found:
        name = "no DIRECT" if one.budget is None else "none" if one.budget == UNBOUNDED else str(one.budget)
        times = f"p50 {one.p50_ms:.1f} ms, p99 {one.p99_ms:.1f} ms, longest {one.longest_ms:.1f} ms"
        sys.stdout.write(f"budget {name}: {times}; {one.direct} DIRECT, {one.refused} refused\n")


if __name__ == "__main__":
    main(sys.argv[1:])
