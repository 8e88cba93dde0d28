"""Workers, stores and routers that fail under real turns: right answers, nothing stranded."""

import asyncio

import grpc
import pytest
from router_fakes import collect
from router_sim import SimFleet, ask, ids, sim_fleet, until_async

PROMPT = ids(400)
SLOW = {"preset": "qwen3-32b-h200"}


async def lease_free(fleet: SimFleet) -> None:
    """No conversation left, all blocks free."""
    await fleet.whole()
    assert await fleet.leases() == 0


async def test_f1_decode_worker_killed_while_it_is_read() -> None:
    async with sim_fleet(decodes=2) as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        first = await client.say(PROMPT)
        assert first.summary is not None
        holder = next(n for n in fleet.decodes if n.name == first.summary.decode_worker)
        prompt = [*PROMPT, *first.token_ids]
        reader = fleet.prefills[0].engine
        reader.faults.stall_reads, reader.faults.stall_s = 1, 0.2
        call = asyncio.create_task(client.say(prompt))

        async def reading() -> bool:
            return any(hold.pins for hold in await holder.engine.holds())

        await until_async(reading, "the read")
        holder.engine.faults.kill()
        answer = await call
        assert answer.way == ("RECOMPUTE", "READ_FAILED")
        assert answer.reuse.retried
        assert answer.token_ids == await client.cold(prompt)
        assert answer.summary is not None
        assert answer.summary.decode_worker != holder.name
        assert await client.end()
        await lease_free(fleet)


async def test_f2_prefill_worker_killed_while_it_reads() -> None:
    async with sim_fleet(prefills=2) as fleet:
        client = await fleet.client()
        first = await client.say(PROMPT)
        prompt = [*PROMPT, *first.token_ids]
        for node in fleet.prefills:
            node.engine.faults.stall_reads, node.engine.faults.stall_s = 1, 60.0
        call = asyncio.create_task(client.say(prompt))

        async def reading() -> bool:
            return any(n.engine.faults.stall_reads == 0 for n in fleet.prefills)

        await until_async(reading, "the read")
        victim = next(n for n in fleet.prefills if n.engine.faults.stall_reads == 0)
        victim.engine.faults.kill()
        answer = await call
        assert answer.way == ("RECOMPUTE", "READ_FAILED")
        assert answer.reuse.retried
        assert answer.token_ids == await client.cold(prompt)
        assert answer.summary is not None
        assert answer.summary.prefill_worker != victim.name
        assert await client.end()
        await lease_free(fleet)


async def test_a_read_that_fails_is_recomputed_by_the_prefill_worker() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(PROMPT)
        fleet.prefills[0].engine.faults.fail_reads = 1
        answer = await client.same_as_cold([*PROMPT, *first.token_ids])
        assert answer.way == ("RECOMPUTE", "READ_FAILED")
        assert answer.reuse.retried
        assert await client.end()
        await lease_free(fleet)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_handoff_that_fails_starts_the_turn_again(begun: bool) -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client(await fleet.router(first_token_from_prefill=begun))
        fleet.decodes[0].engine.faults.fail_reads = 1
        answer = await client.say(PROMPT)
        assert answer.summary is not None
        assert (answer.reuse.retried, answer.summary.migrated) == (not begun, begun)
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert answer.token_ids == await client.cold(PROMPT)
        assert await client.end()
        await lease_free(fleet)


@pytest.mark.parametrize("fault", ["fail_prefills", "fail_decodes"])
async def test_a_worker_that_fails_once_is_tried_around(fault: str) -> None:
    async with sim_fleet(prefills=2, decodes=2) as fleet:
        client = await fleet.client()
        node = (fleet.prefills if fault == "fail_prefills" else fleet.decodes)[0]
        setattr(node.engine.faults, fault, 1)
        answers = [await client.say(PROMPT, f"c{n}") for n in range(8)]
        cold = await client.cold(PROMPT)
        assert all(answer.token_ids == cold for answer in answers)
        assert sum(answer.reuse.retried for answer in answers) <= 1
        for number in range(8):
            assert await client.end(f"c{number}")
        await lease_free(fleet)


async def test_f5_a_lost_entry_is_a_cold_turn() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client(await fleet.router(prefix_hints=False))
        first = await client.say(PROMPT)
        assert first.summary is not None
        lookups: list[bytes] = []
        inner = fleet.flaky.lookup

        async def watched(scope: bytes) -> object:
            lookups.append(scope)
            return await inner(scope)

        fleet.flaky.lookup = watched  # type: ignore[method-assign]
        await client.say([*PROMPT, 9], "other")
        scope = lookups[0]
        assert scope
        entry = (await inner(scope)).entry
        assert entry is not None
        await fleet.flaky.remove(scope, entry.lease_id)
        answer = await client.same_as_cold([*PROMPT, 9, 10], "other")
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert await client.end("other")
        assert await client.end()
        await fleet.whole()


async def test_f7_directory_down_at_publish_and_back() -> None:
    async with sim_fleet(decode={"publish_bound_s": 0.5}) as fleet:
        client = await fleet.client()
        fleet.flaky.down = True
        first = await client.say(PROMPT)
        assert first.way == ("RECOMPUTE", "DIRECTORY_UNAVAILABLE")
        second = await client.say([*PROMPT, *first.token_ids])
        assert second.way == ("RECOMPUTE", "DIRECTORY_UNAVAILABLE")
        fleet.flaky.down = False
        prompt = [*PROMPT, *first.token_ids, *second.token_ids]
        third = await client.same_as_cold(prompt)
        fourth = await client.same_as_cold([*prompt, *third.token_ids])
        assert fourth.way == ("READBACK", "PROVEN")
        assert await client.end()
        await lease_free(fleet)


async def test_a_router_that_stops_in_the_middle_strands_nothing() -> None:
    # A prompt whose decode leg was cancelled before its read is freed by its time.
    brief = {"prefill_hold_s": 3.0, "read_margin_s": 0.5}
    async with sim_fleet(engine=SLOW | brief) as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        calls = [client.generate(ask(ids(300, seed=n), f"c{n}", max_tokens=300)) for n in range(6)]
        await anext(aiter(calls[0]))
        await app.stop()
        for call in calls[1:]:
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(call)
        await lease_free(fleet)
        other = await fleet.client()
        assert (await other.say(PROMPT)).token_ids == await other.cold(PROMPT)
        assert await other.end()
        await lease_free(fleet)


async def test_clients_that_leave_at_any_time_strand_nothing() -> None:
    # A prompt whose decode leg was cancelled before its first chunk is freed by D's notice or by its time.
    brief = {"prefill_hold_s": 3.0, "read_margin_s": 0.5}
    async with sim_fleet(prefills=2, decodes=2, engine=SLOW | brief) as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        for round_ in range(12):
            call = client.generate(ask(ids(300, seed=round_), f"c{round_}", max_tokens=500))
            task = asyncio.create_task(collect(call))
            await asyncio.wait({task}, timeout=0.02 * round_)
            call.cancel()
            await asyncio.wait({task})

        async def quiet() -> bool:
            return app.turns == 0

        await until_async(quiet, "the end of all turns")
        await lease_free(fleet)
        assert sum(w.in_flight for w in app.pool.prefill) + sum(w.in_flight for w in app.pool.decode) == 0
