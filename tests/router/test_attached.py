"""Legs of many turns on one stream per worker, and turns of many clients on one stream to the router."""

import asyncio
import hashlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from router_fakes import expected_answer, fake_fleet, until

from kvloop.gateway.routers import Routers
from kvloop.runtime import tokens
from kvloop.runtime.channels import open_channel
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.resolving import addresses
from kvloop.v1alpha1 import router_service_pb2

PROMPTS = [[number, *range(60)] for number in range(1, 21)]


async def test_turns_share_a_stream_per_worker() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        asked = [client.say(prompt, f"c{number}", max_tokens=8) for number, prompt in enumerate(PROMPTS)]
        answers = await asyncio.gather(*asked)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == expected_answer(tokens.pack(prompt), 8)
        assert (fleet.prefills[0].streams, fleet.decodes[0].streams) == (1, 1)


async def test_workers_that_have_no_such_stream_get_a_call_per_leg() -> None:
    async with fake_fleet() as fleet:
        for worker in (fleet.prefills[0], fleet.decodes[0]):
            worker.info.attach = False
        client = await fleet.client()
        answer = await client.say(PROMPTS[0])
        assert answer.token_ids == expected_answer(tokens.pack(PROMPTS[0]), 4)
        assert (fleet.prefills[0].streams, fleet.decodes[0].streams) == (0, 0)


async def test_a_worker_that_comes_back_older_is_served_by_calls() -> None:
    async with fake_fleet() as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        await client.say(PROMPTS[0])
        fleet.decodes[0].info.attach = False
        fleet.decodes[0].info.epoch = "another life"
        worker = app.pool.decode[0]
        await until(lambda: worker.info is not None and not worker.info.attach, "the new facts")
        await client.say(PROMPTS[1])
        assert fleet.decodes[0].streams == 1


async def test_a_stream_that_breaks_before_any_chunk_costs_each_turn_a_retry() -> None:
    async with fake_fleet(decodes=2) as fleet:
        client = await fleet.client()
        stuck = asyncio.Event()
        first, other = fleet.decodes

        async def hang(number: int) -> None:
            await stuck.wait()

        for decode in fleet.decodes:
            decode.on_chunk = hang
        asked = [asyncio.create_task(client.say(p, f"c{number}")) for number, p in enumerate(PROMPTS)]
        await until(lambda: len(first.requests) + len(other.requests) == len(PROMPTS), "all second legs")
        lost = len(first.requests)
        assert lost
        await first.host.kill()
        other.on_chunk = None
        stuck.set()
        answers = await asyncio.gather(*asked)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == expected_answer(tokens.pack(prompt), 4)
        assert sum(answer.reuse.retried for answer in answers) == lost


async def test_a_client_that_goes_away_takes_only_its_own_turn_off_the_stream() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        go = asyncio.Event()

        async def hang(number: int) -> None:
            if number:
                await go.wait()

        decode = fleet.decodes[0]
        decode.on_chunk = hang
        stays = asyncio.create_task(client.say(PROMPTS[0], "stays"))
        leaves = asyncio.create_task(client.say(PROMPTS[1], "leaves"))
        await until(lambda: len(decode.requests) == 2, "both second legs")
        leaves.cancel()
        await until(lambda: decode.cancelled == 1, "the cancellation")
        go.set()
        assert (await stays).token_ids == expected_answer(tokens.pack(PROMPTS[0]), 4)
        assert decode.streams == 1


async def turn(routers: Routers, number: int, *, max_tokens: int = 8, token: str = "") -> list[int]:
    """The answer, by a turn on the stream that a gateway's turns share."""
    request = router_service_pb2.GenerateRequest(
        conversation_id=f"c{number}", prompt_token_ids=tokens.pack(PROMPTS[number])
    )
    request.sampling.max_tokens = max_tokens
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    ids: list[int] = []
    async with aclosing(routers.generate(request, timeout_s=20, metadata=metadata)) as answers:
        async for response in answers:
            ids += tokens.unpack(response.chunk.token_ids)
    return ids


@asynccontextmanager
async def attached(*endpoints: str, streams: int = 1) -> AsyncIterator[Routers]:
    routers = Routers(endpoints, streams=streams)
    await routers.start()
    try:
        yield routers
    finally:
        await routers.stop()


async def test_turns_share_a_stream_to_the_router_too(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    serve = Carrier.serve

    def seen(carrier: Carrier, batches: Any, context: Any) -> Any:
        opened.append(carrier)
        return serve(carrier, batches, context)

    async with fake_fleet() as fleet:
        router = await fleet.router()
        monkeypatch.setattr(Carrier, "serve", seen)
        async with attached(router.endpoint) as routers:
            answers = await asyncio.gather(*(turn(routers, number) for number in range(len(PROMPTS))))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer == expected_answer(tokens.pack(prompt), 8)
    # The router's own, and one per worker, whose ends run in this process too.
    assert len(opened) == len(set(opened)) == 3


async def test_a_call_on_the_stream_is_refused_as_one_of_its_own() -> None:
    async with fake_fleet() as fleet:
        router = await fleet.router()
        async with attached(router.endpoint) as routers:
            with pytest.raises(Failure) as caught:
                await turn(routers, 0, max_tokens=10**6)
            assert (caught.value.reason, caught.value.field) == (
                Reason.ERROR_REASON_PROMPT_TOO_LONG,
                "sampling.max_tokens",
            )
            assert len(await turn(routers, 1)) == 8


async def test_every_call_on_the_stream_shows_its_own_token(tmp_path: Path) -> None:
    known = tmp_path / "tokens"
    known.write_text(f"{hashlib.sha256(b'good').hexdigest()} acme\n", encoding="utf-8")
    async with fake_fleet() as fleet:
        router = await fleet.router(tokens_file=known)
        async with attached(router.endpoint) as routers:
            assert len(await turn(routers, 0, token="good")) == 8
            for token in ("", "bad"):
                with pytest.raises(Failure) as caught:
                    await turn(routers, 1, token=token)
                assert caught.value.reason == Reason.ERROR_REASON_UNAUTHENTICATED


async def test_leaving_a_turn_on_the_stream_ends_its_legs_alone() -> None:
    async with fake_fleet() as fleet:
        router = await fleet.router()
        go = asyncio.Event()

        async def hang(number: int) -> None:
            if number:
                await go.wait()

        decode = fleet.decodes[0]
        decode.on_chunk = hang
        async with attached(router.endpoint) as routers:
            stays, leaves = (asyncio.create_task(turn(routers, number)) for number in (0, 1))
            await until(lambda: len(decode.requests) == 2, "both second legs")
            leaves.cancel()
            await until(lambda: decode.cancelled == 1, "the cancellation")
            go.set()
            assert await stays == expected_answer(tokens.pack(PROMPTS[0]), 8)


async def test_a_router_that_drains_ends_its_turns_and_the_next_one_takes_over() -> None:
    async with fake_fleet() as fleet:
        first, other = await fleet.router(), await fleet.router()
        go = asyncio.Event()

        async def hang(number: int) -> None:
            await go.wait()

        fleet.decodes[0].on_chunk = hang
        async with attached(first.endpoint, other.endpoint) as routers:
            begun = asyncio.create_task(turn(routers, 0))
            await until(lambda: first.turns == 1, "the turn")
            draining = asyncio.create_task(first.drain())
            client = await fleet.client(first)
            with pytest.raises(grpc.aio.AioRpcError):
                await client.say(PROMPTS[0], "refused")
            later = [asyncio.create_task(turn(routers, number)) for number in (1, 2, 3)]
            await until(lambda: other.turns == 3, "the later turns")
            go.set()
            answers = await asyncio.gather(begun, *later)
            await draining
    for number, answer in enumerate(answers):
        assert answer == expected_answer(tokens.pack(PROMPTS[number]), 8)


async def test_turns_move_on_from_a_router_that_is_gone() -> None:
    async with fake_fleet() as fleet:
        first, other = await fleet.router(), await fleet.router()
        async with attached(first.endpoint, other.endpoint) as routers:
            assert len(await turn(routers, 0)) == 8
            await first.stop()
            answers = await asyncio.gather(*(turn(routers, number) for number in range(6)))
    assert [len(answer) for answer in answers] == [8] * 6


class Balancer:
    """Sends each stream to the next router, and none to one that is out."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._channels = deque(open_channel(endpoint) for endpoint in endpoints)
        self.streams: list[int] = []
        self.turns = 0
        self.out: set[int] = set()

    async def start(self) -> str:
        self._server = grpc.aio.server()
        both = {
            name: grpc.stream_stream_rpc_method_handler(partial(self._pass, name))
            for name in ("Attach", "Generate")
        }
        service = "kvloop.v1alpha1.RouterService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, both),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)
        for channel in self._channels:
            await channel.close()

    async def _pass(self, name: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.turns += name == "Generate"
        ready = [number for number in range(len(self._channels)) if number not in self.out]
        chosen = ready[len(self.streams) % len(ready)]
        self.streams.append(chosen)
        ask: Any = self._channels[chosen].stream_stream(f"/kvloop.v1alpha1.RouterService/{name}")
        async for answer in ask(requests):
            yield answer


@asynccontextmanager
async def balancing(*endpoints: str) -> AsyncIterator[tuple[Balancer, str]]:
    balancer = Balancer(endpoints)
    door = await balancer.start()
    try:
        yield balancer, door
    finally:
        await balancer.stop()


async def test_several_streams_reach_several_routers_behind_a_balancer() -> None:
    async with fake_fleet() as fleet:
        apps = [await fleet.router() for _ in range(3)]
        async with (
            balancing(*(app.endpoint for app in apps)) as (balancer, door),
            attached(door, streams=3) as routers,
        ):
            answers = await asyncio.gather(*(turn(routers, number) for number in range(9)))
            assert (sorted(balancer.streams), balancer.turns) == ([0, 1, 2], 0)
    assert [len(answer) for answer in answers] == [8] * 9


async def test_behind_a_balancer_turns_leave_the_stream_of_a_router_that_drains() -> None:
    async with fake_fleet() as fleet:
        first, other = await fleet.router(), await fleet.router()
        go = asyncio.Event()

        async def hang(number: int) -> None:
            await go.wait()

        fleet.decodes[0].on_chunk = hang
        async with balancing(first.endpoint, other.endpoint) as (balancer, door), attached(door) as routers:
            begun = asyncio.create_task(turn(routers, 0))
            await until(lambda: first.turns == 1, "the turn")
            balancer.out.add(0)
            draining = asyncio.create_task(first.drain())
            client = await fleet.client(first)
            with pytest.raises(grpc.aio.AioRpcError):
                await client.say(PROMPTS[0], "refused")
            later = asyncio.create_task(turn(routers, 1))
            await until(lambda: other.turns == 1, "the later turn")
            go.set()
            assert [len(answer) for answer in await asyncio.gather(begun, later)] == [8, 8]
            await draining
            assert balancer.streams == [0, 1]


async def test_all_routers_behind_a_name_are_met_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_fleet() as fleet:
        apps = [await fleet.router() for _ in range(2)]
        behind = [app.endpoint for app in apps]

        async def addresses(endpoint: str) -> tuple[str, ...]:
            return tuple(behind)

        monkeypatch.setattr("kvloop.gateway.routers.addresses", addresses)
        monkeypatch.setattr("kvloop.gateway.routers.RESOLVE_EVERY_S", 0.02)
        go = asyncio.Event()

        async def hang(number: int) -> None:
            await go.wait()

        fleet.decodes[0].on_chunk = hang
        async with attached("routers.example:7600") as routers:
            begun = [asyncio.create_task(turn(routers, number)) for number in range(2)]
            await until(lambda: [app.turns for app in apps] == [1, 1], "a turn at each")
            del behind[0]
            await until(lambda: len(set(routers.in_turn())) == 1, "the name's news")
            begun += [asyncio.create_task(turn(routers, number)) for number in (2, 3)]
            await until(lambda: [app.turns for app in apps] == [1, 3], "the rest at the other")
            go.set()
            answers = await asyncio.gather(*begun)
    for number, answer in enumerate(answers):
        assert answer == expected_answer(tokens.pack(PROMPTS[number]), 8)


@pytest.mark.parametrize(
    ("found", "meant"),
    [
        ([("10.0.0.2", 2), ("10.0.0.1", 2)], ("10.0.0.1:7600", "10.0.0.2:7600")),
        ([("10.0.0.2", 2)], ("routers.example:7600",)),
        ([("10.0.0.2", 2), ("fd00::2", 10)], ("routers.example:7600",)),
        ([("fd00::2", 10), ("fd00::1", 10), ("10.0.0.2", 2)], ("[fd00::1]:7600", "[fd00::2]:7600")),
        ([], ()),
    ],
)
async def test_a_name_stands_for_its_addresses(
    monkeypatch: pytest.MonkeyPatch, found: list[tuple[str, int]], meant: tuple[str, ...]
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("routers.example", 7600)
        if not found:
            raise socket.gaierror
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for address, family in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    assert await addresses("routers.example:7600") == meant
