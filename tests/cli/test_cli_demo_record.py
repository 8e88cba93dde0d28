"""What makes a demo run a failure."""

from dataclasses import replace

import pytest

from kvloop.cli.demo import script
from kvloop.cli.demo.record import DemoRecord, TurnRecord

TURN = TurnRecord(
    turn=1,
    prompt_tokens=100,
    verdict="RECOMPUTE",
    reason="NOT_FOUND",
    tokens={"p_local": 0, "readback": 0, "d_local": 0, "computed": 100},
    engine_external_tokens=0,
    prefill_ms=1.0,
    ttft_ms=2.0,
    transfer_ms=0.0,
    transfer_bytes=0,
    descriptors=0,
    token_ids=[1, 2],
    text="a b",
)
READ = replace(
    TURN,
    turn=2,
    verdict="READBACK",
    reason="PROVEN",
    tokens={"p_local": 0, "readback": 90, "d_local": 0, "computed": 10},
    engine_external_tokens=90,
    transfer_bytes=900,
)
COLD = replace(TURN, turn=2)


def record(on: TurnRecord = READ, off: TurnRecord = COLD) -> DemoRecord:
    return DemoRecord([TURN, on], [TURN, off], {}, {})


def test_a_good_run_has_no_complaints() -> None:
    assert record().identical
    assert record().complaints() == []


@pytest.mark.parametrize(
    ("on", "off", "says"),
    [
        (replace(READ, token_ids=[1, 3]), COLD, "differ"),
        (replace(READ, token_ids=[1]), COLD, "differ"),
        (replace(READ, transfer_bytes=0), COLD, "did not come as READBACK"),
        (replace(READ, verdict="DIRECT"), COLD, "did not come as DIRECT"),
        (replace(COLD, tokens={**COLD.tokens, "d_local": 1}), COLD, "did not come as RECOMPUTE"),
        (replace(READ, engine_external_tokens=89), COLD, "counted 89"),
        (READ, replace(COLD, engine_external_tokens=32), "without reuse read"),
        (READ, replace(COLD, transfer_bytes=1), "without reuse read"),
    ],
)
def test_each_flaw_is_told(on: TurnRecord, off: TurnRecord, says: str) -> None:
    complaints = record(on, off).complaints()
    assert len(complaints) == 1
    assert says in complaints[0]
    assert "turn 2" in complaints[0]


def test_a_turn_that_went_another_way_is_told() -> None:
    cold = record(replace(COLD, reason="EXPIRED"))
    assert cold.complaints() == []
    wanted = replace(cold, expected=[("RECOMPUTE", "NOT_FOUND"), ("READBACK", "PROVEN")])
    assert wanted.complaints() == ["turn 2 did not go READBACK (PROVEN)"]
    assert replace(record(), expected=wanted.expected).complaints() == []
    assert replace(record(), expected=[*wanted.expected, ("DIRECT", "PROVEN")]).complaints() == [
        "turn 3 did not go DIRECT (PROVEN)"
    ]


def test_a_run_without_turns_is_not_identical() -> None:
    assert not DemoRecord([], [], {}, {}).identical


def test_the_script_is_the_same_each_time() -> None:
    assert script.turns() == script.turns()
    assert len(script.turns()) == len(script.WAYS) == 7
