"""The fleets that a chaos run breaks: routers, P and D of the simulated engine or real vLLM.

One D is reached through a proxy of ours, which can slow its network down.
"""

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.runtime.channels import open_channel
from kvloop.runtime.ports import free_ports
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    worker_pb2,
)

CLOCK = Path(__file__).parent / "clock"
POLL_S = 0.01
_LOOK_S = 0.2
_CHUNK = 64 * 1024


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    conversations: int = 200
    turns: int = 2000
    users: int = 14
    """Turns under way at a time."""
    routers: int = 3
    prefills: int = 3
    decodes: int = 4
    limit_s: float = 480.0
    """Longest time for the traffic; more is a failure."""
    hold_s: float = 40.0
    """decoder_kv_blocks_ttl."""
    answer_tokens: tuple[int, int] = (16, 40)
    prompt_tokens: tuple[int, int] = (150, 400)
    new_tokens: tuple[int, int] = (10, 60)
    longest_prompt: int = 1500
    workers: dict[str, Any] = field(default_factory=dict)
    """Engine settings."""
    ready_timeout_s: float = 120.0
    pause_s: float = 6.0
    info_timeout_s: float = 1.0
    environment: dict[str, Any] = field(default_factory=dict)


SIMULATED = {
    "engine": "simulated",
    "max_model_len": 4096,
    "block_size": 16,
    "kv_recompute_threshold": 32,
    "prefill_hold_s": 15.0,
    "extra_engine_args": {"preset": "qwen3-32b-h200-per-layer", "num_blocks": 4096, "eos_every": 200},
}


class Proxy:
    """Forwards a port to another one, `delay_s` later."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.port = 0
        self.target = 0
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self, target: int) -> None:
        """Listen, and forward to a port of this host."""
        self.target = target
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Hang up."""
        if self._server is not None:
            self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(_CHUNK):
                    if self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()


class Arena:
    """A running fleet and what can be told of it."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.proxy = Proxy()
        self._behind, self.proxy.port = free_ports(2)
        self.ended: list[str] = []
        """What ended by itself, and how."""
        self.slowed = f"decode-{size.decodes - 1}"
        decodes: list[dict[str, Any]] = [{} for _ in range(size.decodes)]
        decodes[-1] = {"listen": f"127.0.0.1:{self._behind}", "advertise": f"127.0.0.1:{self.proxy.port}"}
        path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH", ""))))
        plan = FleetPlan(
            # What the first P does not compute, it has read.
            prefill=[
                {
                    "enable_prefix_caching": number > 0,
                    "control_path": str(self.control(f"prefill-{number}")),
                    "test_hooks": True,
                }
                for number in range(size.prefills)
            ],
            decode=decodes,
            # One router goes the cheapest way, mostly DIRECT; the others read back.
            routers=[
                {
                    "info_interval_s": 0.25,
                    "info_timeout_s": size.info_timeout_s,
                    "drain_limit_s": 10.0,
                    "directory_timeout_ms": 250.0,
                    "direct": number == 0,
                    "by_cost": number == 0,
                    "metrics_listen": "127.0.0.1:0",
                }
                for number in range(size.routers)
            ],
            workers={
                **size.workers,
                "directory_timeout_ms": 250.0,
                "decoder_kv_blocks_ttl": size.hold_s,
                "metrics_listen": "127.0.0.1:0",
                "drain_limit_s": 8.0,
            },
            environment={"PYTHONPATH": path, **size.environment},
            ready_timeout_s=size.ready_timeout_s,
        )
        self.fleet = Fleet(plan, folder)
        self._http = httpx.AsyncClient(timeout=2.0)

    async def __aenter__(self) -> "Arena":
        await self.proxy.start(self._behind)
        await self.fleet.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.fleet.__aexit__(*error)
        await self.proxy.stop()
        await self._http.aclose()

    def control(self, name: str) -> Path:
        """Return the path of a prefill worker's control socket."""
        return self.folder / f"{name}.control"

    def move_clock(self, name: str, seconds: float) -> None:
        """Move the wall clock of one part."""
        (self.folder / f"{name}.clock").write_text(str(seconds))

    async def metric(self, name: str, metric: str) -> float:
        """Return the sum of a gauge's series of one part; 0 while it does not answer."""
        try:
            page = (await self._http.get(f"http://{self.fleet.parts[name].facts['metrics']}/metrics")).text
        except httpx.HTTPError:
            return 0.0
        values = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(metric)]
        return sum(float(value) for value in values)

    async def settled(self) -> None:
        """Return when every router has every worker ready: ahead of the next one of a rolling restart."""
        expected = self.size.prefills + self.size.decodes
        async with asyncio.timeout(self.size.ready_timeout_s):
            for name in self.fleet.names("router"):
                while await self._ready(name) < expected:  # noqa: ASYNC110 - of other processes
                    await asyncio.sleep(_LOOK_S)

    async def supervise(self) -> None:
        """Start again what ended by itself, as whatever runs kvloop would. To be cancelled."""
        while True:
            for name in self.fleet.names("prefill", "decode", "router"):
                part = self.fleet.parts[name]
                if not part.running and not part.expected_to_end:
                    self.ended.append(str(part.failure().args[0]).partition(";")[0])
                    await self.fleet.start(name)
            await asyncio.sleep(_LOOK_S)

    async def _ready(self, router: str) -> float:
        roles = [f'kvloop_router_workers{{role="{role}",state="ready"}}' for role in ("prefill", "decode")]
        return sum([await self.metric(router, role) for role in roles])

    async def infos(self) -> dict[str, worker_pb2.WorkerInfo]:
        """Return the facts of all workers by part."""
        found = {}
        for name in self.fleet.names("prefill", "decode"):
            if not self.fleet.parts[name].running:
                continue
            async with open_channel(self.fleet.endpoint(name)) as channel:
                found[name] = await _info(name, channel)
        return found

    async def stranded(self, patience_s: float) -> int:
        """Return how many blocks are not free once that can't be due to time any more."""
        until = asyncio.get_running_loop().time() + patience_s
        while True:
            pools = [info.pool for info in (await self.infos()).values()]
            left = sum(pool.total_blocks - pool.free_blocks for pool in pools)
            if not left or asyncio.get_running_loop().time() > until:
                return left
            await asyncio.sleep(0.5)


async def _info(name: str, channel: grpc.aio.Channel) -> worker_pb2.WorkerInfo:
    stub: Any
    request: Any
    if name.startswith("prefill"):
        stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        request = prefill_service_pb2.PrefillServiceGetInfoRequest()
    else:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        request = decode_service_pb2.DecodeServiceGetInfoRequest()
    answer = await stub.GetInfo(request, timeout=20, wait_for_ready=True)
    info: worker_pb2.WorkerInfo = answer.info
    return info
