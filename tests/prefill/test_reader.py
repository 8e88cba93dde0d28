"""The reader's side: what goes wrong costs a cold turn and never a pin."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_status import rpc_status
from worker_kit import Pair, failing, open_pair, prefill_request, prompt, read_source, scope_of, until

from kvloop.metastore.port import DirectoryUnavailable
from kvloop.metastore.registry import Worker
from kvloop.prefill.peers import (
    ANY_LOOPBACK,
    ASK_AGAIN_S,
    FIRST_REST_S,
    KNOWN_FOR_S,
    LONGEST_REST_S,
    EndpointRule,
    Peers,
    Registered,
)
from kvloop.prefill.reading import NotRead, Reader, ReaderTimes
from kvloop.runtime import tokens
from kvloop.runtime.channels import SERVER_OPTIONS
from kvloop.runtime.clock import Clock, SystemClock
from kvloop.runtime.errors import Failure, Reason, to_status
from kvloop.runtime.servicing import Context
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    errors_pb2,
    lease_pb2,
    prefill_service_pb2,
    turn_pb2,
)

HISTORY = prompt(150, 1)
SUFFIX = prompt(40, 2)


class ManualClock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class MuteDecode(decode_service_pb2_grpc.DecodeServiceServicer):
    """Takes calls and answers when told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.begun = 0
        self.ended: list[str] = []
        self.end_failures = 0
        self.num_tokens = 32
        self.refusal: Failure | None = None

    async def BeginRead(  # noqa: N802
        self, request: decode_service_pb2.BeginReadRequest, context: Context
    ) -> decode_service_pb2.BeginReadResponse:
        self.begun += 1
        self.asked.set()
        await self.answer.wait()
        if self.refusal is not None:
            await context.abort_with_status(rpc_status.to_status(to_status(self.refusal)))
        response = decode_service_pb2.BeginReadResponse(read_id="r1", num_tokens=self.num_tokens)
        response.pin_time.FromSeconds(30)
        return response

    async def EndRead(  # noqa: N802
        self, request: decode_service_pb2.EndReadRequest, context: Context
    ) -> decode_service_pb2.EndReadResponse:
        if self.end_failures > 0:
            self.end_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "")
        self.ended.append(request.read_id)
        return decode_service_pb2.EndReadResponse()


class MuteServer:
    """MuteDecode on loopback."""

    async def __aenter__(self) -> "MuteServer":
        self.service = MuteDecode()  # type: ignore[abstract]
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self.service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.source = lease_pb2.ReadSource(
            decode_endpoint=f"127.0.0.1:{port}", lease_id="l", epoch="e", num_tokens=150, block_size=16
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)

    async def all_ended(self) -> bool:
        return self.service.ended == ["r1"]


async def stored_source(pair: Pair) -> lease_pb2.ReadSource:
    await pair.play(HISTORY)
    entry = await pair.entry()
    assert entry is not None
    return read_source(entry)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_id": "unknown"}, "NOT_FOUND"),
        ({"epoch": "another"}, "EPOCH"),
        ({"decode_endpoint": "127.0.0.1:1"}, "DECODE_UNAVAILABLE"),
        ({"decode_endpoint": "192.0.2.1:50052"}, "DECODE_UNAVAILABLE"),
        ({"decode_endpoint": "unix:/tmp/socket"}, "DECODE_UNAVAILABLE"),
        ({"decode_endpoint": ""}, "DECODE_UNAVAILABLE"),
        ({"num_tokens": 0}, "BELOW_THRESHOLD"),
    ],
)
async def test_f6_stale_or_forged_entries_cost_a_cold_turn(
    pair: Pair, change: dict[str, object], reason: str
) -> None:
    source = await stored_source(pair)
    for name, value in change.items():
        setattr(source, name, value)
    answer = await pair.play([*HISTORY, *SUFFIX], source=source)
    assert (answer.verdict, answer.reason) == ("RECOMPUTE", reason)
    assert answer.reuse.tokens.readback == 0
    assert answer.ids == (await pair.cold([*HISTORY, *SUFFIX])).ids


async def test_more_tokens_than_held_are_no_more_than_held(pair: Pair) -> None:
    source = await stored_source(pair)
    source.num_tokens = 4_000_000
    held = (await pair.leases())[0].num_tokens
    answer = await pair.play([*HISTORY, *prompt(60, 5)], source=source)
    assert answer.verdict == "READBACK"
    assert answer.reuse.tokens.readback <= held
    assert answer.ids == (await pair.cold([*HISTORY, *prompt(60, 5)])).ids


async def test_another_tenant_reads_nothing(pair: Pair) -> None:
    source = await stored_source(pair)
    answer = await pair.play([*HISTORY, *SUFFIX], scope=scope_of("c", "other"), source=source)
    assert (answer.verdict, answer.reason) == ("RECOMPUTE", "NOT_FOUND")


async def test_a_router_that_wants_to_look_again_is_told_of_a_missing_lease(pair: Pair) -> None:
    source = await stored_source(pair)
    source.lease_id = "superseded-elsewhere"
    before = (await pair.prefill_engine.counters()).computed_tokens
    with pytest.raises(Failure) as raised:
        await pair.run_prefill([*HISTORY, *SUFFIX], scope_of("c"), source, report_missing_lease=True)
    assert raised.value.reason == Reason.ERROR_REASON_LEASE_NOT_FOUND
    assert (await pair.prefill_engine.counters()).computed_tokens == before


async def test_engines_of_other_weights_do_not_meet() -> None:
    async with open_pair(prefill_engine={"revision": "another"}) as pair:
        prefilled = await pair.run_prefill(HISTORY, scope_of("c"), None)
        await failing(
            pair.prefill.ReleasePrefill(
                prefill_service_pb2.ReleasePrefillRequest(request_id="nothing"), timeout=5
            )
        )
        assert prefilled.reuse.tokens.computed == len(HISTORY)
        answer = await pair.run_decode(HISTORY, scope_of("c", start=1), None)
        assert answer.summary.HasField("lease")
        source = await pair.source(scope_of("c"))
        again = await pair.run_prefill([*HISTORY, *SUFFIX], scope_of("c"), source)
        assert again.reuse.reason == turn_pb2.REUSE_REASON_INCOMPATIBLE


async def test_readback_switched_off() -> None:
    async with open_pair(prefill_engine={"bidirectional_kv_xfer": False}) as pair:
        await pair.play(HISTORY)
        answer = await pair.play([*HISTORY, *SUFFIX])
        assert (answer.verdict, answer.reason) == ("RECOMPUTE", "INCOMPATIBLE")


async def test_a_failed_read_is_computed_anew_once(pair: Pair) -> None:
    await pair.play(HISTORY)
    pair.prefill_engine.faults.fail_reads = 1
    answer = await pair.play([*HISTORY, *SUFFIX])
    assert (answer.verdict, answer.reason) == ("RECOMPUTE", "READ_FAILED")
    assert answer.reuse.retried
    assert answer.reuse.tokens.computed == len(HISTORY) + len(SUFFIX)
    assert answer.ids == (await pair.cold([*HISTORY, *SUFFIX])).ids
    await pair.close_conversation()
    await until(pair.all_free)


async def test_blocks_of_other_tokens_are_refused_by_the_guard(pair: Pair) -> None:
    await pair.play(HISTORY)
    pair.prefill_engine.faults.corrupt_reads = 1
    answer = await pair.play([*HISTORY, *SUFFIX])
    assert (answer.reason, answer.reuse.retried) == ("READ_FAILED", True)
    assert answer.ids == (await pair.cold([*HISTORY, *SUFFIX])).ids


async def test_other_engine_failures_are_statuses(pair: Pair) -> None:
    pair.prefill_engine.faults.fail_prefills = 1
    with pytest.raises(Failure) as raised:
        await pair.play(HISTORY)
    assert raised.value.reason == Reason.ERROR_REASON_WORKER_FAILED
    await until(pair.all_free)


async def test_a_kv_made_by_the_second_attempt_can_be_released(pair: Pair) -> None:
    await pair.play(HISTORY)
    pair.prefill_engine.faults.fail_reads = 1
    scope = scope_of("c")
    request = prefill_request([*HISTORY, *SUFFIX], scope, await pair.source(scope))
    answer = await failing(pair.prefill.Prefill(request, timeout=10))
    assert answer.reuse.retried
    release = prefill_service_pb2.ReleasePrefillRequest(request_id=request.request_id)
    assert (await failing(pair.prefill.ReleasePrefill(release, timeout=10))).released
    assert not (await failing(pair.prefill.ReleasePrefill(release, timeout=10))).released
    pool = await pair.prefill_engine.pool()
    assert pool.free_blocks == pool.total_blocks


async def test_a_caller_that_leaves_holds_nothing() -> None:
    async with open_pair(prefill_engine={"preset": "qwen3-32b-h200", "time_scale": 20.0}) as pair:
        call = pair.prefill.Prefill(prefill_request(HISTORY, scope_of("c")), timeout=20)

        async def running() -> bool:
            pool = await pair.prefill_engine.pool()
            return pool.free_blocks < pool.total_blocks

        await until(running)
        call.cancel()
        await until(pair.all_free)


async def test_a_mute_holder_costs_one_timeout_then_rests() -> None:
    async with MuteServer() as mute, open_pair(prefill={"begin_read_timeout_s": 0.05}) as pair:
        for _ in range(2):
            answer = await pair.run_prefill(HISTORY, scope_of("c"), mute.source)
            assert answer.reuse.reason == turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE
        assert mute.service.begun == 1
        # It grants at last, when nobody waits any more, and is no quicker a holder for that.
        mute.service.answer.set()
        await until(mute.all_ended)


@asynccontextmanager
async def open_reader(clock: Clock, begin_s: float) -> AsyncIterator[tuple[Reader, Peers]]:
    peers = Peers(clock, limit=2)
    known = Registered(nobody, clock)
    rule = EndpointRule((ANY_LOOPBACK,), known.has)
    reader = Reader(peers, rule, known.side_channel, clock, ReaderTimes(begin_s=begin_s))
    try:
        yield reader, peers
    finally:
        await reader.close(0)
        await peers.close()


async def nobody() -> dict[str, dict[str, str]]:
    return {}


async def ask(reader: Reader, mute: MuteServer, pair: Pair, time_left_s: float) -> NotRead:
    facts = pair.prefill_engine.facts
    with pytest.raises(NotRead) as raised:
        await reader.begin(mute.source, scope_of("c"), tokens.pack(HISTORY), facts, time_left_s)
    return raised.value


async def test_a_turn_short_of_time_says_nothing_of_its_holder(pair: Pair) -> None:
    async with MuteServer() as mute, open_reader(SystemClock(), begin_s=30.0) as (reader, peers):
        refused = await ask(reader, mute, pair, time_left_s=0.05)
        assert refused.reason == turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE
        assert not peers.is_resting(mute.source.decode_endpoint)
        mute.service.answer.set()
        await until(mute.all_ended)
        assert not peers.is_resting(mute.source.decode_endpoint)


async def test_a_late_answer_does_not_end_a_rest(pair: Pair) -> None:
    clock = ManualClock()
    async with MuteServer() as mute, open_reader(clock, begin_s=0.05) as (reader, peers):
        await ask(reader, mute, pair, time_left_s=30.0)
        assert peers.is_resting(mute.source.decode_endpoint)
        clock.now += 0.1
        mute.service.answer.set()
        await until(mute.all_ended)
        assert peers.is_resting(mute.source.decode_endpoint)
        # Nor does what came of it count twice.
        clock.now += FIRST_REST_S
        assert not peers.is_resting(mute.source.decode_endpoint)


@pytest.mark.parametrize("reason", [Reason.ERROR_REASON_DRAINING, Reason.ERROR_REASON_INVALID_FIELD])
async def test_a_holder_that_refuses_is_not_mute(
    pair: Pair, reason: "errors_pb2.ErrorReason.ValueType"
) -> None:
    async with MuteServer() as mute, open_reader(SystemClock(), begin_s=30.0) as (reader, peers):
        mute.service.refusal = Failure(reason, "no")
        mute.service.answer.set()
        refused = await ask(reader, mute, pair, time_left_s=30.0)
        assert refused.reason == turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE
        assert not peers.is_resting(mute.source.decode_endpoint)


async def test_leave_granted_to_a_caller_that_left_is_given_back(pair: Pair) -> None:
    async with MuteServer() as mute:
        mute.service.end_failures = 1
        call = pair.prefill.Prefill(prefill_request(HISTORY, scope_of("c"), mute.source), timeout=20)
        await mute.service.asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        mute.service.answer.set()
        await until(mute.all_ended)


async def test_a_grant_of_tokens_not_proven_is_given_back(pair: Pair) -> None:
    async with MuteServer() as mute:
        mute.service.answer.set()
        mute.service.num_tokens = 33
        answer = await pair.run_prefill(HISTORY, scope_of("c"), mute.source)
        assert answer.reuse.reason == turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE
        await until(mute.all_ended)


async def test_a_registered_holder_may_be_dialled() -> None:
    async with open_pair(prefill={"decode_endpoints": ()}) as pair:
        await pair.play(HISTORY)

        async def read_back() -> bool:
            scope = scope_of("c")
            answer = await pair.run_prefill([*HISTORY, *SUFFIX], scope, await pair.source(scope))
            return answer.reuse.verdict == turn_pb2.VERDICT_READBACK

        # The decode worker announces itself to the store that both use.
        await until(read_back)
        workers = await pair.store.registry.workers()
        assert {worker.role for worker in workers.values()} == {"prefill", "decode"}
        assert all(isinstance(worker, Worker) for worker in workers.values())


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        ("127.0.0.1:50052", "127.0.0.1:50052"),
        ("localhost:50052", "localhost:50052"),
        ("[::1]:50052", "[::1]:50052"),
        ("[0:0:0:0:0:0:0:1]:50052", "[::1]:50052"),
        ("d7.example:50052", "d7.example:50052"),
        ("d8.example:50052", "d8.example:50052"),
        ("d7.example:50053", None),
        ("10.0.0.1:50052", None),
        ("::1:50052", None),
        ("127.0.0.1", None),
        ("127.0.0.1:0", None),
        ("127.0.0.1:99999", None),
        ("dns:///127.0.0.1:1", None),
        ("unix:127.0.0.1:1", None),
        ("127.0.0.1:1/path", None),
    ],
)
async def test_endpoints_that_may_be_dialled(text: str, admitted: str | None) -> None:
    async def registered() -> dict[str, dict[str, str]]:
        return {"d8.example:50052": {}}

    known = Registered(registered, ManualClock())
    rule = EndpointRule((ANY_LOOPBACK, "d7.example:50052"), known.has)
    assert await rule.admit(text) == admitted


async def test_the_registry_is_read_when_somebody_is_not_known_and_seldom_otherwise() -> None:
    clock, readings = ManualClock(), 0
    listed: dict[str, dict[str, str]] = {"a:1": {}}

    async def read() -> dict[str, dict[str, str]]:
        nonlocal readings
        readings += 1
        if not listed:
            raise DirectoryUnavailable
        return listed

    known = Registered(read, clock)
    assert await asyncio.gather(*(known.has("a:1") for _ in range(8))) == [True] * 8
    assert readings == 1
    # Whoever names endpoints that nobody knows does not keep the store busy.
    assert not any([await known.has(f"x:{port}") for port in range(1, 50)])
    assert readings == 1
    listed["b:1"] = {}
    clock.now += ASK_AGAIN_S
    assert await known.has("b:1")
    assert readings == 2
    clock.now += KNOWN_FOR_S - 0.01
    assert await known.has("a:1")
    assert readings == 2
    del listed["a:1"]
    clock.now += 0.01
    assert not await known.has("a:1")
    # A store that is away takes nobody away.
    listed.clear()
    clock.now += KNOWN_FOR_S
    assert await known.has("b:1")
    assert await known.has("b:1")
    assert readings == 4


async def test_the_registry_is_read_again_for_another_life_of_a_worker() -> None:
    clock, readings = ManualClock(), 0
    listed = {"a:1": {"one": "10.0.0.1:7000"}}

    async def read() -> dict[str, dict[str, str]]:
        nonlocal readings
        readings += 1
        return listed

    known = Registered(read, clock)
    assert await known.has("a:1")
    assert await known.side_channel("a:1", "one") == "10.0.0.1:7000"
    assert readings == 1
    listed["a:1"] = {"two": "10.0.0.1:7001"}
    assert await known.side_channel("a:1", "two") == ""
    clock.now += ASK_AGAIN_S
    assert await known.side_channel("a:1", "two") == "10.0.0.1:7001"
    assert await known.side_channel("a:1", "one") == ""
    assert readings == 2


async def test_rests_double_up_to_a_limit_and_end_with_an_answer() -> None:
    clock = ManualClock()
    peers = Peers(clock, limit=2)
    peers.stub("127.0.0.1:1")
    rest = FIRST_REST_S
    for _ in range(8):
        peers.failed("127.0.0.1:1")
        assert peers.is_resting("127.0.0.1:1")
        clock.now += rest
        assert not peers.is_resting("127.0.0.1:1")
        rest = min(rest * 2, LONGEST_REST_S)
    peers.failed("127.0.0.1:1")
    peers.answered("127.0.0.1:1")
    assert not peers.is_resting("127.0.0.1:1")
    peers.stub("127.0.0.1:2")
    peers.stub("127.0.0.1:3")
    assert len(peers) == 2
    await peers.close()
