"""What is remembered of a turn agrees with what its client was told."""

import asyncio

import grpc
import pytest
from router_fakes import Client, fake_fleet, make_request, until
from router_sim import ids, sim_fleet
from test_migration_on_sim import SLOW, ask, broken

from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

LONG = list(range(100))


async def explain(client: Client, request_id: str) -> router_service_pb2.ExplainTurnResponse:
    request = router_service_pb2.ExplainTurnRequest(request_id=request_id)
    told: router_service_pb2.ExplainTurnResponse = await client.stub.ExplainTurn(request, timeout=10)
    return told


async def test_a_turn_that_was_started_again() -> None:
    async with fake_fleet() as fleet:

        async def fail() -> None:
            fleet.prefills[0].on_prefill = None
            raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "no")

        fleet.prefills[0].on_prefill = fail
        client = await fleet.client()
        answer = await client.say(LONG, request_id="again")
        told = await explain(client, "again")
        assert (told.outcome, told.attempts) == ("ok", 2)
        assert told.reuse.retried
        assert told.reuse == answer.reuse


async def test_a_direct_turn_that_migrated() -> None:
    async with sim_fleet(decodes=2, engine=SLOW | {"enable_prefix_caching": True}) as fleet:
        client = await fleet.client(await fleet.router(direct=True))
        first = await client.say(ids(400))
        prompt = [*ids(400), *first.token_ids, 9]
        got = await broken(fleet, client, ask(prompt, max_tokens=30, request_id="moved"))
        told = await explain(client, "moved")
        assert (told.migrations, told.decided_verdict) == (1, turn_pb2.VERDICT_DIRECT)
        assert told.reuse == got.reuse
        assert told.reuse.verdict == turn_pb2.VERDICT_DIRECT
        assert told.reuse.tokens.d_local + told.reuse.tokens.computed == len(prompt) == told.prompt_tokens
        assert await client.end()
        await fleet.whole()


async def test_a_turn_that_nobody_expected_to_fail_and_one_that_was_cancelled() -> None:
    async with fake_fleet() as fleet:
        app = await fleet.router()
        client = await fleet.client(app)

        def broken_lookup() -> None:
            raise ZeroDivisionError

        fleet.directory.on_lookup = broken_lookup
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.say(LONG, request_id="broken")
        assert error.value.code() == grpc.StatusCode.INTERNAL
        told = await explain(client, "broken")
        assert told.outcome == "INTERNAL"
        assert not told.HasField("reuse")

        fleet.directory.on_lookup = None

        async def hang() -> None:
            await asyncio.Event().wait()

        fleet.prefills[0].on_prefill = hang
        call = client.generate(make_request(LONG, request_id="left"))
        await until(lambda: bool(fleet.prefills[0].requests), "the leg")
        call.cancel()
        await until(lambda: app.turns == 0, "the end of the turn")
        assert (await explain(client, "left")).outcome == "cancelled"
