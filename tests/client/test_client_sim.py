"""The Python client on simulated fleets: reuse, sessions, and routers that go away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf import duration_pb2
from router_sim import SimFleet, ids, sim_fleet, until_async

from kvloop.client import Client, Retention, SamplingParams, Session, Summary
from kvloop.router.app import RouterApp
from kvloop.v1alpha1 import turn_pb2

SAMPLING = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SHORT = Retention(ttl=duration_pb2.Duration(seconds=2))


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[SimFleet, list[RouterApp], Client]]:
    async with sim_fleet() as fleet:
        apps = [await fleet.router(session_alive_s=3.0, drain_limit_s=5.0) for _ in range(2)]
        async with Client([app.endpoint for app in apps]) as client:
            yield fleet, apps, client


async def say(talker: Session, prompt: list[int], retention: Retention | None = None) -> Summary:
    """Play a turn; its answer is put behind the prompt."""
    summary: Summary | None = None
    options = {"retention": retention} if retention is not None else {}
    async for event in talker.turn(list(prompt), sampling=SAMPLING, **options):  # type: ignore[arg-type]
        prompt += event.token_ids
        summary = event.summary or summary
    assert summary is not None
    return summary


def way(summary: Summary) -> str:
    return turn_pb2.Verdict.Name(summary.reuse.verdict).removeprefix("VERDICT_")


async def until_prolonged(fleet: SimFleet, times: int) -> None:
    async def often() -> bool:
        return fleet.decodes[0].app.parts.prolonger.prolonged >= times  # type: ignore[union-attr]

    await until_async(often, f"{times} times prolonged")


async def test_an_agent_s_conversation_from_beginning_to_end() -> None:
    async with two_routers() as (fleet, _, client):
        history = ids(100)
        async with client.session("agent") as session:
            assert way(await say(session, history, SHORT)) == "RECOMPUTE"
            held = await client.get("agent")
            assert held is not None
            assert held.num_tokens == len(history) - 1
            await until_prolonged(fleet, 2)
            history += ids(10, seed=1)
            second = await say(session, history, SHORT)
            assert way(second) == "READBACK"
            assert second.reuse.tokens.readback == held.num_tokens
            assert (await client.explain(second.request_id)).outcome == "ok"
            assert await fleet.leases() == 1
        assert await client.get("agent") is None
        await fleet.whole()
        assert not await client.end("agent")


async def test_a_router_that_drains_costs_neither_turns_nor_what_is_held() -> None:
    async with two_routers() as (fleet, apps, client):
        history = ids(100)
        async with client.session("agent") as session:
            await say(session, history, SHORT)
            await apps[0].drain()
            await apps[0].stop()
            await until_prolonged(fleet, 3)
            history += ids(10, seed=1)
            assert way(await say(session, history, SHORT)) == "READBACK"
            assert session.streams == 2
        await fleet.whole()


async def test_an_agent_that_is_cancelled_leaves_what_is_held_for_its_time() -> None:
    async with two_routers() as (fleet, _, client):
        talking = asyncio.Event()

        async def agent() -> None:
            async with client.session("agent") as session:
                await say(session, ids(100))
                talking.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(agent())
        await talking.wait()
        task.cancel()
        await asyncio.wait({task})
        assert await client.get("agent") is not None
        assert await client.end("agent")
        await fleet.whole()


async def test_many_turns_at_once_over_one_client() -> None:
    async with two_routers() as (fleet, _, client):

        async def one(number: int) -> str:
            async with client.session(f"agent-{number}") as session:
                history = ids(64, seed=number)
                await say(session, history)
                return way(await say(session, history))

        ways = await asyncio.gather(*(one(number) for number in range(20)))
        assert set(ways) == {"READBACK"}
        await fleet.whole()
