"""compose.yaml: a sound file, and a deployment that works when its commands run as plain processes."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from compose_kit import COMPOSE, ROOT, Plain, load, services
from compose_spec import PyCompose
from ops_http import get
from router_sim import SimClient, ids

from kvloop.engine.settings import EngineSettings, smollm2_dir

TOKEN = "a tenant's token"
OVERLAYS = sorted((ROOT / "deploy" / "compose").glob("*.yaml"))
GPUS = {"prefill-0-cuda", "decode-0-cuda", "decode-1-cuda"}


def merged(profile: str) -> dict[str, dict[str, Any]]:
    return services(load(COMPOSE, {}), profile, "observe")


@pytest.mark.parametrize("file", [COMPOSE, *OVERLAYS], ids=lambda file: file.name)
def test_the_file_follows_the_compose_specification(file: Path) -> None:
    document = load(file, {})
    parsed = PyCompose.from_yaml(yaml.safe_dump(document))
    if file == COMPOSE:
        # Networks, secrets and volumes that services name are there.
        parsed.validate()


def test_what_the_specification_does_not_know_is_refused() -> None:
    document = load(COMPOSE, {})
    document["services"]["router-0"]["imag"] = "kvloop/router"
    with pytest.raises(ValueError, match="imag"):
        PyCompose.from_yaml(yaml.safe_dump(document))


def test_overlays_speak_of_services_that_exist() -> None:
    known = load(COMPOSE, {})["services"]
    for overlay in OVERLAYS:
        assert set(load(overlay, {})["services"]) <= set(known)


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_every_service_is_confined_bounded_and_watched(profile: str) -> None:
    found = merged(profile)
    roles = {name.removesuffix("-cuda") for name in found}
    assert roles >= {"store", "prefill-0", "decode-0", "decode-1", "gateway", "haproxy", "prometheus"}
    assert roles >= {"router-0", "router-1", "router-2"}
    for name, service in found.items():
        assert service["user"].split(":")[0] not in {"", "0", "root"}, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["healthcheck"]["test"][0] == "CMD", name
        resources = service["deploy"]["resources"]
        assert set(resources["limits"]) == {"cpus", "memory", "pids"}, name
        # Nothing but loopback of the host is opened.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for needed in service.get("depends_on", ()):
            assert needed in found, f"{name} waits for {needed}, which is not of profile {profile}"


def test_gpus_are_seen_by_all_and_used_by_one() -> None:
    used = []
    for name in GPUS:
        service = merged("cuda")[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        # What cuda_ipc asks for between containers.
        assert (service["ipc"], service["pid"]) == ("host", "host")
        used.append(EngineSettings(visible_devices=service["environment"]["KVLOOP_VISIBLE_DEVICES"]))
    assert sorted(str(settings.visible_devices) for settings in used) == ["0", "1", "2"]


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_what_engines_compile_can_be_loaded_and_written_by_them(profile: str) -> None:
    for name, service in merged(profile).items():
        if "build" not in service:
            continue
        uid = service["user"].split(":")[0]
        assert f"--uid {uid} " in (ROOT / "Dockerfile").read_text(encoding="utf-8")
        mounts = dict(mount.split(":") for mount in service["tmpfs"])
        assert {"exec", "mode=1777"} <= set(mounts["/tmp"].split(",")), name
        assert {"exec", f"uid={uid}"} <= set(mounts["/home/kvloop"].split(",")), name


def test_targets_are_stages_of_the_dockerfile() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    stages = {line.split(" AS ")[1] for line in lines if line.startswith("FROM ")}
    for profile in ("cpu", "cuda"):
        for service in merged(profile).values():
            if "build" in service:
                assert service["build"]["target"] in stages
    slim = " ".join(lines).partition("AS cpu")[0]
    assert "torch" not in slim.partition("FROM base AS slim")[2], "the router's image has no engine"


def test_prometheus_scrapes_every_service_that_has_metrics() -> None:
    document = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target.split(":")[0]
        for job in document["scrape_configs"]
        for config in job["static_configs"]
        for target in config["targets"]
    }
    assert targets == {
        name
        for name, service in services(load(COMPOSE, {}), "cpu").items()
        if "KVLOOP_METRICS_LISTEN" in service.get("environment", {}) or name == "gateway"
    }


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Callable[..., Plain]]:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "fleet_secret").write_text("5e" * 32)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    (tmp_path / "secrets" / "tokens").write_text(f"{digest} tenant-a\n")
    started: list[Plain] = []

    def make(variables: dict[str, str], extra: dict[str, str], *names: str) -> Plain:
        started.append(Plain(tmp_path, variables, extra, names=names))
        return started[-1]

    yield make
    for deployment in started:
        deployment.stop()


SIMULATED = {"KVLOOP_ENGINE": "simulated", "KVLOOP_MODELS": "/nonexistent"}
ROUTERS = ("router-0", "router-1", "router-2")
WORKERS = ("prefill-0", "decode-0", "decode-1")
# A simulated worker on a busy machine is slower to answer than a store must be.
PATIENT = {"KVLOOP_DIRECTORY_TIMEOUT_MS": "2000"}


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_deployment_serves(plain: Callable[..., Plain]) -> None:
    names = ("store", *WORKERS, *ROUTERS, "haproxy", "prometheus")
    deployment = plain(SIMULATED, PATIENT, *names)
    deployment.start("store")
    deployment.start(*WORKERS, *ROUTERS)
    deployment.start("haproxy", "prometheus")
    client = SimClient(f"{deployment.hosts['haproxy']}:7600", TOKEN)
    first = await client.say(ids(200))
    prompt = [*ids(200), *first.token_ids, *ids(40, seed=1)]
    # Whichever router gets it finds what D holds.
    for _ in ROUTERS:
        second = await client.say(prompt)
        assert second.reuse.tokens.computed < len(prompt)
    await client.channel.close()
    prometheus = f"{deployment.hosts['prometheus']}:9090"
    await until_up(prometheus, {*ROUTERS, *WORKERS}, deployment)
    status, rules = await get(prometheus, "/api/v1/rules")
    assert status == 200
    assert "KvloopNoWorker" in rules
    # A router that stops fails its health check; HAProxy's own stays well.
    stopped = deployment.containers["router-0"]
    assert stopped.stop() == 0
    assert not stopped.check()
    assert deployment.containers["haproxy"].healthy()
    codes = deployment.stop()
    assert {name for name, code in codes.items() if name in {*ROUTERS, *WORKERS} and code} == set()


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_the_gateway_serves(plain: Callable[..., Plain]) -> None:
    variables = SIMULATED | {"KVLOOP_MODELS": str(smollm2_dir().parent)}
    workers = {"KVLOOP_EXTRA_ENGINE_ARGS": json.dumps({"vocab_size": 49_152})}
    deployment = plain(variables, PATIENT | workers, "store", *WORKERS, "router-0", "gateway")
    deployment.containers["gateway"].environment.pop("KVLOOP_EXTRA_ENGINE_ARGS")
    deployment.start("store")
    deployment.start(*WORKERS, "router-0")
    deployment.start("gateway")
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"http://{deployment.hosts['gateway']}:8000/v1/chat/completions",
            headers={"Authorization": f"Bearer {TOKEN}"},
            json={
                "model": "smollm2",
                "messages": [{"role": "user", "content": "What is in crate A12?"}],
                "max_tokens": 8,
                "temperature": 0,
            },
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


async def until_up(prometheus: str, names: set[str], deployment: Plain) -> None:
    """Wait until Prometheus has scraped all of them."""
    wanted = {f"{deployment.hosts[name]}:9600" for name in names}
    limit = time.monotonic() + 60
    up: set[str] = set()
    while not wanted <= up:
        assert time.monotonic() < limit, f"never scraped: {wanted - up}"
        _, body = await get(prometheus, "/api/v1/query?query=up")
        found = json.loads(body)["data"]["result"]
        up = {one["metric"]["instance"] for one in found if one["value"][1] == "1"}
        await asyncio.sleep(0.1)
