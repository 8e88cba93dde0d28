"""`kvloop bench sweep`."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloop.cli import options
from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences

if TYPE_CHECKING:
    from kvloop.bench.records import RecordFile
    from kvloop.bench.sweep import Leg, SweepPlan
    from kvloop.cli.bench.fleet import Routes
    from kvloop.v1alpha1 import worker_pb2

_HELP = """Measure TTFT against prompt length, leg by leg, on identical prompts.

Starts one decode worker and the prefill workers and routers that the legs need, or uses routers that run
already (--router). The engine's options go to every worker. Ctrl-C ends it and keeps what was measured.

Legs: off-cold (P computes everything), off-hot (P has its own prefix cache), readback (P reads the history
back from D), direct (D goes on by itself; where the router offers it). By name only: off-moved and
readback-moved (the second turn meets another P), off-evicted and readback-evicted (other prompts fill P's
cache between the turns).
"""
_LENGTHS = "512,1024,2048,4096"
_VOCABULARY = 32_000

_EXTRA: dict[str, Any] = {
    "legs": Annotated[
        str | None, typer.Option(help="Legs, with commas. [default: the first four, if offered]")
    ],
    "lengths": Annotated[str | None, typer.Option(help=f"Prompt lengths in tokens. [default: {_LENGTHS}]")],
    "samples": Annotated[int | None, typer.Option(min=1, help="Per length and leg. [default: 6]")],
    "suffix_tokens": Annotated[
        int | None, typer.Option(min=1, help="New input of the measured turn. [default: 160]")
    ],
    "answer_tokens": Annotated[
        int | None, typer.Option(min=1, help="Answer of the turn before. [default: 32]")
    ],
    "output_tokens": Annotated[
        int | None, typer.Option(min=1, help="Answer of the measured turn. [default: 16]")
    ],
    "warm_up": Annotated[int | None, typer.Option(min=0, help="Rounds that do not count. [default: 1]")],
    "warm_up_all": Annotated[
        bool | None, typer.Option("--warm-up-all", help="Warm up at all lengths, not the shortest alone.")
    ],
    "workload_seed": Annotated[int | None, typer.Option(help="Seed of prompts and order. [default: 0]")],
    "out": Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go. [default: out/sweep]")
    ],
    "router": Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A router whose P has no prefix cache.")
    ],
    "router_hot": Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A router whose P has a prefix cache.")
    ],
    "router_direct": Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A router that lets turns go to D directly.")
    ],
    "router_other": Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A router with another P that has a prefix cache.")
    ],
    "prefill_worker": Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A P of theirs: what it says of its engine is recorded."),
    ],
    "filler_tokens": Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that fill a P's cache. [default: P's whole block pool]"),
    ],
    "title": Annotated[
        str | None, typer.Option(help="What is measured, for the pictures. [default: from the settings]")
    ],
    "token": Annotated[str | None, typer.Option(envvar="KVLOOP_TOKEN", help="Bearer token of the routers.")],
    "vocabulary": Annotated[
        int | None,
        typer.Option(min=2, help=f"Size, with routers that run already. [default: {_VOCABULARY}]"),
    ],
    "logs": Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where logs go. [default: a temporary folder]")
    ],
}


def make_command() -> Any:
    """Return the command; its engine options come from the engine's settings."""
    from kvloop.engine.settings import EngineSettings

    made = options.options_of(EngineSettings)

    def run(given: dict[str, Any], **own: Any) -> None:
        from kvloop.cli import signals

        engine = {option.parameter: option.parse(given.get(option.parameter)) for option in made}
        engine = {name: value for name, value in engine.items() if value not in (None, [], ())}
        signals.run(_sweep(engine, plan_of(own), own))

    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("sweep")(sentences(options.command_of(made, _EXTRA, run, _HELP)))
    return typer.main.get_command(single)


def plan_of(own: Mapping[str, Any]) -> "SweepPlan":
    """Return the plan that the options ask for. Raises CommandFailed."""
    from kvloop.bench.sweep import SweepPlan
    from kvloop.bench.workload.lengths import LengthSweep

    given = {name: value for name, value in own.items() if value is not None}
    shape = {name: given[name] for name in ("suffix_tokens", "answer_tokens") if name in given}
    try:
        lengths = tuple(int(text) for text in str(given.get("lengths", _LENGTHS)).split(","))
        plan = SweepPlan(
            legs=tuple(_legs(given)),
            lengths=tuple(dict.fromkeys(lengths)),
            samples=given.get("samples", 6),
            shape=LengthSweep(**shape),
            output_tokens=given.get("output_tokens", 16),
            seed=given.get("workload_seed", 0),
            filler_tokens=given.get("filler_tokens", 0),
            warm_up=given.get("warm_up", 1),
            warm_up_all=given.get("warm_up_all", False),
        )
        plan.check()
    except ValueError as error:
        raise CommandFailed(f"--lengths: {error}") from None
    return plan


def _legs(given: Mapping[str, Any]) -> "list[Leg]":
    from kvloop.bench.sweep import LEGS, STANDARD
    from kvloop.cli.bench.fleet import legs_offered

    routes = running_routes(given)
    running = [leg for leg in LEGS.values() if set(leg.routes) <= routes.keys()]
    names = {leg.name: leg for leg in (running if routes else legs_offered())}
    usual = ",".join(leg.name for leg in STANDARD if leg.name in names)
    wanted = [name.strip() for name in str(given.get("legs", usual)).split(",")]
    for name in wanted:
        if name not in names:
            known = f"choose from {', '.join(names)}" if name not in LEGS else "nothing here offers it"
            raise CommandFailed(f"--legs: {name}: {known}")
    return [names[name] for name in dict.fromkeys(wanted)]


def running_routes(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the routers that were named, by route."""
    named = {"cold": "router", "hot": "router_hot", "other": "router_other", "direct": "router_direct"}
    return {route: given[option] for route, option in named.items() if given.get(option)}


async def _sweep(engine: dict[str, Any], plan: "SweepPlan", own: Mapping[str, Any]) -> int:
    from kvloop.bench.records import REQUESTS, RecordFile
    from kvloop.cli.bench.environment import facts_of, here, now, of_client
    from kvloop.cli.logfolder import log_folder
    from kvloop.cli.places import check_model

    running = running_routes(own)
    if not running:
        check_model(engine)
    elif any(leg.evicted for leg in plan.legs) and not plan.filler_tokens and not own["prefill_worker"]:
        raise CommandFailed(
            "--filler-tokens: running routers don't tell the size of P's cache; give its tokens,"
            " or a P's address with --prefill-worker"
        )
    out: Path = own["out"] or Path("out/sweep")
    # What runs already may run elsewhere, with other packages.
    settings = {"date": now(), **(of_client() if running else here())}
    if own["title"]:
        settings["title"] = own["title"]
    complete, lacking = False, list[str]()
    async with (
        log_folder(own["logs"], "sweep") as folder,
        _routes(engine, plan, own, folder) as (routes, vocabulary),
    ):
        if routes.info.engine:
            settings |= facts_of(routes.info)
        if own["filler_tokens"] is None:
            pool = routes.info.pool.total_blocks * routes.info.block_size
            plan = replace(plan, filler_tokens=pool)
        settings |= settings_of(plan)
        with RecordFile(out / REQUESTS) as file:
            try:
                playing = _play(plan, routes, vocabulary, own["token"], file)
                await _unless_crashed(playing, routes)
                complete = True
            finally:
                # A signal comes as a cancellation: what was measured is kept.
                lacking = _report(out, file, settings, complete=complete)
    if failed := [record for record in file.records if record.error]:
        say(f"{len(failed)} requests failed; the first: {failed[0].error}")
        return EXIT_FAILED
    return EXIT_FAILED if lacking else 0


async def _unless_crashed(playing: Coroutine[Any, Any, None], routes: "Routes") -> None:
    """Play to the end; a part that crashes ends it."""
    tasks = {asyncio.create_task(playing)}
    if routes.watch is not None:
        tasks.add(asyncio.create_task(routes.watch()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _routes(
    engine: dict[str, Any], plan: "SweepPlan", own: Mapping[str, Any], folder: Path
) -> "AsyncIterator[tuple[Routes, int]]":
    from kvloop.cli.bench.fleet import Routes, open_routes
    from kvloop.v1alpha1 import worker_pb2

    if running := running_routes(own):
        info = await _facts_of(own["prefill_worker"]) if own["prefill_worker"] else worker_pb2.WorkerInfo()
        _check_length(plan, info)
        yield Routes(running, info), own["vocabulary"] or info.vocab_size or _VOCABULARY
        return
    async with open_routes(plan.legs, engine, folder) as routes:
        _check_length(plan, routes.info)
        yield routes, routes.info.vocab_size


async def _facts_of(endpoint: str) -> "worker_pb2.WorkerInfo":
    from kvloop.cli.demo.play import PrefillInfo

    reader = PrefillInfo(endpoint)
    try:
        return await reader.read()
    except CommandFailed as failure:
        raise CommandFailed(f"--prefill-worker: {endpoint}: {failure}") from None
    finally:
        await reader.close()


def _check_length(plan: "SweepPlan", info: "worker_pb2.WorkerInfo") -> None:
    """Raise CommandFailed where the model is too short for a plan; what is not told, is not checked."""
    longest = max(plan.lengths) + plan.output_tokens
    if info.max_model_len and longest > info.max_model_len:
        raise CommandFailed(
            f"the longest turn takes {longest:,} tokens, the model {info.max_model_len:,};"
            " lower --lengths or raise --max-model-len"
        )


async def _play(
    plan: "SweepPlan", routes: "Routes", vocabulary: int, token: str | None, file: "RecordFile"
) -> None:
    from kvloop.bench.records import Record
    from kvloop.bench.sweep import Sweep
    from kvloop.bench.target import RouterTarget
    from kvloop.bench.workload.words import WordEncoder
    from kvloop.cli.bench.progress import Bar

    async with AsyncExitStack() as stack:
        targets = {}
        for route, endpoint in routes.endpoints.items():
            targets[route] = RouterTarget(endpoint, token=token)
            stack.push_async_callback(targets[route].close)
        bar = stack.enter_context(Bar(plan.requests))

        def told(record: Record) -> None:
            file.add(record)
            bar.tell(record)

        await Sweep(plan, targets, WordEncoder(vocabulary), told).play()


def settings_of(plan: "SweepPlan") -> dict[str, Any]:
    """Return a plan as a summary tells it."""
    return {
        "legs": {leg.name: leg.line for leg in plan.legs},
        "lengths": list(plan.lengths),
        "samples": plan.samples,
        "warm_up": plan.warm_up,
        "suffix_tokens": plan.shape.suffix_tokens,
        "answer_tokens": plan.shape.answer_tokens,
        "output_tokens": plan.output_tokens,
        "filler_tokens": plan.filler_tokens if any(leg.evicted for leg in plan.legs) else 0,
        "seed": plan.seed,
    }


def _report(out: Path, file: "RecordFile", settings: Mapping[str, Any], *, complete: bool) -> list[str]:
    """Write what there is; return what legs lack."""
    if not any(record.measured and not record.error for record in file.records):
        say(f"Nothing was measured; what there is, is in {out}")
        return []
    from kvloop.bench.report import summarise
    from kvloop.cli.bench.report import write_all

    return write_all(out, summarise(file.records, settings, complete=complete))
