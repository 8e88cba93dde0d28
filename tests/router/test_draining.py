"""Decode workers that go away, seen by routers that were only told where workers are."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from router_fakes import until
from router_sim import Node, SimFleet, ids, sim_fleet, until_async

from kvloop.router.app import RouterApp
from kvloop.router.worker import DecodeWorker

PROMPT = ids(400)
CACHED = {"enable_prefix_caching": True}


@asynccontextmanager
async def draining(node: Node) -> AsyncIterator[None]:
    """The worker drains for as long as something is held there."""
    task = asyncio.create_task(node.app.drain())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def holder_of(fleet: SimFleet, app: RouterApp, name: str) -> tuple[Node, DecodeWorker]:
    node = next(n for n in fleet.decodes if n.name == name)
    return node, next(w for w in app.pool.decode if w.name == name)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("told", [True, False])
async def test_what_a_draining_worker_holds_is_read_back_elsewhere(told: bool, direct: bool) -> None:
    async with sim_fleet(decodes=2, engine=CACHED if direct else None) as fleet:
        app = await fleet.router(
            direct=direct, first_token_from_prefill=False, info_interval_s=0.1 if told else 60.0
        )
        client = await fleet.client(app)
        first = await client.say(PROMPT, max_tokens=64)
        assert first.summary is not None
        node, worker = holder_of(fleet, app, first.summary.decode_worker)
        async with draining(node):
            if told:
                await until(lambda: worker.draining, "what the worker says of itself")
            prompt = [*PROMPT, *first.token_ids]
            answer = await client.say(prompt)
            assert answer.summary is not None
            assert answer.way == ("READBACK", "PROVEN")
            assert answer.summary.decode_worker != node.name
            # A turn that was not told asks once in vain, unless it needed no prefill leg for that.
            assert answer.reuse.retried == (not told and not direct)
            assert worker.reachable
            assert not worker.ready
            assert answer.token_ids == await client.cold(prompt)
        await client.end()


async def test_a_named_worker_is_heard_of_in_the_registry_too() -> None:
    async with sim_fleet(decodes=2) as fleet:
        app = await fleet.router(store=fleet.store, info_interval_s=60.0)
        await fleet.add_decode()
        node, worker = holder_of(fleet, app, "d0")
        async with draining(node):
            await until(lambda: worker.draining, "what the registry says of the worker")
            # One that was not named is not taken in.
            assert len(app.pool.decode) == 2


async def test_a_lease_that_is_displaced_at_a_worker_of_another_name_is_released() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with sim_fleet(decodes=0) as fleet:
        fleet.decode = {"advertise": f"localhost:{port}"}
        await fleet.add_decode(f"127.0.0.1:{port}")
        fleet.decode = {}
        other = await fleet.add_decode()
        app = await fleet.router(decode_endpoints=(f"127.0.0.1:{port}", other.endpoint))
        node, worker = holder_of(fleet, app, "d0")
        _, second = holder_of(fleet, app, other.name)
        second.unlisted = True
        client = await fleet.client(app)
        first = await client.say(PROMPT)
        assert len(await node.engine.holds()) == 1
        worker.unlisted, second.unlisted = True, False
        await client.say([*PROMPT, *first.token_ids])

        async def released() -> bool:
            return not await node.engine.holds()

        await until_async(released, "the release of the displaced lease")
        assert await client.end()
        await fleet.whole()
