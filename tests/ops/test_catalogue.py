"""The catalogue: sound, written down, bounded."""

from pathlib import Path
from typing import Any

import pytest
from ops_http import samples
from prometheus_client import REGISTRY, generate_latest

from kvloop.decode.lease import Ended
from kvloop.gateway import metrics as gateway
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.identity import HEADERS, Identity, identify
from kvloop.metastore.port import Outage
from kvloop.runtime import catalogue
from kvloop.runtime.catalogue import CATALOGUE
from kvloop.runtime.catalogue_page import page
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.metrics import Metrics
from kvloop.v1alpha1 import turn_pb2

ROOT = Path(__file__).parents[2]


def test_the_document_is_fresh() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page(), "run make docs"


def test_names_are_unique_and_well_formed() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert metric.name.startswith("kvloop_")
        assert not metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)


def test_labels_hold_what_the_code_can_say() -> None:
    assert set(catalogue.ENDINGS) == {str(ended) for ended in Ended}
    bodies: tuple[dict[str, Any], ...] = (
        *({name: "c"} for name in ("conversation_id", "session_id")),
        {"vllm_xargs": {"session_id": "c"}},
        {},
    )
    sources = {identify(body, {}).source for body in bodies} | set(HEADERS)
    assert set(catalogue.IDENTITIES) == sources
    assert set(catalogue.OUTAGES) | {catalogue.OTHER} == {str(outage) for outage in Outage}


def test_series_are_bounded() -> None:
    for metric in CATALOGUE:
        series = 1
        for _, values in metric.labels:
            series *= len(values) + 1
        # Where a name was found comes on top of verdict and reason; most of these never meet.
        assert series <= (600 if metric.name == "kvloop_gateway_turns" else 100), metric.name


async def test_unknown_values_are_counted_together() -> None:
    metrics = Metrics("router")
    for number in range(50):
        metrics.add("kvloop_turn_failures", f"made up {number}")
    found = samples((await metrics.exposition()).decode())
    mine = {key: value for key, value in found.items() if key[0] == "kvloop_turn_failures_total"}
    assert mine == {("kvloop_turn_failures_total", frozenset({("reason", "other")})): 50}


@pytest.mark.parametrize("process", catalogue.PROCESSES)
async def test_every_metric_of_a_process_is_exposed(process: catalogue.Process) -> None:
    metrics = Metrics(process)
    for metric in catalogue.of_process(process):
        labels = [values[0] for _, values in metric.labels]
        if metric.kind == "histogram":
            metrics.observe(metric.name, *labels, value=metric.buckets[0])
        elif metric.kind == "counter":
            metrics.add(metric.name, *labels)
        else:
            metrics.put(metric.name, *labels, value=1)
    names = {name for name, _ in samples((await metrics.exposition()).decode())}
    for metric in catalogue.of_process(process):
        assert set(metric.series) <= names
    with pytest.raises(KeyError):
        metrics.add("kvloop_no_such_metric")


async def test_a_probe_that_fails_spoils_no_scrape() -> None:
    metrics = Metrics("decode")

    async def broken() -> None:
        raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "gone")

    metrics.probe(broken)
    assert b"kvloop_lease_pins" in await metrics.exposition()


def test_a_gateway_counts_what_the_catalogue_names_and_bounds_it() -> None:
    before = samples(generate_latest(REGISTRY).decode())
    counts = gateway.Metrics()
    for reason in ("DRAINING", "made up", None):
        counts.failed(reason)
    counts.ended(Exchange(identity=Identity("c", "a new header")), turn_pb2.Summary())
    after = samples(generate_latest(REGISTRY).decode())
    new = {key: value - before.get(key, 0.0) for key, value in after.items() if key not in before}
    failures = {key[1]: value for key, value in new.items() if key[0] == "kvloop_gateway_failures_total"}
    assert failures == {frozenset({("reason", name)}): 1 for name in ("draining", "refused", catalogue.OTHER)}
    (turn,) = (labels for name, labels in new if name == "kvloop_gateway_turns_total")
    assert ("identity", catalogue.OTHER) in turn
    known = {family.name: family for family in REGISTRY.collect() if family.name.startswith("kvloop_gateway")}
    named = {metric.name: metric for metric in catalogue.of_process("gateway")}
    assert {name: (one.type, one.documentation) for name, one in known.items()} == {
        name: (metric.kind, metric.help) for name, metric in named.items()
    }
