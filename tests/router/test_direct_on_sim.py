"""DIRECT, costs and explanations over simulated engines: real gRPC, a memory store."""

import asyncio
from typing import Any

import grpc
import pytest
from router_sim import SimClient, SimFleet, ask, ids, sim_fleet

from kvloop.router.app import RouterApp
from kvloop.router.settings import RouterSettings
from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

SUFFIX = [7, 8, 9, 10]
CACHED: dict[str, Any] = {"enable_prefix_caching": True}
TIMED: dict[str, Any] = {"preset": "qwen3-32b-h200"}


async def started(fleet: SimFleet, **settings: Any) -> tuple[RouterApp, SimClient]:
    app = await fleet.router(**settings)
    return app, await fleet.client(app)


async def explain(client: SimClient, request_id: str) -> router_service_pb2.ExplainTurnResponse:
    request = router_service_pb2.ExplainTurnRequest(request_id=request_id)
    try:
        told: router_service_pb2.ExplainTurnResponse = await client.stub.ExplainTurn(
            request, timeout=10, metadata=client.metadata
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, Reason.ERROR_REASON_INTERNAL) from None
    return told


async def test_direct_turn_after_turn() -> None:
    async with sim_fleet(engine=CACHED) as fleet:
        app, client = await started(fleet, direct=True)
        history = ids(300)
        for turn in range(4):
            answer = await client.same_as_cold(history)
            assert answer.summary is not None
            if turn:
                assert answer.way == ("DIRECT", "PROVEN")
                assert answer.reuse.tokens.d_local >= len(history) - len(SUFFIX) - 32
                assert answer.reuse.tokens.d_local + answer.reuse.tokens.computed == len(history)
                assert not answer.summary.prefill_worker
            history += [*answer.token_ids, *SUFFIX]
        assert all(worker.direct_tokens == worker.pending_ms == 0 for worker in app.pool.decode)
        assert await fleet.leases() == 1
        await client.end()
        await fleet.whole()


@pytest.mark.parametrize("by_cost", [False, True])
async def test_a_turn_that_asks_for_it_is_read_back(by_cost: bool) -> None:
    read_back = router_service_pb2.REUSE_POLICY_READBACK
    async with sim_fleet(engine=CACHED) as fleet:
        _, client = await started(fleet, direct=True, by_cost=by_cost)
        # P has the prompt in its own cache, so the answer must be worth a read.
        one = await client.say(ids(40), max_tokens=200)
        prompt = [*ids(40), *one.token_ids, *SUFFIX]
        answer = await client.same_as_cold(prompt, reuse_policy=read_back)
        assert answer.way == ("READBACK", "PROVEN")
        assert answer.reuse.tokens.readback > 0
        await client.end()
        await fleet.whole()


async def test_a_refusal_is_not_a_failed_attempt() -> None:
    async with sim_fleet(engine=CACHED) as fleet:
        _, client = await started(fleet, direct=True, max_attempts=1)
        one = await client.say(ids(300))
        prompt = [*ids(300), *one.token_ids, *SUFFIX]
        # The hold goes between lookup and submission; the directory still names it.
        fleet.flaky.on_lookup = fleet.decodes[0].engine.core.table.revoke_all
        two = await client.say(prompt, request_id="refused")
        fleet.flaky.on_lookup = None
        assert two.way == ("RECOMPUTE", "NOT_FOUND")
        assert two.token_ids == await client.cold(prompt)
        assert not two.reuse.retried
        told = await explain(client, "refused")
        assert told.direct_refused
        assert (told.decided_verdict, told.attempts) == (turn_pb2.VERDICT_DIRECT, 1)
        await client.end()
        await fleet.whole()


async def test_decode_workers_bound_suffix_tokens_themselves() -> None:
    async with sim_fleet(engine=CACHED | TIMED, decode={"direct_budget_tokens": 30}) as fleet:
        _, client = await started(fleet, direct=True, direct_budget_tokens=10_000)
        history = ids(300)
        one = await client.say(history)
        prompt = [*history, *one.token_ids, *ids(20, 5)]
        answers = await asyncio.gather(
            *(client.say(prompt, f"fork{i}", parent_conversation_id="c") for i in range(4))
        )
        ways = sorted(answer.way[0] for answer in answers)
        assert ways[0] == "DIRECT"
        assert ways[-1] in {"READBACK", "RECOMPUTE"}
        assert all(answer.token_ids == answers[0].token_ids for answer in answers)
        assert answers[0].token_ids == await client.cold(prompt)
        for name in ("c", *(f"fork{i}" for i in range(4))):
            await client.end(name)
        await fleet.whole()


async def test_a_cancelled_direct_turn_leaves_nothing() -> None:
    async with sim_fleet(engine=CACHED | TIMED) as fleet:
        app, client = await started(fleet, direct=True)
        one = await client.say(ids(300))
        prompt = [*ids(300), *one.token_ids, *SUFFIX]
        call = client.generate(ask(prompt, max_tokens=2000))
        await anext(aiter(call))
        call.cancel()
        await client.end()
        await fleet.whole()
        assert all(worker.direct_tokens == worker.pending_ms == 0 for worker in app.pool.decode)


@pytest.mark.parametrize("by_cost", [False, True])
async def test_a_holder_with_much_to_do_is_left(by_cost: bool) -> None:
    async with sim_fleet(decodes=2, engine=CACHED | TIMED) as fleet:
        app, client = await started(fleet, direct=True, by_cost=by_cost)
        one = await client.say(ids(40), max_tokens=200)
        prompt = [*ids(40), *one.token_ids, *SUFFIX]
        assert one.summary is not None
        [holder] = [worker for worker in app.pool.decode if worker.name == one.summary.decode_worker]
        assert holder.info is not None
        holder.announced(holder.info.epoch, 40.0, draining=False)
        two = await client.say(prompt)
        assert two.summary is not None
        assert two.way == ("READBACK", "PROVEN")
        assert two.summary.decode_worker not in {"", holder.name}
        assert two.token_ids == await client.cold(prompt)
        await client.end()
        await fleet.whole()


async def test_costs_are_learnt_and_decide() -> None:
    async with sim_fleet(engine=TIMED) as fleet:
        # By this seed reading takes for ever.
        _, client = await started(fleet, by_cost=True, seed_transfer=(10_000.0, 0.0, 0.0))
        history = ids(3000)
        one = await client.say(history)
        prompt = [*history, *one.token_ids, *SUFFIX]
        # The hand-over of the first turn has told what moving takes.
        two = await client.say(prompt, request_id="second")
        told = await explain(client, "second")
        assert told.by_cost
        assert told.costs.readback_ms < told.costs.recompute_ms
        assert two.way == ("READBACK", "PROVEN")
        assert told.costs.transfer_terms[0] < 1000
        assert told.timings_ms["prefill"] > 0
        await client.end()
        await fleet.whole()


async def test_a_turn_goes_to_the_decode_worker_that_is_less_full() -> None:
    async with sim_fleet(decodes=2) as fleet:
        app, client = await started(fleet)
        for worker, capacity in zip(app.pool.decode, (32, 256), strict=True):
            assert worker.info is not None
            worker.announced(worker.info.epoch, 30.0, draining=False, capacity=capacity)
        for number in range(6):
            answer = await client.say(ids(50, number), f"c{number}")
            assert answer.summary is not None
            assert answer.summary.decode_worker == app.pool.decode[1].name
            await client.end(f"c{number}")
        await fleet.whole()


@pytest.mark.parametrize("others", [0.0, 3.0])
async def test_a_leg_beside_other_routers_turns_is_no_measurement(others: float) -> None:
    async with sim_fleet(engine=TIMED) as fleet:
        app, client = await started(fleet, by_cost=True)
        history = ids(3000)
        for worker in (*app.pool.prefill, *app.pool.decode):
            assert worker.info is not None
            worker.announced(worker.info.epoch, others, draining=False)
        one = await client.say(history)
        await client.say([*history, *one.token_ids, *SUFFIX], request_id="second")
        costs, seeds = (await explain(client, "second")).costs, RouterSettings.model_fields
        learnt = (tuple(costs.prefill_terms), costs.first_step_ms) != (
            pytest.approx(seeds["seed_compute"].default),
            pytest.approx(seeds["seed_first_step_ms"].default),
        )
        assert learnt == (not others)
        await client.end()
        await fleet.whole()


async def test_what_other_routers_gave_to_p_is_waited_for() -> None:
    async with sim_fleet(engine=CACHED | TIMED) as fleet:
        app, client = await started(fleet, direct=True, by_cost=True)
        prefill, history = app.pool.prefill[0], ids(3000)
        assert prefill.info is not None
        waits = []
        for load in (0.0, 4.0, 8.0):
            prefill.announced(prefill.info.epoch, load, draining=False)
            answer = await client.say(history, request_id=f"beside-{load}")
            waits.append((await explain(client, f"beside-{load}")).costs.prefill_wait_ms)
            history += [*answer.token_ids, *SUFFIX]
        assert waits[0] == 0 < waits[1] < waits[2]
        await client.end()
        await fleet.whole()


@pytest.mark.parametrize("cheap", [True, False])
async def test_seeds_decide_before_anything_is_measured(cheap: bool) -> None:
    async with sim_fleet() as fleet:
        _, first = await started(fleet)
        one = await first.say(ids(300))
        seed = (0.0 if cheap else 10_000.0, 0.0, 0.0)
        _, client = await started(fleet, by_cost=True, seed_transfer=seed)
        two = await client.say([*ids(300), *one.token_ids, *SUFFIX])
        assert two.way == (("READBACK", "PROVEN") if cheap else ("RECOMPUTE", "COSTLIER"))
        await client.end()
        await fleet.whole()


async def test_only_the_own_recent_turns_are_explained() -> None:
    async with sim_fleet() as fleet:
        _, client = await started(fleet, explained_turns=2)
        for number in range(3):
            await client.say(ids(50), "", request_id=f"turn{number}")
        told = await explain(client, "turn2")
        assert (told.outcome, told.prompt_tokens, told.attempts) == ("ok", 50, 1)
        assert told.reuse.tokens.computed == 50
        for gone in ("turn0", "never"):
            with pytest.raises(Failure) as raised:
                await explain(client, gone)
            assert raised.value.reason == Reason.ERROR_REASON_TURN_NOT_FOUND


async def test_a_holder_that_fails_is_left_for_another() -> None:
    async with sim_fleet(decodes=2, engine=CACHED) as fleet:
        app, client = await started(fleet, direct=True)
        one = await client.say(ids(300))
        assert one.summary is not None
        holder = next(node for node in fleet.decodes if node.name == one.summary.decode_worker)
        holder.engine.faults.fail_decodes = 1
        prompt = [*ids(300), *one.token_ids, *SUFFIX]
        two = await client.say(prompt)
        assert two.way == ("RECOMPUTE", "READ_FAILED")
        assert two.reuse.retried
        assert two.summary is not None
        assert two.summary.decode_worker != one.summary.decode_worker
        assert two.token_ids == await client.cold(prompt)
        assert all(worker.direct_tokens == worker.pending_ms == 0 for worker in app.pool.decode)
        await client.end()
        await fleet.whole()
