"""`kvloop bench leases`."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloop.cli import options
from kvloop.cli.errors import say, sentences

_HELP = """Measure what leases cost, and what they are worth under memory pressure.

Starts a prefill worker without a prefix cache, two decode workers (the second with few blocks) and a router
to the second; under memory pressure, on CPUs, also a P and a D of stock vLLM. The engine's options go to
every worker. Writes one JSON file.
"""
_SMALL_BLOCKS = 96
_DIRECTORY_S = 2.0

_EXTRA: dict[str, Any] = {
    "out": Annotated[Path | None, typer.Option(metavar="FILE", help="[default: out/leases.json]")],
    "rounds": Annotated[int | None, typer.Option(min=1, help="Rounds under pressure. [default: 3]")],
    "reads": Annotated[int | None, typer.Option(min=10, help="BeginRead + EndRead. [default: 1000]")],
    "stock": Annotated[
        bool | None,
        typer.Option("--stock/--no-stock", help="Stock vLLM beside it. [default: on CPUs, with vLLM]"),
    ],
    "idle_s": Annotated[float | None, typer.Option(min=1.0, help="Seconds of idleness. [default: 20]")],
}


def make_command() -> Any:
    """Return the command; its engine options come from the engine's settings."""
    from kvloop.engine.settings import EngineSettings

    made = options.options_of(EngineSettings)

    def run(given: dict[str, Any], **own: Any) -> None:
        from kvloop.cli import signals

        engine = {option.parameter: option.parse(given.get(option.parameter)) for option in made}
        engine = {name: value for name, value in engine.items() if value not in (None, [], ())}
        signals.run(_leases(engine, own))

    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("leases")(sentences(options.command_of(made, _EXTRA, run, _HELP)))
    return typer.main.get_command(single)


async def _leases(engine: dict[str, Any], own: Mapping[str, Any]) -> int:
    from kvloop.bench.target import TargetFailed
    from kvloop.cli.logfolder import log_folder
    from kvloop.cli.places import check_model

    check_model(engine)
    async with log_folder(None, "leases", TargetFailed) as folder:
        found = await _measure(engine, own, folder)
    _write(own["out"] or Path("out/leases.json"), found)
    return 0


def _write(out: Path, found: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    say(f"Written to {out}")


async def _measure(engine: dict[str, Any], own: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from kvloop.bench.leases import Holder, Oversubscription, begin_end_read, idle_cpu
    from kvloop.bench.target import RouterTarget
    from kvloop.cli.bench import stock
    from kvloop.cli.bench.environment import facts_of, machine, now, versions
    from kvloop.cli.supervisor.board import Board
    from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
    from kvloop.metastore.factory import StoreOptions, open_store

    given = {name: value for name, value in own.items() if value is not None}
    patient = {"directory_timeout_ms": _DIRECTORY_S * 1e3}
    plan = FleetPlan(
        workers={**engine, **patient},
        prefill=[{"enable_prefix_caching": False}],
        decode=[{}, {"hold_share": 0.9, **_few_blocks(engine)}],
        routers=[{**patient, "direct": False, "by_cost": False}],
    )
    beside = None
    if stock.can_run(engine) and given.get("stock", True):
        beside = functools.partial(stock.open_stock, engine, _SMALL_BLOCKS + 1, folder)
    with Board() as board:
        fleet = Fleet(plan, folder, board.tell)
        board.show(fleet.parts)
        async with fleet:
            small = fleet.endpoint("decode-1")
            await fleet.restart("router-0", decode_endpoints=small)
            pid = fleet.parts["decode-0"].pid
            assert pid is not None
            async with Holder(fleet.endpoint("decode-0"), seed=1) as holder, Holder(small, seed=2) as few:
                found = {"date": now(), "machine": machine(), "versions": versions()}
                found["engine"] = facts_of(holder.info)
                say("idle")
                store = open_store(fleet.store_url, options=StoreOptions(deadline_s=_DIRECTORY_S))
                try:
                    idle_s = given.get("idle_s", 20.0)
                    found["idle_cpu"] = await idle_cpu(holder, pid, 100, idle_s, store.directory)
                finally:
                    await store.close()
                say("reads")
                reads = await begin_end_read(holder, 1000, given.get("reads", 1000), streams=8)
                found["begin_end_read_ms"] = reads
                say("memory pressure")
                target = RouterTarget(fleet.endpoint("router-0"))
                try:
                    play = Oversubscription(rounds=given.get("rounds", 3))
                    found["oversubscription"] = await play.measure(target, few, beside)
                finally:
                    await target.close()
    return found


def _few_blocks(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that give the second decode worker a small pool."""
    if engine.get("engine") == "simulated":
        return {"extra_engine_args": {**engine.get("extra_engine_args", {}), "num_blocks": _SMALL_BLOCKS}}
    return {
        "extra_engine_args": {
            **engine.get("extra_engine_args", {}),
            "num_gpu_blocks_override": _SMALL_BLOCKS + 1,
        }
    }
