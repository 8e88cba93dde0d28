"""`kvloop demo` on simulated engines: the record's shape, and that nothing remains."""

import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvloop.cli.demo import script

Start = Callable[..., Any]
DEMO = ("demo", "--engine", "simulated", "--max-tokens", "12")
TURN = {
    "turn": int,
    "prompt_tokens": int,
    "verdict": str,
    "reason": str,
    "tokens": dict,
    "engine_external_tokens": int,
    "prefill_ms": float,
    "ttft_ms": float,
    "transfer_ms": float,
    "transfer_bytes": int,
    "descriptors": int,
    "token_ids": list,
    "text": str,
}


def test_the_record_has_the_agreed_shape_and_says_what_happened(kvloop: Start, tmp_path: Path) -> None:
    demo = kvloop(*DEMO, "--out", "out/demo.json")
    demo.wait_for("turn 1 with reuse")
    assert demo.wait() == 0, demo.text()
    demo.assert_nothing_remains()
    record = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert set(record) == {"legs", "identical", "settings", "versions"}
    assert set(record["legs"]) == {"on", "off"}
    assert record["identical"] is True
    assert record["settings"]["engine"] == "simulated"
    assert record["settings"]["prefix_caching_on_prefill"] is False
    assert record["versions"]["kvloop"]
    for leg in record["legs"].values():
        assert [turn["turn"] for turn in leg] == [1, 2, 3, 4, 5, 6, 7]
        for turn in leg:
            assert {name: type(value) for name, value in turn.items()} == TURN
            assert set(turn["tokens"]) == {"p_local", "readback", "d_local", "computed"}
            assert sum(turn["tokens"].values()) == turn["prompt_tokens"]
            assert turn["tokens"]["readback"] == turn["engine_external_tokens"]
    for turn in record["legs"]["off"]:
        assert (turn["verdict"], turn["transfer_bytes"]) == ("RECOMPUTE", 0)
        assert turn["tokens"]["computed"] == turn["prompt_tokens"]
    assert [(turn["verdict"], turn["reason"]) for turn in record["legs"]["on"]] == list(script.WAYS)
    for before, turn in itertools.pairwise(record["legs"]["on"]):
        held = before["prompt_tokens"] + len(before["token_ids"]) - 1
        assert (turn["transfer_bytes"] > 0) == (turn["verdict"] == "READBACK")
        if turn["verdict"] == "READBACK":
            # P reads back all that D held of the turn before.
            assert turn["tokens"]["readback"] == held
        elif turn["verdict"] == "DIRECT":
            assert 0 < turn["tokens"]["d_local"] <= held
        else:
            assert turn["tokens"]["computed"] == turn["prompt_tokens"]
    assert "identical" in demo.text()
    for line in ("READBACK (proven)", "DIRECT (proven)", "turn 7 with reuse: RECOMPUTE (not found)"):
        assert line in demo.text()


@pytest.mark.parametrize(
    ("moment", "number"), [("store starting", signal.SIGTERM), ("warm-up", signal.SIGINT)]
)
def test_interrupted(kvloop: Start, tmp_path: Path, moment: str, number: signal.Signals) -> None:
    demo = kvloop(*DEMO)
    demo.wait_for(moment)
    demo.signal(number)
    assert demo.wait() == 128 + number
    demo.assert_nothing_remains()
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in demo.text()


def test_a_crash_is_told_and_no_record_is_written(kvloop: Start, tmp_path: Path) -> None:
    demo = kvloop(*DEMO, "--logs", "logs")
    demo.wait_for("decode-0 ready")
    facts = json.loads((tmp_path / "logs" / "decode-0.ready").read_text())
    psutil.Process(facts["pid"]).kill()
    assert demo.wait() == 1
    demo.assert_nothing_remains()
    assert "decode-0" in demo.text()
    assert "logs" in demo.text()
    assert "Traceback" not in demo.text()
    assert not (tmp_path / "out").exists()
