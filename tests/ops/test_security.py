"""TLS and tokens between all parts: a fleet of real processes, and everybody who is kept out of it."""

import json
import secrets
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from router_fakes import Answer, collect
from router_sim import ask, ids

from kvloop.cli import certs
from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.router.auth import hash_token
from kvloop.runtime.config import ConfigError
from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.runtime.security import GuardedSettings, SecuredSettings, Security, from_environment
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
)

in_one_loop = pytest.mark.asyncio(loop_scope="module")
pytestmark = pytest.mark.slow
WORKER_TOKEN = "worker-token-" + secrets.token_hex(8)
TENANT_TOKEN = "tenant-token-" + secrets.token_hex(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("secured")
    certs.make(made, list(certs.HOSTS), 1)
    certs.make(made / "strangers", list(certs.HOSTS), 1)
    (made / "worker-token").write_text(f"{WORKER_TOKEN}\n")
    (made / "tenants").write_text(f"{hash_token(TENANT_TOKEN)} alpha\n")
    return made


def files(folder: Path, role: str) -> dict[str, str]:
    return {
        "tls_cert": str(folder / f"{role}.crt"),
        "tls_key": str(folder / f"{role}.key"),
        "tls_ca": str(folder / "ca.crt"),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    token = {"worker_token_file": str(folder / "worker-token")}
    # A busy machine may be late; that is not what is asked here.
    metrics = {"metrics_listen": "127.0.0.1:0", "directory_timeout_ms": 2000.0}
    plan = FleetPlan(
        prefill=[{**files(folder, "prefill"), **token, **metrics}],
        decode=[{**files(folder, "decode"), **token, **metrics}],
        routers=[
            {
                **files(folder, "router"),
                **token,
                **metrics,
                "tokens_file": str(folder / "tenants"),
                "by_cost": False,
            },
        ],
        workers={"engine": "simulated", "kv_recompute_threshold": 16, "enable_prefix_caching": False},
    )
    async with Fleet(plan, folder / "fleet") as running:
        yield running


def caller(folder: Path, *, certificate: bool = True, token: bool = True) -> Security:
    """Return what somebody has who calls a part."""
    paths: dict[str, Any] = files(folder, "client") if certificate else {"tls_ca": str(folder / "ca.crt")}
    if certificate and token:
        settings: SecuredSettings = GuardedSettings(**paths, worker_token_file=folder / "worker-token")
    else:
        settings = SecuredSettings(**paths)
    return Security.load(settings)


async def say(fleet: Fleet, security: Security, prompt: list[int], token: str = TENANT_TOKEN) -> Answer:
    async with security.channel(fleet.endpoint("router-0")) as channel:
        stub: Any = router_service_pb2_grpc.RouterServiceStub(channel)
        return await collect(
            stub.Generate(ask(prompt), timeout=30, metadata=[("authorization", f"Bearer {token}")])
        )


@in_one_loop
async def test_turns_travel_over_tls_in_both_directions(fleet: Fleet, folder: Path) -> None:
    # Clients need the authority, and a certificate of their own only towards workers.
    client = caller(folder, certificate=False)
    prompt = ids(200)
    first = await say(fleet, client, prompt)
    second = await say(fleet, client, [*prompt, *first.token_ids, 5])
    assert second.way == ("READBACK", "PROVEN")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await say(fleet, client, prompt, token="not a tenant's")
    assert from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED).reason_name == "UNAUTHENTICATED"


async def ask_decode(endpoint: str, security: Security) -> object:
    async with security.channel(endpoint) as channel:
        stub: Any = decode_service_pb2_grpc.DecodeServiceStub(channel)
        return await stub.GetInfo(decode_service_pb2.DecodeServiceGetInfoRequest(), timeout=10)


async def ask_prefill(endpoint: str, security: Security) -> object:
    async with security.channel(endpoint) as channel:
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        return await stub.GetInfo(prefill_service_pb2.PrefillServiceGetInfoRequest(), timeout=10)


@in_one_loop
@pytest.mark.parametrize("part", ["prefill-0", "decode-0"])
async def test_workers_keep_strangers_out(fleet: Fleet, folder: Path, part: str) -> None:
    call = ask_prefill if part.startswith("prefill") else ask_decode
    endpoint = fleet.endpoint(part)
    assert await call(endpoint, caller(folder))
    strangers = folder / "strangers"
    trusted = files(strangers, "client") | {"tls_ca": str(folder / "ca.crt")}
    unreachable = {
        "plain": Security(),
        "without a certificate": caller(folder, certificate=False),
        "another authority's": Security.load(SecuredSettings(**trusted)),  # type: ignore[arg-type]
        "who trusts another authority": Security.load(SecuredSettings(**files(strangers, "client"))),  # type: ignore[arg-type]
    }
    for who, security in unreachable.items():
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(endpoint, security)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE, who
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(endpoint, caller(folder, token=False))
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED).reason_name == "UNAUTHENTICATED"


@in_one_loop
async def test_the_streaming_door_asks_for_the_token_too(fleet: Fleet, folder: Path) -> None:
    async with caller(folder, token=False).channel(fleet.endpoint("decode-0")) as channel:
        stub: Any = decode_service_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stub.Decode(decode_service_pb2.DecodeRequest(), timeout=10))
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


@in_one_loop
async def test_a_worker_token_is_exchanged_without_a_restart(fleet: Fleet, folder: Path) -> None:
    file = folder / "worker-token"
    old = caller(folder)
    fresh = "the-next-token-" + secrets.token_hex(8)
    try:
        # The next one is made known first, then shown, then the old one is taken away.
        file.write_text(f"{WORKER_TOKEN}\n{fresh}\n")
        assert await ask_decode(fleet.endpoint("decode-0"), old)
        file.write_text(f"{fresh}\n{WORKER_TOKEN}\n")
        assert await say(fleet, caller(folder, certificate=False), ids(50))
    finally:
        file.write_text(f"{WORKER_TOKEN}\n")


@in_one_loop
async def test_nothing_secret_is_in_logs_metrics_and_errors(fleet: Fleet, folder: Path) -> None:
    client = caller(folder, certificate=False)
    prompt = ids(300, seed=77)
    answer = await say(fleet, client, prompt)
    reused = await say(fleet, client, [*prompt, *answer.token_ids, 8, 9])
    assert reused.way == ("READBACK", "PROVEN")
    told: list[str] = []
    async with client.channel(fleet.endpoint("router-0")) as channel:
        stub: Any = router_service_pb2_grpc.RouterServiceStub(channel)
        for request in bad_requests(prompt):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(
                    stub.Generate(request, timeout=10, metadata=[("authorization", f"Bearer {TENANT_TOKEN}")])
                )
            told += [str(error.value.details()), str(error.value.trailing_metadata())]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(
                stub.Generate(ask(prompt), timeout=10, metadata=[("authorization", "Bearer wrong-one")])
            )
        told += [str(error.value.details()), str(error.value.trailing_metadata())]
    await fleet.kill("decode-0")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await say(fleet, client, prompt)
    told += [str(error.value.details()), str(error.value.trailing_metadata())]
    await fleet.start("decode-0")
    told += [
        await page(str(part.facts["metrics"])) for part in fleet.parts.values() if "metrics" in part.facts
    ]
    told += [part.log_path.read_text(encoding="utf-8") for part in fleet.parts.values()]
    everything = "\n".join(told)
    assert len(told) > 15
    hidden = {
        "worker token": WORKER_TOKEN,
        "tenant token": TENANT_TOKEN,
        "its hash": hash_token(TENANT_TOKEN),
        "a wrong token": "wrong-one",
        "ids": ", ".join(map(str, prompt[:3])),
        "ids, dense": ",".join(map(str, prompt[:3])),
        "text": " ".join(answer.text.split()[:2]),
        "a stop string": "a secret stop string",
        "a handle": "remote_block_ids",
        "a handle's engine": "remote_engine_id",
        "the fleet's secret": secret_of(fleet),
        "the store's password": fleet.store_url.partition("@")[0].rpartition(":")[2],
        "a private key": "PRIVATE KEY",
    }
    for what, text in hidden.items():
        assert text, what
        assert text not in everything, what


def bad_requests(prompt: list[int]) -> list[router_service_pb2.GenerateRequest]:
    stops = ask(prompt)
    stops.sampling.stop.extend(["a secret stop string"] * 300)
    steering = ask(prompt)
    steering.sampling.extra_args_json = json.dumps({"kv_transfer_params": {"remote_block_ids": [1, 2]}})
    long = ask(ids(40_000))
    return [stops, steering, long]


def secret_of(fleet: Fleet) -> str:
    settings = (fleet.folder / "router-0.yaml").read_text(encoding="utf-8")
    return settings.partition("fleet_secret: ")[2].split()[0]


async def page(endpoint: str) -> str:
    import httpx

    async with httpx.AsyncClient() as http:
        return (await http.get(f"http://{endpoint}/metrics")).text


def test_keys_are_for_their_owner_alone_and_the_authority_is_kept(tmp_path: Path) -> None:
    certs.make(tmp_path, ["localhost"], 1)
    authority, leaf = (tmp_path / "ca.crt").read_bytes(), (tmp_path / "router.crt").read_bytes()
    certs.make(tmp_path, ["localhost", "example.org"], 1)
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert (tmp_path / "router.crt").read_bytes() != leaf
    for role in ("ca", *certs.ROLES):
        assert stat.S_IMODE((tmp_path / f"{role}.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tls_cert": "a"}, "tls_cert is set without tls_key"),
        ({"tls_key": "a"}, "tls_key is set without tls_cert"),
        ({"tls_ca": "a"}, "workers ask for a certificate"),
        ({"worker_token_file": "a"}, "in the clear"),
        ({"tls_server_name": "a"}, "no effect without tls_ca"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        GuardedSettings.load(flags=changes)


@pytest.mark.parametrize("text", ["", "short", "täg-" + "x" * 20])
def test_tokens_that_are_none(folder: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    settings = GuardedSettings(**files(folder, "router"), worker_token_file=file)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="worker_token_file"):
        Security.load(settings)


def test_commands_take_theirs_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment() == Security()
    for name, value in files(folder, "client").items():
        monkeypatch.setenv(f"KVLOOP_{name.upper()}", value)
    made = from_environment()
    assert made.authority == (folder / "ca.crt").read_bytes()
    assert made.tokens is None
    monkeypatch.setenv("KVLOOP_WORKER_TOKEN_FILE", str(folder / "worker-token"))
    tokens = from_environment().tokens
    assert tokens is not None
    assert tokens.value() == [WORKER_TOKEN]
