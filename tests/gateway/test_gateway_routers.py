"""Turns over several routers: one that is away is stepped over, one that has begun is not."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from gateway_router import FakeRouter, fail

from kvloop.gateway.routers import Routers
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import router_service_pb2


class Letters:
    """Token ids that are characters; enough of a tokenizer for the scripts."""

    def encode(self, text: str, add_special_tokens: bool = False) -> Any:
        return type("Encoding", (), {"ids": [ord(letter) for letter in text]})

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


@pytest.fixture
def pair() -> Iterator[tuple[FakeRouter, FakeRouter]]:
    one, other = FakeRouter(Letters()), FakeRouter(Letters())
    yield one, other
    one.stop()
    other.stop()


@pytest.fixture
async def routers(pair: tuple[FakeRouter, FakeRouter]) -> AsyncIterator[Routers]:
    made = Routers([f"127.0.0.1:{router.port}" for router in pair])
    await made.start()
    yield made
    await made.stop()


async def turn(routers: Routers, timeout_s: float = 20) -> str:
    request = router_service_pb2.GenerateRequest(prompt_token_ids=tokens.pack([1]))
    text = ""
    async with aclosing(routers.generate(request, timeout_s=timeout_s, metadata=())) as stream:  # type: ignore[type-var]
        async for response in stream:
            text += response.chunk.text
    return text


async def test_turns_are_shared(routers: Routers, pair: tuple[FakeRouter, FakeRouter]) -> None:
    assert [await turn(routers) for _ in range(4)] == ["Hello there."] * 4
    assert [len(router.turns) for router in pair] == [2, 2]


async def test_a_router_that_is_away_is_stepped_over(
    routers: Routers, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    pair[0].stop()
    assert [await turn(routers) for _ in range(2)] == ["Hello there."] * 2
    assert len(pair[1].turns) == 2
    assert await routers.ready()


async def test_a_router_that_drains_is_stepped_over(
    routers: Routers, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    pair[0].scripts.append(fail(Failure(Reason.ERROR_REASON_DRAINING, "going away")))
    assert await turn(routers) == "Hello there."
    assert [len(router.turns) for router in pair] == [1, 1]


async def test_a_router_without_streams_is_called_however_its_refusal_looks(
    routers: Routers, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    for router in pair:
        router.broken_streams = 1
    assert [await turn(routers) for _ in range(4)] == ["Hello there."] * 4
    assert [len(router.turns) for router in pair] == [2, 2]
    assert [router.broken_streams for router in pair] == [0, 0]


async def test_other_failures_are_told(routers: Routers, pair: tuple[FakeRouter, FakeRouter]) -> None:
    pair[0].scripts.append(fail(Failure(Reason.ERROR_REASON_OVERLOADED, "too many", retry_after_s=2)))
    with pytest.raises(Failure) as caught:
        await turn(routers)
    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.ERROR_REASON_OVERLOADED, 2)
    assert not pair[1].turns


async def test_a_turn_that_has_begun_does_not_move(
    routers: Routers, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    def broken(request: Any) -> Iterator[Any]:
        yield next(iter(pair[0].say("Hello")(request)))
        raise Failure(Reason.ERROR_REASON_DRAINING, "going away")

    pair[0].scripts.append(broken)
    with pytest.raises(Failure) as caught:
        await turn(routers)
    assert caught.value.reason == Reason.ERROR_REASON_DRAINING
    assert not pair[1].turns


async def test_nobody_there(routers: Routers, pair: tuple[FakeRouter, FakeRouter]) -> None:
    for router in pair:
        router.stop()
    with pytest.raises(Failure) as caught:
        await turn(routers)
    assert caught.value.reason == Reason.ERROR_REASON_DRAINING
    assert caught.value.retry_after_s is not None
    assert not await routers.ready()


async def test_closing_cancels(routers: Routers, pair: tuple[FakeRouter, FakeRouter]) -> None:
    pair[0].scripts.append(pair[0].say("Hello", pause=lambda turn: turn.ended.wait(20)))
    request = router_service_pb2.GenerateRequest(prompt_token_ids=tokens.pack([1]))
    stream = routers.generate(request, timeout_s=20, metadata=())
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    (seen,) = pair[0].turns
    assert seen.ended.wait(10)
    assert seen.cancelled
