"""The Grafana dashboard: made of metrics that exist, and every query answered by a real Prometheus."""

import asyncio
import hashlib
import json
import re
import shutil
import time
import urllib.parse
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from ops_fleet import play, watched_fleet
from ops_http import get
from prometheus_client import start_http_server

from kvloop.cli.supervisor.fleet import Fleet
from kvloop.gateway import metrics as gateway
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.segments import Rendering
from kvloop.runtime.catalogue import CATALOGUE
from kvloop.runtime.ports import free_port
from kvloop.v1alpha1 import turn_pb2

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvloop.json").read_text(encoding="utf-8"))
SERIES = {name: metric for metric in CATALOGUE for name in metric.series}


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def queries() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def test_queries_are_made_of_metrics_and_labels_that_exist() -> None:
    for title, expression in queries():
        named = re.findall(r"(kvloop_\w+)(?:\{([^}]*)\})?", expression)
        assert named, title
        for name, selector in named:
            assert name in SERIES, (title, name)
            allowed = dict(SERIES[name].labels)
            for label, wanted in re.findall(r'(\w+)!?="([^"]*)"', selector):
                assert wanted in allowed[label], (title, label, wanted)
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            known = {label for name, _ in named for label, _ in SERIES[name].labels}
            assert set(labels.split(", ")) <= known | {"le", "job", "instance"}, title


def test_panels_are_apart_and_have_one_data_source() -> None:
    ids_ = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids_)) == len(ids_)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    file = ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(file.read_text(encoding="utf-8"))["datasources"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["uid"]}


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with watched_fleet(tmp_path / "fleet", canary_per_minute=60.0) as running:
        yield running


@pytest.fixture
def gateway_metrics() -> Iterator[str]:
    """Serve what a gateway counts; this process stands in for one, which would need vLLM."""
    endpoint = f"127.0.0.1:{(port := free_port())}"
    server, thread = start_http_server(port, "127.0.0.1")
    yield endpoint
    server.shutdown()
    server.server_close()
    thread.join()


def chat() -> None:
    summary = turn_pb2.Summary(reuse=turn_pb2.Reuse(verdict=turn_pb2.VERDICT_READBACK))
    counts = gateway.Metrics()
    counts.ended(Exchange(), summary)
    rendering = Rendering("abc", [1, 2, 3], 1, 1, 0, 0, hashlib.blake2b(), array("I"))
    counts.rendered(rendering, cache_bytes=100)


@pytest_asyncio.fixture
async def prometheus(fleet: Fleet, gateway_metrics: str, tmp_path: Path) -> AsyncIterator[str]:
    jobs: list[dict[str, Any]] = [
        {
            "job_name": role,
            "static_configs": [
                {"targets": [fleet.parts[name].facts["metrics"] for name in fleet.names(role)]}
            ],
        }
        for role in ("router", "prefill", "decode")
    ]
    jobs.append({"job_name": "gateway", "static_configs": [{"targets": [gateway_metrics]}]})
    file = tmp_path / "prometheus.yml"
    document = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: make debian, or install Debian's prometheus"
    endpoint = f"127.0.0.1:{free_port()}"
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(program, f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"),
            f"--web.listen-address={endpoint}",
            stdout=log,
            stderr=log,
        )
    try:
        yield endpoint
    finally:
        process.terminate()
        await process.wait()


async def answer(prometheus: str, expression: str) -> list[dict[str, Any]]:
    # Grafana puts four scrape intervals there, at least.
    query = urllib.parse.quote(expression.replace("$__rate_interval", "30s"))
    status, body = await get(prometheus, f"/api/v1/query?query={query}")
    assert status == 200, (expression, body)
    found: list[dict[str, Any]] = json.loads(body)["data"]["result"]
    return [one for one in found if one["value"][1] != "NaN"]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_query_finds_data(fleet: Fleet, prometheus: str) -> None:
    waiting = dict.fromkeys(expression for _, expression in queries())
    limit = time.monotonic() + 150
    played = 0
    while waiting:
        assert time.monotonic() < limit, f"no data for: {list(waiting)}"
        await play(fleet, f"c{played}")
        chat()
        played += 1
        for expression in list(waiting):
            try:
                if await answer(prometheus, expression):
                    del waiting[expression]
            except OSError:
                break  # Prometheus is still starting.
    # With nothing to divide by, or of another name, there is none.
    assert await answer(prometheus, "sum(rate(kvloop_no_such_metric_total[30s]))") == []
