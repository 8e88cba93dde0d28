"""Reloads of weights: what is waited for, and what happens when it does not come."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.engine.reloading import Reloading
from kvloop.runtime.errors import Failure


class FakeEngine:
    """Has blocks in use for so many askings, and notes what it is told."""

    def __init__(self, busy: float = 0) -> None:
        self.busy = busy
        self.told: list[str] = []
        self.facts = SimpleNamespace(epoch="old")

    async def reset_prefix_cache(self) -> bool:
        self.busy -= 1
        self.told.append("reset")
        return self.busy < 0

    async def reload_weights(self, version: str) -> None:
        self.told.append(version)
        self.facts.epoch = "new"


def reloading(engine: Any, told: list[str]) -> Reloading:
    async def let_go() -> None:
        told.append("let go")

    return Reloading(engine, let_go)


async def test_weights_come_last() -> None:
    engine = FakeEngine(busy=2)
    assert await reloading(engine, engine.told).run("v2", 5.0) == "new"
    assert engine.told == ["let go", "reset", "reset", "reset", "v2"]


async def test_blocks_that_stay_in_use_end_it_and_turns_are_admitted_again() -> None:
    engine = FakeEngine(busy=float("inf"))
    one = reloading(engine, engine.told)
    running = asyncio.ensure_future(one.run("v2", 0.1))
    while not engine.told:  # noqa: ASYNC110 - one turn of the loop at a time
        await asyncio.sleep(0)
    with pytest.raises(Failure) as turn:
        one.admit()
    with pytest.raises(Failure) as other:
        await one.run("v3", 1.0)
    assert turn.value.reason_name == other.value.reason_name == "DRAINING"
    assert turn.value.retry_after_s
    with pytest.raises(Failure) as late:
        await running
    assert late.value.reason_name == "DEADLINE_EXCEEDED"
    assert "v2" not in engine.told
    one.admit()


@pytest.mark.parametrize("version", ["", "v" * 65])
async def test_versions_that_are_none(version: str) -> None:
    engine = FakeEngine()
    with pytest.raises(Failure) as raised:
        await reloading(engine, engine.told).run(version, 1.0)
    assert (raised.value.reason_name, raised.value.field) == ("INVALID_FIELD", "weights_version")
    assert engine.told == []
