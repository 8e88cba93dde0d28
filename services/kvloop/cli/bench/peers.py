"""`kvloop bench peers`: kvloop beside vLLM's example proxies and vllm-router, in one run."""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences, write_line

if TYPE_CHECKING:
    from kvloop.bench.peers_real import RealPlan
    from kvloop.cli.bench.peers_record import PeersRecord

_STEP_MS = 20.0
_ASTRAY = 0.01
"""Share of a leg's turns that may go another way than its own before its figures are worth nothing."""


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("peers")(peers)
    return typer.main.get_command(single)


@dataclass(frozen=True, slots=True)
class _Plan:
    rounds: int
    turns: int
    limit_s: float
    cache: Path | None
    offline: bool
    real: "RealPlan | None"
    prefix_caching_on_prefill: bool


@sentences
def peers(
    *,
    rounds: Annotated[int, typer.Option(min=2, help="Turns each way for the first chunk.")] = 200,
    turns: Annotated[int, typer.Option(min=1, help="Turns each way for CPU time.")] = 480,
    limit_s: Annotated[float, typer.Option(min=0, help="Fewer of each when these take longer.")] = 45.0,
    real: Annotated[bool, typer.Option("--real/--no-real", help="Whether to play on real vLLM too.")] = True,
    conversations: Annotated[int, typer.Option(min=1, help="On real vLLM, of each leg.")] = 3,
    conversation_turns: Annotated[int, typer.Option(min=2, help="Turns of each.")] = 6,
    real_limit_s: Annotated[
        float, typer.Option(min=0, help="No further conversation begins after so many seconds.")
    ] = 150.0,
    prefix_caching_on_prefill: Annotated[
        bool, typer.Option("--prefix-caching-on-prefill", help="P with its own prefix cache, on both sides.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where peers are kept. [default: in the user's cache]"),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes.")] = Path(
        "out/peers.json"
    ),
) -> None:
    """Measure kvloop, vLLM's example proxies and vllm-router in front of the same engines.

    Peers are fetched once, pinned by version and hash, into the user's cache. What can't run is reported
    with its reason. The record is written after each point: Ctrl-C or a part that fails leave what there was.
    """
    import uvloop

    from kvloop.bench.peers import lines
    from kvloop.bench.peers_picture import draw
    from kvloop.bench.peers_real import RealPlan, ttft_lines
    from kvloop.cli.bench.peers_vllm import LONGEST
    from kvloop.cli.supervisor.part import PartFailed

    played = RealPlan(conversations=conversations, turns=conversation_turns, limit_s=real_limit_s)
    if real and played.longest > LONGEST:
        raise CommandFailed(
            f"--conversation-turns: the last of {conversation_turns} turns takes {played.longest:,} tokens,"
            f" the engines {LONGEST:,}; lower it"
        )
    plan = _Plan(rounds, turns, limit_s, cache, offline, played if real else None, prefix_caching_on_prefill)
    try:
        record = uvloop.run(_measure(plan, out))
    except PartFailed as failure:
        raise CommandFailed(str(failure)) from None
    for line in [*lines(record["peers"]), *ttft_lines(record["peers"])]:
        write_line(sys.stdout, line)
    written = [out, *draw(out.with_suffix(""), record)]
    write_line(sys.stdout, f"written to {', '.join(map(str, written))}")
    if complaints := complaints_of(record["peers"]):
        for complaint in complaints:
            say(complaint)
        sys.exit(EXIT_FAILED)


def complaints_of(found: "Mapping[str, Mapping[str, Any]]") -> list[str]:
    """Return what makes a record's figures of kvloop worth nothing, for people."""
    from kvloop.bench.peers import astray
    from kvloop.cli.bench import peers_parts, peers_vllm

    complaints = [] if found[peers_parts.KVLOOP_GRPC]["samples"] else ["kvloop was not measured"]
    for name, peer in found.items():
        told = {
            "simulated engines": (peer["verdicts"], peers_parts.VERDICT),
            "real vLLM": (peer["real"].get("later_verdicts", {}), peers_vllm.VERDICTS.get(name, "")),
        }
        complaints += [
            f"{name} is not what it is named for, on {where}: {astray(verdicts, wanted)}"
            for where, (verdicts, wanted) in told.items()
            if wanted and verdicts.get(wanted, 0) < (1 - _ASTRAY) * sum(verdicts.values())
        ]
    return complaints


def places(cache: Path | None, *, offline: bool) -> dict[str, "Path | str"]:
    """Return the folder of each peer's files, or why there is none."""
    from kvloop.bench import peers_fetch
    from kvloop.cli.bench.peers_parts import PROXY_NAME, ROUTER_NAME, TOY_NAME

    found: dict[str, Path | str] = {}
    wanted = {
        peers_fetch.VLLM_PROXIES: (PROXY_NAME, TOY_NAME),
        peers_fetch.VLLM_ROUTER: (ROUTER_NAME,),
    }
    for release, names in wanted.items():
        place: Path | str
        try:
            place = peers_fetch.get(release, cache, offline=offline)
        except peers_fetch.FetchFailed as failure:
            place = str(failure)
        found |= dict.fromkeys(names, place)
    return found


async def _measure(plan: _Plan, out: Path) -> dict[str, Any]:
    from kvloop.cli.bench.peers_record import PeersRecord

    say("peers: fetching what is not there yet")
    found = places(plan.cache, offline=plan.offline)
    settings = {
        "rounds": plan.rounds,
        "turns": plan.turns,
        "step_ms": _STEP_MS,
        "real": asdict(plan.real) if plan.real else None,
        "prefix_caching_on_prefill": plan.prefix_caching_on_prefill,
    }
    record = PeersRecord(out, settings, _versions())
    with tempfile.TemporaryDirectory(prefix="kvloop-bench-peers-") as folder:
        await _overhead(plan, found, Path(folder), record)
        await _real(plan, found, Path(folder) / "real", record)
    record.complete = True
    return record.keep()


async def _real(plan: _Plan, found: "Mapping[str, Path | str]", folder: Path, record: "PeersRecord") -> None:
    """Play conversations on real vLLM; what can't run has its reason."""
    from kvloop.bench import peers_real
    from kvloop.cli.bench import peers_vllm
    from kvloop.cli.bench.peers_parts import PROXY_NAME
    from kvloop.cli.supervisor.part import PartFailed

    if lacks := "--no-real was given" if plan.real is None else peers_vllm.lacks():
        record.real_reasons.append(dict.fromkeys(peers_vllm.LEGS, lacks))
        return
    assert plan.real is not None
    say("peers: starting real vLLM, four engines")
    try:
        async with peers_vllm.real(
            found[PROXY_NAME], folder, prefix_caching_on_prefill=plan.prefix_caching_on_prefill
        ) as stage:
            say(f"peers: conversations on real vLLM: {', '.join(stage.legs)}")
            playing = peers_real.Real(plan.real, dict(stage.legs), stage.encoder, kept=record.keep)
            record.turns = playing.turns
            record.real_reasons += [stage.reasons, playing.lost]
            try:
                await playing.play()
            finally:
                record.proxy_log = stage.proxy_hits()
    except (PartFailed, OSError, ValueError) as failure:
        # What was measured before is worth keeping.
        record.real_reasons.append(dict.fromkeys(peers_vllm.LEGS, str(failure)))


async def _overhead(
    plan: _Plan, found: "Mapping[str, Path | str]", folder: Path, record: "PeersRecord"
) -> None:
    """Measure first chunks on engines that take no time, and CPU on engines with a token every 20 ms."""
    from kvloop.bench import peers as measure
    from kvloop.cli.bench.peers_parts import simulated
    from kvloop.engine.settings import smollm2_dir

    for stage_name, step_ms in (("instant", 0.0), ("paced", _STEP_MS)):
        say(f"peers: starting, {stage_name} engines")
        async with simulated(found, smollm2_dir(), step_ms=step_ms, folder=folder / stage_name) as stage:
            record.floors |= {name: entrant.floor for name, entrant in stage.entrants.items()}
            record.verdicts.append({name: one.verdicts() for name, one in stage.entrants.items()})
            field = measure.Field(dict(stage.entrants))
            record.reasons += [stage.reasons, field.lost]
            for tokens in measure.LENGTHS:
                if step_ms:
                    say(f"peers: CPU, {tokens:,} ids")
                    record.costs[tokens] = await measure.cpu(
                        field, tokens, at_once=32, turns=plan.turns, rounds=4, limit_s=plan.limit_s
                    )
                    record.keep()
                    continue
                for at_once in measure.AT_ONCE:
                    say(f"peers: first chunk, {tokens:,} ids, {at_once} at once")
                    record.firsts[tokens, at_once] = await measure.first_chunks(
                        field, tokens, at_once, rounds=max(2, plan.rounds // at_once), limit_s=plan.limit_s
                    )
                    record.keep()
            record.engines[stage_name] = await stage.counts()


def _versions() -> dict[str, str]:
    from kvloop.bench.peers_fetch import VLLM_PROXIES, VLLM_ROUTER

    return {
        "vllm-router": VLLM_ROUTER.version,
        "vLLM's example proxies": VLLM_PROXIES.version,
    }
