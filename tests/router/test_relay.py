"""The way of an answer: order, merging, ends."""

import asyncio

import pytest

from kvloop.router.legs import CHUNK_TAG
from kvloop.router.relay import MERGED_BYTES, Relay, merge
from kvloop.runtime import tokens
from kvloop.v1alpha1 import decode_service_pb2, router_service_pb2, turn_pb2


def chunk(number: int) -> bytes:
    piece = turn_pb2.Chunk(token_ids=tokens.pack([number]), text=f"{number},")
    piece.logprobs.add().candidates.add(token_id=number)
    return decode_service_pb2.DecodeResponse(chunk=piece).SerializeToString()


def numbers(raw: bytes) -> list[int]:
    return tokens.unpack(router_service_pb2.GenerateResponse.FromString(raw).chunk.token_ids)


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


class Client:
    """Reads an answer; each write waits until it is let go on."""

    def __init__(self, relay: Relay, *, free: bool = True) -> None:
        self.got: list[bytes] = []
        self.may_go_on = asyncio.Event()
        if free:
            self.may_go_on.set()
        self.reading = asyncio.create_task(relay.pour(self._write))

    async def _write(self, answer: bytes) -> None:
        self.got.append(answer)
        await self.may_go_on.wait()

    async def step(self) -> None:
        """Let what is ready be written."""
        for _ in range(3):
            await asyncio.sleep(0)


async def test_what_is_read_at_once_passes_untouched() -> None:
    relay = Relay()
    client = Client(relay)
    for number in range(3):
        relay.put(chunk(number))
        await client.step()
        assert client.got == [chunk(n) for n in range(number + 1)]
    assert not client.reading.done()
    relay.finish(summary())
    await client.reading
    assert client.got[3:] == [summary()]


async def test_what_piles_up_is_one_chunk_and_the_summary_is_apart() -> None:
    relay = Relay()
    client = Client(relay, free=False)
    relay.put(chunk(0))
    await client.step()
    for number in range(1, 100):
        relay.put(chunk(number))
    relay.finish(summary())
    await client.step()
    assert client.got == [chunk(0)]
    client.may_go_on.set()
    await client.reading
    got = [router_service_pb2.GenerateResponse.FromString(raw) for raw in client.got[1:]]
    assert [response.WhichOneof("event") for response in got] == ["chunk", "summary"]
    assert tokens.unpack(got[0].chunk.token_ids) == list(range(1, 100))


async def test_what_piles_up_is_never_merged_beyond_what_clients_receive() -> None:
    relay = Relay()
    for number in range(5):
        piece = turn_pb2.Chunk(token_ids=tokens.pack([number]), text="x" * (MERGED_BYTES * 2 // 5))
        relay.put(router_service_pb2.GenerateResponse(chunk=piece).SerializeToString())
    relay.finish(summary())
    client = Client(relay)
    await asyncio.wait_for(client.reading, 5)
    chunks = [router_service_pb2.GenerateResponse.FromString(raw).chunk for raw in client.got[:-1]]
    assert [tokens.unpack(one.token_ids) for one in chunks] == [[0, 1], [2, 3], [4]]
    assert all(len(raw) <= MERGED_BYTES for raw in client.got)


async def test_a_failure_comes_after_what_was_said_before_it_and_the_first_end_stands() -> None:
    relay = Relay()
    relay.put(chunk(1))
    relay.fail(ValueError("first"))
    relay.fail(ValueError("second"))
    relay.finish(summary())
    client = Client(relay)
    with pytest.raises(ValueError, match="first"):
        await client.reading
    assert client.got == [chunk(1)]


async def test_what_is_offered_and_what_is_written_keep_their_order() -> None:
    relay, got, room = Relay(), [], 2
    opened = asyncio.Event()

    def offer(answer: bytes) -> bool:
        nonlocal room
        if room:
            room -= 1
            got.append(answer)
            return True
        return False

    async def write(answer: bytes) -> None:
        got.append(answer)
        await opened.wait()

    reading = asyncio.create_task(relay.pour(write, offer))
    await asyncio.sleep(0)
    for number in range(3):
        relay.put(chunk(number))
    await asyncio.sleep(0)
    for number in range(3, 5):
        relay.put(chunk(number))
    # Room again, but what has piled up goes first.
    room = 5
    relay.put(chunk(5))
    opened.set()
    relay.finish(summary())
    await reading
    assert [*map(numbers, got[:-1])] == [[0], [1], [2], [3, 4, 5]]
    assert got[-1] == summary()
    relay.put(chunk(6))
    assert len(got) == 5
