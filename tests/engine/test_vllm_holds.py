"""The adapter's half of the table of holds, over a control server without an engine."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvloop.connector.control import ControlClient
from kvloop.connector.server import ControlServer
from kvloop.connector.table import HoldTable as Table
from kvloop.connector.turns import TurnLog
from kvloop.engine.vllm.holds import HoldTable


class Engine:
    """A table with one hold, whose answers wait for a gate."""

    def __init__(self, path: Path) -> None:
        self.table = Table()
        self.asked, self.gate = threading.Event(), threading.Event()
        self.server = ControlServer(
            self.table, TurnLog(), path=path, handle=self.handle, wake=lambda: None, pool=lambda: (9, 9)
        )
        self.table.hold("a", kind="decode", blocks=[1], num_tokens=9, ttl_s=60.0)

    def handle(self, *_: object) -> dict[str, Any]:
        self.asked.set()
        self.gate.wait(30)
        return {}

    def pins(self) -> int:
        found = self.table.snapshot("a")
        assert found is not None
        return found.pins


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_path / "control")
    made.server.start()
    yield made
    made.gate.set()
    made.server.stop()


@pytest.fixture
async def holds(engine: Engine, tmp_path: Path) -> AsyncIterator[HoldTable]:
    made = HoldTable()
    made._control = await ControlClient.connect(tmp_path / "control")
    yield made
    await made._control.close()


async def test_a_pin_whose_asker_has_left_is_taken_off(engine: Engine, holds: HoldTable) -> None:
    asking = asyncio.create_task(holds.begin_read("a", 9, 30.0))
    await asyncio.to_thread(engine.asked.wait, 30)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.pins() == 1
    engine.gate.set()
    async with asyncio.timeout(30):
        while holds._asking:
            await asyncio.wait(set(holds._asking))
    assert engine.pins() == 0


async def test_a_pin_that_is_wanted_stays(engine: Engine, holds: HoldTable) -> None:
    engine.gate.set()
    grant = await holds.begin_read("a", 9, 30.0)
    assert engine.pins() == 1
    await holds.end_read("a", grant.read_id)
    assert engine.pins() == 0
