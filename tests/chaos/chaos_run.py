"""`make chaos`: traffic over a fleet of which every kind of process is killed, paused, drained and restarted.

    python tests/chaos/chaos_run.py [--turns N] [--only simulated|real] [--out out/chaos.json]

Exits with 1, and says why, when a promise is missed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from chaos_faults import KINDS, Faults, hit
from chaos_fleet import POLL_S, SIMULATED, Arena, Size
from chaos_oracle import ColdOracle, Oracle, SimulatedOracle
from chaos_traffic import Routers, Traffic

from kvloop.engine.settings import smollm2_dir

REAL_KINDS = (
    "pause_decode",
    "kill_decode_mid_stream",
    "restart_store_empty",
    "kill_router",
    "drain_decode",
    "pause_store",
    "drain_router",
    "kill_decode_mid_read",
    "kill_prefill",
)
"""One of each that the engines have a part in; four restarts of an engine are most of the time."""
REAL = Size(
    conversations=8,
    turns=24,
    users=3,
    routers=2,
    prefills=2,
    decodes=2,
    limit_s=600.0,
    hold_s=30.0,
    answer_tokens=(16, 32),
    prompt_tokens=(80, 160),
    new_tokens=(10, 30),
    longest_prompt=600,
    workers={
        "engine": "vllm",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 128 * 1024 * 1024,
        "kv_recompute_threshold": 32,
        "prefill_hold_s": 15.0,
    },
    ready_timeout_s=280.0,
    pause_s=10.0,
    info_timeout_s=3.0,
)
_TEXT = Path(__file__).parents[2] / "README.md"
_TELL_S = 15.0
_AFTER_HOLD_S = 60.0
"""Pins and prompts handed over outlast holds by no more."""


async def simulated(
    size: Size, folder: Path, *, seed: int, kinds: Sequence[str] = KINDS, rolling: bool = False
) -> dict[str, Any]:
    """Run on simulated engines and return the report. rolling: every process is restarted in turn."""
    oracle = SimulatedOracle()
    await oracle.start()
    try:
        async with Arena(replace(size, workers=size.workers or SIMULATED), folder) as arena:
            return await _run(
                arena, lambda _: oracle, _any_ids, seed=seed, kinds=_shuffled(kinds, seed), rolling=rolling
            )
    finally:
        await oracle.stop()


async def real(size: Size, folder: Path, *, seed: int) -> dict[str, Any]:
    """Run on real vLLM and return the report."""
    async with Arena(size, folder) as arena:
        return await _run(arena, ColdOracle, _words(smollm2_dir()), seed=seed, kinds=REAL_KINDS)


async def _run(
    arena: Arena,
    oracle: Callable[[Routers], Oracle],
    words: Callable[[random.Random, int], list[int]],
    *,
    seed: int,
    kinds: Sequence[str],
    rolling: bool = False,
) -> dict[str, Any]:
    size = arena.size
    routers = Routers({name: arena.fleet.endpoint(name) for name in arena.fleet.names("router")})
    traffic = Traffic(size, routers, oracle(routers), seed=seed, words=words)
    faults = Faults(arena, traffic, seed=seed)
    started = time.monotonic()
    supervising = asyncio.create_task(arena.supervise())
    try:
        await _play(size, traffic, faults, kinds, rolling=rolling)
        seconds = time.monotonic() - started
        await traffic.check()
        await traffic.end_all()
        stranded = await arena.stranded(size.hold_s + _AFTER_HOLD_S)
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await routers.close()
    return report(traffic, faults, stranded, seconds)


def _shuffled(kinds: Sequence[str], seed: int) -> list[str]:
    order = list(kinds)
    random.Random(seed).shuffle(order)
    return order


def _any_ids(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(3, 32_000) for _ in range(count)]


def _words(model: Path) -> Callable[[random.Random, int], list[int]]:
    """Return a source of runs of a text's tokens: over noise, a model is never sure of its next token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text: list[int] = tokenizer.encode(_TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids

    def take(dice: random.Random, count: int) -> list[int]:
        at = dice.randrange(len(text) - count)
        return text[at : at + count]

    return take


async def _tell(traffic: Traffic, faults: Faults) -> None:
    while True:
        await asyncio.sleep(_TELL_S)
        failed = sum(record.outcome != "ok" for record in traffic.records)
        migrated = sum(record.migrated for record in traffic.records)
        sys.stderr.write(
            f"chaos: {len(traffic.records)} turns, {migrated} migrated, {failed} failed,"
            f" {len(faults.struck)} faults\n"
        )


async def _play(size: Size, traffic: Traffic, faults: Faults, kinds: Sequence[str], *, rolling: bool) -> None:
    """Play until every kind has struck and the turns are there."""
    playing = asyncio.create_task(traffic.run())
    telling = asyncio.create_task(_tell(traffic, faults))
    try:
        async with asyncio.timeout(size.limit_s):
            if rolling:
                await faults.roll()
            await faults.run(list(kinds), gap_s=(1.0, 3.0))
            while len(traffic.records) < size.turns:
                if playing.done():
                    await playing
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        # What is missing by then is told by `missed`.
        sys.stderr.write(f"chaos: stopped after {size.limit_s:.0f} s\n")
    finally:
        traffic.stop.set()
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing


def report(traffic: Traffic, faults: Faults, stranded: int, seconds: float) -> dict[str, Any]:
    """Return what is written to out/chaos.json."""
    records = traffic.records
    answered = [record for record in records if record.outcome == "ok"]
    totals = {
        "turns": len(records),
        "failed": sum(record.outcome != "ok" for record in records),
        "wrong": sum(record.expected_digest != record.actual_digest for record in answered),
        "duplicated_tokens": traffic.duplicated,
        "lost_tokens": traffic.lost,
        "stranded_blocks": stranded,
        "migrations": sum(record.migrated for record in records),
    }
    return {
        **totals,
        "totals": totals,
        "retried_by_clients": sum(record.attempts > 1 for record in records),
        "verdicts": {
            verdict: sum(record.verdict == verdict for record in answered)
            for verdict in ("DIRECT", "READBACK", "RECOMPUTE")
        },
        "conversations": len({record.conversation.partition(".")[0] for record in records}),
        "seconds": round(seconds, 1),
        "faults": faults.as_json(),
        "ended_by_themselves": faults.arena.ended,
        "errors": traffic.errors,
        "records": [asdict(record) for record in records],
    }


def missed(
    report: dict[str, Any], turns: int, kinds: Sequence[str], *, engines_may_end: bool = False
) -> list[str]:
    """Return the promises that a report does not keep.

    engines_may_end: UCX ends a process that begins a read at a peer which has just been killed.
    """
    found = [
        f"{name} is {report[name]}, not 0"
        for name in ("failed", "wrong", "duplicated_tokens", "lost_tokens", "stranded_blocks")
        if report[name]
    ]
    if report["turns"] < turns:
        found.append(f"{report['turns']} turns were played, not {turns}")
    if not engines_may_end:
        found += report["ended_by_themselves"]
    if not report["migrations"]:
        found.append("no answer migrated")
    if absent := sorted(set(kinds) - {fault["kind"] for fault in report["faults"]}):
        found.append(f"these faults did not strike: {', '.join(absent)}")
    if absent := sorted(set(kinds) - hit(report["faults"], report["records"]) - set(absent)):
        found.append(f"no turn shows these faults: {', '.join(absent)}")
    if absent := [verdict for verdict in ("DIRECT", "READBACK") if not report["verdicts"][verdict]]:
        found.append(f"no turn went this way: {', '.join(absent)}")
    return found


def main() -> int:
    """Run, write the report, and tell what was missed."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("out/chaos.json"))
    options.add_argument("--turns", type=int, default=Size.turns)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--logs", type=Path)
    options.add_argument("--only", choices=("simulated", "real"))
    given = options.parse_args()
    folder = given.logs or Path(tempfile.mkdtemp(prefix="kvloop-chaos-"))
    made: dict[str, Any] = {}
    problems: list[str] = []
    if given.only != "real":
        size = Size(turns=given.turns)
        made = asyncio.run(simulated(size, folder / "simulated", seed=given.seed))
        problems += missed(made, size.turns, KINDS)
    if given.only != "simulated":
        made["real_vllm"] = asyncio.run(real(REAL, folder / "real", seed=given.seed))
        made.setdefault("totals", {})["real_vllm"] = made["real_vllm"]["totals"]
        broken = missed(made["real_vllm"], REAL.turns, REAL_KINDS, engines_may_end=True)
        problems += [f"real vLLM: {text}" for text in broken]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{json.dumps(made['totals'])}\n")
    for problem in problems:
        sys.stderr.write(f"chaos: {problem}\n")
    if problems:
        sys.stderr.write(f"chaos: logs are in {folder}\n")
        return 1
    if given.logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
