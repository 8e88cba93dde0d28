"""`kvloop explain`: what it shows of an answer, and what it says without one."""

import socket

from typer.testing import CliRunner

from kvloop.cli.explain import plain, rows
from kvloop.cli.main import app
from kvloop.v1alpha1 import router_service_pb2, turn_pb2


def answer(**fields: object) -> router_service_pb2.ExplainTurnResponse:
    told = router_service_pb2.ExplainTurnResponse(
        request_id="r", outcome="ok", attempts=1, prompt_tokens=1000
    )
    for name, value in fields.items():
        setattr(told, name, value)
    return told


def test_a_turn_with_costs() -> None:
    told = answer(
        decided_verdict=turn_pb2.VERDICT_RECOMPUTE,
        decided_reason=turn_pb2.REUSE_REASON_COSTLIER,
        lease_tokens=900,
        matched_tokens=880,
        below_tokens=901,
        by_cost=True,
        decode_worker="d",
    )
    told.costs.readback_ms, told.costs.recompute_ms, told.costs.direct_ms = 87.3, 58.8, 60.0
    told.costs.prefill_terms.extend([20.0, 0.0877, 1.98e-6])
    told.reuse.tokens.computed = 1000
    told.timings_ms["prefill"] = 40.25
    shown = dict(rows(plain(told)))
    assert shown["decided"] == "RECOMPUTE (COSTLIER)"
    assert shown["expected ms"] == "direct 60.0, readback 87.3, recompute 58.8 (decided)"
    assert shown["prompt and lease"].startswith("1000 and 900 tokens, sharing at least 880")
    assert shown["prefill terms"] == "20 0.0877 1.98e-06"
    assert "computed 1000" in shown["tokens"]
    assert shown["spent ms"] == "prefill 40.2"
    assert shown["workers"] == "-, d"


def test_a_turn_without_anything_to_reuse() -> None:
    shown = dict(rows(plain(answer(outcome="NO_WORKER"))))
    assert shown["outcome"] == "NO_WORKER, attempts 1"
    assert "expected ms" not in shown
    assert "DIRECT limits" not in shown


def test_without_a_router_it_says_so() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = CliRunner().invoke(app, ["explain", "r", "--router", f"127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert "no router answers" in result.output
