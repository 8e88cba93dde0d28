"""One trace per turn across router, P, D and directory; off by default and then free of OpenTelemetry."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from router_sim import ids, sim_fleet

from kvloop.runtime import tracing

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CALLER_UNSAMPLED = CALLER[:-1] + "0"


def spans_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


async def play(file: Path, *metadata: tuple[str, str]) -> tuple[list[int], str]:
    """Play two turns; return the second prompt and its answer's text."""
    async with sim_fleet() as fleet:
        client = await fleet.client(await fleet.router())
        first = await client.say(ids(100))
        prompt = [*ids(100), *first.token_ids, *ids(20, seed=1)]
        client.metadata = (*client.metadata, *metadata)
        second = await client.say(prompt)
        assert second.reuse.tokens.readback > 0
    return prompt, second.text


async def test_one_trace_per_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "spans.jsonl"
    monkeypatch.setenv("KVLOOP_TRACE_FILE", str(file))
    prompt, text = await play(file, ("traceparent", CALLER))
    assert not tracing.on()
    spans = spans_of(file)
    assert len({span["trace_id"] for span in spans}) == 2
    turn = [span for span in spans if span["trace_id"] == CALLER.split("-")[1]]
    by_id = {span["span_id"]: span for span in turn}

    def path(span: dict[str, Any]) -> tuple[str, ...]:
        parent = by_id.get(span["parent_id"])
        return (*(path(parent) if parent else ()), span["name"])

    paths = {path(span) for span in turn}
    root = "router.turn"
    assert (root, "router.lookup", "directory.lookup") in paths
    assert (root, "router.prefill", "rpc.Prefill") in paths
    assert (root, "router.prefill", "rpc.Prefill", "rpc.BeginRead") in paths
    assert (root, "router.decode", "decode.leg", "directory.publish") in paths
    assert all(at[0] == root for at in paths), "a span hangs in the air"
    assert [span["parent_id"] for span in turn if span["name"] == root] == [CALLER.split("-")[2]]

    (facts,) = (span["facts"] for span in turn if span["name"] == root)
    assert facts["kvloop.verdict"] == "readback"
    assert facts["kvloop.readback_tokens"] > 0
    assert facts["kvloop.expected_tokens"] >= facts["kvloop.readback_tokens"]
    assert facts["kvloop.prompt_tokens"] == len(prompt)
    (read,) = (span["facts"] for span in turn if span["name"] == "rpc.Prefill")
    assert read["kvloop.readback_bytes"] == facts["kvloop.readback_bytes"] > 0

    written = file.read_text(encoding="utf-8")
    assert text not in written
    for name in ("handle", "params_json", "remote_block_ids", "token_ids"):
        assert name not in written


async def test_the_caller_decides_and_the_share_where_nobody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spans.jsonl"
    monkeypatch.setenv("KVLOOP_TRACE_FILE", str(file))
    monkeypatch.setenv("KVLOOP_TRACE_SHARE", "0")
    await play(file, ("traceparent", CALLER_UNSAMPLED))
    assert spans_of(file) == []


async def test_a_broken_traceparent_starts_a_trace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spans.jsonl"
    monkeypatch.setenv("KVLOOP_TRACE_FILE", str(file))
    await play(file, ("traceparent", "nonsense"))
    roots = [span for span in spans_of(file) if span["name"] == "router.turn"]
    assert len(roots) == 2
    assert all(span["parent_id"] is None for span in roots)


async def test_a_canary_is_no_part_of_a_turn_s_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "spans.jsonl"
    monkeypatch.setenv("KVLOOP_TRACE_FILE", str(file))
    async with sim_fleet() as fleet:
        app = await fleet.router(canary_per_minute=600.0)
        client = await fleet.client(app)
        client.metadata = (("traceparent", CALLER),)
        first = await client.say(ids(100))
        await client.say([*ids(100), *first.token_ids, *ids(20, seed=1)])
        await app.canary.settle()
    assert [span["name"] for span in spans_of(file)].count("router.prefill") == 2


class Collector(TraceServiceServicer):
    """An OTLP collector that remembers."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.services: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        for resource in request.resource_spans:
            self.services |= {
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            }
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


async def test_spans_go_to_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        monkeypatch.setenv("KVLOOP_TRACE_OTLP_URL", f"http://127.0.0.1:{port}")
        await play(tmp_path / "none")
    finally:
        server.stop(None).wait()
    assert collector.names.count("router.turn") == 2
    assert "decode.leg" in collector.names
    assert len(collector.services) == 1


async def test_a_turn_that_fails_is_told_by_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spans.jsonl"
    monkeypatch.setenv("KVLOOP_TRACE_FILE", str(file))
    async with sim_fleet() as fleet:
        client = await fleet.client(await fleet.router(max_attempts=1))
        fleet.prefills[0].engine.faults.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await client.say(ids(50))
    (root,) = (span for span in spans_of(file) if span["name"] == "router.turn")
    assert root["status"] == "error"
    assert root["facts"]["kvloop.failure"] == "worker_failed"


def test_off_nothing_is_imported_and_nothing_is_made() -> None:
    assert tracing.span("a", root=True) is tracing.span("b") is tracing.serving("c", ())
    assert tracing.outgoing() is None
    code = (
        # Not the apps: redis-py imports what it finds of OpenTelemetry by itself.
        "import sys, kvloop.router.steps, kvloop.prefill.leg, kvloop.decode.leg, kvloop.metastore.tracing;"
        "sys.exit(any(n.startswith('opentelemetry') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
