"""The pump: merged chunks, nothing lost, nothing told twice."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvloop.decode.pump import Pump
from kvloop.engine.port import DecodeDelta, Finish, Sources
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import turn_pb2

FINISH = Finish(turn_pb2.FINISH_REASON_LENGTH, None, Sources(0, 0, 1), None)


async def answer(count: int, *, finish: bool = True) -> AsyncIterator[DecodeDelta]:
    for i in range(count):
        await asyncio.sleep(0)
        logprobs = [turn_pb2.PositionLogprobs(candidates=[turn_pb2.TokenLogprob(token_id=i)])]
        yield DecodeDelta([i], f"{i} ", logprobs, FINISH if finish and i == count - 1 else None)


async def test_a_lagging_reader_gets_one_merged_chunk() -> None:
    pump = Pump(answer(100))
    assert await pump.drain() is FINISH
    pump.close()
    [chunk] = [chunk async for chunk in pump.chunks()]
    assert tokens.unpack(chunk.token_ids) == list(range(100)) == tokens.unpack(pump.answer())
    assert chunk.text == "".join(f"{i} " for i in range(100))
    assert [entry.candidates[0].token_id for entry in chunk.logprobs] == list(range(100))


async def test_a_quick_reader_gets_everything_once() -> None:
    pump = Pump(answer(100))
    draining = asyncio.create_task(pump.drain())
    draining.add_done_callback(lambda _: pump.close())
    chunks = [chunk async for chunk in pump.chunks()]
    assert len(chunks) > 1
    assert [token for chunk in chunks for token in tokens.unpack(chunk.token_ids)] == list(range(100))


async def test_an_error_comes_after_what_was_generated() -> None:
    pump = Pump(answer(3, finish=False))
    with pytest.raises(Failure) as raised:
        await pump.drain()
    pump.close(raised.value)
    chunks = aiter(pump.chunks())
    assert tokens.unpack((await anext(chunks)).token_ids) == [0, 1, 2]
    with pytest.raises(Failure):
        await anext(chunks)


async def test_an_empty_answer_is_no_chunk() -> None:
    pump = Pump(answer(0))
    pump.close()
    assert [chunk async for chunk in pump.chunks()] == []
