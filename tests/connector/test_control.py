"""The control socket with a table, without an engine."""

import asyncio
import json
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvloop.connector.control import ControlClient, ControlError, Report
from kvloop.connector.hold import Hold
from kvloop.connector.hooks import Hooks
from kvloop.connector.server import ControlServer
from kvloop.connector.table import HoldTable
from kvloop.connector.turns import TurnLog

REPORT: Report = {
    "local": 1,
    "external": 2,
    "computed": 3,
    "transfer": None,
    "hold": None,
    "held_s": 0.0,
    "refused": None,
}


class FakeEngine:
    """Owns the pool's blocks and gives back what the table lets go of, on its own thread."""

    def __init__(self, path: Path, hooks: Hooks | None) -> None:
        self.table, self.turns = HoldTable(), TurnLog()
        self.free = 10
        self.versions: list[str] = []
        self.woken = threading.Event()
        self.over = False
        self.server = ControlServer(
            self.table,
            self.turns,
            path=path,
            handle=self.handle,
            wake=self.woken.set,
            pool=lambda: (10, self.free),
            reloaded=self.versions.append,
            hooks=hooks,
        )
        self.thread = threading.Thread(target=self.run)

    def handle(self, hold: Hold, num_tokens: int, read_id: str, deadline: float) -> dict[str, Any]:
        return {"lease": hold.lease_id, "tokens": num_tokens, "read": read_id, "until": deadline}

    def run(self) -> None:
        while not self.over:
            self.woken.wait()
            self.woken.clear()
            for blocks in self.table.take_freeable():
                self.free += len(blocks)

    def keep(self, lease_id: str, blocks: int = 2, ttl_s: float = 60.0) -> None:
        self.free -= blocks
        start = self.table.held_blocks + 1
        ids = list(range(start, start + blocks))
        self.table.hold(lease_id, kind="decode", blocks=ids, num_tokens=blocks * 16 - 3, ttl_s=ttl_s)


HOOKS = Hooks()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control"


@pytest.fixture
def engine(path: Path) -> Any:
    HOOKS.guards_off.clear()
    HOOKS.stall = HOOKS.spoil = None
    engine = FakeEngine(path, HOOKS)
    engine.thread.start()
    engine.server.start()
    yield engine
    engine.server.stop()
    engine.over = True
    engine.woken.set()
    engine.thread.join()


@pytest.fixture
async def control(engine: FakeEngine, path: Path) -> AsyncIterator[ControlClient]:
    client = await ControlClient.connect(path)
    yield client
    await client.close()


def test_the_socket_is_its_owners(engine: FakeEngine, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_reads_pin_and_do_not_consume(engine: FakeEngine, control: ControlClient) -> None:
    engine.keep("a")
    grants = [await control.begin_read("a", 20, 30.0) for _ in range(2)]
    assert [g["num_tokens"] for g in grants] == [20, 20]
    assert grants[0]["read_id"] != grants[1]["read_id"]
    assert grants[0]["params"]["read"] == grants[0]["read_id"]
    assert [(h["pins"], h["doomed"]) for h in await control.list()] == [(2, False)]
    assert await control.release("a")
    assert [(h["pins"], h["doomed"]) for h in await control.list()] == [(2, True)]
    with pytest.raises(ControlError, match="not_found"):
        await control.begin_read("a", 20, 30.0)
    assert await control.end_read("a", grants[0]["read_id"])
    assert (await control.pool())["free"] == 8
    assert await control.end_read("a", grants[1]["read_id"])
    assert not await control.end_read("a", grants[1]["read_id"])
    assert await control.pool() == {"total": 10, "free": 10, "held": 0, "leases": 0}


async def test_more_than_is_held_is_cut(engine: FakeEngine, control: ControlClient) -> None:
    engine.keep("a")
    assert (await control.begin_read("a", 1000, 30.0))["params"]["tokens"] == 29


async def test_deadlines_pass_on_an_idle_engine(engine: FakeEngine, control: ControlClient) -> None:
    events = control.subscribe()
    first = asyncio.ensure_future(anext(events))
    await control.list()
    engine.keep("a", ttl_s=0.05)
    assert await first == {"lease_id": "a", "reason": "expired"}
    assert (await control.pool())["free"] == 10
    await events.aclose()


async def test_deadlines_are_kept_after_what_nobody_expected(
    engine: FakeEngine, control: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = control.subscribe()
    first = asyncio.ensure_future(anext(events))
    await control.list()
    expire, failures = engine.table.expire, iter([KeyError("surprise"), KeyError("again")])

    def failing() -> None:
        for failure in failures:
            raise failure
        expire()

    monkeypatch.setattr(engine.table, "expire", failing)
    engine.keep("a", ttl_s=0.01)
    assert await asyncio.wait_for(first, 10) == {"lease_id": "a", "reason": "expired"}
    await events.aclose()


async def test_a_socket_that_can_t_be_opened_is_told_however_late_its_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ControlServer(
        HoldTable(),
        TurnLog(),
        path=tmp_path / "missing" / "control",
        handle=lambda *_: {},
        wake=lambda: None,
        pool=lambda: (0, 0),
    )
    monkeypatch.setattr(server._thread, "is_alive", lambda: True)
    with pytest.raises(RuntimeError, match="could not be opened"):
        server.start()
    monkeypatch.undo()
    server.stop()


async def test_evictions_and_revocations_are_told(engine: FakeEngine, control: ControlClient) -> None:
    events = control.subscribe()
    first = asyncio.ensure_future(anext(events))
    for _ in range(2):  # the first of them may overtake the subscription
        await control.list()
    engine.keep("a")
    engine.keep("b")
    assert engine.table.evict("a")
    assert await first == {"lease_id": "a", "reason": "evicted"}
    assert await control.revoke_all() == 1
    assert await anext(events) == {"lease_id": "b", "reason": "revoked"}
    await events.aclose()


async def test_hold_waits_for_the_turn_to_end(engine: FakeEngine, control: ControlClient) -> None:
    waiting = asyncio.ensure_future(control.hold("a", 30.0))
    both = asyncio.ensure_future(control.report("a", 30.0))
    await control.list()
    assert not waiting.done()
    engine.keep("a")
    engine.turns.settle("a", REPORT)
    engine.server.turn_settled("a")
    hold = await waiting
    assert hold is not None
    assert (hold["num_tokens"], hold["num_blocks"]) == (29, 2)
    assert await both == REPORT


async def test_a_turn_that_keeps_nothing_or_never_ends(engine: FakeEngine, control: ControlClient) -> None:
    engine.turns.settle("a", REPORT)
    assert await control.hold("a", 30.0) is None
    assert await control.hold("b", 0.01) is None
    assert await control.report("b", 0.0) is None


async def test_cancellations_are_noted_once(engine: FakeEngine, control: ControlClient) -> None:
    await control.cancel("a")
    assert engine.turns.take_cancelled("a")
    assert not engine.turns.take_cancelled("a")


async def test_extend(engine: FakeEngine, control: ControlClient) -> None:
    engine.keep("a", ttl_s=5.0)
    assert await control.extend("a", 50.0)
    (hold,) = await control.list()
    assert 45.0 < hold["remaining_s"] <= 50.0
    assert not await control.extend("b", 50.0)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ({"op": "begin_read", "lease_id": "nope", "num_tokens": 5, "pin_s": 1.0}, "not_found"),
        ({"op": "begin_read", "lease_id": "a", "num_tokens": 0, "pin_s": 1.0}, "bad_request"),
        ({"op": "begin_read", "lease_id": "a", "num_tokens": "5", "pin_s": 1.0}, "bad_request"),
        ({"op": "begin_read", "lease_id": "a", "num_tokens": 5, "pin_s": -1.0}, "bad_request"),
        ({"op": "begin_read", "lease_id": "a", "num_tokens": 5, "pin_s": 1e9}, "bad_request"),
        ({"op": "begin_read", "lease_id": "a"}, "bad_request"),
        ({"op": "release", "lease_id": 5}, "bad_request"),
        ({"op": "extend", "lease_id": "a", "ttl_s": "x"}, "bad_request"),
        ({"op": "guard", "name": "everything", "enabled": False}, "bad_request"),
        ({"op": "stall", "where": "middle"}, "bad_request"),
        ({"op": "spoil", "how": "badly"}, "bad_request"),
        ({"op": "reloaded", "weights_version": ""}, "bad_request"),
        ({"op": "nonsense"}, "bad_request"),
        ({}, "bad_request"),
    ],
)
async def test_malformed_calls_are_answered(
    engine: FakeEngine, path: Path, call: dict[str, Any], code: str
) -> None:
    engine.keep("a")
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(json.dumps({"id": 7, **call}).encode() + b"\nnot json\n")
    answers = [json.loads(await reader.readline()) for _ in range(2)]
    assert sorted((a["id"] or 0, a["error"]) for a in answers) == [(0, "bad_request"), (7, code)]
    writer.close()
    await writer.wait_closed()
    assert engine.table.snapshots()[0].pins == 0


async def test_guards_are_switched_by_tests_only(
    tmp_path: Path, engine: FakeEngine, control: ControlClient
) -> None:
    await control.guard("hash", False)
    assert HOOKS.guards_off == {"hash"}
    await control.guard("hash", True)
    assert not HOOKS.guards_off
    other = FakeEngine(tmp_path / "other", None)
    other.server.start()
    client = await ControlClient.connect(tmp_path / "other")
    with pytest.raises(ControlError, match="bad_request"):
        await client.guard("hash", False)
    for call in (client.stall("end"), client.spoil("short"), client.evict("a")):
        with pytest.raises(ControlError, match="bad_request"):
            await call
    await client.close()
    other.server.stop()


async def test_reads_are_stalled_and_handles_spoiled(engine: FakeEngine, control: ControlClient) -> None:
    await control.stall("end")
    await control.spoil("twice")
    assert (HOOKS.stall, HOOKS.spoil) == ("end", "twice")
    await control.stall(None)
    await control.spoil(None)
    assert (HOOKS.stall, HOOKS.spoil) == (None, None)


async def test_a_hold_is_evicted_by_name(engine: FakeEngine, control: ControlClient) -> None:
    engine.keep("a")
    engine.keep("b")
    events = control.subscribe()
    first = asyncio.ensure_future(anext(events))
    grant = await control.begin_read("a", 20, 30.0)
    assert not await control.evict("a")
    assert await control.evict("b")
    assert await first == {"lease_id": "b", "reason": "evicted"}
    assert not await control.evict("b")
    await control.end_read("a", grant["read_id"])
    assert await control.evict("a")
    await events.aclose()


async def test_new_weights_are_told(engine: FakeEngine, control: ControlClient) -> None:
    await control.reloaded("v2")
    assert engine.versions == ["v2"]


async def test_many_calls_at_once(engine: FakeEngine, control: ControlClient) -> None:
    engine.keep("a")
    slow = asyncio.ensure_future(control.hold("never", 30.0))
    grants = await asyncio.gather(*(control.begin_read("a", 5, 30.0) for _ in range(200)))
    assert len({g["read_id"] for g in grants}) == 200
    assert not slow.done()
    slow.cancel()


async def test_a_stopped_server_fails_calls(engine: FakeEngine, control: ControlClient) -> None:
    waiting = asyncio.ensure_future(control.hold("a", 30.0))
    await control.list()
    engine.server.stop()
    with pytest.raises(ControlError, match="closed"):
        await waiting
    with pytest.raises(ControlError, match="closed"):
        await control.list()
