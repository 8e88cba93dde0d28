"""`kvloop demo-cluster`: what a deployment looks like, on one machine.

Three routers behind HAProxy, one prefill and two decode workers, a gateway, Prometheus scraping all of them.
One agent's conversation goes through the gateway, turn by turn to whichever router HAProxy picks. What is
kept of it: each turn's router and verdict, what Prometheus says, one trace, and a picture of `kvloop top`.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences
from kvloop.cli.places import SMOLLM2, check_model

if TYPE_CHECKING:
    from kvloop.cli.demo.cluster_record import ClusterRecord
    from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

MIB = 1024 * 1024
_MAX_MODEL_LEN = 4096
_GATEWAY_READY_S = 240.0
_ENDED_S = 10.0
_SPANS = "spans.jsonl"
_WATCHED = {"metrics_listen": "127.0.0.1:0"}


@sentences
def demo_cluster(
    engine: Annotated[
        Literal["vllm", "simulated"], typer.Option(help="Real engines, or a quick rehearsal.")
    ] = "vllm",
    turns: Annotated[int, typer.Option(min=2, max=6, help="Turns of the conversation.")] = 6,
    deploy: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where haproxy/ and prometheus/ are.")
    ] = Path("deploy"),
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the records go.")] = Path("out/cluster"),
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where logs go. [default: a temporary folder]")
    ] = None,
) -> None:
    """Run a deployment of ten processes here, play one conversation over all routers, and end everything."""
    from kvloop.cli import signals

    check_model({"engine": "vllm", "model": SMOLLM2})
    signals.run(_demo(engine, turns, deploy, out, logs))


async def _demo(engine: str, turns: int, deploy: Path, out: Path, logs: Path | None) -> int:
    from rich.console import Console

    from kvloop.cli.demo.cluster_record import ClusterRecord
    from kvloop.cli.logfolder import log_folder

    record = ClusterRecord(engine)
    async with log_folder(logs, "cluster", CommandFailed) as folder:
        await _run(record, folder, turns=turns, deploy=deploy, out=out)
        record.trace = await asyncio.to_thread(record.longest_trace, folder / _SPANS)
        record.left_behind = await _left_behind(record.pids)
    await asyncio.to_thread(record.write, out)
    Console().print(record.shown())
    for complaint in (complaints := record.complaints()):
        say(complaint)
    return EXIT_FAILED if complaints else 0


async def _run(record: "ClusterRecord", folder: Path, *, turns: int, deploy: Path, out: Path) -> None:
    from kvloop.cli.bench.balanced import haproxy_binary, open_balanced
    from kvloop.cli.demo.cluster_parts import Gateway, Prometheus, picture
    from kvloop.cli.demo.cluster_play import play

    plan = plan_of(record.engine, folder)
    config = deploy / "haproxy" / "haproxy.cfg"
    async with AsyncExitStack() as stack:
        fleet, balanced = await stack.enter_async_context(
            open_balanced(plan, folder, haproxy_binary(), config)
        )
        gateway = await stack.enter_async_context(
            Gateway(
                folder,
                {
                    "router": balanced,
                    "router_streams": len(fleet.names("router")),
                    "max_model_len": _MAX_MODEL_LEN,
                    "trace_file": str(folder / _SPANS),
                },
                _GATEWAY_READY_S,
            )
        )
        targets = {role: _metrics(fleet, role) for role in ("router", "prefill", "decode")}
        rules = (deploy / "prometheus" / "alerts.yml").resolve()
        prometheus = await stack.enter_async_context(
            Prometheus(folder, {**targets, "gateway": [gateway.endpoint]}, rules)
        )
        parts = [*fleet.parts.values(), gateway.part, prometheus.part]
        record.pids = {part.name: part.pid for part in parts if part.pid is not None}
        routers = {name: str(fleet.parts[name].facts["metrics"]) for name in fleet.names("router")}
        async for turn in play(gateway.endpoint, routers, turns):
            record.turns.append(turn)
            say(turn.line())
        record.prometheus = await prometheus.answers(expected_turns=turns)
        command = ["top", "--store", fleet.store_url, "--interval", "1"]
        for at in (*targets["router"], *targets["decode"]):
            command += ["--metrics", at]
        record.screen = await picture(command, out / "top.svg", await_text="READBACK")


def plan_of(engine: str, folder: Path) -> "FleetPlan":
    """Return three routers, one P and two D; P keeps no prefix cache, so that reuse is what D held."""
    from kvloop.cli.supervisor.plan import FleetPlan

    traced = {**_WATCHED, "trace_file": str(folder / _SPANS)}
    workers: dict[str, Any] = {"engine": engine, "model": SMOLLM2, "max_model_len": _MAX_MODEL_LEN}
    if engine == "simulated":
        # As many tokens as SmolLM2's tokenizer has.
        workers |= {"block_size": 32, "extra_engine_args": {"vocab_size": 49_152}}
    else:
        # Room for the whole conversation within the half that leases may keep.
        workers["kv_cache_memory_bytes"] = 400 * MIB
    patient = {"directory_timeout_ms": 1000.0}
    router = {
        **patient,
        **traced,
        # What one router finds of another's turn shows as read back, in the trace too.
        "direct": False,
        "by_cost": False,
        # On two cores a repeat of a longer prompt would hold up the conversation for many seconds.
        "canary_per_minute": 60.0,
        "canary_max_prompt_tokens": 1500,
    }
    return FleetPlan(
        workers={**workers, **traced, **patient},
        prefill=({"enable_prefix_caching": False, "begin_read_timeout_s": 5.0},),
        decode=({}, {}),
        routers=(router,) * 3,
    )


def _metrics(fleet: "Fleet", role: str) -> list[str]:
    return [str(fleet.parts[name].facts["metrics"]) for name in fleet.names(role)]


async def _left_behind(pids: Mapping[str, int]) -> list[str]:
    """Return the parts that are still there after a while."""
    deadline = asyncio.get_running_loop().time() + _ENDED_S
    while left := [name for name, pid in pids.items() if _lives(pid)]:
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.05)
    return left


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
