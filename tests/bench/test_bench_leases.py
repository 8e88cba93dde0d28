"""The arithmetic and the schedule of the lease measurements; real services measure in `make bench-leases`."""

import asyncio
import os
from types import SimpleNamespace
from typing import Any

from kvloop.bench.leases import Oversubscription, family, percentiles
from kvloop.bench.target import Outcome, Request


class FakeHolder:
    """A decode worker with 24 blocks of 16 tokens, and two preemptions per round without leases."""

    def __init__(self) -> None:
        pool = SimpleNamespace(total_blocks=24)
        self.info = SimpleNamespace(pool=pool, block_size=16)
        self.preemptions = 0

    def prompt(self, length: int) -> list[int]:
        return [7] * length

    async def facts(self) -> Any:
        return SimpleNamespace(counters=SimpleNamespace(preemptions=self.preemptions))


class FakeTarget:
    """Remembers the last few conversations that were held."""

    def __init__(self, holder: FakeHolder) -> None:
        self.holder = holder
        self.held: list[str] = []
        self.ended: list[str] = []

    async def send(self, request: Request) -> Outcome:
        await asyncio.sleep(0)
        again = request.conversation_id in self.held
        if request.reuse and request.conversation_id:
            self.held = [*self.held, request.conversation_id][-8:]
        elif request.conversation_id:
            self.holder.preemptions += 1
        read = len(request.prompt) // 2 if again else 0
        return Outcome(
            [1, 2],
            10.0,
            20.0,
            len(request.prompt),
            2,
            verdict="READBACK" if again else "RECOMPUTE",
            tokens={"p_local": 0, "readback": read, "d_local": 0, "computed": len(request.prompt) - read},
        )

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        self.ended.append(conversation_id)

    async def close(self) -> None:
        pass


async def test_both_ways_are_played_and_told_apart() -> None:
    holder = FakeHolder()
    target = FakeTarget(holder)
    play = Oversubscription(factor=2.0, blocks=6, rounds=2)
    found = await play.measure(target, holder)  # type: ignore[arg-type]
    assert found["conversations"] == 8
    assert found["leases"]["reuse_rate"] == 1.0
    assert found["leases"]["preemptions"] == 0
    assert found["retention_off"]["reuse_rate"] == 0.0
    assert found["retention_off"]["preemptions"] == 2 * 16
    assert found["leases"]["second_turns"] == found["retention_off"]["second_turns"] == 16
    assert len(target.ended) == 32


def test_percentiles_are_samples() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "samples": 3}


def test_a_family_has_its_own_front() -> None:
    assert family(os.getpid())["front"] == [os.getpid()]
