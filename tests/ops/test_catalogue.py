"""The catalogue: sound, written down, bounded."""

from pathlib import Path

import pytest
from ops_http import samples

from kvloop.decode.lease import Ended
from kvloop.metastore.port import Outage
from kvloop.runtime import catalogue
from kvloop.runtime.catalogue import CATALOGUE
from kvloop.runtime.catalogue_page import page
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.metrics import Metrics

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
    assert set(catalogue.OUTAGES) | {catalogue.OTHER} == {str(outage) for outage in Outage}


def test_series_are_bounded() -> None:
    for metric in CATALOGUE:
        series = 1
        for _, values in metric.labels:
            series *= len(values) + 1
        assert series <= 100, metric.name


async def test_unknown_values_are_counted_together() -> None:
    metrics = Metrics("router")
    for number in range(50):
        metrics.add("kvloop_turn_failures", f"made up {number}")
    found = samples((await metrics.exposition()).decode())
    mine = {key: value for key, value in found.items() if key[0] == "kvloop_turn_failures_total"}
    assert mine == {("kvloop_turn_failures_total", frozenset({("reason", "other")})): 50}


@pytest.mark.parametrize("process", catalogue.ALL)
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
