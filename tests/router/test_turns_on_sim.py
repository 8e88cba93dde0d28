"""Conversations through real routers, prefill and decode workers on simulated engines.

The simulated tokens are a digest of what the blocks were filled with, so a wrong block is a wrong answer.
"""

import asyncio
import secrets
from pathlib import Path

import grpc
import pytest
from router_fakes import collect
from router_sim import THRESHOLD, ask, ids, sim_fleet, until_async

from kvloop.router.auth import hash_token
from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, turn_pb2


async def test_turns_of_a_conversation_reuse(store_url: str) -> None:
    async with sim_fleet(prefills=2, decodes=3, url=store_url) as fleet:
        client = await fleet.client()
        conversation = secrets.token_hex(4)
        history, held = ids(200), 0
        for turn in range(5):
            answer = await client.say(history, conversation)
            assert answer.token_ids == await client.cold(history)
            if turn == 0:
                assert answer.way == ("RECOMPUTE", "NOT_FOUND")
            else:
                assert answer.way == ("READBACK", "PROVEN")
                assert answer.reuse.tokens.readback == held
                assert answer.reuse.readback.bytes > 0
            sources = answer.reuse.tokens
            assert sources.readback + sources.p_local + sources.computed == len(history)
            assert answer.summary is not None
            held = answer.summary.lease.num_tokens
            history += [*answer.token_ids, *ids(20, seed=turn)]
        assert await client.end(conversation)
        assert not await client.end(conversation)
        await fleet.whole()


async def test_any_router_serves_any_turn(store_url: str) -> None:
    async with sim_fleet(decodes=2, url=store_url) as fleet:
        routers = [await fleet.client(await fleet.router()) for _ in range(3)]
        conversation = secrets.token_hex(4)
        history = ids(100)
        for turn in range(6):
            answer = await routers[turn % 3].say(history, conversation)
            assert answer.way[0] == ("READBACK" if turn else "RECOMPUTE")
            history += [*answer.token_ids, 7]
        assert await routers[0].end(conversation)
        await fleet.whole()


async def test_d5_two_turns_of_one_conversation_at_once_on_two_routers(store_url: str) -> None:
    async with sim_fleet(prefills=2, decodes=2, url=store_url) as fleet:
        one, other = await fleet.client(), await fleet.client()
        conversation = secrets.token_hex(4)
        first = await one.say(ids(100), conversation)
        history = [*ids(100), *first.token_ids]
        prompts = [[*history, 5], [*history, 6, 7]]
        answers = await asyncio.gather(one.say(prompts[0], conversation), other.say(prompts[1], conversation))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == await one.cold(prompt)
            assert answer.way == ("READBACK", "PROVEN")

        async def one_lease() -> bool:
            return await fleet.leases() == 1

        await until_async(one_lease, "a single lease")
        assert await one.end(conversation)
        await fleet.whole()


async def test_c1_tenants_never_meet(tmp_path: Path, store_url: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{hash_token('a')} acme\n{hash_token('b')} beta\n")
    async with sim_fleet(url=store_url, engine={"enable_prefix_caching": True}) as fleet:
        app = await fleet.router(tokens_file=file)
        acme, beta = await fleet.client(app, "a"), await fleet.client(app, "b")
        conversation = secrets.token_hex(4)
        first = await acme.say(ids(100), conversation, max_tokens=80)
        prompt = [*ids(100), *first.token_ids]
        answer = await beta.say(prompt, conversation)
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert answer.reuse.tokens.computed == len(prompt)
        assert await beta.end(conversation)
        assert not await beta.end(conversation)
        request = router_service_pb2.GetConversationRequest(conversation_id=conversation)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await beta.stub.GetConversation(request, timeout=5, metadata=beta.metadata)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        assert (await acme.say(prompt, conversation)).way[0] == "READBACK"
        assert await acme.end(conversation)
        await fleet.whole()


async def test_no_token_no_turn(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{hash_token('a')} acme\n")
    async with sim_fleet() as fleet:
        app = await fleet.router(tokens_file=file)
        for token in (None, "b"):
            client = await fleet.client(app, token)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.say(ids(10))
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.end()
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_c4_salts_separate() -> None:
    async with sim_fleet(engine={"enable_prefix_caching": True}) as fleet:
        client = await fleet.client()
        first = await client.say(ids(100), max_tokens=80, cache_salt="one")
        prompt = [*ids(100), *first.token_ids]
        answer = await client.say(prompt, cache_salt="two")
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert answer.reuse.tokens.computed == len(prompt)
        assert (await client.say(prompt, cache_salt="one")).way[0] == "READBACK"
        assert await client.end(cache_salt="one")
        assert await client.end(cache_salt="two")
        await fleet.whole()


async def test_c6_f3_a_restarted_decode_worker_has_forgotten_and_serves_on() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        first = await client.say(ids(100))
        prompt = [*ids(100), *first.token_ids]
        old = fleet.decodes.pop()
        endpoint = old.endpoint
        old.engine.faults.kill()
        await old.app.stop()
        fleet.decodes.clear()
        new = await fleet.add_decode(endpoint)
        worker = app.pool.decode[0]

        async def noticed() -> bool:
            return worker.ready and worker.info is not None and worker.info.epoch == new.engine.facts.epoch

        await until_async(noticed, "the new epoch")
        answer = await client.same_as_cold(prompt)
        assert answer.way in {("RECOMPUTE", "EPOCH"), ("RECOMPUTE", "NOT_FOUND")}
        again = await client.same_as_cold([*prompt, *answer.token_ids])
        assert again.way == ("READBACK", "PROVEN")
        assert await client.end()
        await fleet.whole()


async def test_e1_a_lease_whose_time_is_over_is_gone() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        retention = turn_pb2.Retention()
        retention.ttl.FromMilliseconds(300)
        first = await client.say(ids(100), retention=retention)
        assert first.summary is not None
        assert first.summary.HasField("lease")

        async def none_left() -> bool:
            return await fleet.leases() == 0

        await until_async(none_left, "the end of the lease")
        answer = await client.same_as_cold([*ids(100), *first.token_ids])
        assert answer.way[0] == "RECOMPUTE"
        assert answer.way[1] in {"NOT_FOUND", "EXPIRED"}
        await client.end()
        await fleet.whole()


async def test_e2_a_lease_that_goes_between_lookup_and_read() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(100))
        assert first.summary is not None
        lease = first.summary.lease.lease_id
        engine = fleet.decodes[0].engine
        evicted: list[bool] = []

        def evict() -> None:
            fleet.flaky.on_lookup = None
            evicted.append(engine.faults.evict(lease))

        # The directory is not told, so that it names the lease at the second look as well.
        engine.faults.drop_hold_events = 1
        fleet.flaky.on_lookup = evict
        answer = await client.same_as_cold([*ids(100), *first.token_ids])
        assert evicted == [True]
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert answer.reuse.readback.bytes == 0
        await client.end()
        await fleet.whole()


async def test_e6_a_client_that_does_not_read_holds_up_nobody() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        call = client.generate(ask(ids(100), max_tokens=2000))

        async def leased() -> bool:
            return await fleet.leases() == 1

        await until_async(leased, "the lease")
        request = router_service_pb2.GetConversationRequest(conversation_id="c")

        async def published() -> bool:
            try:
                held = (await client.stub.GetConversation(request, timeout=5)).lease
            except grpc.aio.AioRpcError:
                return False
            return bool(held.num_tokens == 2099)

        await until_async(published, "the directory entry")
        answer = await collect(call)
        assert len(answer.token_ids) == 2000
        assert await client.end()
        await fleet.whole()


async def test_a12_below_the_threshold_nothing_moves_and_the_lease_lives() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        short = ids(THRESHOLD - 17)
        first = await client.say(short)
        assert first.summary is not None
        assert first.summary.lease.num_tokens == THRESHOLD - 2
        prompt = [*short, *first.token_ids, 5]
        answer = await client.say(prompt, "fork", parent_conversation_id="c")
        assert answer.way == ("RECOMPUTE", "BELOW_THRESHOLD")
        assert answer.reuse.readback.bytes == 0
        assert await client.end("fork")
        assert await client.end()
        await fleet.whole()


async def test_a2_a_changed_beginning_diverges() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(200))
        prompt = [9, *ids(200)[1:], *first.token_ids]
        answer = await client.same_as_cold(prompt)
        assert answer.way == ("RECOMPUTE", "DIVERGED")
        assert answer.reuse.readback.bytes == 0
        await client.end()
        await fleet.whole()


async def test_a3_a_changed_middle_reads_what_is_before_it() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(200))
        prompt = [*ids(200), *first.token_ids]
        prompt[100] += 1
        answer = await client.same_as_cold(prompt)
        assert answer.way == ("READBACK", "PROVEN")
        assert 96 <= answer.reuse.tokens.readback <= 100
        await client.end()
        await fleet.whole()


async def test_d2_d3_forks_of_one_context_all_reuse() -> None:
    async with sim_fleet(prefills=2) as fleet:
        client = await fleet.client()
        first = await client.say(ids(200), "parent")
        history = [*ids(200), *first.token_ids]
        prompts = [[*history, n, n + 1] for n in range(10, 15)]
        answers = await asyncio.gather(
            *(
                client.say(prompt, f"fork{n}", parent_conversation_id="parent")
                for n, prompt in enumerate(prompts)
            )
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.way == ("READBACK", "PROVEN")
            assert answer.token_ids == await client.cold(prompt)
        for name in ("parent", *(f"fork{n}" for n in range(5))):
            assert await client.end(name)
        await fleet.whole()


async def test_d3_siblings_that_share_a_conversation_all_reuse() -> None:
    async with sim_fleet(prefills=2) as fleet:
        client = await fleet.client()
        first = await client.say(ids(200))
        history = [*ids(200), *first.token_ids]
        prompts = [[*history, n, n + 1] for n in range(10, 16)]
        answers = await asyncio.gather(*(client.say(prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.way == ("READBACK", "PROVEN")
            assert answer.token_ids == await client.cold(prompt)
        assert await client.end()
        await fleet.whole()


@pytest.mark.parametrize("keep", [True, False])
async def test_b5_b6_a_cancelled_turn_keeps_what_it_was_told_to(keep: bool) -> None:
    slow = {"preset": "qwen3-32b-h200"}
    async with sim_fleet(engine=slow) as fleet:
        client = await fleet.client()
        retention = turn_pb2.Retention(hold_on_cancel=keep)
        call = client.generate(ask(ids(200), max_tokens=2000, retention=retention))
        await anext(aiter(call))
        call.cancel()
        if keep:

            async def leased() -> bool:
                return await fleet.leases() == 1

            await until_async(leased, "the lease")

            async def published() -> bool:
                answer = await client.say(ids(200))
                return answer.way == ("READBACK", "PROVEN")

            await until_async(published, "reuse of the cancelled turn")
            assert await client.end()
        await fleet.whole()


async def test_ways_to_ask_without_trace() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        await client.say(ids(100), retention=turn_pb2.Retention(hold=False))
        assert not await client.end()
        await client.say(ids(100), "")
        await fleet.whole()


async def test_get_conversation_tells_the_lease() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        answer = await client.say(ids(100))
        assert answer.summary is not None
        request = router_service_pb2.GetConversationRequest(conversation_id="c")
        lease = (await client.stub.GetConversation(request, timeout=5)).lease
        assert lease.lease_id == answer.summary.lease.lease_id
        assert lease.num_tokens == 115
        assert lease.decode_worker == "d0"
        assert await client.end()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.stub.GetConversation(request, timeout=5)
        failure = from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED)
        assert failure.reason_name == "CONVERSATION_NOT_FOUND"
