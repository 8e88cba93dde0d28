"""`kvloop bench replicas`: three routers behind HAProxy, one of them killed, the store restarted empty."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences, write_line

if TYPE_CHECKING:
    from kvloop.bench.replicas import Event, Outage, ReplicaRecord, Rota
    from kvloop.bench.target import Outcome
    from kvloop.bench.workload.model import Session
    from kvloop.cli.supervisor.fleet import Fleet

CONFIG = Path("deploy/haproxy/haproxy.cfg")
MEMORY = "memory://"
_VOCABULARY = 32_000
_PATIENT = {"directory_timeout_ms": 250.0}
"""Instead of 25: a machine that is busy with other things must not decide what is measured."""
_OPENING, _INPUT, _OUTPUT = (96, 256), (24, 72), (8, 24)
"""Tokens, whole, uniform."""


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("replicas")(replicas)
    return typer.main.get_command(single)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is made of."""

    turns: int
    turns_per_conversation: int
    at_a_time: int
    seed: int
    preset: str
    config: Path

    def workers(self) -> dict[str, Any]:
        """Return the settings of the workers. Without a prefix cache on P, what is not read is computed."""
        return {"engine": "simulated", "model": self.preset, "block_size": 16, "max_model_len": 8192}


@sentences
def replicas(
    *,
    turns: Annotated[int, typer.Option(min=12, help="At least so many turns.")] = 1200,
    turns_per_conversation: Annotated[int, typer.Option(min=2, help="Of each conversation.")] = 24,
    at_a_time: Annotated[int, typer.Option(min=4, help="Conversations whose turns are interleaved.")] = 8,
    seed: Annotated[int, typer.Option(help="The same seed gives the same conversations.")] = 0,
    preset: Annotated[str, typer.Option(help="Cost model of the simulated engines.")] = "instant",
    haproxy_config: Annotated[Path, typer.Option(metavar="FILE", help="The balancer's.")] = CONFIG,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes.")] = Path(
        "out/replicas.json"
    ),
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where logs go. [default: a temporary folder]")
    ] = None,
) -> None:
    """Play conversations through three routers behind HAProxy, on simulated engines and a real store.

    Consecutive turns of a conversation meet different routers. Half-way a router is killed while it serves a
    turn; at three quarters the store is killed and comes back empty. Every answer is compared with a cold
    engine's. The same is played on memory:// per process. Fails when a promise is missed.
    """
    from kvloop.cli import signals

    setting = Setting(turns, turns_per_conversation, at_a_time, seed, preset, haproxy_config)
    signals.run(_replicas(setting, out, logs))


async def _replicas(setting: Setting, out: Path, logs: Path | None) -> int:
    from kvloop.bench.replicas import missed, summarise
    from kvloop.cli.bench.balanced import ROUTERS, haproxy_binary, haproxy_version
    from kvloop.cli.bench.environment import machine, now, versions
    from kvloop.cli.logfolder import log_folder

    binary = haproxy_binary()
    if not setting.config.is_file():
        raise CommandFailed(f"{setting.config} is missing: run this in the repository, or name the file")
    made = sessions_of(setting)
    async with log_folder(logs, "replicas", CommandFailed) as folder:
        records = await _played(setting, made, binary, folder / "store", None)
        contrast = await _played(setting, made, binary, folder / "memory", MEMORY)
    settings = {
        "date": now(),
        "machine": machine(),
        "versions": versions() | {"haproxy": haproxy_version(binary)},
        "routers": ROUTERS,
        "prefill_workers": 1,
        "decode_workers": 2,
        "conversations": len(made),
        "turns_per_conversation": setting.turns_per_conversation,
        "at_a_time": setting.at_a_time,
        "seed": setting.seed,
        "workers": setting.workers() | {"enable_prefix_caching": {"prefill": False, "decode": True}},
        **_PATIENT,
        "haproxy_config": str(setting.config),
        "router_killed_at": kill_at(setting, made),
        "store_restarted_at": restart_at(setting, made),
    }
    summary = summarise(records, contrast, settings)
    await asyncio.to_thread(_write, out, summary)
    _tell(summary)
    complaints = missed(records, contrast)
    for complaint in complaints:
        say(complaint)
    say(f"The record is in {out}")
    return EXIT_FAILED if complaints else 0


def _write(out: Path, summary: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(summary) + "\n", encoding="utf-8")


def _tell(summary: Mapping[str, Any]) -> None:
    contrast, outage = summary["contrast_memory"], summary["in_outage"]
    lines = [
        f"turns          {summary['turns']:>6}   {summary['by_router']}",
        f"reusable       {summary['reusable']:>6}   but for {outage['turns']} turns in the store's outage",
        f"reused         {summary['reused']:>6}   {summary['reuse_rate']:.2%}",
        f"wrong          {summary['wrong']:>6}",
        f"failed         {summary['failed']:>6}   {summary['asked_twice']} asked twice",
        f"memory://      {contrast['reused']:>6}   of {contrast['reusable']} reusable were reused",
    ]
    for line in lines:
        write_line(sys.stdout, line)


def sessions_of(setting: Setting) -> "list[Session]":
    """Return the conversations: as many as the turns need, all of one length, nothing in common."""
    from kvloop.bench.workload.distributions import Constant, UniformInt
    from kvloop.bench.workload.multiturn import MultiTurn

    workload = MultiTurn(
        messages=Constant(2 * setting.turns_per_conversation),
        common_opening_tokens=0,
        opening_tokens=UniformInt(*_OPENING),
        input_tokens=UniformInt(*_INPUT),
        output_tokens=UniformInt(*_OUTPUT),
    )
    return workload.sessions(setting.seed, -(-setting.turns // setting.turns_per_conversation))


def kill_at(setting: Setting, made: "Sequence[Session]") -> int:
    """Return how many turns are played before a router is killed."""
    return sum(session.requests for session in made) // 2


def restart_at(setting: Setting, made: "Sequence[Session]") -> int:
    """Return how many turns are played before the store is restarted."""
    return sum(session.requests for session in made) * 3 // 4


async def _played(
    setting: Setting, made: "Sequence[Session]", binary: str, folder: Path, store_url: str | None
) -> "list[ReplicaRecord]":
    from kvloop.bench.replicas import Outage, Player, ReplicaPlan, Rota
    from kvloop.bench.target import RouterTarget
    from kvloop.bench.workload.words import WordEncoder
    from kvloop.cli.bench.balanced import ROUTERS, open_balanced
    from kvloop.cli.bench.cold import ColdEngine
    from kvloop.cli.bench.progress import Bar
    from kvloop.cli.supervisor.fleet import FleetPlan

    async with AsyncExitStack() as stack:
        plan = FleetPlan(
            workers={**setting.workers(), **_PATIENT},
            prefill=[{"enable_prefix_caching": False}],
            decode=[{}, {}],
            # What is reused shows as read back.
            routers=[{**_PATIENT, "direct": False, "by_cost": False}] * ROUTERS,
            store_url=store_url,
        )
        fleet, endpoint = await stack.enter_async_context(open_balanced(plan, folder, binary, setting.config))
        cold = await stack.enter_async_context(ColdEngine(setting.workers()))
        target = RouterTarget(endpoint)
        stack.push_async_callback(target.close)
        bar = stack.enter_context(Bar(sum(session.requests for session in made)))
        rota, outage = Rota(fleet.names("router")), Outage()
        troubles = Troubles(fleet, rota, outage)
        stack.push_async_callback(troubles.settled)
        events: dict[int, Event] = {kill_at(setting, made): troubles.kill_a_router}
        if store_url is None:
            events[restart_at(setting, made)] = troubles.restart_the_store
        player = Player(
            plan=ReplicaPlan(at_a_time=setting.at_a_time),
            target=target,
            reference=cold,
            encoder=WordEncoder(_VOCABULARY),
            clock=time.monotonic,
            rota=rota,
            outage=outage,
            events=events,
            told=lambda record: bar.count(record.outcome),
        )
        return await player.play(made)


class Troubles:
    """What happens to a fleet while a turn is on its way."""

    def __init__(self, fleet: "Fleet", rota: "Rota", outage: "Outage") -> None:
        self._fleet = fleet
        self._rota = rota
        self._outage = outage
        self._tasks: list[asyncio.Task[None]] = []

    async def kill_a_router(self, sending: "Awaitable[Outcome]") -> "Outcome":
        """SIGKILL the router that has the turn, before any token: P stands still until it is dead."""
        [due] = self._rota.due()
        async with _standing(self._fleet, self._fleet.names("prefill")):
            turn = asyncio.ensure_future(sending)
            # The request is on its way to the router, or its prefill leg to P.
            await asyncio.wait({turn}, timeout=0.05)
            await self._fleet.kill(due)
        self._rota.lost(due)
        return await turn

    async def restart_the_store(self, sending: "Awaitable[Outcome]") -> "Outcome":
        """SIGKILL the store while a turn is on its way; it comes back empty while turns go on."""
        turn = asyncio.ensure_future(sending)
        self._outage.begin(time.monotonic())
        await self._fleet.kill("store")
        self._tasks.append(asyncio.create_task(self._bring_back()))
        return await turn

    async def _bring_back(self) -> None:
        from kvloop.metastore.breaker import LONGEST_PAUSE_S

        await self._fleet.start("store")
        # Routers and decode workers notice by probes of their own.
        self._outage.end(time.monotonic() + LONGEST_PAUSE_S)

    async def settled(self) -> None:
        """Return when nothing is still being brought back. Raises what went wrong."""
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def _standing(fleet: "Fleet", names: Sequence[str]) -> AsyncIterator[None]:
    for name in names:
        fleet.parts[name].signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            fleet.parts[name].signal(signal.SIGCONT)
