"""`kvloop bench router`: what a router costs, on simulated engines and a real store."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloop.cli.errors import EXIT_FAILED, say, sentences, write_line

if TYPE_CHECKING:
    from kvloop.bench.router import Process
    from kvloop.bench.router_traffic import Way, Workers
    from kvloop.cli.supervisor.fleet import Fleet

_BLOCK = 128
"""Large blocks keep the simulated engines' own work small."""
_BLOCKS = 65_536
"""Room for what D keeps of all conversations."""
# A busy machine gets fewer samples rather than more time.
_FIRST_CHUNKS_S = 45.0
_CPU_S = 120.0
_BY_CALL = "router, a call a turn"
_PASS = "pass-through"


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("router")(router)
    return typer.main.get_command(single)


@sentences
def router(
    *,
    pairs: Annotated[int, typer.Option(min=10, help="Turns each way for the first chunk.")] = 300,
    turns: Annotated[int, typer.Option(min=100, help="Turns each way for CPU, 500 tokens.")] = 3200,
    long_turns: Annotated[int, typer.Option(min=50, help="The same, 24k tokens.")] = 800,
    memory_turns: Annotated[int, typer.Option(min=5000, help="Turns for the memory slope.")] = 50_000,
    memory_limit_s: Annotated[float, typer.Option(min=5, help="Fewer turns when these take longer.")] = 200.0,
    vllm_router: Annotated[
        Path | None,
        typer.Option(
            metavar="PROGRAM",
            help="A vllm-router to compare with. [default: on the PATH, or as `bench peers` has it]",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes.")] = Path(
        "out/router.json"
    ),
) -> None:
    """Measure the router as a process of its own, in less than ten minutes."""
    import uvloop

    from kvloop.bench.router import missed

    plan = _Plan(pairs, turns, long_turns, memory_turns, memory_limit_s, _found(vllm_router))
    record = uvloop.run(_measure(plan))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    write_line(
        sys.stdout, json.dumps({key: value for key, value in record.items() if key != "samples"}, indent=2)
    )
    problems = missed(record)
    for problem in problems:
        say(problem)
    sys.exit(EXIT_FAILED if problems else 0)


@dataclass(frozen=True, slots=True)
class _Plan:
    pairs: int
    turns: int
    long_turns: int
    memory_turns: int
    memory_limit_s: float
    vllm_router: Path | None


@dataclass(frozen=True, slots=True)
class _Stand:
    """What is measured, running."""

    fleet: "Fleet"
    workers: "Workers"
    router: "Process"


@asynccontextmanager
async def _stand(preset: str, folder: Path) -> AsyncIterator[_Stand]:
    from kvloop.bench.router import Process
    from kvloop.bench.router_traffic import facts
    from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

    workers = {
        "engine": "simulated",
        "block_size": _BLOCK,
        "max_model_len": 32_768,
        "directory_timeout_ms": 2000.0,
        "extra_engine_args": {"preset": preset, "num_blocks": _BLOCKS},
    }
    # The longest way: both legs, and a read in between, which a prefix cache at P would spare.
    patient = {"directory_timeout_ms": 2000.0, "direct": False, "by_cost": False}
    plan = FleetPlan(workers=workers, prefill=[{"enable_prefix_caching": False}], routers=[patient])
    async with Fleet(plan, folder) as fleet:
        pid = fleet.parts["router-0"].pid
        assert pid is not None
        known = await facts(fleet.endpoint("prefill-0"), fleet.endpoint("decode-0"))
        yield _Stand(fleet, known, Process(pid))


@asynccontextmanager
async def _pass_through(stand: _Stand, folder: Path) -> AsyncIterator[tuple[str, "Process"]]:
    from kvloop.bench import router_passthrough
    from kvloop.bench.router import Process
    from kvloop.cli.supervisor.part import Command, Part
    from kvloop.cli.supervisor.plan import part_environment

    part = Part("pass-through", folder)
    arguments = [sys.executable, "-m", router_passthrough.__name__, stand.workers.prefill]
    arguments += [stand.workers.decode, str(part.ready_path)]
    await part.spawn(Command(arguments, part_environment({}, ())))
    try:
        endpoint = await part.wait_ready(120)
        assert part.pid is not None
        yield endpoint, Process(part.pid)
    finally:
        await part.stop(2.0)


@asynccontextmanager
async def _vllm_router(place: Path | None, folder: Path) -> AsyncIterator[dict[str, tuple["Way", "Process"]]]:
    """Yield vllm-router as a way of turns, over workers of its own kind; nothing where there is none."""
    if place is None:
        yield {}
        return
    from kvloop.bench.peers_http import ThroughHttp
    from kvloop.bench.router import Process
    from kvloop.cli.bench.peers_parts import ROUTER_NAME, http_engines, start_peer
    from kvloop.engine.simulated.cost import PRESETS

    async with AsyncExitStack() as stack:
        engines = await http_engines(stack, PRESETS["paced"].decode_base_s * 1000, folder)
        peer, endpoint = await start_peer(stack, ROUTER_NAME, place, engines, folder)
        way = ThroughHttp(endpoint)
        stack.push_async_callback(way.close)
        assert peer.pid is not None
        yield {ROUTER_NAME: (way, Process(peer.pid))}


def _found(program: Path | None) -> Path | None:
    """Return a vllm-router: as named, on the PATH, or as `kvloop bench peers` has fetched it."""
    from kvloop.bench import peers_fetch

    if program is not None:
        return program.absolute()
    if installed := shutil.which("vllm-router"):
        return Path(installed)
    try:
        return peers_fetch.get(peers_fetch.VLLM_ROUTER, offline=True)
    except peers_fetch.FetchFailed:
        return None


async def _measure(plan: _Plan) -> dict[str, Any]:
    from kvloop.cli.bench import environment

    begun, busy = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvloop-bench-") as folder:
        paced = await _paced(plan, Path(folder) / "paced")
        instant = await _instant(plan, Path(folder) / "instant")
    return {
        "when": environment.now(),
        "machine": environment.machine(),
        "versions": environment.versions(),
        # Of the whole machine, before and after: what is beyond some two was not ours.
        "load_average": [round(busy, 1), round(os.getloadavg()[0], 1)],
        "wall_s": round(time.monotonic() - begun),
        **{key: value for key, value in {**instant, **paced}.items() if key != "samples"},
        "samples": instant["samples"] | paced["samples"],
    }


async def _instant(plan: _Plan, folder: Path) -> dict[str, Any]:
    """Measure what needs engines that take no time."""
    from kvloop.bench import router as measure
    from kvloop.bench.router_traffic import PassedThrough, PastRouter, ThroughRouter, ThroughRouterByCall, Way

    async with (
        _stand("instant", folder) as stand,
        _pass_through(stand, folder) as (endpoint, _),
        AsyncExitStack() as stack,
    ):
        door = stand.fleet.endpoint("router-0")
        through = ThroughRouter(door)
        ways: dict[str, Way] = {
            "router": through,
            _BY_CALL: ThroughRouterByCall(door),
            _PASS: PassedThrough(stand.workers, endpoint),
            "direct": PastRouter(stand.workers),
        }
        for way in ways.values():
            stack.push_async_callback(way.close)
        firsts = {}
        for name, tokens in (("24k", measure.LONG), ("500", measure.SHORT)):
            say(f"first chunk, {name} tokens")
            firsts[name] = await measure.first_chunks(
                ways, tokens, rounds=plan.pairs, limit_s=_FIRST_CHUNKS_S
            )
        asked = await measure.lookups(through, stand.router, stand.fleet.store_url, 200)
        say(f"memory, {plan.memory_turns:,} turns")
        memory = await measure.memory(
            through, stand.router, turns=plan.memory_turns, limit_s=plan.memory_limit_s
        )
    rss = memory.pop("samples")
    return {
        "added_first_chunk_ms": {name: measure.added(samples) for name, samples in firsts.items()},
        "added_first_chunk_ms_by_call": {
            name: measure.added(samples, _BY_CALL) for name, samples in firsts.items()
        },
        # How fast the machine is: what the least costs that a router can do.
        "added_first_chunk_ms_passthrough": {
            name: measure.added(samples, _PASS) for name, samples in firsts.items()
        },
        "first_chunk_ms": {name: measure.median_ms(samples) for name, samples in firsts.items()},
        "lookups_per_turn": asked["commands"].get("lookup", 0) / asked["turns"],
        "store_commands": asked,
        "memory_slope": memory,
        "samples": {"first_chunk_ms": firsts, "memory": rss},
    }


async def _paced(plan: _Plan, folder: Path) -> dict[str, Any]:
    """Measure CPU on engines that give a token every 20 ms."""
    from kvloop.bench import router as measure
    from kvloop.bench.router_traffic import PassedThrough, ThroughRouter, ThroughRouterByCall, Way

    async with (
        _stand("paced", folder) as stand,
        _pass_through(stand, folder) as (endpoint, passing),
        _vllm_router(plan.vllm_router, folder) as peers,
        AsyncExitStack() as stack,
    ):
        door = stand.fleet.endpoint("router-0")
        through, by_call = ThroughRouter(door), ThroughRouterByCall(door)
        passed = PassedThrough(stand.workers, endpoint)
        for made in (through, by_call, passed):
            stack.push_async_callback(made.close)
        ways: dict[str, tuple[Way, Process]] = {
            "router": (through, stand.router),
            _BY_CALL: (by_call, stand.router),
            _PASS: (passed, passing),
        }
        say(f"CPU, 500 tokens, {plan.turns:,} turns each way")
        short = await measure.cpu(
            ways, measure.SHORT, conversations=64, turns=plan.turns, rounds=8, limit_s=_CPU_S
        )
        say(f"CPU, 24k tokens, {plan.long_turns:,} turns each way")
        long = await measure.cpu(
            ways | peers, measure.LONG, conversations=24, turns=plan.long_turns, rounds=8, limit_s=_CPU_S
        )
    each = {name: round(measure.per_turn_ms(short, name), 3) for name in ways}
    long_each = {name: round(measure.per_turn_ms(long, name), 3) for name in ways | peers}
    return {
        "cpu_per_turn_vs_passthrough": round(each["router"] / each[_PASS], 3),
        "cpu_per_turn_by_call_vs_passthrough": round(each[_BY_CALL] / each[_PASS], 3),
        "cpu_per_turn_ms": {"500": each, "24k": long_each},
        "chunks_per_cpu_second": round(measure.chunks_per_cpu_second(short, "router")),
        "chunks_per_cpu_second_by_call": round(measure.chunks_per_cpu_second(short, _BY_CALL)),
        "chunks_per_turn": {name: round(measure.chunks_per_turn(short, name), 1) for name in ways},
        "vllm_router": "measured" if peers else "not installed",
        "turns_per_cpu_second": {name: round(1000 / spent) for name, spent in long_each.items()},
        "samples": {"cpu_500": [m.as_dict() for m in short], "cpu_24k": [m.as_dict() for m in long]},
    }
