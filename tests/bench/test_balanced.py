"""HAProxy with the deployed file: who has gone is noticed on both sides."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kvloop.bench.target import Outcome, Request, RouterTarget, TargetFailed
from kvloop.cli.bench.balanced import ROUTERS, haproxy_binary, open_balanced
from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONFIG = Path(__file__).parents[2] / "deploy/haproxy/haproxy.cfg"
PROMPT = list(range(100, 200))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def balanced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Fleet, RouterTarget]]:
    plan = FleetPlan(workers={"engine": "simulated"}, routers=[{"metrics_listen": "127.0.0.1:0"}] * ROUTERS)
    folder = tmp_path_factory.mktemp("balanced")
    async with open_balanced(plan, folder, haproxy_binary(), CONFIG) as (fleet, endpoint):
        target = RouterTarget(endpoint)
        yield fleet, target
        await target.close()


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(60):
            while not await condition():  # noqa: ASYNC110 - what other processes do sets no event here
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


async def in_flight(fleet: Fleet) -> int:
    """Return how many turns the routers are serving."""
    total = 0
    async with httpx.AsyncClient(timeout=30) as client:
        for name in fleet.names("router"):
            page = (await client.get(f"http://{fleet.parts[name].facts['metrics']}/metrics")).text
            [line] = [one for one in page.splitlines() if one.startswith("kvloop_turns_in_flight ")]
            total += int(float(line.split()[1]))
    return total


async def say(target: RouterTarget) -> Outcome:
    """Send a turn; once more when it was refused before any token."""
    request = Request(prompt=PROMPT, max_tokens=4, conversation_id="")
    try:
        return await target.send(request)
    except TargetFailed as failure:
        if not failure.may_move:
            raise
        return await target.send(request)


async def test_routers_are_taken_in_turn(balanced: tuple[Fleet, RouterTarget]) -> None:
    _, target = balanced
    served = [(await say(target)).router for _ in range(2 * ROUTERS)]
    assert set(served[:ROUTERS]) == {"router-0", "router-1", "router-2"}
    assert served[ROUTERS:] == served[:ROUTERS]


async def test_a_client_that_goes_takes_its_turn_along(balanced: tuple[Fleet, RouterTarget]) -> None:
    fleet, target = balanced
    prefill = fleet.parts["prefill-0"]
    prefill.signal(signal.SIGSTOP)
    try:
        turn = asyncio.ensure_future(say(target))

        async def serving() -> bool:
            return await in_flight(fleet) == 1

        async def gone() -> bool:
            return await in_flight(fleet) == 0

        await until(serving, "the turn at a router")
        turn.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turn
        # P still stands, so the turn can't have ended by itself.
        await until(gone, "the end of the turn")
    finally:
        prefill.signal(signal.SIGCONT)


async def test_a_router_may_go_and_come_back_while_turns_are_served(
    balanced: tuple[Fleet, RouterTarget],
) -> None:
    fleet, target = balanced
    await until(lambda: _served_by(target, "router-1"), "a turn at the router that goes")
    going = asyncio.ensure_future(fleet.restart("router-1"))
    while not going.done():
        await say(target)
    await going
    await until(lambda: _served_by(target, "router-1"), "a turn at the router that came back")


async def test_a_killed_router_costs_no_turn_before_its_first_token(
    balanced: tuple[Fleet, RouterTarget],
) -> None:
    fleet, target = balanced
    await fleet.kill("router-2")
    served = {(await say(target)).router for _ in range(12)}
    assert served == {"router-0", "router-1"}
    await fleet.start("router-2")
    await until(lambda: _served_by(target, "router-2"), "a turn at the router that came back")


async def test_without_any_router_every_turn_is_refused_as_one_that_may_move(
    balanced: tuple[Fleet, RouterTarget],
) -> None:
    fleet, target = balanced
    for name in fleet.names("router"):
        await fleet.kill(name)
    for _ in range(30):
        with pytest.raises(TargetFailed, match="UNAVAILABLE") as failed:
            await target.send(Request(prompt=PROMPT, max_tokens=4, conversation_id=""))
        assert failed.value.may_move
    for name in fleet.names("router"):
        await fleet.start(name)


async def _served_by(target: RouterTarget, router: str) -> bool:
    return (await say(target)).router == router
