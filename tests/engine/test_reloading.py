"""Reloads of weights: what is waited for, and what happens when it does not come."""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.engine.reloading import Reloading
from kvloop.runtime import background
from kvloop.runtime.errors import Failure


class FakeEngine:
    """Has blocks in use for so many askings, and notes what it is told."""

    def __init__(self, busy: float = 0) -> None:
        self.busy = busy
        self.told: list[str] = []
        self.loading = asyncio.Event()
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.broken = False
        self.facts = SimpleNamespace(epoch="old")

    async def reset_prefix_cache(self) -> bool:
        self.busy -= 1
        self.told.append("reset")
        return self.busy < 0

    async def reload_weights(self, version: str) -> None:
        self.told.append(version)
        self.loading.set()
        await self.loaded.wait()
        if self.broken:
            raise RuntimeError("no such file")
        self.facts.epoch = "new"


def reloading(engine: Any, told: list[str]) -> Reloading:
    async def let_go() -> None:
        told.append("let go")

    tasks: set[asyncio.Task[None]] = set()
    return Reloading(engine, let_go, functools.partial(background.spawn, tasks))


def refusal(one: Reloading) -> str | None:
    """Why turns are not admitted; None when they are."""
    try:
        one.admit()
    except Failure as failure:
        return failure.reason_name
    return None


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


async def test_a_call_that_ends_while_weights_are_loaded_leaves_the_load_to_end() -> None:
    engine = FakeEngine()
    engine.loaded.clear()
    one = reloading(engine, engine.told)
    call = asyncio.ensure_future(one.run("v2", 5.0))
    await engine.loading.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert refusal(one) == "DRAINING"
    assert engine.facts.epoch == "old"
    engine.loaded.set()
    async with asyncio.timeout(5):
        while refusal(one):  # noqa: ASYNC110 - one turn of the loop at a time
            await asyncio.sleep(0)
    assert engine.facts.epoch == "new"


async def test_weights_that_were_not_loaded_whole_serve_nothing_until_they_are() -> None:
    engine = FakeEngine()
    engine.broken = True
    one = reloading(engine, engine.told)
    with pytest.raises(RuntimeError):
        await one.run("v2", 5.0)
    assert refusal(one) == "WORKER_FAILED"
    engine.broken = False
    await one.run("v2", 5.0)
    assert refusal(one) is None


async def test_a_call_that_ends_while_turns_do_leaves_the_old_weights() -> None:
    engine = FakeEngine(busy=float("inf"))
    one = reloading(engine, engine.told)
    call = asyncio.ensure_future(one.run("v2", 5.0))
    while not engine.told:  # noqa: ASYNC110 - one turn of the loop at a time
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert refusal(one) is None
    assert "v2" not in engine.told


@pytest.mark.parametrize("version", ["", "v" * 65])
async def test_versions_that_are_none(version: str) -> None:
    engine = FakeEngine()
    with pytest.raises(Failure) as raised:
        await reloading(engine, engine.told).run(version, 1.0)
    assert (raised.value.reason_name, raised.value.field) == ("INVALID_FIELD", "weights_version")
    assert engine.told == []
