"""The way of an answer: order, merging, ends."""

import asyncio

import pytest

from kvloop.router.legs import CHUNK_TAG
from kvloop.router.relay import Relay, merge
from kvloop.runtime import tokens
from kvloop.v1alpha1 import decode_service_pb2, router_service_pb2, turn_pb2


def chunk(number: int) -> bytes:
    piece = turn_pb2.Chunk(token_ids=tokens.pack([number]), text=f"{number},")
    piece.logprobs.add().candidates.add(token_id=number)
    return decode_service_pb2.DecodeResponse(chunk=piece).SerializeToString()


def summary() -> bytes:
    return router_service_pb2.GenerateResponse(summary=turn_pb2.Summary(request_id="r")).SerializeToString()


def test_both_responses_have_chunks_in_the_same_field() -> None:
    for message in (decode_service_pb2.DecodeResponse, router_service_pb2.GenerateResponse):
        field = message.DESCRIPTOR.fields_by_name["chunk"]
        assert field.number == 1
        assert field.message_type is not None
        assert field.message_type.full_name == "kvloop.v1alpha1.Chunk"
        assert message(chunk=turn_pb2.Chunk()).SerializeToString().startswith(CHUNK_TAG)
    ends = (
        decode_service_pb2.DecodeResponse(summary=decode_service_pb2.DecodeSummary()),
        router_service_pb2.GenerateResponse(summary=turn_pb2.Summary()),
    )
    assert not any(end.SerializeToString().startswith(CHUNK_TAG) for end in ends)


def test_merged_chunks_lose_nothing() -> None:
    merged = router_service_pb2.GenerateResponse.FromString(merge([chunk(n) for n in range(5)])).chunk
    assert tokens.unpack(merged.token_ids) == [0, 1, 2, 3, 4]
    assert merged.text == "0,1,2,3,4,"
    assert [p.candidates[0].token_id for p in merged.logprobs] == [0, 1, 2, 3, 4]


async def test_what_is_read_at_once_passes_untouched() -> None:
    relay = Relay()
    reader = relay.read()
    for number in range(3):
        relay.put(chunk(number))
        assert await anext(reader) == chunk(number)
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    relay.put(chunk(7))
    assert await waiting == chunk(7)
    relay.finish(summary())
    assert await anext(reader) == summary()
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


async def test_what_piles_up_is_one_chunk_and_the_summary_is_apart() -> None:
    relay = Relay()
    for number in range(100):
        relay.put(chunk(number))
    relay.finish(summary())
    got = [router_service_pb2.GenerateResponse.FromString(raw) async for raw in relay.read()]
    assert [response.WhichOneof("event") for response in got] == ["chunk", "summary"]
    assert tokens.unpack(got[0].chunk.token_ids) == list(range(100))


async def test_a_failure_comes_after_what_was_said_before_it_and_the_first_end_stands() -> None:
    relay = Relay()
    relay.put(chunk(1))
    relay.fail(ValueError("first"))
    relay.fail(ValueError("second"))
    relay.finish(summary())
    reader = relay.read()
    assert await anext(reader) == chunk(1)
    with pytest.raises(ValueError, match="first"):
        await anext(reader)
