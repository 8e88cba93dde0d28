"""Metrics of a fleet over simulated engines: what is scraped is what the turns said."""

import asyncio
import shutil
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import duration_pb2
from ops_http import get, scrape, total, value
from router_sim import SimFleet, ids, sim_fleet, until_async

from kvloop.client import Client, Retention
from kvloop.decode.app import DecodeApp
from kvloop.decode.settings import DecodeSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.prefill.app import PrefillApp
from kvloop.router.settings import RouterSettings
from kvloop.runtime.config import ConfigError
from kvloop.runtime.exposition import MAX_OPEN, Exposition
from kvloop.runtime.metrics import Metrics


class Loading(SimulatedEngine):
    """An engine that loads until it is told to be done."""

    def __init__(self) -> None:
        super().__init__(SimulatedSettings(), "decode")
        self.asked, self.loaded = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        self.asked.set()
        await self.loaded.wait()
        await super().start()


LISTEN = {"metrics_listen": "127.0.0.1:0"}


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SimFleet]:
    # The workers' settings are loaded as in a process; this one reaches all of them.
    monkeypatch.setenv("KVLOOP_METRICS_LISTEN", LISTEN["metrics_listen"])
    async with sim_fleet() as opened:
        yield opened


async def test_a_reused_turn_is_counted_everywhere(fleet: SimFleet) -> None:
    router = await fleet.router()
    client = await fleet.client(router)
    first = await client.say(ids(100))
    prompt = [*ids(100), *first.token_ids, *ids(20, seed=1)]
    second = await client.say(prompt)
    assert second.reuse.tokens.readback > 0
    seen = await scrape(router.metrics_endpoint)
    assert value(seen, "kvloop_turns_total", verdict="readback", reason="proven") == 1
    assert value(seen, "kvloop_turns_total", verdict="recompute", reason="not_found") == 1
    assert value(seen, "kvloop_turn_ttft_seconds_count", verdict="readback") == 1
    assert value(seen, "kvloop_turn_tpot_seconds_count", verdict="readback") == 1
    readback = second.reuse.tokens.readback
    assert value(seen, "kvloop_prompt_tokens_total", source="readback") == readback
    assert total(seen, "kvloop_prompt_tokens_total") == 100 + len(prompt)
    assert value(seen, "kvloop_output_tokens_total") == len(first.token_ids) + len(second.token_ids)
    assert value(seen, "kvloop_reuse_actual_tokens_total") == readback
    assert value(seen, "kvloop_reuse_expected_tokens_total") >= readback
    assert value(seen, "kvloop_turn_step_seconds_count", step="lookup") == 2
    assert value(seen, "kvloop_router_workers", role="decode", state="ready") == 1
    assert value(seen, "kvloop_turns_in_flight") == 0

    (prefill,), (decode,) = fleet.prefills, fleet.decodes
    assert isinstance(prefill.app, PrefillApp)
    assert isinstance(decode.app, DecodeApp)
    read = await scrape(prefill.app.metrics_endpoint)
    assert value(read, "kvloop_prefills_total", verdict="readback", reason="proven") == 1
    assert value(read, "kvloop_transfer_seconds_count") == 1
    assert value(read, "kvloop_transfer_bytes_total") == second.reuse.readback.bytes
    assert value(read, "kvloop_engine_prompt_tokens_total", source="external") == readback
    held = await scrape(decode.app.metrics_endpoint)
    assert value(held, "kvloop_leases", state="live") == 1
    assert value(held, "kvloop_leases_ended_total", reason="superseded") == 1
    assert value(held, "kvloop_lease_publications_total", outcome="won") == 2
    assert value(held, "kvloop_lease_publish_seconds_count") == 2
    assert value(held, "kvloop_reads_granted_total") == 1
    assert value(held, "kvloop_transfer_seconds_count") == 2
    assert value(held, "kvloop_engine_up") == 1
    pool = await decode.engine.pool()
    assert value(held, "kvloop_pool_blocks", state="held") == pool.held_blocks > 0
    assert value(held, "kvloop_pool_held_share") == pytest.approx(pool.held_blocks / pool.total_blocks)


async def test_sessions_and_what_they_prolong_are_counted(fleet: SimFleet) -> None:
    router = await fleet.router(max_sessions=7)
    (decode,) = fleet.decodes
    assert isinstance(decode.app, DecodeApp)

    async def prolonged() -> bool:
        held = await scrape(decode.app.metrics_endpoint)
        return value(held, "kvloop_leases_prolonged_total") > 0

    async with Client(router.endpoint) as client, client.session("c") as session:
        short = Retention(ttl=duration_pb2.Duration(seconds=2))
        async for _ in session.turn(ids(100), max_tokens=4, retention=short):
            pass
        seen = await scrape(router.metrics_endpoint)
        assert value(seen, "kvloop_sessions_open") == 1
        assert value(seen, "kvloop_sessions_limit") == 7
        await until_async(prolonged, "a lease prolonged")
    assert value(await scrape(router.metrics_endpoint), "kvloop_sessions_open") == 0


async def test_what_is_not_answered_is_counted(fleet: SimFleet) -> None:
    router = await fleet.router(max_attempts=1)
    client = await fleet.client(router)
    with pytest.raises(grpc.aio.AioRpcError, match="empty"):
        await client.say([])
    fleet.prefills[0].engine.faults.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await client.say(ids(50))
    seen = await scrape(router.metrics_endpoint)
    assert value(seen, "kvloop_turns_refused_total", reason="empty_prompt") == 1
    assert total(seen, "kvloop_turn_failures_total") == 1
    assert total(seen, "kvloop_turns_total") == 0


async def test_an_engine_that_loads_is_not_down() -> None:
    flags = LISTEN | {"engine": "simulated", "listen": "127.0.0.1:0", "stop_grace_s": 0}
    engine = Loading()
    app = DecodeApp(DecodeSettings.load(flags=flags), engine=engine)
    starting = asyncio.create_task(app.start())
    await engine.asked.wait()
    assert "kvloop_engine_up" not in {name for name, _ in await scrape(app.metrics_endpoint)}
    engine.loaded.set()
    await starting
    assert value(await scrape(app.metrics_endpoint), "kvloop_engine_up") == 1
    engine.faults.kill()
    assert value(await scrape(app.metrics_endpoint), "kvloop_engine_up") == 0
    await app.stop()


async def test_live_and_ready(fleet: SimFleet) -> None:
    router = await fleet.router()
    for endpoint in (router.metrics_endpoint, fleet.decodes[0].app.metrics_endpoint):
        assert await get(endpoint, "/livez") == (200, "alive\n")
        assert await get(endpoint, "/readyz") == (200, "ready\n")
        assert (await get(endpoint, "/metrics", "HEAD")) == (200, "")
        assert (await get(endpoint, "/metrics", "POST"))[0] == 405
        assert (await get(endpoint, "/elsewhere"))[0] == 404
    assert value(await scrape(router.metrics_endpoint), "kvloop_draining") == 0
    await router.drain()
    assert value(await scrape(router.metrics_endpoint), "kvloop_draining") == 1
    assert await get(router.metrics_endpoint, "/readyz") == (503, "not ready\n")
    assert await get(router.metrics_endpoint, "/livez") == (200, "alive\n")


@pytest.mark.slow
async def test_promtool_has_nothing_against_it(fleet: SimFleet) -> None:
    client = await fleet.client(router := await fleet.router())
    await client.say(ids(100))
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: make debian, or install Debian's prometheus"
    for endpoint in (router.metrics_endpoint, fleet.decodes[0].app.metrics_endpoint):
        _, text = await get(endpoint, "/metrics")
        check = await asyncio.create_subprocess_exec(
            *(promtool, "check", "metrics"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await check.communicate(text.encode())
        assert (check.returncode, said.decode()) == (0, "")


async def test_off_by_default_and_never_open_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sim_fleet() as fleet:
        assert (await fleet.router()).metrics_endpoint == ""
    links = {"prefill_endpoints": "h:1", "decode_endpoints": "h:2"}
    with pytest.raises(ConfigError, match="set metrics_open"):
        RouterSettings.load(flags={**links, "metrics_listen": "0.0.0.0:9601"})
    RouterSettings.load(flags={**links, "metrics_listen": "0.0.0.0:9601", "metrics_open": True})


async def test_idle_connections_are_bounded_and_end_with_the_process() -> None:
    exposition = Exposition(Metrics("router"), lambda: True)
    endpoint = await exposition.start("127.0.0.1:0")
    host, _, port = endpoint.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_OPEN + 1)]
    try:
        # One of them, whichever came last, is closed; the others wait for a request.
        ends = {asyncio.ensure_future(reader.read()) for reader, _ in opened}
        done, waiting = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        await exposition.stop()
        await asyncio.wait(waiting)
        assert all(end.result() == b"" for end in ends)
    finally:
        for _, writer in opened:
            writer.close()
    await exposition.stop()


async def test_nonsense_is_not_answered_and_harms_nobody() -> None:
    exposition = Exposition(Metrics("router"), lambda: True)
    endpoint = await exposition.start("127.0.0.1:0")
    host, _, port = endpoint.rpartition(":")
    for nonsense in (b"\x16\x03\x01" * 9000, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200, b"\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(nonsense)
        writer.write_eof()
        assert b"200 OK" not in await reader.read()
        writer.close()
    assert (await get(endpoint, "/livez"))[0] == 200
    await exposition.stop()
