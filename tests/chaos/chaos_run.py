"""`make chaos`: traffic over a fleet of which every kind of process is killed, paused, drained and restarted.

    python tests/chaos/chaos_run.py --out out/chaos.json [--turns N] [--real | --no-real]

Exits with 1, and says why, when a promise is missed.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from chaos_faults import KINDS, Faults
from chaos_fleet import SIMULATED, Arena, Size
from chaos_traffic import Routers, Said, Traffic, as_json

from kvloop.engine.port import DecodeJob
from kvloop.engine.settings import EngineSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime import tokens
from kvloop.v1alpha1 import sampling_pb2

_TELL_S = 15.0
_AFTER_HOLD_S = 60.0
"""Pins and prompts handed over outlast holds by no more."""


class SimulatedOracle:
    """An engine of its own that nothing disturbs."""

    def __init__(self) -> None:
        settings = EngineSettings.model_validate(SIMULATED)
        made = SimulatedSettings.from_engine_settings(settings)
        self._engine = SimulatedEngine(replace(made, preset="instant"), "decode")
        self._serial = itertools.count()

    async def start(self) -> None:
        """Bring the engine up."""
        await self._engine.start()

    async def stop(self) -> None:
        """End the engine."""
        await self._engine.stop()

    async def answer(self, prompt: Sequence[int], sampling: sampling_pb2.SamplingParams) -> Said:
        """Return the answer, computed here."""
        said = Said()
        job = DecodeJob(request_id=str(next(self._serial)), prompt=tokens.pack(prompt), sampling=sampling)
        async for delta in self._engine.decode(job):
            said.token_ids += delta.token_ids
            said.text += delta.text
        return said


async def simulated(
    size: Size, folder: Path, *, seed: int, kinds: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run on simulated engines and return the report."""
    size = replace(size, workers=size.workers or SIMULATED)
    oracle = SimulatedOracle()
    await oracle.start()
    try:
        async with Arena(size, folder) as arena:
            routers = Routers({name: arena.fleet.endpoint(name) for name in arena.fleet.names("router")})
            traffic = Traffic(size, routers, oracle, seed=seed, vocabulary=range(3, 32_000))
            faults = Faults(arena, traffic, seed=seed)
            started = time.monotonic()
            try:
                await _play(size, traffic, faults, list(kinds or KINDS))
                seconds = time.monotonic() - started
                await traffic.end_all()
                stranded = await arena.stranded(size.hold_s + _AFTER_HOLD_S)
            finally:
                await routers.close()
    finally:
        await oracle.stop()
    return report(traffic, faults, stranded, seconds)


async def _tell(traffic: Traffic, faults: Faults) -> None:
    while True:
        await asyncio.sleep(_TELL_S)
        failed = sum(record.outcome != "ok" for record in traffic.records)
        migrated = sum(record.migrated for record in traffic.records)
        sys.stderr.write(
            f"chaos: {len(traffic.records)} turns, {migrated} migrated, {failed} failed,"
            f" {len(faults.struck)} faults\n"
        )


async def _play(size: Size, traffic: Traffic, faults: Faults, kinds: list[str]) -> None:
    """Play until every kind has struck and the turns are there."""
    playing = asyncio.create_task(traffic.run())
    telling = asyncio.create_task(_tell(traffic, faults))
    try:
        async with asyncio.timeout(size.limit_s):
            await faults.run(kinds, gap_s=(1.0, 3.0))
            while len(traffic.records) < size.turns:
                if playing.done():
                    break
                await faults.run(kinds[: len(kinds) // 2], gap_s=(1.0, 3.0))
                kinds = kinds[len(kinds) // 2 :] + kinds[: len(kinds) // 2]
    finally:
        traffic.stop.set()
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing


def report(traffic: Traffic, faults: Faults, stranded: int, seconds: float) -> dict[str, Any]:
    """Return what is written to out/chaos.json."""
    records = traffic.records
    answered = [record for record in records if record.outcome == "ok"]
    return {
        "turns": len(records),
        "failed": sum(record.outcome != "ok" for record in records),
        "wrong": sum(record.expected_digest != record.actual_digest for record in answered),
        "duplicated_tokens": traffic.duplicated,
        "lost_tokens": traffic.lost,
        "stranded_blocks": stranded,
        "migrations": sum(record.migrated for record in records),
        "retried_by_clients": sum(record.attempts > 1 for record in records),
        "verdicts": {
            verdict: sum(record.verdict == verdict for record in answered)
            for verdict in ("DIRECT", "READBACK", "RECOMPUTE")
        },
        "conversations": len({record.conversation.partition(".")[0] for record in records}),
        "seconds": round(seconds, 1),
        "faults": faults.as_json(),
        "errors": traffic.errors,
        "records": [as_json(record) for record in records],
    }


def missed(report: dict[str, Any], turns: int, kinds: Sequence[str]) -> list[str]:
    """Return the promises that a report does not keep."""
    found = [
        f"{name} is {report[name]}, not 0"
        for name in ("failed", "wrong", "duplicated_tokens", "lost_tokens", "stranded_blocks")
        if report[name]
    ]
    if report["turns"] < turns:
        found.append(f"{report['turns']} turns were played, not {turns}")
    if not report["migrations"]:
        found.append("no answer migrated")
    if absent := sorted(set(kinds) - {fault["kind"] for fault in report["faults"]}):
        found.append(f"these faults did not strike: {', '.join(absent)}")
    return found


def main() -> int:
    """Run, write the report, and tell what was missed."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("out/chaos.json"))
    options.add_argument("--turns", type=int, default=Size.turns)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--logs", type=Path)
    given = options.parse_args()
    size = Size(turns=given.turns)
    folder = given.logs or Path(tempfile.mkdtemp(prefix="kvloop-chaos-"))
    made = asyncio.run(simulated(size, folder, seed=given.seed))
    problems = missed(made, size.turns, KINDS)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    totals = {name: value for name, value in made.items() if not isinstance(value, list)}
    sys.stdout.write(f"{json.dumps(totals)}\n")
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
