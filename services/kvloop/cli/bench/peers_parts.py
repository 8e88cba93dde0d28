"""The processes that `kvloop bench peers` compares, as contexts."""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloop.bench import peers_engines, peers_router
from kvloop.bench.peers import FLOOR, GRPC_FLOOR, Entrant
from kvloop.bench.peers_fetch import PROXY, TOY_PROXY
from kvloop.bench.peers_http import Line, PastHttp, ThroughHttp
from kvloop.bench.router_traffic import PastRouter, ThroughRouter, facts
from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.cli.supervisor.part import Command, Part, PartFailed
from kvloop.cli.supervisor.plan import part_environment
from kvloop.runtime.ports import free_port

KVLOOP, KVLOOP_GRPC, PROXY_NAME, TOY_NAME, ROUTER_NAME = (
    "kvloop",
    "kvloop-grpc",
    "proxy",
    "toy-proxy",
    "vllm-router",
)
WHAT: Mapping[str, str] = {
    KVLOOP: "gateway and router, over HTTP",
    KVLOOP_GRPC: "router alone, RouterService over gRPC",
    PROXY_NAME: "vLLM's example multi-turn proxy",
    TOY_NAME: "the proxy of vLLM's own tests of NIXL; knows no conversations",
    ROUTER_NAME: "vllm-router, PD over NIXL, round robin",
    FLOOR: "the client calls P and D itself, over HTTP",
    GRPC_FLOOR: "the client calls P and D itself, over gRPC",
}
MODEL = "smollm2"
_LONGEST = 32_768
_BLOCK = 128
"""Large blocks keep the simulated engines' own work small."""
_BLOCKS = 65_536
"""Room for what D keeps of all conversations of all ways."""
_START_S = 120.0
_POLL_S = 0.1
_SCRIPTS = {PROXY_NAME: (Path(PROXY).name, "/health"), TOY_NAME: (Path(TOY_PROXY).name, "/healthcheck")}
_PATIENT = {"directory_timeout_ms": 2000.0}
# The floors have P read as well; with a prefix cache of its own P would have all of a regenerated turn.
# And the peers wait for P and D before an answer begins, so kvloop does as well.
FIRST_TOKEN = False
ROUTER = {**_PATIENT, "direct": False, "by_cost": False, "first_token_from_prefill": FIRST_TOKEN}
_PREFILL = {"enable_prefix_caching": False}
VERDICT = "READBACK"
"""Of the turns that such a router serves after a conversation's first one."""


def gateway_lacks(tokenizer: Path) -> str:
    """Return why no gateway can run here; empty when one can."""
    if importlib.util.find_spec("vllm") is None:
        return "the gateway needs vLLM, which is not installed"
    if not (tokenizer / "tokenizer.json").is_file():
        return "the gateway needs a tokenizer; run: kvloop model fetch smollm2"
    return ""


@dataclass(slots=True)
class Stage:
    """What runs, and why others do not."""

    entrants: dict[str, Entrant] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    engines: tuple[str, str] = ("", "")
    """P and D behind the peers."""

    async def counts(self) -> dict[str, Any]:
        """Return what P and D behind the peers have counted."""
        counted = {}
        for role, endpoint in zip(("prefill", "decode"), self.engines, strict=True):
            line = Line(endpoint)
            counted[role] = json.loads((await line.ask("GET", peers_engines.COUNTS)).content)
            await line.close()
        return counted


@asynccontextmanager
async def simulated(
    places: Mapping[str, Path | str], tokenizer: Path, *, step_ms: float, folder: Path
) -> AsyncIterator[Stage]:
    """Start everything in front of engines that take step_ms for a token: 0 or 20.

    places: by peer, the folder of its files, or why there is none. Raises PartFailed for ours.
    """
    stage = Stage()
    async with AsyncExitStack() as stack:
        await _kvloop(stack, stage, tokenizer, "paced" if step_ms else "instant", folder)
        stage.engines = await http_engines(stack, step_ms, folder)
        past = PastHttp(*stage.engines)
        stack.push_async_callback(past.close)
        stage.entrants[FLOOR] = Entrant(past, FLOOR)
        for name, place in places.items():
            if isinstance(place, str):
                stage.reasons[name] = place
                continue
            try:
                part, endpoint = await start_peer(stack, name, place, stage.engines, folder)
            except PartFailed as failure:
                stage.reasons[name] = str(failure)
                continue
            way = ThroughHttp(endpoint)
            stack.push_async_callback(way.close)
            assert part.pid is not None
            stage.entrants[name] = Entrant(way, FLOOR, (part.pid,))
        yield stage


async def _kvloop(stack: AsyncExitStack, stage: Stage, tokenizer: Path, preset: str, folder: Path) -> None:
    lacks = gateway_lacks(tokenizer)
    engine: dict[str, Any] = {"preset": preset, "num_blocks": _BLOCKS}
    gateways: list[dict[str, Any]] = []
    if lacks:
        stage.reasons[KVLOOP] = lacks
    else:
        engine["tokenizer"] = str(tokenizer)
        longest = f'{{"max_position_embeddings": {_LONGEST}}}'
        gateways.append(
            {
                "model": str(tokenizer),
                "served_model_name": MODEL,
                "max_model_len": _LONGEST,
                "vllm_args": ["--hf-overrides", longest],
            }
        )
    workers = {
        "engine": "simulated",
        "block_size": _BLOCK,
        "max_model_len": _LONGEST,
        "extra_engine_args": engine,
        **_PATIENT,
    }
    plan = FleetPlan(workers=workers, prefill=[_PREFILL], routers=[ROUTER], gateways=gateways)
    fleet = await stack.enter_async_context(Fleet(plan, folder / "kvloop"))
    router, pids = fleet.parts["router-0"].pid, []
    assert router is not None
    through = ThroughRouter(fleet.endpoint("router-0"))
    stack.push_async_callback(through.close)
    stage.entrants[KVLOOP_GRPC] = Entrant(through, GRPC_FLOOR, (router,))
    workers_here = await facts(fleet.endpoint("prefill-0"), fleet.endpoint("decode-0"))
    past = PastRouter(workers_here, first_token=FIRST_TOKEN)
    stack.push_async_callback(past.close)
    stage.entrants[GRPC_FLOOR] = Entrant(past, GRPC_FLOOR)
    if not lacks:
        gateway = fleet.parts["gateway-0"].pid
        assert gateway is not None
        pids = [gateway, router]
        chat = ThroughHttp(fleet.endpoint("gateway-0"), MODEL)
        stack.push_async_callback(chat.close)
        stage.entrants[KVLOOP] = Entrant(chat, GRPC_FLOOR, tuple(pids))


async def http_engines(stack: AsyncExitStack, step_ms: float, folder: Path) -> tuple[str, str]:
    """Start what stands for P and D of vLLM; return their endpoints. Raises PartFailed."""
    engines = Part("http-engines", folder)
    stack.push_async_callback(engines.stop, 2.0)
    serve = [sys.executable, "-m", peers_engines.__name__, str(engines.ready_path), str(step_ms)]
    await engines.spawn(Command(serve, part_environment({}, ())))
    decode = await engines.wait_ready(_START_S)
    return str(engines.facts["prefill"]), decode


async def start_peer(
    stack: AsyncExitStack, name: str, place: Path, engines: Sequence[str], folder: Path
) -> tuple[Part, str]:
    """Start a peer before P and D, each host:port; return it and its endpoint. Raises PartFailed.

    place: the folder of its files; of vllm-router a program will do, too.
    """
    port = free_port()
    environment: dict[str, str] = {}
    if name == ROUTER_NAME:
        program, environment = _router_program(place)
        arguments, path = [*program, *_router_arguments(engines, port)], "/health"
    else:
        script, path = _SCRIPTS[name]
        arguments = [sys.executable, str(place / script), *_proxy_arguments(engines, port)]
    part, endpoint = Part(name, folder), f"127.0.0.1:{port}"
    stack.push_async_callback(part.stop, 2.0)
    await part.spawn(Command(arguments, part_environment(environment, ())))
    way = ThroughHttp(endpoint)
    try:
        await answers(part, way, path, _START_S)
    finally:
        await way.close()
    return part, endpoint


async def answers(part: Part, way: ThroughHttp, path: str, limit_s: float) -> None:
    """Wait until a peer answers. Raises PartFailed."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not await way.ready(path):
        if not part.running:
            raise part.failure()
        if asyncio.get_running_loop().time() > deadline:
            raise PartFailed(part.name, f"did not answer within {limit_s:.0f} s", part.log_tail())
        await asyncio.sleep(_POLL_S)


def _router_program(place: Path) -> tuple[list[str], dict[str, str]]:
    """Return vllm-router's program, and what its environment needs."""
    if not place.is_dir():
        return [str(place)], {}
    # Its folder first, then where this process finds kvloop.
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-m", peers_router.__name__], {"PYTHONPATH": os.pathsep.join(paths)}


def _router_arguments(engines: Sequence[str], port: int) -> list[str]:
    arguments = ["--vllm-pd-disaggregation", "--policy", "round_robin", "--kv-connector", "nixl"]
    arguments += ["--prefill", f"http://{engines[0]}", "--decode", f"http://{engines[1]}"]
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    return [*arguments, "--prometheus-port", str(free_port()), "--log-level", "warning"]


def _proxy_arguments(engines: Sequence[str], port: int) -> list[str]:
    arguments = ["--host", "127.0.0.1", "--port", str(port)]
    for role, endpoint in zip(("prefiller", "decoder"), engines, strict=True):
        host, _, at = endpoint.rpartition(":")
        arguments += [f"--{role}-host", host, f"--{role}-port", at]
    return arguments
