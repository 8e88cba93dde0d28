"""A small chaos run, and a rolling restart under load, on simulated engines in processes of their own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos_faults import Faults
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
    "verdict",
    "reason",
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


KEPT = {
    **dict.fromkeys(("failed", "wrong", "duplicated_tokens", "lost_tokens", "stranded_blocks"), 0),
    "turns": 5,
    "migrations": 1,
    "verdicts": {"DIRECT": 1, "READBACK": 1, "RECOMPUTE": 3},
    "faults": [{"id": 0, "kind": "a"}],
    "records": [],
    "ended_by_themselves": [],
}


def test_a_broken_promise_is_told() -> None:
    assert missed(KEPT, 5, ["a"]) == []
    for name in ("failed", "wrong", "duplicated_tokens", "lost_tokens", "stranded_blocks"):
        assert missed({**KEPT, name: 1}, 5, ["a"]) == [f"{name} is 1, not 0"]
    ended = {**KEPT, "ended_by_themselves": ["decode-0 ended with exit code 1"]}
    assert missed(ended, 5, ["a"]) == ["decode-0 ended with exit code 1"]
    assert missed(ended, 5, ["a"], engines_may_end=True) == []
    assert missed({**KEPT, "migrations": 0}, 5, ["a"]) == ["no answer migrated"]
    assert missed(KEPT, 6, ["a"]) == ["5 turns were played, not 6"]
    assert missed(KEPT, 5, ["a", "b"]) == ["these faults did not strike: b"]
    for way in ("DIRECT", "READBACK"):
        without = {**KEPT, "verdicts": {**KEPT["verdicts"], way: 0}}
        assert missed(without, 5, ["a"]) == [f"no turn went this way: {way}"]


STREAM, READ = "kill_decode_mid_stream", "kill_decode_mid_read"


@pytest.mark.parametrize(
    ("kind", "changes", "shown"),
    [
        (STREAM, {}, False),
        (STREAM, {"migrated": True}, True),
        (STREAM, {"migrated": True, "faults": [1]}, False),
        (STREAM, {"attempts": 2}, False),
        (READ, {}, False),
        (READ, {"migrated": True}, True),
        (READ, {"attempts": 2}, True),
        (READ, {"reason": "READ_FAILED"}, True),
        (READ, {"reason": "EXPIRED"}, False),
        (READ, {"reason": "READ_FAILED", "faults": []}, False),
        (READ, {"reason": "READ_FAILED", "faults": [1, 2]}, True),
    ],
)
def test_a_fault_that_met_nobody_does_not_count(kind: str, changes: dict[str, Any], shown: bool) -> None:
    turn = {"faults": [0], "attempts": 1, "migrated": False, "reason": "NONE", **changes}
    # Of several of a kind, one that struck is enough.
    faults = [{"id": 0, "kind": kind}, {"id": 1, "kind": "a"}, {"id": 2, "kind": kind}]
    report = {**KEPT, "faults": faults, "records": [turn]}
    assert missed(report, 5, ["a", kind]) == ([] if shown else [f"no turn shows these faults: {kind}"])


class Watched:
    """Decode workers by a counter and a gauge alone; each look at the counter is at the next pair."""

    def __init__(self, **looks: list[tuple[float, float]]) -> None:
        self.fleet = self
        self._looks = looks
        self._now: dict[str, tuple[float, float]] = {}

    def names(self, _: str) -> list[str]:
        return list(self._looks)

    async def metric(self, name: str, metric: str) -> float:
        counter, looks = metric.endswith("_total"), self._looks[name]
        if counter:
            self._now[name] = looks.pop(0) if len(looks) > 1 else looks[0]
        return self._now[name][0 if counter else 1]


async def test_the_worker_that_is_read_from_is_told_from_one_that_goes_on_itself() -> None:
    # Grants and pins: one goes on from what it holds, one was read from before, one is read from now.
    arena = Watched(direct=[(3, 1)], over=[(5, 0), (6, 0)], read=[(2, 0), (2, 1), (3, 1)])
    faults = Faults(arena, None, seed=1)  # type: ignore[arg-type]
    assert await faults._busy(faults._is_read()) == "read"


async def test_the_worker_whose_stream_flows_is_told_from_one_that_waits() -> None:
    # Tokens and legs: one waits for KV, one has just ended its last leg, one streams.
    arena = Watched(waits=[(70, 1)], ended=[(5, 1), (9, 0)], streams=[(8, 1), (8, 1), (9, 1)])
    faults = Faults(arena, None, seed=1)  # type: ignore[arg-type]
    assert await faults._busy(faults._generates()) == "streams"
