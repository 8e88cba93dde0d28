"""The workers as processes see them: settings that contradict, starting, stopping, health."""

import asyncio
from functools import partial
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker_kit import Pair, open_pair, prompt, scope_of, until

from kvloop.decode.app import DecodeApp
from kvloop.decode.settings import DecodeSettings
from kvloop.engine import worker
from kvloop.engine.settings import Role
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.metastore.factory import open_store
from kvloop.prefill.app import PrefillApp
from kvloop.prefill.settings import PrefillSettings
from kvloop.runtime.config import ConfigError
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.server import LIVENESS, ServerError, run_until_signal


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"listen": "nowhere"}, "host:port"),
        ({"listen": "0.0.0.0:1"}, "advertise"),
        ({"listen": "[::]:1"}, "advertise"),
        ({"advertise": "host:0"}, "advertise"),
        ({"pin_s": 200.0}, "max_pin_s"),
        ({"decoder_kv_blocks_ttl": 5000.0}, "max_ttl_s"),
        ({"unknown": 1}, "no such setting"),
    ],
)
def test_contradictions_are_refused_with_a_sentence(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        DecodeSettings.load(flags=flags)


def test_prefill_settings() -> None:
    with pytest.raises(ConfigError, match="decode_endpoints"):
        PrefillSettings.load(flags={"decode_endpoints": ("nowhere",)})
    loaded = PrefillSettings.load(flags={"listen": "0.0.0.0:1", "advertise": "host:1"})
    assert loaded.decode_endpoints == ("loopback",)


async def test_from_settings_alone() -> None:
    common = {"engine": "simulated", "listen": "127.0.0.1:0", "stop_grace_s": 0.0}
    apps: list[DecodeApp | PrefillApp] = [
        DecodeApp(DecodeSettings.load(flags=common)),
        PrefillApp(PrefillSettings.load(flags=common)),
    ]
    for app in apps:
        await app.start()
        assert app.endpoint.startswith("127.0.0.1:")
        assert app.endpoint in app.worker_id
        await app.drain()
        await app.stop()
        await app.stop()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_port_that_is_taken(pair: Pair, role: str) -> None:
    flags = {"engine": "simulated", "listen": pair.decode_app.endpoint}
    app: DecodeApp | PrefillApp
    if role == "decode":
        app = DecodeApp(DecodeSettings.load(flags=flags))
    else:
        app = PrefillApp(PrefillSettings.load(flags=flags))
    with pytest.raises(ServerError):
        await app.start()
    await app.stop()


async def health(pair: Pair, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(pair.channels[0])
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return int(answer.status)


async def test_readiness_follows_the_engine_and_liveness_does_not() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with open_pair() as pair:
        assert await health(pair, "") == serving
        assert await health(pair, "kvloop.v1alpha1.DecodeService") == serving
        pair.decode_engine.faults.kill()

        async def unready() -> bool:
            return bool(await health(pair, "") != serving)

        await until(unready)
        assert await health(pair, LIVENESS) == serving
        with pytest.raises(Failure) as raised:
            await pair.run_decode(prompt(50), scope_of("c", start=1), None)
        assert raised.value.reason == Reason.ERROR_REASON_WORKER_FAILED
        # Another life of the engine: what was held is gone, and new turns leave leases again.
        await pair.decode_engine.start()

        async def ready() -> bool:
            return bool(await health(pair, "") == serving)

        await until(ready)
        answer = await pair.run_decode(prompt(50), scope_of("c", start=1), None)
        entry = await pair.entry()
        assert entry is not None
        assert entry.lease_id == answer.summary.lease.lease_id
        assert entry.epoch == pair.decode_engine.facts.epoch


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_process_ends_when_its_engine_stays_dead(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(worker, "DEAD_S", 0.05)
    flags = {"engine": "simulated", "listen": "127.0.0.1:0", "stop_grace_s": 0.0, "worker_id": "w"}
    engine = SimulatedEngine(SimulatedSettings(), role)
    store = open_store("memory://")
    app: DecodeApp | PrefillApp
    if role == "decode":
        app = DecodeApp(DecodeSettings.load(flags=flags), engine=engine, store=store)
    else:
        app = PrefillApp(PrefillSettings.load(flags=flags), engine=engine, store=store)
    serving = asyncio.create_task(run_until_signal(app))

    async def up() -> bool:
        return "w" in await store.registry.workers()

    await until(up)
    said = (await store.registry.workers())["w"]
    engine.faults.kill()
    with pytest.raises(ServerError, match="the engine is dead"):
        async with asyncio.timeout(10):
            await serving
    assert said.capacity == SimulatedSettings().max_num_seqs
    await store.close()


async def test_an_engine_that_comes_back_in_time_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HEALTH_INTERVAL_S", 0.01)
    async with open_pair() as pair:
        lost = asyncio.create_task(pair.decode_app.lost())
        for _ in range(3):
            pair.decode_engine.faults.kill()

            async def seen(ready: bool) -> bool:
                serving = health_pb2.HealthCheckResponse.SERVING
                return (await health(pair, "") == serving) == ready

            await until(partial(seen, ready=False))
            await pair.decode_engine.start()
            await until(partial(seen, ready=True))
        assert not lost.done()
        lost.cancel()


async def test_f3_a_restarted_decode_worker() -> None:
    async with open_pair() as pair:
        await pair.play(prompt(150))
        pair.decode_engine.faults.kill()
        await pair.decode_engine.start()
        old = await pair.play([*prompt(150), *prompt(40, 2)])
        assert (old.verdict, old.reason) == ("RECOMPUTE", "EPOCH")
        await pair.play(prompt(150, 3), "new")
        again = await pair.play([*prompt(150, 3), *prompt(40, 4)], "new")
        assert again.verdict == "READBACK"


async def test_draining_prefill_waits_until_its_kv_is_fetched() -> None:
    async with open_pair() as pair:
        scope = scope_of("c", start=1)
        prefilled = await pair.run_prefill(prompt(150), scope, None)
        draining = asyncio.create_task(pair.prefill_app.drain())

        async def refused() -> bool:
            try:
                await pair.run_prefill(prompt(150), scope, None)
            except Failure as failure:
                return failure.reason == Reason.ERROR_REASON_DRAINING
            return False

        await until(refused)
        assert not draining.done()
        await pair.run_decode(prompt(150), scope, prefilled)
        await draining
