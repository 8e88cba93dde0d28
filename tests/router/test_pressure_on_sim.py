"""More conversations than a decode worker has room for: leases go at any moment, no turn fails."""

import asyncio

import pytest
from router_sim import SimClient, ids, sim_fleet

from kvloop.decode.app import DecodeApp

CONVERSATIONS = 8
AT_ONCE = 6
"""Their first turns have room together, all of their turns have not."""
TURNS = 3
GONE = {"NOT_FOUND", "EXPIRED", "READ_FAILED"}


async def test_a_lease_evicted_after_its_lookup_costs_a_cold_turn() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(100))
        table = fleet.decodes[0].engine.core.table
        evicted: list[bool] = []

        def make_room() -> None:
            fleet.flaky.on_lookup = None
            evicted.append(table.evict_one())

        fleet.flaky.on_lookup = make_room
        answer = await client.same_as_cold([*ids(100), *first.token_ids])
        assert evicted == [True]
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        await client.end()
        await fleet.whole()


async def test_twice_the_pool_at_once_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # The workers' settings are loaded as in a process. A busy machine must not decide what is found.
    monkeypatch.setenv("KVLOOP_BEGIN_READ_TIMEOUT_S", "20")
    # Room for 70 blocks; a conversation begins with 11 and ends with 17.
    async with sim_fleet(engine={"num_blocks": 140, "max_model_len": 1024, "hold_share": 0.5}) as fleet:
        client = await fleet.client()
        gate = asyncio.Semaphore(AT_ONCE)
        ways = await asyncio.gather(*(_talk(client, number, gate) for number in range(CONVERSATIONS)))
        seen = [way for conversation in ways for way in conversation]
        assert all(why in GONE for verdict, why in seen if verdict == "RECOMPUTE"), seen
        (decode,) = fleet.decodes
        assert isinstance(decode.app, DecodeApp)
        assert decode.app.parts.keeper.table.endings["evicted"] > 0
        assert ("READBACK", "PROVEN") in seen
        for number in range(CONVERSATIONS):
            await client.end(f"c{number}")
        await fleet.whole()


async def _talk(client: SimClient, number: int, gate: asyncio.Semaphore) -> list[tuple[str, str]]:
    """Play a conversation; return how each turn after its first was served."""
    history, ways = ids(150, seed=number), []
    async with gate:
        for turn in range(TURNS):
            answer = await client.say(history, f"c{number}")
            assert answer.token_ids == await client.cold(history)
            if turn:
                ways.append(answer.way)
            history = [*history, *answer.token_ids, *ids(30, seed=turn)]
    return ways
