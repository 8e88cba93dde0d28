"""Alert rules: made of metrics that exist, each fires when it should and only then (by promtool)."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloop.runtime.catalogue import CATALOGUE

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
SERIES = {name: metric for metric in CATALOGUE for name in metric.series}

# Per alert: series that fire it, then series that don't. "a+bxn": from a by b each minute; "_": none.
UP, FLAT = "0+60x60", "0+0x60"
# Besides: every turn fails, and none was ever answered; an engine loads for most of the time.
ALSO: Sequence[tuple[str, Mapping[str, str], bool]] = (
    ("KvloopTurnsFailing", {'kvloop_turn_failures_total{reason="no_worker"}': UP}, True),
    ("KvloopTurnsFailing", {"kvloop_turns_total": UP}, False),
    ("KvloopEngineDown", {'kvloop_engine_up{instance="d0"}': "_x50 1x10"}, False),
)
CASES: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "KvloopTurnsFailing": (
        {'kvloop_turn_failures_total{reason="internal"}': "0+6x60", "kvloop_turns_total": UP},
        {'kvloop_turn_failures_total{reason="internal"}': "0+1x60", "kvloop_turns_total": UP},
    ),
    "KvloopWrongTokens": (
        {'kvloop_canary_total{result="mismatch"}': "0x50 1+0x10"},
        {'kvloop_canary_total{result="match"}': UP, 'kvloop_canary_total{result="mismatch"}': "3+0x60"},
    ),
    "KvloopTurnsRefused": (
        {'kvloop_turns_refused_total{reason="overloaded"}': "0+1x60"},
        {'kvloop_turns_refused_total{reason="invalid_field"}': UP},
    ),
    "KvloopReuseBelowExpectation": (
        {"kvloop_reuse_expected_tokens_total": UP, "kvloop_reuse_actual_tokens_total": "0+20x60"},
        {"kvloop_reuse_expected_tokens_total": FLAT, "kvloop_reuse_actual_tokens_total": FLAT},
    ),
    "KvloopReadsFail": (
        {"kvloop_cold_retries_total": "0+2x60", "kvloop_prefills_total": UP},
        {"kvloop_cold_retries_total": "0+1x60", "kvloop_prefills_total": UP},
    ),
    "KvloopLookupSlow": (
        {
            'kvloop_turn_step_seconds_bucket{step="lookup",le="0.01"}': FLAT,
            'kvloop_turn_step_seconds_bucket{step="lookup",le="0.05"}': UP,
            'kvloop_turn_step_seconds_bucket{step="lookup",le="+Inf"}': UP,
        },
        {
            'kvloop_turn_step_seconds_bucket{step="lookup",le="0.01"}': UP,
            'kvloop_turn_step_seconds_bucket{step="lookup",le="+Inf"}': UP,
            'kvloop_turn_step_seconds_bucket{step="prefill",le="0.01"}': FLAT,
            'kvloop_turn_step_seconds_bucket{step="prefill",le="+Inf"}': UP,
        },
    ),
    "KvloopNoWorker": (
        # One router is blind, the other is not.
        {
            'kvloop_router_workers{role="decode",state="ready",instance="r0"}': FLAT,
            'kvloop_router_workers{role="decode",state="ready",instance="r1"}': "2+0x60",
        },
        {
            'kvloop_router_workers{role="decode",state="ready",instance="r0"}': "1+0x60",
            'kvloop_router_workers{role="decode",state="gone",instance="r0"}': FLAT,
        },
    ),
    "KvloopProcessDown": (
        {'up{job="decode",instance="d0"}': "1x20 0x40", 'up{job="router",instance="r0"}': "1+0x60"},
        {'up{job="decode",instance="d0"}': "1+0x60", 'up{job="node",instance="n0"}': FLAT},
    ),
    "KvloopNoRouter": (
        {'up{job="router",instance="r0"}': FLAT},
        {'kvloop_router_workers{role="decode",state="ready"}': FLAT},
    ),
    "KvloopWorkerGone": (
        {'kvloop_router_workers{role="prefill",state="gone"}': "1+0x60"},
        {'kvloop_router_workers{role="prefill",state="gone"}': FLAT},
    ),
    "KvloopEngineDown": (
        {'kvloop_engine_up{instance="d0"}': FLAT},
        {'kvloop_engine_up{instance="d0"}': "1+0x60"},
    ),
    "KvloopPreemptions": (
        {'kvloop_engine_preemptions_total{instance="d0"}': "0+1x60"},
        {'kvloop_engine_preemptions_total{instance="d0"}': "7+0x60"},
    ),
    "KvloopTransfersSlow": (
        {
            'kvloop_transfer_seconds_bucket{instance="p0",le="1.0"}': FLAT,
            'kvloop_transfer_seconds_bucket{instance="p0",le="5.0"}': UP,
            'kvloop_transfer_seconds_bucket{instance="p0",le="+Inf"}': UP,
        },
        {
            'kvloop_transfer_seconds_bucket{instance="p0",le="1.0"}': UP,
            'kvloop_transfer_seconds_bucket{instance="p0",le="+Inf"}': UP,
        },
    ),
    "KvloopLeasesEvicted": (
        {
            'kvloop_leases_ended_total{reason="evicted"}': "0+20x60",
            'kvloop_leases_ended_total{reason="superseded"}': UP,
        },
        {
            'kvloop_leases_ended_total{reason="evicted"}': "0+10x60",
            'kvloop_leases_ended_total{reason="superseded"}': UP,
        },
    ),
    "KvloopLeasesExpire": (
        {
            'kvloop_leases_ended_total{reason="expired"}': UP,
            'kvloop_leases_ended_total{reason="superseded"}': "0+30x60",
        },
        {
            'kvloop_leases_ended_total{reason="expired"}': "0+30x60",
            'kvloop_leases_ended_total{reason="superseded"}': UP,
        },
    ),
    "KvloopPoolFull": (
        {
            'kvloop_pool_blocks{instance="d0",job="decode",state="free"}': "4+0x60",
            'kvloop_pool_blocks{instance="d0",job="decode",state="total"}': "100+0x60",
        },
        {
            'kvloop_pool_blocks{instance="d0",job="decode",state="free"}': "5+0x60",
            'kvloop_pool_blocks{instance="d0",job="decode",state="total"}': "100+0x60",
        },
    ),
    "KvloopPublicationsLost": (
        {'kvloop_lease_publications_total{outcome="given_up"}': "0+1x60"},
        {'kvloop_lease_publications_total{outcome="won"}': UP},
    ),
    "KvloopGatewayFailing": (
        {'kvloop_gateway_failures_total{reason="no_worker"}': "0+6x60", "kvloop_gateway_turns_total": UP},
        {
            'kvloop_gateway_failures_total{reason="no_worker"}': "0+1x60",
            'kvloop_gateway_failures_total{reason="invalid_field"}': UP,
            "kvloop_gateway_turns_total": UP,
        },
    ),
    "KvloopChatsWithoutIdentity": (
        {
            'kvloop_gateway_turns_total{identity="none"}': UP,
            'kvloop_gateway_turns_total{identity="x-session-id"}': "0+30x60",
        },
        {
            'kvloop_gateway_turns_total{identity="none"}': "0+30x60",
            'kvloop_gateway_turns_total{identity="x-session-id"}': UP,
        },
    ),
    "KvloopStoreDegraded": (
        {'kvloop_store_degraded{instance="r0"}': "1+0x60"},
        {'kvloop_store_degraded{instance="r0"}': FLAT},
    ),
}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_has_a_case_a_summary_and_a_remedy() -> None:
    assert {rule["alert"] for rule in rules()} == set(CASES)
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "remedy"}


def test_alerts_are_made_of_metrics_and_values_that_exist() -> None:
    for rule in rules():
        named = re.findall(r"(kvloop_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert named or rule["expr"].startswith("up{")
        for name, selector in named:
            assert name in SERIES, name
            allowed = dict(SERIES[name].labels)
            for label, wanted in re.findall(r'(\w+)=~?"([^"]*)"', selector):
                assert set(wanted.split("|")) <= set(allowed[label]), (name, label, wanted)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    tests = []
    cases = [
        (name, series, fires)
        for name, both in CASES.items()
        for series, fires in zip(both, (True, False), strict=True)
    ]
    for name, series, fires in (*cases, *ALSO):
        inputs = [{"series": text, "values": values} for text, values in series.items()]
        # promtool compares the labels of what fires; a count leaves them out.
        fired: dict[str, Any] = {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
            "eval_time": "58m",
        }
        fired["exp_samples"] = [{"labels": "{}", "value": 1}] if fires else []
        tests.append({"interval": "1m", "input_series": inputs, "promql_expr_test": [fired]})
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}), encoding="utf-8")
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: make debian, or install Debian's prometheus"
    done = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
