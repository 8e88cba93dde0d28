"""`kvloop demo-cluster`: what a run must show, and a run on simulated engines."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvloop.cli.demo.cluster_play import PlayedTurn
from kvloop.cli.demo.cluster_record import ClusterRecord

ROOT = Path(__file__).parents[2]
COLD = PlayedTurn(1, "router-0", "recompute", "not_found", 100, 0, 10.0)
WARM = PlayedTurn(2, "router-1", "readback", "proven", 200, 96, 10.0)
SPANS = [
    {"trace_id": "t", "span_id": str(n), "parent_id": None, "start_us": n, "name": "n", "service": service}
    for n, service in enumerate(("kvloop-gateway", "kvloop-router", "kvloop-prefill", "kvloop-decode"))
]


def good() -> ClusterRecord:
    return ClusterRecord("simulated", [COLD, WARM], {"canary": {"match": 1.0}, "alerts": {}}, SPANS)


def test_a_good_run_has_nothing_against_it() -> None:
    assert good().complaints() == []


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (
            replace(good(), turns=[COLD, replace(WARM, verdict="recompute", reason="not_found")]),
            "turns reused nothing: 2 (not_found)",
        ),
        (replace(good(), turns=[COLD, replace(WARM, router="router-0")]), "the same router"),
        (replace(good(), trace=SPANS[:3]), "no trace spans"),
        (replace(good(), prometheus={"canary": {"mismatch": 1.0}}), "wrong tokens"),
        (replace(good(), prometheus={"alerts": {"KvloopPoolFull": 1.0}}), "KvloopPoolFull"),
        (replace(good(), left_behind=["gateway"]), "still there: gateway"),
    ],
)
def test_what_is_missing_is_said(spoiled: ClusterRecord, said: str) -> None:
    (complaint,) = spoiled.complaints()
    assert said in complaint


def test_the_longest_trace_is_the_one_of_most_services(tmp_path: Path) -> None:
    other = [{**SPANS[0], "trace_id": "u", "span_id": str(n)} for n in range(10)]
    file = tmp_path / "spans.jsonl"
    file.write_text("".join(json.dumps(span) + "\n" for span in [*other, *reversed(SPANS)]))
    assert ClusterRecord.longest_trace(file) == SPANS
    assert ClusterRecord.longest_trace(tmp_path / "none") == []


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_a_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvloop.cli.main", "demo-cluster", "--engine", "simulated"),
            *("--turns", "3", "--deploy", str(ROOT / "deploy"), "--out", str(out)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((out / "cluster.json").read_text())
    assert [turn["verdict"] for turn in document["turns"]] == ["recompute", "readback", "readback"]
    assert len({turn["router"] for turn in document["turns"]}) > 1
    assert document["prometheus"]["up"][""] == 7
    assert (out / "top.svg").read_text().startswith("<svg")
    assert {span["service"] for span in json.loads((out / "trace.json").read_text())} >= {
        "kvloop-gateway",
        "kvloop-router",
        "kvloop-prefill",
        "kvloop-decode",
    }
