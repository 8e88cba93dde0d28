"""Real engines of `kvloop bench peers`: kvloop's own deployment, and `vllm serve` with a proxy before it."""

import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloop.bench import peers_serve
from kvloop.bench.http_target import HttpTarget
from kvloop.bench.peers import FLOOR
from kvloop.bench.peers_http import ThroughHttp
from kvloop.bench.peers_real import BareEngines, Leg
from kvloop.bench.target import RouterTarget
from kvloop.bench.workload.model import Encoder
from kvloop.bench.workload.words import WordEncoder
from kvloop.cli.bench.peers_parts import KVLOOP, MODEL, PROXY_NAME, answers, start_peer
from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.cli.supervisor.part import Command, Part, PartFailed
from kvloop.cli.supervisor.plan import part_environment
from kvloop.engine.settings import MIB, EngineSettings, gpu_present, resolve, smollm2_dir
from kvloop.engine.vllm import env
from kvloop.runtime.ports import free_port

KVLOOP_DIRECT, PREFILL_ALONE = "kvloop-direct", "prefill-alone"
WHAT: Mapping[str, str] = {
    KVLOOP_DIRECT: "router that lets D go on by itself, RouterService over gRPC",
    PREFILL_ALONE: "P of vllm serve computes the whole prompt and one token",
}
VERDICTS: Mapping[str, str] = {KVLOOP: "READBACK", KVLOOP_DIRECT: "DIRECT"}
"""Of the turns after a conversation's first: each leg is one way, whatever is the cheapest here."""
LEGS = (KVLOOP, KVLOOP_DIRECT, PROXY_NAME, FLOOR, PREFILL_ALONE)
LONGEST = 4096
_ENGINE: Mapping[str, Any] = {"max_model_len": LONGEST, "kv_cache_memory_bytes": 640 * MIB}
"""Of all four. The pool holds what a D keeps of every conversation; the rest is as this machine has it."""
_START_S = 300.0
# A busy machine must not decide what is measured.
_PATIENT = {
    "directory_timeout_ms": 2000.0,
    "prefill_timeout_s": 600.0,
    "first_chunk_timeout_s": 600.0,
    "chunk_timeout_s": 600.0,
}


@dataclass(slots=True)
class RealStage:
    """What runs, and why others do not."""

    encoder: Encoder
    legs: dict[str, Leg] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    proxy_log: Path | None = None

    def proxy_hits(self) -> dict[str, int]:
        """Return how often the proxy found a conversation's handle, by its own log."""
        text = self.proxy_log.read_text(errors="replace") if self.proxy_log else ""
        return {"hits": text.count("cache HIT"), "misses": text.count("cache MISS")}


def lacks() -> str:
    """Return why real engines can't run here; empty when they can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if gpu_present():
        return "four engines share a CPU; here is a GPU"
    if not (smollm2_dir() / "config.json").is_file():
        return "the model is not there; run: kvloop model fetch smollm2"
    return ""


@asynccontextmanager
async def real(
    proxy: Path | str, folder: Path, *, prefix_caching_on_prefill: bool
) -> AsyncIterator[RealStage]:
    """Start kvloop, then P and D of `vllm serve` and the proxy before them.

    proxy: the folder of its files, or why there is none. Raises PartFailed for ours.
    """
    settings = resolve(EngineSettings(**_ENGINE))
    encoder = WordEncoder(_vocabulary(settings))
    stage = RealStage(encoder)
    caching = {"prefill": prefix_caching_on_prefill, "decode": True}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(plan_of(settings, caching), folder / "kvloop"))
        target = HttpTarget(f"http://{fleet.endpoint('gateway-0')}", MODEL, encoder, salted=True)
        stack.push_async_callback(target.close)
        stage.legs[KVLOOP] = Leg(target.send, verdict=VERDICTS[KVLOOP])
        direct = RouterTarget(fleet.endpoint("router-1"), model=MODEL)
        stack.push_async_callback(direct.close)
        stage.legs[KVLOOP_DIRECT] = Leg(direct.send, verdict=VERDICTS[KVLOOP_DIRECT])
        try:
            engines = await _serve(stack, settings, caching, folder)
        except PartFailed as failure:
            stage.reasons |= dict.fromkeys((PROXY_NAME, FLOOR, PREFILL_ALONE), str(failure))
            yield stage
            return
        bare = BareEngines(*engines, MODEL)
        stack.push_async_callback(bare.close)
        stage.legs[FLOOR] = Leg(bare.send)
        stage.legs[PREFILL_ALONE] = Leg(bare.prefill, shadow=True)
        if isinstance(proxy, str):
            stage.reasons[PROXY_NAME] = proxy
        else:
            try:
                part, endpoint = await start_peer(stack, PROXY_NAME, proxy, engines, folder)
            except PartFailed as failure:
                stage.reasons[PROXY_NAME] = str(failure)
            else:
                stage.proxy_log = part.log_path
                through = HttpTarget(f"http://{endpoint}", MODEL, encoder, salted=True)
                stack.push_async_callback(through.close)
                stage.legs[PROXY_NAME] = Leg(through.send)
        yield stage


def _vocabulary(settings: EngineSettings) -> int:
    config = json.loads((Path(settings.model_path) / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


def plan_of(settings: EngineSettings, caching: Mapping[str, bool]) -> FleetPlan:
    """Return kvloop's own deployment: a gateway before the first router, the other one is asked over gRPC."""
    listen = f"127.0.0.1:{free_port()}"
    gateway = {"model": settings.model_path, "served_model_name": MODEL, "router": listen}
    return FleetPlan(
        workers={**_ENGINE, "served_model_name": MODEL},
        prefill=[{"enable_prefix_caching": caching["prefill"]}],
        decode=[{"enable_prefix_caching": caching["decode"]}],
        routers=[
            {**_PATIENT, "listen": listen, "direct": False, "by_cost": False},
            {**_PATIENT, "direct": True, "by_cost": False},
        ],
        gateways=[{**gateway, "max_model_len": settings.max_model_len}],
    )


async def _serve(
    stack: AsyncExitStack, settings: EngineSettings, caching: Mapping[str, bool], folder: Path
) -> tuple[str, str]:
    """Start P and D of `vllm serve` at once; return their endpoints. Raises PartFailed."""
    parts, endpoints = [], []
    for role in ("prefill", "decode"):
        port = free_port()
        part = Part(f"vllm-{role}", folder)
        stack.push_async_callback(part.stop, 4.0)
        side = env.side_channel_port(settings)
        values = {**env.defaults(settings), **env.environment(settings, side)}
        values.pop(env.PARENT_PID)
        arguments = [sys.executable, "-m", peers_serve.__name__]
        arguments += serve_arguments(settings, role, port, prefix_caching=caching[role])
        await part.spawn(Command(arguments, part_environment(values, ())))
        parts.append(part)
        endpoints.append(f"127.0.0.1:{port}")
    for part, endpoint in zip(parts, endpoints, strict=True):
        way = ThroughHttp(endpoint)
        try:
            await answers(part, way, "/health", _START_S)
        finally:
            await way.close()
    return endpoints[0], endpoints[1]


def serve_arguments(settings: EngineSettings, role: str, port: int, *, prefix_caching: bool) -> list[str]:
    """Return the arguments of `vllm serve` that make an engine what kvloop's is. settings: resolved."""
    transfer = {
        "kv_connector": peers_serve.CONNECTOR,
        "kv_connector_module_path": peers_serve.CONNECTOR_MODULE,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_buffer_device": "cpu" if settings.device == "cpu" else "cuda",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": settings.kv_recompute_threshold,
            "decoder_kv_blocks_ttl": settings.decoder_kv_blocks_ttl,
            "backends": settings.backends,
            **({"num_threads": 1} if settings.device == "cpu" else {}),
        },
    }
    arguments = [settings.model_path, "--served-model-name", MODEL, "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--seed", str(settings.seed or 0), "--disable-uvicorn-access-log"]
    arguments.append("--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching")
    if settings.enforce_eager:
        arguments.append("--enforce-eager")
    for name in (
        "dtype",
        "max_model_len",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
    ):
        value = getattr(settings, name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return [*arguments, "--kv-transfer-config", json.dumps(transfer)]
