"""A small chaos run, and a rolling restart under load, on simulated engines in processes of their own."""

from dataclasses import replace
from pathlib import Path

import pytest
from chaos_fleet import SIMULATED, Size
from chaos_run import missed, simulated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = Size(
    conversations=12,
    turns=40,
    users=4,
    routers=2,
    prefills=2,
    decodes=2,
    limit_s=200.0,
    hold_s=20.0,
    workers=SIMULATED,
)
RECORD = {
    "id",
    "conversation",
    "router",
    "faults",
    "attempts",
    "outcome",
    "expected_digest",
    "actual_digest",
    "migrated",
}
FEW = (
    "kill_decode_mid_stream",
    "kill_decode_mid_read",
    "kill_router",
    "pause_prefill",
    "restart_store_empty",
    "clock_jump_router",
)


async def test_a_small_chaos_run_keeps_every_promise(tmp_path: Path) -> None:
    made = await simulated(SMALL, tmp_path, seed=3, kinds=FEW)
    assert missed(made, SMALL.turns, FEW) == [], made["errors"]
    assert any(record["faults"] for record in made["records"])
    assert set(made["records"][0]) == RECORD
    assert {"id", "kind", "target", "time"} <= set(made["faults"][0])
    assert all(made[name] == value for name, value in made["totals"].items())


async def test_a_rolling_restart_under_load_fails_no_turn(tmp_path: Path) -> None:
    made = await simulated(replace(SMALL, hold_s=15.0), tmp_path, seed=4, kinds=(), rolling=True)
    broken = [promise for promise in missed(made, SMALL.turns, ()) if "migrated" not in promise]
    assert broken == [], made["errors"]
    restarted = [fault["target"] for fault in made["faults"]]
    assert sorted(restarted) == sorted(
        f"{role}-{number}" for role in ("router", "prefill", "decode") for number in range(2)
    )


def test_a_broken_promise_is_told() -> None:
    kept = dict.fromkeys(("failed", "wrong", "duplicated_tokens", "lost_tokens", "stranded_blocks"), 0)
    report = {**kept, "turns": 5, "migrations": 1, "faults": [{"kind": "a"}], "ended_by_themselves": []}
    assert missed(report, 5, ["a"]) == []
    for name in kept:
        assert missed({**report, name: 1}, 5, ["a"]) == [f"{name} is 1, not 0"]
    ended = {**report, "ended_by_themselves": ["decode-0 ended with exit code 1"]}
    assert missed(ended, 5, ["a"]) == ["decode-0 ended with exit code 1"]
    assert missed(ended, 5, ["a"], engines_may_end=True) == []
    assert missed({**report, "migrations": 0}, 5, ["a"]) == ["no answer migrated"]
    assert missed(report, 6, ["a"]) == ["5 turns were played, not 6"]
    assert missed(report, 5, ["a", "b"]) == ["these faults did not strike: b"]
