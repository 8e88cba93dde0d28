"""The supervisor as a library: parts with settings of their own, killed, and restarted in place.

The tests share one fleet and leave it whole.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.cli.supervisor.part import Command, Part, PartFailed
from kvloop.runtime.channels import open_channel
from kvloop.runtime.config import ConfigError
from kvloop.v1alpha1 import decode_service_pb2, decode_service_pb2_grpc, worker_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIMULATED = {"engine": "simulated"}


async def info_of(endpoint: str) -> worker_pb2.WorkerInfo:
    async with open_channel(endpoint) as channel:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        request = decode_service_pb2.DecodeServiceGetInfoRequest()
        answer = await stub.GetInfo(request, timeout=20, wait_for_ready=True)
        return answer.info


async def until(condition: Callable[[], bool]) -> None:
    """Poll for a condition."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event here
            await asyncio.sleep(0.01)


def alive(fleet: Fleet) -> list[psutil.Process]:
    return [psutil.Process(part.pid) for part in fleet.parts.values() if part.pid is not None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    plan = FleetPlan(
        decode=({"block_size": 16}, {"block_size": 64, "enable_prefix_caching": False}), workers=SIMULATED
    )
    async with Fleet(plan, tmp_path_factory.mktemp("fleet")) as running:
        yield running


async def test_parts_have_settings_of_their_own(fleet: Fleet) -> None:
    sizes = [(await info_of(endpoint)).block_size for endpoint in fleet.endpoints("decode")]
    assert sizes == [16, 64]
    assert len(set(fleet.endpoints("decode"))) == 2


async def test_killed_and_restarted_in_the_same_place_with_other_settings(fleet: Fleet) -> None:
    before, pid = fleet.endpoint("decode-0"), fleet.parts["decode-0"].pid
    epoch = (await info_of(before)).epoch
    await fleet.kill("decode-0")
    assert fleet.parts["decode-0"].exit_code == -signal.SIGKILL
    assert fleet.parts["decode-0"].pid is None
    assert await fleet.restart("decode-0", block_size=32) == before
    assert fleet.parts["decode-0"].pid != pid
    info = await info_of(before)
    assert info.block_size == 32
    assert info.epoch != epoch
    assert info.worker_id == "decode-0"


async def test_a_restarted_store_keeps_its_url(fleet: Fleet) -> None:
    url = fleet.store_url
    await fleet.restart("store")
    assert fleet.store_url == url


async def test_watch_raises_for_a_crash_and_not_for_a_kill_that_was_asked_for(fleet: Fleet) -> None:
    watching = asyncio.create_task(fleet.watch())
    await fleet.kill("decode-1")
    fleet.parts["prefill-0"].signal(signal.SIGABRT)
    with pytest.raises(PartFailed) as failure:
        await watching
    assert failure.value.name == "prefill-0"
    assert "SIGABRT" in failure.value.what
    assert failure.value.log_lines
    await fleet.start("prefill-0")
    await fleet.start("decode-1")


async def test_leaving_ends_everything_also_what_does_not_listen(tmp_path: Path) -> None:
    async with Fleet(FleetPlan(workers=SIMULATED), tmp_path / "fleet") as fleet:
        processes = alive(fleet)
        assert len(processes) == 4
        fleet.parts["decode-0"].signal(signal.SIGSTOP)
    assert not any(process.is_running() for process in processes)
    assert fleet.parts["decode-0"].exit_code == -signal.SIGKILL


async def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    states: list[tuple[str, str]] = []
    plan = FleetPlan(decode=({"listen": "203.0.113.1:1"},), workers=SIMULATED)
    fleet = Fleet(plan, tmp_path / "fleet", lambda name, state: states.append((name, state)))
    with pytest.raises(PartFailed, match="decode-0 ended with exit code 1"):
        await fleet.__aenter__()
    assert not alive(fleet)
    assert ("store", "stopped") in states
    assert ("router-0", "starting") not in states


async def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    plan = FleetPlan(decode=({"no_such": 1},), workers=SIMULATED)
    fleet = Fleet(plan, tmp_path / "fleet")
    with pytest.raises(ConfigError, match="decode-0: no such setting: no_such"):
        await fleet.__aenter__()
    assert not alive(fleet)


async def test_not_ready_in_time_is_told_with_the_log(tmp_path: Path) -> None:
    part = Part("sleeper", tmp_path)
    await part.spawn(Command(["/bin/sh", "-c", "echo still loading; exec sleep 600"], {}))
    try:
        await until(lambda: bool(part.log_tail()))
        with pytest.raises(PartFailed, match="sleeper was not ready within 0 s") as failure:
            await part.wait_ready(0.01)
        assert failure.value.log_lines == ("still loading",)
    finally:
        await part.stop(grace_s=1.0)
    assert part.exit_code == -signal.SIGTERM


async def test_stopping_takes_the_part_s_own_children_along(tmp_path: Path) -> None:
    part = Part("parent", tmp_path)
    await part.spawn(Command(["/bin/sh", "-c", "sleep 600 & echo $!; wait"], {}))
    await until(lambda: bool(part.log_tail()))
    child = psutil.Process(int(part.log_tail()[0]))
    await part.stop(grace_s=1.0)
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
