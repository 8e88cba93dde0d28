"""`kvloop bench gateway`: what the gateway adds, on simulated engines with a real tokenizer."""

import asyncio
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloop.cli.errors import CommandFailed, sentences, write_line

MODEL = "smollm2"
_LONGEST = 32_768
_SHORT, _LONG = 2_000, 24_000
_STEP_MS = 42.0
"""A decode step of the cost model with 200 sequences, at time_scale 1."""
_PACED = "qwen3-32b-h200"


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("gateway")(gateway)
    return typer.main.get_command(single)


@sentences
def gateway(
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes.")] = Path(
        "out/gateway.json"
    ),
    rounds: Annotated[int, typer.Option(min=10, help="First chunks measured each way.")] = 200,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 200,
    stream_tokens: Annotated[int, typer.Option(min=10, help="Tokens of each.")] = 120,
    pace_ms: Annotated[float, typer.Option(min=1, help="About a token each so often, per stream.")] = 100.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each long conversation.")] = 20,
) -> None:
    """Measure the gateway: first chunk at 2k tokens, 200 streams at once, turns a core at 24k tokens."""
    import uvloop

    from kvloop.bench.gateway import missed
    from kvloop.bench.sse import StreamFailed
    from kvloop.bench.target import TargetFailed
    from kvloop.cli.places import smollm2_checkpoint
    from kvloop.cli.supervisor.part import PartFailed

    tokenizer = str(smollm2_checkpoint())
    measured = _measure(
        tokenizer, rounds, streams=streams, stream_tokens=stream_tokens, pace_ms=pace_ms, turns=turns
    )
    try:
        record = uvloop.run(measured)
    except (StreamFailed, TargetFailed, PartFailed) as failure:
        raise CommandFailed(str(failure)) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    for name in (
        "added_p50_ms",
        "longest_stall_ms",
        "usual_gap_ms",
        "turns_per_cpu_s",
        "uncached_turns_per_cpu_s",
    ):
        write_line(sys.stdout, f"{name:<26} {record[name]:.2f}")
    write_line(sys.stdout, f"written to {out}")
    if problems := missed(record):
        raise CommandFailed("\n".join(problems))


async def _measure(
    tokenizer: str, rounds: int, *, streams: int, stream_tokens: int, pace_ms: float, turns: int
) -> dict[str, Any]:
    import psutil

    from kvloop.bench import gateway as measure
    from kvloop.cli.bench import environment
    from kvloop.cli.supervisor.board import Board
    from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

    long = json.dumps({"max_position_embeddings": _LONGEST})
    shared = {
        "model": tokenizer,
        "served_model_name": MODEL,
        "max_model_len": _LONGEST,
        "vllm_args": ["--hf-overrides", long],
    }
    plan = FleetPlan(
        workers={
            "engine": "simulated",
            "extra_engine_args": {"tokenizer": tokenizer},
            "max_model_len": _LONGEST,
        },
        gateways=[shared, {**shared, "render_cache_bytes": 0}],
    )
    with tempfile.TemporaryDirectory(prefix="kvloop-bench-gateway-") as folder, Board() as board:
        fleet = Fleet(plan, Path(folder), board.tell)
        board.show(fleet.parts)
        async with fleet:
            board.finish()
            places = [
                measure.Place(gateway, fleet.endpoint("router-0"), MODEL)
                for gateway in fleet.endpoints("gateway")
            ]

            def cpu_time(number: int) -> float:
                used = psutil.Process(fleet.parts[f"gateway-{number}"].pid).cpu_times()
                return float(used.user + used.system)

            first = await measure.first_chunks(places[0], tokens=_SHORT, rounds=rounds)
            cached, uncached = [
                await measure.long_chats(
                    place, partial(cpu_time, number), tokens=_LONG, conversations=4, turns=turns
                )
                for number, place in enumerate(places)
            ]
            paced = {"tokenizer": tokenizer, "preset": _PACED, "time_scale": pace_ms / _STEP_MS}
            await asyncio.gather(
                *(fleet.restart(name, extra_engine_args=paced) for name in ("prefill-0", "decode-0"))
            )
            # The router has to notice that its workers are back.
            await measure.wait_serving(places[0])
            arrivals = await measure.many_streams(places[0], streams=streams, tokens=stream_tokens)
    waits = measure.stalls(arrivals)
    medians = {name: statistics.median(values) for name, values in first.items()}
    return {
        "added_p50_ms": medians["gateway"] - medians["router"],
        "first_chunk_p50_ms": medians,
        "longest_stall_ms": waits["longest_stall_ms"],
        "usual_gap_ms": waits["usual_gap_ms"],
        "all_streams_s": waits["window_s"],
        "turns_per_cpu_s": measure.turns_per_cpu_s(cached),
        "uncached_turns_per_cpu_s": measure.turns_per_cpu_s(uncached),
        "when": environment.now(),
        "machine": environment.machine(),
        "load_average": os.getloadavg()[0],
        "versions": environment.versions(),
        "settings": {
            "rounds": rounds,
            "streams": streams,
            "stream_tokens": stream_tokens,
            "pace_ms": pace_ms,
            "tokens": [_SHORT, _LONG],
        },
        "samples": {
            "first_chunk_ms": {name: [round(one, 3) for one in values] for name, values in first.items()},
            "gaps_ms": waits["gaps_ms"],
            "long_chats": {"cached": cached, "uncached": uncached},
        },
    }
