"""F: processes, entries and the store die or lie. These restart parts of the fleet."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cases_kit import Case, failure_of, until
from cases_store import open_entries

from kvloop.v1alpha1 import lease_pb2


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("F5", "RECOMPUTE; nothing else")
async def test_entry_lost(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    async with open_entries(case.stack) as entries:
        await entries.lose(await entries.key_of(one.summary.lease.lease_id))
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    three = await case.turn([*history, *one.ids, *suffix, *two.ids, *suffix])
    case.expect(three, "READBACK", "PROVEN")


def _set(name: str, value: object) -> Callable[[lease_pb2.DirectoryEntry], None]:
    return lambda entry: setattr(entry, name, value)


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        pytest.param(_set("lease_id", "forged"), ("NOT_FOUND",), id="lease"),
        pytest.param(_set("decode_endpoint", "127.0.0.1:9"), ("PROVEN",), id="endpoint"),
        pytest.param(_set("num_tokens", 100_000), ("PROVEN",), id="num_tokens"),
        pytest.param(_set("block_size", 1), ("PROVEN", "INCOMPATIBLE"), id="block_size"),
    ],
)
@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("F6", "RECOMPUTE; nothing else")
async def test_entry_forged(
    case: Case,
    history: list[int],
    suffix: list[int],
    change: Callable[[lease_pb2.DirectoryEntry], None],
    reasons: tuple[str, ...],
) -> None:
    one = await case.turn(history)
    async with open_entries(case.stack) as entries:
        key = await entries.key_of(one.summary.lease.lease_id)
        await entries.forge(key, change)
    two = await case.turn([*history, *one.ids, *suffix])
    # The epoch names the holder and D answers from what it holds, so most lies change nothing.
    case.expect(two, "READBACK" if two.reason == "PROVEN" else "RECOMPUTE", reasons)
    held = [lease for lease in await case.stack.leases() if lease.conversation_id == case.name()]
    assert len(held) == 1


@pytest.mark.parametrize("router", ["main"])
@pytest.mark.case("F6", "RECOMPUTE; nothing else")
async def test_entry_corrupt(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    async with open_entries(case.stack) as entries:
        key = await entries.key_of(one.summary.lease.lease_id)
        value = await entries.raw(key)
        await entries.put(key, value[:-1] + bytes([value[-1] ^ 1]))
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)


@pytest.mark.parametrize("router", ["main"])
@pytest.mark.case("C6", "RECOMPUTE (epoch), 0 bytes")
async def test_entry_of_old_epoch(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    async with open_entries(case.stack) as entries:
        key = await entries.key_of(one.summary.lease.lease_id)
        await entries.forge(key, _set("epoch", "0123456789abcdef"))
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "RECOMPUTE", "EPOCH", 0)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("F7", "RECOMPUTE; nothing else")
async def test_directory_down(case: Case, history: list[int], suffix: list[int]) -> None:
    fleet = case.stack.fleet
    one = await case.turn(history)
    await fleet.kill("store")
    two = await case.turn([*history, *one.ids, *suffix], check=False)
    case.expect(two, "RECOMPUTE", "DIRECTORY_UNAVAILABLE", 0)
    await fleet.start("store")
    prompt = [*history, *one.ids, *suffix]
    await case.compare(two, prompt)

    async def reused() -> bool:
        three = await case.turn([*prompt, *two.ids, *suffix], check=False)
        return three.verdict == "READBACK" and three.reason == "PROVEN"

    assert await until(reused), "reuse did not come back with the store"


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("F10", "D's blocks: leased or free, none stranded")
async def test_router_killed_mid_decode(case: Case, history: list[int]) -> None:
    case.router = "twin"
    stack = case.stack
    call = stack.start(stack.request(history, case.name(), max_tokens=600), router="twin")
    await anext(aiter(call))
    await stack.fleet.kill("router-2")
    await failure_of(stack.finish(call))

    async def whole() -> bool:
        return await stack.free_blocks() == case.free_before

    assert await until(whole), "the dead router's turn left blocks behind"
    await stack.fleet.start("router-2")
    await stack.ready()
    case.expect(await case.turn(history), "RECOMPUTE", "NOT_FOUND", 0)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("F3", "old lease: RECOMPUTE; new conversation: READBACK works")
async def test_decode_restarted_on_the_same_port(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    await case.stack.fleet.restart("decode-0")
    await case.stack.ready()
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "RECOMPUTE", ("EPOCH", "NOT_FOUND"), 0)
    other = await case.turn(history, case.name("new"))
    again = await case.turn([*history, *other.ids, *suffix], case.name("new"))
    case.expect(again, "READBACK", "PROVEN")


def _group(pid: int) -> set[int]:
    """Return the live processes of a process's group."""
    group = os.getpgid(pid)
    members = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                members.add(int(entry.name))
    return members


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("F4", "engine core gone, ports free, restart works")
async def test_front_end_killed(case: Case, history: list[int], suffix: list[int]) -> None:
    fleet = case.stack.fleet
    pid = fleet.parts["decode-0"].pid
    members = _group(pid)
    assert pid in members
    await fleet.kill("decode-0")

    async def ended() -> bool:
        return not _alive(members)

    assert await until(ended), "processes of a killed front end live on"
    await fleet.start("decode-0")
    await case.stack.ready()
    one = await case.turn(history)
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "READBACK", "PROVEN")


def _alive(pids: set[int]) -> set[int]:
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            alive.add(pid)
    return alive


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("F1", "cold elsewhere")
async def test_decode_killed_before_the_read(case: Case, history: list[int], suffix: list[int]) -> None:
    fleet = case.stack.fleet
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    os.kill(fleet.parts["decode-0"].pid, signal.SIGSTOP)
    turn = asyncio.create_task(case.turn(prompt, check=False))
    await fleet.kill("decode-0")
    # There is no other decode worker: the turn fails with a status that says so, and the client's retry
    # is cold.
    assert (await failure_of(turn)).reason_name in {"NO_WORKER", "WORKER_FAILED"}
    await fleet.start("decode-0")
    await case.stack.ready()
    two = await case.turn(prompt)
    case.expect(two, "RECOMPUTE", ("EPOCH", "NOT_FOUND"), 0)
