"""What peers' measurements mean, the pieces that they are made of, and a small run as a process."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from bench_fakes import FakeTarget
from click.testing import CliRunner

from kvloop.bench import peers_engines
from kvloop.bench.peers import FLOOR, Entrant, Field, astray, cpu, figures, first_chunks, lines, samples_of
from kvloop.bench.peers_http import Line, PastHttp, ThroughHttp, reading
from kvloop.bench.peers_picture import draw
from kvloop.bench.peers_real import (
    Leg,
    Real,
    RealPlan,
)
from kvloop.bench.router import Measured
from kvloop.bench.router_traffic import (
    DECODE,
    PREFILL,
    PastRouter,
    Played,
    Talk,
    TurnLost,
    Workers,
    talk,
)
from kvloop.bench.workload.words import WordEncoder
from kvloop.cli.bench import peers_parts
from kvloop.cli.bench.peers import complaints_of, make_command
from kvloop.cli.bench.peers_record import PeersRecord
from kvloop.cli.supervisor.part import PartFailed
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import decode_service_pb2, prefill_service_pb2, turn_pb2

# -- engines and clients ---------------------------------------------------------------------------------


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """Serve connections; when the context ends, so have they."""
    running: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        await handler(reader, writer)
        writer.close()
        await writer.wait_closed()

    door = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{door.sockets[0].getsockname()[1]}"
    door.close()
    if running:
        await asyncio.wait(running, timeout=30)


class Engines:
    """P and D on ports of their own."""

    def __init__(self, servers: list[peers_engines.Server], endpoints: list[str]) -> None:
        self.prefill, self.decode = servers
        self.endpoints = endpoints


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    pace = peers_engines.Pace(0.0)
    servers = [peers_engines.Server(role, pace) for role in ("prefill", "decode")]
    async with served(servers[0].serve) as prefill, served(servers[1].serve) as decode:
        yield Engines(servers, [prefill, decode])


async def test_the_floor_hands_handles_on_and_reads_back(engines: Engines) -> None:
    way = PastHttp(*engines.endpoints)
    mine = talk(100, 4, 1000)
    for _ in range(3):
        played = await way.play(mine)
        assert played.chunks == 4
        assert played.first_ms > 0
    await way.close()
    # The first turn has nothing to read.
    assert engines.prefill.counts == {"turns": 3, "reads": 2, "refused": 0}
    assert engines.decode.counts == {"turns": 3, "reads": 3, "refused": 0}


async def test_a_turn_that_skips_p_is_refused(engines: Engines) -> None:
    way = ThroughHttp(engines.endpoints[1])
    with pytest.raises(TurnLost, match="answered 400"):
        await way.play(talk(10, 2, 1000))
    await way.close()
    assert engines.decode.counts["refused"] == 1


def test_only_the_other_engines_handles_are_taken() -> None:
    of_p, of_d = peers_engines.handle("prefill", 65), peers_engines.handle("decode", 65)
    assert of_p["remote_block_ids"] == [[0, 1, 2]]
    assert peers_engines.read_of("decode", {"kv_transfer_params": of_p})
    assert peers_engines.read_of("prefill", {"kv_transfer_params": reading(of_d)})
    assert not peers_engines.read_of("prefill", {"kv_transfer_params": reading(None)})
    for role, given in (("decode", of_d), ("decode", {}), ("prefill", of_p), ("prefill", None)):
        with pytest.raises(peers_engines.Refused):
            peers_engines.read_of(role, {"kv_transfer_params": given})
    with pytest.raises(peers_engines.Refused):
        peers_engines.read_of("prefill", {"kv_transfer_params": reading(of_p)})


async def test_a_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    asked = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        # The next request is begun to be read, and not answered.
        await reader.read(1)

    async with served(once) as endpoint:
        line = Line(endpoint)
        for _ in range(3):
            assert (await line.ask("GET", "/")).content == b"ok"
        await line.close()
    assert asked == 3


async def test_a_stream_that_ends_early_is_a_lost_turn() -> None:
    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = peers_engines.chunk("word ")
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
        await reader.read()

    async with served(short) as endpoint:
        way = ThroughHttp(endpoint)
        with pytest.raises(TurnLost, match="ended early"):
            await way.play(talk(10, 2, 1000))
        await way.close()


async def test_a_gateways_verdicts_are_counted_after_a_conversations_first_turn() -> None:
    verdicts = iter(["recompute", "readback", "direct"])

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for verdict in verdicts:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            last = json.dumps({"choices": [{"text": "b"}], "kvloop": {"verdict": verdict}}).encode()
            events = peers_engines.chunk("a ") + b"data: " + last + b"\n\ndata: [DONE]\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events))

    async with served(gateway) as endpoint:
        way, mine = ThroughHttp(endpoint), talk(10, 2, 1000)
        for _ in range(3):
            await way.play(mine)
        assert Entrant(way, FLOOR).verdicts() == {"READBACK": 1, "DIRECT": 1}
        await way.close()
    assert Entrant(Fake(1.0), FLOOR).verdicts() == {}


# -- measuring -------------------------------------------------------------------------------------------


class Fake:
    """A way whose turns take no time and cost what they are said to; one of them may be its last."""

    def __init__(self, first_ms: float, last: int = 1 << 30) -> None:
        self.first_ms = first_ms
        self.last = last
        self.turns = 0

    async def play(self, talk: Talk) -> Played:
        await asyncio.sleep(0)
        self.turns += 1
        if self.turns > self.last:
            raise TurnLost("gone")
        return Played(self.first_ms, talk.output_tokens)

    async def close(self) -> None:
        return None


class Charged(Entrant):
    """An entrant whose process charges a millisecond per turn."""

    def cpu_s(self) -> float:
        assert isinstance(self.way, Fake)
        return self.way.turns / 1000


async def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    entrants = {"floor": Entrant(Fake(1.0), FLOOR), "good": Entrant(Fake(3.0), FLOOR)}
    field = Field({**entrants, "bad": Entrant(Fake(2.0, last=50), FLOOR)})
    samples = await first_chunks(field, 10, 2, rounds=100, limit_s=60)
    assert (len(samples["floor"]), len(samples["good"])) == (200, 200)
    assert 0 < len(samples["bad"]) < 200
    assert field.lost == {"bad": "TurnLost: gone"}
    assert "bad" not in field.entrants


async def test_costs_are_those_of_processes_and_a_failure_costs_nobody_else() -> None:
    field = Field(
        {
            "floor": Entrant(Fake(1.0), FLOOR),
            "good": Charged(Fake(1.0), FLOOR, (1,)),
            "bad": Charged(Fake(1.0, last=10), FLOOR, (2,)),
        }
    )
    measured = await cpu(field, 10, at_once=4, turns=40, rounds=4, limit_s=60)
    assert {one.way for one in measured if one.way != "bad"} == {"good"}
    assert sum(one.turns for one in measured if one.way == "good") == 40
    assert list(field.lost) == ["bad"]
    record = figures("good", FLOOR, {}, {10: measured})
    assert record["10"]["cost"]["turns_per_cpu_s"] == pytest.approx(1000)


def test_figures_are_over_the_floor_at_percentiles() -> None:
    firsts = {(500, 1): {"floor": [1.0, 2.0, 3.0], "proxy": [2.0, 4.0, 9.0], "gone": []}}
    costs = {500: [Measured("proxy", 10, 320, 0.5, 1.0), Measured("proxy", 10, 320, 0.5, 1.0)]}
    record = figures("proxy", "floor", firsts, costs)
    cell = record["500"]["at_once_1"]
    assert cell["first_chunk_ms"] == {"p50": 4.0, "p99": 9.0}
    assert cell["added_ms"] == {"p50": 2.0, "p99": 6.0}
    assert record["500"]["cost"]["turns_per_cpu_s"] == 20.0
    assert record["500"]["cost"]["chunks_per_turn"] == 32.0
    assert samples_of(record) == 23
    assert "added_ms" not in figures("floor", "floor", firsts, costs)["500"]["at_once_1"]
    assert figures("gone", "floor", firsts, costs) == {}


class Legs:
    """P and D over gRPC: P brings a token when it is asked for one, D what is left."""

    def __init__(self) -> None:
        self.prefilled: list[prefill_service_pb2.PrefillRequest] = []
        self.decoded: list[decode_service_pb2.DecodeRequest] = []

    async def prefill(
        self, request: prefill_service_pb2.PrefillRequest, _: object
    ) -> prefill_service_pb2.PrefillResponse:
        self.prefilled.append(request)
        response = prefill_service_pb2.PrefillResponse()
        response.handle.SetInParent()
        if request.first_token:
            response.first.token_ids = pack([7])
        return response

    async def decode(
        self, request: decode_service_pb2.DecodeRequest, _: object
    ) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        self.decoded.append(request)
        count = request.sampling.max_tokens
        for _ in range(count):
            yield decode_service_pb2.DecodeResponse(chunk=turn_pb2.Chunk(token_ids=pack([8])))
        summary = decode_service_pb2.DecodeSummary(output_tokens=count)
        yield decode_service_pb2.DecodeResponse(summary=summary)


@pytest.mark.parametrize(("first_token", "of_d"), [(True, 3), (False, 4)])
async def test_past_the_router_an_answer_begins_where_the_routers_does(first_token: bool, of_d: int) -> None:
    legs, server = Legs(), grpc.aio.server()
    handlers = {
        PREFILL: grpc.unary_unary_rpc_method_handler(
            legs.prefill,
            prefill_service_pb2.PrefillRequest.FromString,
            prefill_service_pb2.PrefillResponse.SerializeToString,
        ),
        DECODE: grpc.unary_stream_rpc_method_handler(
            legs.decode,
            decode_service_pb2.DecodeRequest.FromString,
            decode_service_pb2.DecodeResponse.SerializeToString,
        ),
    }
    for name, handler in handlers.items():
        _, service, method = name.split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    way = PastRouter(Workers(endpoint, endpoint, "e", 16), first_token=first_token)
    played = await way.play(talk(20, 4, 1000))
    await way.close()
    await server.stop(0)
    assert [request.first_token for request in legs.prefilled] == [first_token]
    assert [request.sampling.max_tokens for request in legs.decoded] == [of_d]
    assert played.chunks == 4


def test_ours_waits_for_d_as_the_peers_do() -> None:
    assert peers_parts.ROUTER["first_token_from_prefill"] is peers_parts.FIRST_TOKEN is False


def test_turns_that_went_another_way_than_their_leg_are_told() -> None:
    assert astray({"READBACK": 5}, "READBACK") == astray({"DIRECT": 5}, "") == astray({}, "DIRECT") == ""
    assert astray({"READBACK": 5, "DIRECT": 2}, "READBACK") == "2 of 7 later turns not READBACK: DIRECT x2"

    def peer(real: dict[str, int], **simulated: int) -> dict[str, Any]:
        return {"samples": 1, "verdicts": simulated, "real": {"later_verdicts": real}}

    good = {"kvloop-grpc": peer({}, READBACK=99, RECOMPUTE=1), "kvloop": peer({"READBACK": 5}, READBACK=9)}
    assert complaints_of(good) == []
    (complaint,) = complaints_of({**good, "kvloop": peer({"READBACK": 1, "DIRECT": 4})})
    assert complaint.startswith("kvloop is not what it is named for, on real vLLM: 4 of 5")
    (complaint,) = complaints_of({**good, "kvloop-grpc": peer({}, READBACK=98, DIRECT=2)})
    assert "on simulated engines: 2 of 100" in complaint
    assert complaints_of({"kvloop-grpc": peer({}) | {"samples": 0}}) == ["kvloop was not measured"]


async def test_a_record_can_be_written_at_any_time_and_says_whether_it_is_whole(tmp_path: Path) -> None:
    record = PeersRecord(tmp_path / "deep" / "peers.json", {"rounds": 2}, {"vllm-router": "0.1.17"})
    told: dict[str, str] = {}
    verdicts = Counter({"READBACK": 1})
    record.floors |= {"floor": "floor", "kvloop-grpc": "floor"}
    record.verdicts += [{"kvloop-grpc": verdicts}, {"kvloop-grpc": Counter({"READBACK": 1})}]
    record.reasons += [{"proxy": "no wheel"}, told, {"proxy": "no wheel"}]
    record.firsts[500, 1] = {"floor": [1.0], "kvloop-grpc": [2.0]}
    verdicts["DIRECT"] += 1
    told["kvloop-grpc"] = "TurnLost: gone"
    written = record.keep()
    assert json.loads(record.out.read_text()) == json.loads(json.dumps(written))
    assert not written["complete"]
    assert written["peers"]["proxy"]["reason"] == "no wheel"
    ours = written["peers"]["kvloop-grpc"]
    assert (ours["samples"], ours["verdicts"]) == (1, {"DIRECT": 1, "READBACK": 2})
    assert ours["reason"] == "TurnLost: gone; 1 of 3 later turns not READBACK: DIRECT x1"
    # A conversation on real vLLM is kept as soon as it was played.
    ended: list[int] = []
    legs = {"kvloop": Leg(FakeTarget(fails_at=7).send), "proxy": Leg(FakeTarget().send)}
    plan = RealPlan(conversations=2, turns=3, opening=8, input=4, output=2)
    playing = Real(
        plan, legs, WordEncoder(32_000), kept=lambda: ended.append(record.keep()["samples"]["real"])
    )
    record.turns = playing.turns
    record.real_reasons.append(playing.lost)
    await playing.play()
    assert [len(turns) for turns in ended] == [6, 10]
    assert (
        "on real vLLM: turn 2: TargetFailed"
        in json.loads(record.out.read_text())["peers"]["kvloop"]["reason"]
    )
    assert not list(record.out.parent.glob("*.part"))


def test_what_was_measured_before_a_part_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeStage(peers_parts.Stage):
        async def counts(self) -> dict[str, Any]:
            return {"prefill": {}}

    @asynccontextmanager
    async def simulated(*_: Any, step_ms: float, folder: Path) -> AsyncIterator[FakeStage]:
        if step_ms:
            raise PartFailed("router-0", "ended by itself", "")
        yield FakeStage({"floor": Entrant(Fake(1.0), FLOOR), "kvloop-grpc": Entrant(Fake(2.0), FLOOR)})

    monkeypatch.setattr(peers_parts, "simulated", simulated)
    out = tmp_path / "peers.json"
    arguments = ["--no-real", "--offline", "--rounds", "2", "--cache", str(tmp_path), "--out", str(out)]
    result = CliRunner().invoke(make_command(), arguments)
    assert result.exit_code != 0
    record = json.loads(out.read_text())
    assert (record["complete"], record["engines"]) == (False, {})
    assert set(record["samples"]["first_chunk_ms"]) == {"500/1", "500/8", "24000/1", "24000/8"}
    assert record["peers"]["kvloop-grpc"]["overhead"]["24000"]["at_once_8"]["added_ms"]["p50"] == 1.0


# -- as a process ----------------------------------------------------------------------------------------


def record_of(**peers: dict[str, Any]) -> dict[str, Any]:
    return {"machine": "a machine", "when": "now", "peers": peers}


def test_a_picture_shows_what_there_is(tmp_path: Path) -> None:
    firsts = {(tokens, n): {"floor": [1.0], "proxy": [3.0]} for tokens in (500, 24_000) for n in (1, 8)}
    costs = {500: [Measured("proxy", 10, 320, 0.5, 1.0)]}
    turns = {"1": {"prompt_tokens": 500, "ttft_ms": {"value": 10.0}}}
    empty = {"overhead": {}, "real": {}, "reason": "no wheel"}
    proxy = {"overhead": figures("proxy", "floor", firsts, costs), "real": {"turns": turns}, "reason": ""}
    files = draw(tmp_path / "peers", record_of(proxy=proxy, other=empty))
    assert [file.name for file in files] == ["peers.png", "peers.svg"]
    assert all(file.stat().st_size > 1000 for file in files)
    shown = lines(record_of(proxy=proxy, other=empty)["peers"])
    assert "+2.00 / +2.00" in shown[1]
    assert shown[2].endswith("no wheel")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kvloop_and_the_floor_are_measured_where_no_peer_can_be_had(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    program = [sys.executable, "-m", "kvloop.cli.main", "bench", "peers", "--no-real", "--offline"]
    few = ["--rounds", "2", "--turns", "4", "--limit-s", "0", "--out", str(out)]
    # An empty cache: no peers, and no tokenizer for a gateway.
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(
        [*program, *few], capture_output=True, text=True, timeout=230, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads(out.read_text())
    assert record["complete"]
    peers = record["peers"]
    for name in ("floor", "floor-grpc", "kvloop-grpc"):
        assert peers[name]["samples"] > 0, name
        assert set(peers[name]["overhead"]) == {"500", "24000"}
    assert peers["kvloop-grpc"]["overhead"]["500"]["cost"]["turns_per_cpu_s"] > 0
    assert set(peers["kvloop-grpc"]["verdicts"]) == {"READBACK"}
    for name in ("proxy", "toy-proxy", "vllm-router"):
        assert peers[name]["samples"] == 0
        assert "--offline" in peers[name]["reason"]
    assert "--no-real" in peers["proxy"]["reason"]
    assert (peers["kvloop"]["samples"], "the gateway needs" in peers["kvloop"]["reason"]) == (0, True)
    counts = record["engines"]["instant"]
    assert counts["prefill"]["refused"] == counts["decode"]["refused"] == 0
    assert counts["prefill"]["reads"] > 0
    assert (tmp_path / "peers.png").is_file()
