"""A fleet of routers behind HAProxy, which runs from the file that is deployed."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop.cli.errors import CommandFailed
from kvloop.cli.supervisor.board import Board
from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.cli.supervisor.part import Command, Part, PartFailed
from kvloop.runtime.channels import open_channel
from kvloop.runtime.ports import free_port

ROUTERS = 3
"""As many as the file has."""
_READY_S = 30.0
_BALANCER = "haproxy"


def haproxy_binary() -> str:
    """Return HAProxy's path. Raises CommandFailed."""
    # Not on every user's path.
    found = shutil.which(_BALANCER) or shutil.which(_BALANCER, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise CommandFailed("haproxy is missing: run `make debian`, or install the Debian package haproxy")
    return found


def haproxy_version(binary: str) -> str:
    """Return its version."""
    said = subprocess.run([binary, "-v"], capture_output=True, text=True, check=False).stdout
    words = said.split()
    return words[2] if len(words) > 2 else "unknown"


@asynccontextmanager
async def open_balanced(
    plan: FleetPlan, folder: Path, binary: str, config: Path
) -> AsyncIterator[tuple[Fleet, str]]:
    """Start a plan and HAProxy; yield the fleet and HAProxy's endpoint. Raises PartFailed, ConfigError."""
    with Board() as board:
        fleet = Fleet(plan, folder, board.tell)
        board.show(fleet.parts)
        async with fleet:
            board.finish()
            balancer = Part(_BALANCER, folder)
            try:
                yield fleet, await _start(balancer, binary, config, fleet.endpoints("router"))
            finally:
                await balancer.stop()


async def _start(balancer: Part, binary: str, config: Path, routers: Sequence[str]) -> str:
    """Start HAProxy and return its endpoint once turns can go through."""
    endpoint = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "KVLOOP_LB_LISTEN": endpoint,
        **{f"KVLOOP_LB_ROUTER_{number}": router for number, router in enumerate(routers)},
    }
    await balancer.spawn(Command([binary, "-db", "-f", str(config)], environment))
    if not await _serves(endpoint, balancer):
        raise PartFailed(_BALANCER, f"let no turn through within {_READY_S:.0f} s", balancer.log_tail())
    return endpoint


async def _serves(endpoint: str, balancer: Part) -> bool:
    deadline = time.monotonic() + _READY_S
    async with open_channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while balancer.running and time.monotonic() < deadline:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
    return False
