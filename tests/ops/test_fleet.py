"""Processes as `kvloop up` starts them: the doctor finds nothing, metrics are there, one trace spans them."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from ops_http import scrape, total, value

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.client import Client
from kvloop.v1alpha1 import sampling_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: Any) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    watched = {"metrics_listen": "127.0.0.1:0", "trace_file": str(folder / "spans.jsonl")}
    patient = {"directory_timeout_ms": 2000.0}
    plan = FleetPlan(
        workers={"engine": "simulated", "block_size": 32, **watched, **patient},
        prefill=({"begin_read_timeout_s": 5.0},),
        routers=({**watched, **patient, "info_interval_s": 0.2, "direct": False, "by_cost": False},),
    )
    async with Fleet(plan, folder) as running:
        yield running


async def doctor(fleet: Fleet, *more: str) -> tuple[int, dict[str, Any]]:
    settings = str(fleet.folder / "router-0.yaml")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvloop.cli.main", "doctor", "--json", "--config", settings),
        *("--router", fleet.endpoint("router-0"), *more),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out)


async def test_the_doctor_finds_nothing(fleet: Fleet) -> None:
    code, document = await doctor(fleet)
    wrong = [finding for finding in document["findings"] if finding["status"] != "ok"]
    assert (code, document["healthy"], wrong) == (0, True, [])
    names = [finding["name"] for finding in document["findings"]]
    assert {"side-channel", "store", "registry", "live-read", "compatibility"} <= set(names)
    assert len(set(names)) == len(names)


async def test_the_doctor_fails_when_a_worker_is_gone(fleet: Fleet) -> None:
    code, document = await doctor(fleet, "--decode", "127.0.0.1:1")
    assert (code, document["healthy"]) == (1, False)
    failed = {f["name"]: f["remedy"] for f in document["findings"] if f["status"] == "fail"}
    assert set(failed) == {"decode-workers"}
    assert "kvloop serve decode" in failed["decode-workers"]


async def test_metrics_of_processes(fleet: Fleet) -> None:
    before = await scrape(fleet.parts["router-0"].facts["metrics"])
    await play(fleet)
    after = await scrape(fleet.parts["router-0"].facts["metrics"])
    assert total(after, "kvloop_turns_total") - total(before, "kvloop_turns_total") == TURNS
    assert value(after, "kvloop_store_degraded") == 0
    assert value(after, "kvloop_store_operations_total") > 0
    decode = await scrape(fleet.parts["decode-0"].facts["metrics"])
    assert value(decode, "kvloop_engine_up") == 1


async def test_one_trace_over_processes(fleet: Fleet) -> None:
    await play(fleet)
    # What is not written yet comes with each process's end, the router's last.
    for part in ("router-0", "prefill-0", "decode-0"):
        await fleet.parts[part].stop()
    lines = (fleet.folder / "spans.jsonl").read_text(encoding="utf-8").splitlines()
    traces: dict[str, set[str]] = {}
    for span in map(json.loads, lines):
        traces.setdefault(span["trace_id"], set()).add(f"{span['service']} {span['name']}")
    assert any(
        {
            "kvloop-router router.turn",
            "kvloop-router directory.lookup",
            "kvloop-prefill rpc.Prefill",
            "kvloop-decode rpc.BeginRead",
            "kvloop-decode decode.leg",
            "kvloop-decode directory.publish",
        }
        <= spans
        for spans in traces.values()
    ), traces


async def play(fleet: Fleet) -> None:
    """Play turns of one conversation."""
    client = Client(fleet.endpoint("router-0"))
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    ids = list(range(100, 200))
    for _ in range(TURNS):
        async for event in client.turn(ids, conversation_id="c", sampling=sampling):
            ids = [*ids, *event.token_ids]
        ids += range(300, 500)
    await client.end("c")
    await client.close()
