"""Many calls on one stream: apart from each other, and each as good as a call of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from mux_kit import Answering, Failed, Prefiller, rig, text_of, until, within

from kvloop.runtime.channels import open_channel
from kvloop.runtime.errors import Failure, Reason, from_status, invalid
from kvloop.runtime.mux.caller import Caller
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.mux.frames import BATCH_BYTES, PAYLOAD_BYTES, WINDOW_BYTES, Outbox
from kvloop.runtime.server import GrpcServer
from kvloop.v1alpha1 import attach_pb2, decode_service_pb2, prefill_service_pb2, prefill_service_pb2_grpc


def reason(failed: Failed) -> str:
    assert failed.status is not None
    return from_status(failed.status, Reason.ERROR_REASON_UNSPECIFIED).reason_name


async def count_to_ten(call: Answering) -> AsyncIterator[bytes]:
    for number in range(10):
        await asyncio.sleep(0)
        yield f"{call.request.request_id}/{number}".encode()


def waiting_for(event: asyncio.Event) -> Any:
    async def script(call: Answering) -> AsyncIterator[bytes]:
        yield b"first"
        await event.wait()
        yield b"second"

    return script


async def for_ever(call: Answering) -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.Event().wait()


async def test_calls_share_a_stream_and_do_not_mix() -> None:
    async with rig(count_to_ten) as r:
        names = [f"call-{number}" for number in range(50)]
        answers = await within(asyncio.gather(*(r.texts(name) for name in names)))
        assert r.worker.streams == 1
    for name, texts in zip(names, answers, strict=True):
        assert texts == [f"{name}/{number}".encode() for number in range(10)]


async def test_what_is_ready_together_goes_out_together() -> None:
    go = asyncio.Event()
    async with rig(waiting_for(go)) as r:
        calls = [asyncio.create_task(r.texts(f"call-{number}")) for number in range(40)]
        await until(lambda: len(r.worker.calls) == 40, "all calls")
        await until(lambda: sum(r.worker.batches) == 40, "all first chunks")
        before = len(r.worker.batches)
        go.set()
        assert await within(asyncio.gather(*calls)) == [[b"first", b"second"]] * 40
        # A chunk and an end for each of 40 calls, in far fewer messages.
        assert sum(r.worker.batches[before:]) == 80
        assert len(r.worker.batches) - before <= 8


async def test_leaving_early_cancels_that_call_alone() -> None:
    go = asyncio.Event()
    async with rig(waiting_for(go)) as r:
        stays = asyncio.create_task(r.texts("stays"))
        async with aclosing(r.call("leaves")) as leaving:
            assert text_of(await within(anext(leaving))) == b"first"
        await until(lambda: r.worker.cancelled == {"leaves"}, "the cancellation")
        go.set()
        assert await within(stays) == [b"first", b"second"]
        assert r.worker.streams == 1


async def test_a_renewed_stream_takes_later_calls_and_the_old_one_ends_with_its_last() -> None:
    go = asyncio.Event()
    async with rig(waiting_for(go)) as r:
        first = r.caller.stream
        stays = asyncio.create_task(r.texts("stays"))
        await until(lambda: sum(r.worker.batches) == 1, "its first chunk")
        r.caller.renew(first)
        later = asyncio.create_task(r.texts("later"))
        await until(lambda: r.worker.streams == 2, "the second stream")
        # Who failed of the first stream has no reason to leave the second.
        r.caller.renew(first)
        third = asyncio.create_task(r.texts("third"))
        await until(lambda: len(r.worker.calls) == 3, "all calls")
        assert (r.worker.streams, r.worker.ended) == (2, 0)
        go.set()
        assert await within(asyncio.gather(stays, later, third)) == [[b"first", b"second"]] * 3
        await until(lambda: r.worker.ended == 1, "the first stream's end")


async def test_closing_ends_calls_on_former_streams_too() -> None:
    async with rig(for_ever) as r:
        call = r.call("old")
        assert text_of(await within(anext(call))) == b"first"
        r.caller.renew(r.caller.stream)
        await within(r.caller.close())
        with pytest.raises(Failed):
            await within(anext(call))


async def test_messages_are_handed_on_as_they_come() -> None:
    go = asyncio.Event()
    async with rig(waiting_for(go)) as r:
        taken: list[bytes] = []
        running = asyncio.create_task(r.run("call", taken.append))
        await until(lambda: [text_of(raw) for raw in taken] == [b"first"], "the first message")
        assert not running.done()
        go.set()
        await within(running)
    assert [text_of(raw) for raw in taken] == [b"first", b"second"]


async def test_what_does_not_want_a_message_ends_that_call_alone() -> None:
    class Unwanted(Exception):
        pass

    def refuse(raw: bytes) -> None:
        refused.append(raw)
        raise Unwanted

    refused: list[bytes] = []
    go = asyncio.Event()
    async with rig(waiting_for(go)) as r:
        stays = asyncio.create_task(r.texts("stays"))
        with pytest.raises(Unwanted):
            await within(r.run("refuses", refuse))
        await until(lambda: r.worker.cancelled == {"refuses"}, "the cancellation")
        go.set()
        assert await within(stays) == [b"first", b"second"]
        assert r.worker.streams == 1
    assert [text_of(raw) for raw in refused] == [b"first"]


async def test_cancelling_the_task_of_a_call_that_runs_cancels_the_call() -> None:
    async with rig(for_ever) as r:
        taken: list[bytes] = []
        task = asyncio.create_task(r.run("call", taken.append))
        await until(lambda: bool(taken), "the first message")
        task.cancel()
        await until(lambda: "call" in r.worker.cancelled, "the cancellation")


async def test_more_than_a_window_is_handed_on_without_end() -> None:
    size, count = 16 * 1024, 4 * WINDOW_BYTES // (16 * 1024)

    async def flood(call: Answering) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * size

    async with rig(flood) as r:
        taken: list[bytes] = []
        await within(r.run("call", taken.append))
    assert len(taken) == count


async def test_a_call_that_runs_fails_of_what_ends_it() -> None:
    async with rig(for_ever) as r:
        taken: list[bytes] = []
        with pytest.raises(Failed) as late:
            await within(r.run("late", taken.append, timeout_s=0.2))
        assert late.value.code == "DEADLINE_EXCEEDED" or late.value.status.code == 4  # type: ignore[union-attr]
        broken = asyncio.create_task(r.run("broken", taken.append))
        await until(lambda: len(taken) == 2, "the first message")
        await r.server.stop(None)
        with pytest.raises(Failed) as failed:
            await within(broken)
        assert failed.value.status is None


async def test_cancelling_the_waiting_task_cancels_the_call() -> None:
    async with rig(for_ever) as r:
        task = asyncio.create_task(r.texts("call"))
        await until(lambda: "call" in r.worker.calls, "the call")
        task.cancel()
        await until(lambda: "call" in r.worker.cancelled, "the cancellation")


async def test_a_slow_reader_stops_its_own_source_only() -> None:
    size, count = 16 * 1024, 200

    async def flood(call: Answering) -> AsyncIterator[bytes]:
        for number in range(count):
            yield number.to_bytes(4, "little") * (size // 4)

    async with rig(flood) as r, aclosing(r.call("slow")) as slow:
        taken = [text_of(await within(anext(slow)))]
        # Others pass by, whole, while it is full.
        assert len(await within(r.texts("quick"))) == count
        call = r.worker.calls["slow"]
        # What went beyond the window is a message on its way at most, and one that waits to go.
        assert call.sent * size <= WINDOW_BYTES + 2 * size + WINDOW_BYTES // 2
        async with asyncio.timeout(20):
            taken += [text_of(raw) async for raw in slow]
    assert [int.from_bytes(text[:4], "little") for text in taken] == list(range(count))


async def test_a_deadline_ends_the_call_at_both_ends() -> None:
    async with rig(for_ever) as r:
        call = r.call("late", timeout_s=0.2)
        assert text_of(await within(anext(call))) == b"first"
        with pytest.raises(Failed) as failed:
            await within(anext(call))
        assert failed.value.code == "DEADLINE_EXCEEDED" or failed.value.status.code == 4  # type: ignore[union-attr]
        await until(lambda: "late" in r.worker.cancelled, "the cancellation")


async def test_the_method_sees_deadline_and_metadata() -> None:
    seen = []

    async def look(call: Answering) -> AsyncIterator[bytes]:
        seen.append((call.context.time_remaining(), dict(call.context.invocation_metadata())))
        yield b"done"

    async with rig(look) as r:
        request = decode_service_pb2.DecodeRequest(request_id="call").SerializeToString()
        assert [text_of(raw) async for raw in r.caller.call(request, 12.5, (("traceparent", "00-1"),))] == [
            b"done"
        ]
    [(left, metadata)] = seen
    assert 0 < left <= 12.5
    assert metadata["traceparent"] == "00-1"


async def test_failures_keep_their_reason_and_field() -> None:
    async def refuse(call: Answering) -> AsyncIterator[bytes]:
        raise invalid("sampling.n", "only 1")
        yield b""

    async with rig(refuse) as r:
        with pytest.raises(Failed) as failed:
            await within(r.texts("call"))
        assert failed.value.status is not None
        failure = from_status(failed.value.status, Reason.ERROR_REASON_UNSPECIFIED)
        assert (failure.reason_name, failure.field, failure.message) == (
            "INVALID_FIELD",
            "sampling.n",
            "only 1",
        )
        with pytest.raises(Failed) as garbage:
            await within(anext(r.caller.call(b"\xff\xff", 10)))
        assert reason(garbage.value) == "INVALID_FIELD"
        assert r.worker.streams == 1


async def test_an_unexpected_failure_is_told_as_internal() -> None:
    async def break_down(call: Answering) -> AsyncIterator[bytes]:
        yield b"first"
        raise ZeroDivisionError

    async with rig(break_down) as r:
        call = r.call("call")
        assert text_of(await within(anext(call))) == b"first"
        with pytest.raises(Failed) as failed:
            await within(anext(call))
        assert reason(failed.value) == "INTERNAL"


async def test_a_worker_that_dies_ends_all_calls_and_is_found_again() -> None:
    async with rig(for_ever) as r:
        calls = [r.call(f"call-{number}") for number in range(3)]
        for call in calls:
            assert text_of(await within(anext(call))) == b"first"
        await r.server.stop(None)
        for call in calls:
            with pytest.raises(Failed) as failed:
                await within(anext(call))
            # Nobody said that the call was over: it may have been served.
            assert failed.value.status is None
        with pytest.raises(Failed):
            await within(r.texts("nobody"))
        r.worker.script = count_to_ten

        async def again() -> bool:
            try:
                return len(await r.texts("again")) == 10
            except Failed:
                return False

        await r.serve_again()
        async with asyncio.timeout(20):
            while not await again():  # noqa: ASYNC110 - only calling tells
                await asyncio.sleep(0.05)


async def test_a_caller_that_goes_away_cancels_its_calls() -> None:
    async with rig(for_ever) as r:
        calls = [r.call(f"call-{number}") for number in range(3)]
        for call in calls:
            await within(anext(call))
        await r.caller.close()
        await until(lambda: len(r.worker.cancelled) == 3, "the cancellations")
        for call in calls:
            with pytest.raises(Failed):
                await within(anext(call))


async def test_what_is_too_large_fails_alone() -> None:
    async def large(call: Answering) -> AsyncIterator[bytes]:
        yield b"x" * (PAYLOAD_BYTES if call.request.request_id == "large" else 1)

    async with rig(large) as r:
        with pytest.raises(Failed) as asked:
            await within(anext(r.call("asks", prompt_token_ids=b"x" * PAYLOAD_BYTES)))
        assert asked.value.code == "RESOURCE_EXHAUSTED"
        with pytest.raises(Failed) as answered:
            await within(r.texts("large"))
        assert answered.value.status is not None
        assert answered.value.status.code == 8
        assert await within(r.texts("small")) == [b"x"]
        assert r.worker.streams == 1


async def test_nothing_is_called_after_the_end() -> None:
    async with rig(count_to_ten) as r:
        await within(r.texts("before"))
        await r.caller.close()
        with pytest.raises(Failed) as failed:
            await within(r.texts("after"))
        assert failed.value.code == "UNAVAILABLE"


async def test_draining_ends_streams_once_their_calls_are_over() -> None:
    go = asyncio.Event()
    async with rig(waiting_for(go)) as r:
        call = asyncio.create_task(r.texts("call"))
        await until(lambda: "call" in r.worker.calls, "the call")
        r.worker.carrier.drain()
        stopping = asyncio.create_task(r.server.stop(60.0))
        go.set()
        assert await within(call) == [b"first", b"second"]
        # Not the whole grace: nothing is left to wait for.
        await within(stopping)


async def test_unary_methods_are_carried_too() -> None:
    service, server = Prefiller(), GrpcServer([])
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(service, server.server)
    port = await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        caller = Caller(stub.Attach, prefill_service_pb2.PrefillServiceAttachRequest, Failed)
        request = prefill_service_pb2.PrefillRequest(request_id="one").SerializeToString()
        [raw] = [raw async for raw in caller.call(request, 10)]
        assert prefill_service_pb2.PrefillResponse.FromString(raw).handle.params_json == "one"
        await caller.close()
    await server.stop(None)


class _Alone:
    """Stands for a stream's context."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


def frames(*made: attach_pb2.CallFrame) -> decode_service_pb2.DecodeServiceAttachRequest:
    return decode_service_pb2.DecodeServiceAttachRequest(frames=made)


def opening(call: int, seconds: int = 10) -> attach_pb2.CallFrame:
    frame = attach_pb2.CallFrame(call=call)
    frame.open.left_time.FromSeconds(seconds)
    return frame


async def answers_to(*batches: Any) -> dict[int, list[attach_pb2.AnswerFrame]]:
    """Return the frames that a carrier answers, by call."""

    async def serve(request: Any, context: Any) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        yield decode_service_pb2.DecodeResponse()

    async def arriving() -> AsyncIterator[Any]:
        for batch in batches:
            yield batch

    carrier = Carrier(serve, decode_service_pb2.DecodeRequest, decode_service_pb2.DecodeServiceAttachResponse)
    found: dict[int, list[attach_pb2.AnswerFrame]] = {}
    async with asyncio.timeout(20):
        async for batch in carrier.serve(arriving(), _Alone()):
            for frame in batch.frames:
                found.setdefault(frame.call, []).append(frame)
    return found


async def test_a_call_cancelled_before_it_began_still_ends() -> None:
    cancel = attach_pb2.CallFrame(call=1, cancel=attach_pb2.CallCancel())
    found = await answers_to(frames(opening(1), cancel, opening(2)))
    assert [frame.WhichOneof("event") for frame in found[1]] == ["status"]
    assert found[1][0].status != b""
    assert [frame.WhichOneof("event") for frame in found[2]] == ["message", "status"]


async def test_frames_of_unknown_calls_and_of_no_kind_are_ignored() -> None:
    strays = (
        attach_pb2.CallFrame(call=7, cancel=attach_pb2.CallCancel()),
        attach_pb2.CallFrame(call=8, taken_bytes=5),
        attach_pb2.CallFrame(call=9),
    )
    assert set(await answers_to(frames(*strays, opening(1)))) == {1}


async def test_a_number_used_twice_at_a_time_is_refused() -> None:
    found = await answers_to(frames(opening(1), opening(1)))
    ends = [frame.status for frame in found[1] if frame.WhichOneof("event") == "status"]
    assert len(ends) == 2
    assert ends.count(b"") == 1


async def test_what_is_no_frame_ends_the_stream_with_a_reason() -> None:
    from kvloop.runtime.servicing import Unparsable

    with pytest.raises(Failure) as failure:
        await answers_to(Unparsable())
    assert failure.value.reason_name == "INVALID_FIELD"


async def test_a_message_is_filled_up_to_a_limit() -> None:
    outbox: Outbox[int] = Outbox()
    half = BATCH_BYTES // 2
    for number, size in enumerate((half, half, 1, 3 * BATCH_BYTES, 1)):
        outbox.put(number, size)
    outbox.close()
    outbox.put(99)
    taken = [await within(outbox.take()) for _ in range(4)]
    assert taken == [[0, 1], [2], [3], [4]]
    assert await within(outbox.take()) == []


async def test_a_frame_beyond_the_limit_goes_out_when_it_is_the_last() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put(0, 10)
    outbox.put(1, 2 * BATCH_BYTES)
    assert [await within(outbox.take()) for _ in range(2)] == [[0], [1]]
    outbox.put(2, 1)
    assert await within(outbox.take()) == [2]
