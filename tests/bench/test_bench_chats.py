"""Streamed chats over bare HTTP, and what the gateway's measurements make of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvloop.bench import gateway, history
from kvloop.bench.sse import Connection, StreamFailed
from kvloop.bench.workload.model import Conversation, Kind, Step

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def delta(text: str, **more: Any) -> bytes:
    return event({"choices": [{"delta": {"content": text}}], **more})


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    """A server that answers every request on a connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await answer(await reader.readexactly(length), writer)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def test_a_stream_is_read_however_it_is_cut() -> None:
    asked: list[dict[str, Any]] = []
    whole = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) + delta("Hel")
    whole += delta("lo", kvloop={"verdict": "readback"}) + b"data: [DONE]\n\n"

    async def answer(body: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(json.loads(body))
        cut = 7 * len(asked)
        writer.write(OK + chunk(whole[:cut]) + chunk(whole[cut:]) + b"0\r\n\r\n")

    async with served(answer) as endpoint:
        connection = await Connection.open(endpoint)
        for _ in range(2):
            said = await connection.chat({"model": "m"})
            assert said.text == "Hello"
            assert len(said.arrivals_s) == 2
            assert said.told == {"verdict": "readback"}
        await connection.close()
    assert asked == [{"model": "m", "stream": True}] * 2


@pytest.mark.parametrize(
    ("answered", "told"),
    [
        (b"HTTP/1.1 503 Away\r\nContent-Length: 2\r\n\r\n{}", "HTTP 503"),
        (OK + chunk(event({"error": {"message": "x"}})) + b"0\r\n\r\n", "an error"),
        (OK + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "0 events"),
        (OK + chunk(b"data: {\n\n") + b"0\r\n\r\n", "JSONDecodeError"),
    ],
)
async def test_what_is_no_answer_is_told(answered: bytes, told: str) -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answered)

    async with served(answer) as endpoint:
        connection = await Connection.open(endpoint)
        with pytest.raises(StreamFailed, match=told):
            await connection.chat({})
        await connection.close()


def test_a_stall_is_what_exceeds_the_usual_gap_while_all_run() -> None:
    steady = [number * 0.1 for number in range(1, 11)]
    halting = [0.05, 0.15, 0.25, 0.42, 0.52, 0.62, 0.72, 0.82, 0.92, 5.0]
    found = gateway.stalls([steady, halting])
    assert found["usual_gap_ms"] == 100.0
    # The last gap is beyond the time in which both run.
    assert found["longest_stall_ms"] == 70.0
    assert found["window_s"] == 0.9
    assert gateway.stalls([[0.0, 0.1], [5.0, 5.1]])["longest_stall_ms"] == float("inf")


@pytest.mark.parametrize(
    ("added", "stall", "turns", "count"),
    [
        (5.0, 50.0, 100.0, 0),
        (5.1, 50.0, 100.0, 1),
        (5.0, 50.1, 100.0, 1),
        (5.0, 50.0, 99.9, 1),
        (9, 99, 9, 3),
    ],
)
def test_targets(added: float, stall: float, turns: float, count: int) -> None:
    record = {"added_p50_ms": added, "longest_stall_ms": stall, "turns_per_cpu_s": turns}
    assert len(gateway.missed(record)) == count


def test_turns_a_core_are_of_cpu_time() -> None:
    rounds = [
        {"cpu_ms_per_turn": 8.0, "wall_ms_per_turn": 80.0},
        {"cpu_ms_per_turn": 12.0, "wall_ms_per_turn": 1.0},
    ]
    assert gateway.turns_per_cpu_s(rounds) == 100.0


def test_histories_of_the_trace() -> None:
    said = [
        {"role": "system", "content": "o"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    tool = history.ask(said, Step("result", 5, role="tool"), "o")
    assert tool == [*said, {"role": "tool", "content": "result"}]
    assert history.ask(said, Step("", 5, Kind.REGENERATE), "o") == said[:2]
    compacted = history.ask(said, Step("summary", 5, Kind.COMPACT), "o")
    assert compacted == [said[0], {"role": "user", "content": "summary"}]


async def test_what_a_turn_did_not_reuse_of_what_was_held_is_lost() -> None:
    bodies: list[dict[str, Any]] = []
    told = iter(
        [
            {"reused_tokens": 0, "held_tokens": 50, "reason": "not_found"},
            {"reused_tokens": 50, "held_tokens": 80, "reason": "proven"},
            {"reused_tokens": 10, "held_tokens": 90, "reason": "diverged"},
            {"reused_tokens": 60, "held_tokens": 99, "reason": "proven"},
        ]
    )

    async def answer(body: bytes, writer: asyncio.StreamWriter) -> None:
        bodies.append(json.loads(body))
        writer.write(OK + chunk(delta("yes", kvloop=next(told))) + b"0\r\n\r\n")

    steps = (
        Step("a", 5),
        Step("b", 5, stop=("S",)),
        Step("", 5, Kind.REGENERATE),
        Step("c", 5),
        Step("d", 5),
    )
    async with served(answer) as endpoint:
        turns = await history.play_all(
            {"exact": endpoint}, "m", [Conversation("c", steps, opening="o")], turns=4, temperature=0.5
        )
    assert [(turn.held_tokens, turn.reused_tokens) for turn in turns] == [(50, 50), (90, 60)]
    assert history.summary(turns) == {
        "exact": {
            "turns": 2,
            "held_tokens": 140,
            "reused_tokens": 110,
            "reused_share": 0.7857,
            "turns_that_lost": 1,
            "lost_tokens_per_turn": 15.0,
        }
    }
    assert [len(body["messages"]) for body in bodies] == [2, 4, 4, 6]
    assert {body["conversation_id"] for body in bodies} == {"exact-c"}
    assert [body.get("stop") for body in bodies] == [None, ["S"], None, None]
    assert len(history.rows(turns)) == 2
