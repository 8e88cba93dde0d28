"""Whole turns over real gRPC against small fake workers: what goes to whom, and what comes back."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from router_fakes import FakeFleet, collect, expected_answer, fake_fleet, make_entry, make_request, until

from kvloop.metastore.factory import StoreOptions, open_store
from kvloop.metastore.port import Outage
from kvloop.router.app import RouterApp
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2

LONG = list(range(100))


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED).reason_name


async def test_a_first_turn_is_cold_and_complete() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        answer = await client.say(LONG, request_id="mine", priority=3)
        assert answer.token_ids == expected_answer(tokens.pack(LONG), 4)
        assert answer.text == "".join(f"<{t}>" for t in answer.token_ids)
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        summary = answer.summary
        assert summary is not None
        assert summary.request_id == "mine"
        assert (summary.prompt_tokens, summary.output_tokens) == (100, 4)
        assert (summary.prefill_worker, summary.decode_worker) == ("p0", "d0")
        assert summary.reuse.tokens.computed == 100
        assert summary.reuse.handoff.bytes == 7
        assert summary.lease.num_tokens == 103
        assert summary.ttft_ms > 0
        assert not summary.reuse.retried
        (first,), (second,) = fleet.prefills[0].requests, fleet.decodes[0].requests
        assert first.prompt_token_ids == second.prompt_token_ids == tokens.pack(LONG)
        assert first.scope == second.scope
        assert len(first.scope.scope) == 32
        assert first.scope.turn_start_us > 0
        assert first.priority == second.priority == 3
        assert first.sampling == second.sampling
        assert first.request_id == second.request_id != "mine"


async def test_the_next_turn_reads_back_on_the_same_decode_worker() -> None:
    async with fake_fleet(prefills=2, decodes=4) as fleet:
        client = await fleet.client()
        history, places = list(LONG), set()
        for turn in range(4):
            answer = await client.say(history)
            assert answer.way == (("RECOMPUTE", "NOT_FOUND") if turn == 0 else ("READBACK", "PROVEN"))
            assert answer.summary is not None
            places.add(answer.summary.decode_worker)
            history += [*answer.token_ids, 5, 6, 7]
        assert len(places) == 1
        sources = [r.read_source for p in fleet.prefills for r in p.requests if r.HasField("read_source")]
        source = min(sources, key=lambda read: read.num_tokens)
        assert source.num_tokens == 103
        assert source.block_size == 16


async def test_a_read_source_names_an_endpoint_of_the_pool_not_of_the_entry() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        answer = await client.say(LONG)
        scope = fleet.decodes[0].requests[0].scope
        entry = (await fleet.directory.lookup(scope.scope)).entry
        assert entry is not None
        entry.decode_endpoint, entry.turn_start_us = "192.0.2.1:1", 2**52
        await fleet.directory.publish(scope.scope, entry, 60)
        answer = await client.say(LONG + answer.token_ids)
        assert answer.way == ("READBACK", "PROVEN")
        assert fleet.prefills[0].requests[-1].read_source.decode_endpoint == fleet.decodes[0].host.endpoint


async def forge(fleet: FakeFleet, **changes: object) -> None:
    scope = fleet.decodes[0].requests[0].scope
    entry = (await fleet.directory.lookup(scope.scope)).entry
    assert entry is not None
    entry.turn_start_us = 2**52
    for name, value in changes.items():
        setattr(entry, name, value)
    await fleet.directory.publish(scope.scope, entry, 60)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": "of another life"}, "EPOCH"),
        ({"epoch": "x", "decode_endpoint": "192.0.2.1:1"}, "DECODE_UNAVAILABLE"),
        ({"held": False}, "EXPIRED"),
    ],
)
async def test_entries_that_are_stale_or_forged_cost_a_cold_turn(
    changes: dict[str, object], reason: str
) -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(LONG)
        await forge(fleet, **changes)
        answer = await client.say(LONG + first.token_ids)
        assert answer.way == ("RECOMPUTE", reason)
        assert answer.token_ids == expected_answer(tokens.pack(LONG), 4)
        assert not fleet.prefills[0].requests[-1].HasField("read_source")


async def test_a_restarted_decode_worker_is_noticed() -> None:
    async with fake_fleet() as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        first = await client.say(LONG)
        fleet.decodes[0].info.epoch = "another life"
        worker = app.pool.decode[0]
        await until(lambda: worker.info is not None and worker.info.epoch == "another life", "the new epoch")
        assert (await client.say(LONG + first.token_ids)).way == ("RECOMPUTE", "EPOCH")


async def test_changed_first_token_diverges() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(LONG)
        answer = await client.say([7, *LONG[1:], *first.token_ids])
        assert answer.way == ("RECOMPUTE", "DIVERGED")


async def test_a_fork_reads_its_parents_lease() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(LONG, "parent")
        answer = await client.say(LONG + first.token_ids, "child", parent_conversation_id="parent")
        assert answer.way == ("READBACK", "PROVEN")
        request = fleet.prefills[0].requests[-1]
        assert request.scope.conversation_id == "child"
        assert request.scope.digest_key == fleet.prefills[0].requests[0].scope.digest_key
        again = await client.say([*LONG, *first.token_ids, 1], "child", parent_conversation_id="parent")
        assert again.way == ("READBACK", "PROVEN")


async def test_a_gone_lease_is_looked_up_once_more() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(LONG)
        assert first.summary is not None
        prefill = fleet.prefills[0]
        prefill.missing.add(first.summary.lease.lease_id)

        async def sibling() -> None:
            prefill.on_prefill = None
            await forge(fleet, lease_id="longer")

        prefill.on_prefill = sibling
        answer = await client.say(LONG + first.token_ids)
        assert answer.way == ("READBACK", "PROVEN")
        assert not answer.reuse.retried
        asked = [r.read_source.lease_id for r in prefill.requests[1:]]
        assert asked == [first.summary.lease.lease_id, "longer"]
        assert len({r.request_id for r in prefill.requests}) == 3


async def test_what_is_found_instead_of_a_gone_lease_is_read_back_though_it_would_do_for_direct() -> None:
    async with fake_fleet() as fleet:
        fleet.decodes[0].info.prefix_caching = True
        client = await fleet.client(await fleet.router(direct=True, direct_max_suffix=3))
        first = await client.say(LONG)
        assert first.summary is not None
        prompt = [*LONG, *first.token_ids, 1, 2, 3, 4, 5]
        prefill, [decode] = fleet.prefills[0], fleet.decodes
        prefill.missing.add(first.summary.lease.lease_id)

        async def sibling() -> None:
            prefill.on_prefill = None
            scope = decode.requests[0].scope
            longer = make_entry(
                scope.digest_key,
                tokens.pack(prompt[:-2]),
                endpoint=decode.host.endpoint,
                epoch=decode.info.epoch,
                turn_start_us=2**52,
            )
            await fleet.directory.publish(scope.scope, longer, 60)

        prefill.on_prefill = sibling
        answer = await client.say(prompt)
        assert answer.way == ("READBACK", "PROVEN")
        assert answer.reuse.tokens.readback == len(prompt) - 2


async def test_a_gone_lease_that_nobody_replaced_is_cold() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(LONG)
        assert first.summary is not None
        fleet.prefills[0].missing.add(first.summary.lease.lease_id)
        answer = await client.say(LONG + first.token_ids)
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert fleet.directory.lookups == 3


async def test_reuse_can_be_forbidden_by_a_request_and_switched_off() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(LONG)
        prompt = LONG + first.token_ids
        answer = await client.say(prompt, reuse_policy=router_service_pb2.REUSE_POLICY_FORBID)
        assert answer.way == ("RECOMPUTE", "DISABLED")
        assert answer.summary is not None
        assert answer.summary.HasField("lease")
        off = await fleet.client(await fleet.router(reuse=False))
        lookups = fleet.directory.lookups
        answer = await off.say(prompt)
        assert answer.way == ("RECOMPUTE", "DISABLED")
        assert fleet.directory.lookups == lookups
        assert not fleet.decodes[0].requests[-1].scope.scope


async def test_prompt_logprobs_need_a_full_prefill() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(LONG)
        sampling = sampling_pb2.SamplingParams(max_tokens=4, prompt_logprobs=1)
        answer = await client.say(LONG + first.token_ids, sampling=sampling)
        assert answer.way == ("RECOMPUTE", "FULL_PREFILL_NEEDED")


async def test_no_conversation_no_lease() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        answer = await client.say(LONG, "")
        assert answer.way == ("RECOMPUTE", "NO_CONVERSATION")
        # The prompt's beginning may lead to another conversation.
        assert fleet.directory.lookups == 1
        assert not fleet.decodes[0].requests[0].scope.scope
        assert fleet.decodes[0].requests[0].scope.cache_salt


async def test_an_override_of_the_threshold_counts() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client(await fleet.router(kv_recompute_threshold=104))
        first = await client.say(LONG)
        answer = await client.say([*LONG, *first.token_ids, 1, 2])
        assert answer.way == ("RECOMPUTE", "BELOW_THRESHOLD")


async def test_directory_down_or_stuck_makes_cold_turns() -> None:
    async with fake_fleet() as fleet:
        app = await fleet.router(directory_timeout_ms=30.0)
        client = await fleet.client(app)
        await client.say(LONG)
        fleet.directory.down = True
        answer = await client.say(LONG)
        assert answer.way == ("RECOMPUTE", "DIRECTORY_UNAVAILABLE")
        assert fleet.decodes[0].requests[-1].scope.turn_start_us > 0
        fleet.directory.down = False
        fleet.directory.stuck = asyncio.Event()
        assert (await client.say(LONG)).way == ("RECOMPUTE", "DIRECTORY_UNAVAILABLE")
        fleet.directory.stuck = None
        await client.say(LONG)
        assert (await client.say(LONG)).way == ("READBACK", "PROVEN")


async def test_the_first_turn_that_a_silent_store_keeps_waiting_is_the_last() -> None:
    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    store = open_store(f"redis://127.0.0.1:{port}", options=StoreOptions(deadline_s=0.1))
    async with fake_fleet() as fleet, AsyncExitStack() as stack:
        stack.callback(silent.close)
        stack.push_async_callback(store.close)
        app = RouterApp(fleet.settings(directory_timeout_ms=100.0), directory=store.directory)
        stack.push_async_callback(app.stop)
        await app.start()
        client = await fleet.client(app)
        assert store.link is not None
        for _ in range(3):
            assert (await client.say(LONG)).way == ("RECOMPUTE", "DIRECTORY_UNAVAILABLE")
            assert store.degraded
            assert store.link.attempts == 1
        assert store.link.outages == {Outage.TIMEOUT: 1, Outage.BREAKER: 2}
        await app.stop()
        for writer in writers:
            writer.close()
            await writer.wait_closed()


async def test_a_displaced_lease_is_released_by_id_at_known_workers_only() -> None:
    async with fake_fleet(decodes=2) as fleet:
        for decode in fleet.decodes:
            decode.displaces = ("192.0.2.1:1", "unknown")
        client = await fleet.client()
        await client.say(LONG)
        for decode, other in zip(fleet.decodes, reversed(fleet.decodes), strict=True):
            decode.displaces = (other.host.endpoint, "displaced")
        await client.say(LONG)
        await until(lambda: any(d.released for d in fleet.decodes), "the release")
        assert [r for d in fleet.decodes for r in d.released] == [("displaced", b"")]


async def test_chunks_pile_up_into_one_for_a_slow_reader_and_the_lease_is_published() -> None:
    async with fake_fleet() as fleet:
        # More than the transport's buffers take: the reader holds the router up, but not the decode leg.
        fleet.decodes[0].padding = "x" * 5000
        client = await fleet.client(narrow=True)
        call = client.generate(make_request(LONG, max_tokens=200))
        await until(lambda: fleet.decodes[0].finished == 1, "the end of the decode leg")
        assert (await fleet.directory.lookup(fleet.decodes[0].requests[0].scope.scope)).entry is not None
        answer = await collect(call)
        assert answer.token_ids == expected_answer(tokens.pack(LONG), 200)
        assert answer.text == "".join(f"<{t}>{'x' * 5000}" for t in answer.token_ids)
        assert answer.chunks < 200


async def test_the_newest_attempt_of_a_request_wins() -> None:
    async with fake_fleet() as fleet:
        gate = asyncio.Event()

        async def wait(number: int) -> None:
            if number == 1 and len(fleet.decodes[0].requests) == 1:
                await gate.wait()

        fleet.decodes[0].on_chunk = wait
        app = await fleet.router()
        client = await fleet.client(app)
        older = client.generate(make_request(LONG, request_id="same"))
        responses = aiter(older)
        assert (await anext(responses)).WhichOneof("event") == "chunk"
        answer = await client.say(LONG, request_id="same")
        assert answer.summary is not None
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in responses:
                pass
        assert error.value.code() == grpc.StatusCode.CANCELLED
        assert reason_of(error.value) == "SUPERSEDED"
        await until(lambda: fleet.decodes[0].cancelled == 1, "the older leg's cancellation")
        await until(lambda: app.turns == 0, "no turns")


async def test_a_request_of_another_tenant_or_conversation_does_not_supersede() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        answers = await asyncio.gather(*(client.say(LONG, f"c{n}", request_id=f"r{n}") for n in range(20)))
        assert all(a.summary is not None for a in answers)


async def test_end_and_get_conversation() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        get = router_service_pb2.GetConversationRequest(conversation_id="c")
        end = router_service_pb2.EndConversationRequest(conversation_id="c")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.stub.GetConversation(get, timeout=5)
        assert reason_of(error.value) == "CONVERSATION_NOT_FOUND"
        assert not (await client.stub.EndConversation(end, timeout=5)).released
        answer = await client.say(LONG)
        assert answer.summary is not None
        lease: turn_pb2.LeaseInfo = (await client.stub.GetConversation(get, timeout=5)).lease
        assert lease.lease_id == answer.summary.lease.lease_id
        assert (lease.num_tokens, lease.decode_worker) == (103, "d0")
        assert 50 < lease.remaining_time.ToSeconds() <= 60
        assert (await client.stub.EndConversation(end, timeout=5)).released
        assert not fleet.decodes[0].leases
        assert (await client.say(LONG)).way == ("RECOMPUTE", "NOT_FOUND")


async def test_ending_a_conversation_whose_worker_is_gone_removes_the_entry() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        await client.say(LONG)
        await fleet.decodes[0].host.kill()
        end = router_service_pb2.EndConversationRequest(conversation_id="c")
        assert (await client.stub.EndConversation(end, timeout=10)).released
        assert (await fleet.directory.lookup(fleet.decodes[0].requests[0].scope.scope)).entry is None


async def test_conversations_need_the_directory() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        fleet.directory.down = True
        for call, request in (
            (client.stub.GetConversation, router_service_pb2.GetConversationRequest(conversation_id="c")),
            (client.stub.EndConversation, router_service_pb2.EndConversationRequest(conversation_id="c")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(request, timeout=5)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert reason_of(error.value) == "DIRECTORY_UNAVAILABLE"


async def test_a_prefill_worker_that_cannot_read_back_gets_no_read_source() -> None:
    async with fake_fleet() as fleet:
        fleet.prefills[0].info.bidirectional_kv_xfer = False
        client = await fleet.client()
        first = await client.say(LONG)
        answer = await client.say(LONG + first.token_ids)
        assert answer.way == ("RECOMPUTE", "INCOMPATIBLE")


async def test_engines_that_cannot_exchange_kv_are_no_pair() -> None:
    async with fake_fleet() as fleet:
        fleet.decodes[0].info.compatibility = "c2"
        client = await fleet.client()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.say(LONG)
        assert reason_of(error.value) == "NO_WORKER"


async def test_failures_of_the_request_itself_come_back_as_the_worker_said_them() -> None:
    async with fake_fleet() as fleet:

        async def refuse() -> None:
            raise Failure(
                Reason.ERROR_REASON_INVALID_FIELD, "does not compile", field="sampling.structured_outputs"
            )

        fleet.prefills[0].on_prefill = refuse
        client = await fleet.client()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.say(LONG)
        failure = from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED)
        assert (failure.reason_name, failure.field) == ("INVALID_FIELD", "sampling.structured_outputs")
        assert len(fleet.prefills[0].requests) == 1
