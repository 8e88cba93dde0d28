"""What a gateway costs: its share of the first chunk, stalls of many streams, and long chats per second.

Engines are simulated, the tokenizer and chat template are real. What is compared is measured in turns, so
that whatever else the machine does hits both alike; long chats are counted per second of the gateway's own
CPU time, which others on the machine change least. Every sample is kept.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvloop.bench.sse import Connection, Streamed, StreamFailed
from kvloop.bench.target import Request, RouterTarget
from kvloop.bench.workload.words import words

AT_MOST = {"added_p50_ms": 5.0, "longest_stall_ms": 50.0}
AT_LEAST = {"turns_per_cpu_s": 100.0}
_WARM_UP = 10
_POLL_S = 0.1
_MESSAGE_WORDS = 200
_REPLY_WORDS = 20

Messages = list[dict[str, str]]
CpuTime = Callable[[], float]
"""CPU seconds that a gateway has used."""


@dataclass(frozen=True, slots=True)
class Place:
    """A gateway and the router behind it."""

    gateway: str
    router: str
    model: str


def chat_of(rng: random.Random, tokens: int) -> Messages:
    """Return a history of about so many tokens that ends with a user's message."""
    count = max(1, round(tokens / _MESSAGE_WORDS)) | 1
    roles = ("user", "assistant")
    size = max(1, tokens // count)
    return [{"role": roles[number % 2], "content": words(rng, size)} for number in range(count)]


async def first_chunks(place: Place, *, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds to the first chunk, by the gateway and by RouterService with the same ids.

    The history is the same from turn to turn, the last message is not.
    """
    rng = random.Random(1)
    history = chat_of(rng, tokens)
    samples: dict[str, list[float]] = {"gateway": [], "router": []}
    connection = await Connection.open(place.gateway)
    router = RouterTarget(place.router)
    async with httpx.AsyncClient(base_url=f"http://{place.gateway}", timeout=60) as client:
        for number in range(rounds + _WARM_UP):
            history[-1]["content"] = words(rng, _REPLY_WORDS)
            body = {"model": place.model, "messages": history, "max_tokens": 4, "temperature": 0}
            ids = (await client.post("/tokenize", json={"model": place.model, "messages": history})).json()
            request = Request(
                prompt=ids["tokens"], max_tokens=4, conversation_id="", exact=False, reuse=False
            )
            spoken = await connection.chat({**body, "conversation_id": ""})
            bare = await router.send(request)
            if number >= _WARM_UP:
                samples["gateway"].append(spoken.arrivals_s[0] * 1e3)
                samples["router"].append(bare.ttft_ms)
    await connection.close()
    await router.close()
    return samples


async def wait_serving(place: Place, timeout_s: float = 30.0) -> None:
    """Return once a chat is served. Raises StreamFailed when none is in time."""
    body = {"model": place.model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    deadline = time.monotonic() + timeout_s
    while True:
        connection = await Connection.open(place.gateway)
        try:
            await connection.chat(body)
            return
        except StreamFailed:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_POLL_S)
        finally:
            await connection.close()


async def many_streams(place: Place, *, streams: int, tokens: int) -> list[list[float]]:
    """Return the arrivals of each stream in seconds of one clock; all run at once."""
    rng = random.Random(2)
    connections = await asyncio.gather(*(Connection.open(place.gateway) for _ in range(streams)))
    epoch = time.perf_counter()

    async def one(connection: Connection) -> tuple[float, Streamed]:
        body = {"model": place.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        messages = [{"role": "user", "content": words(rng, _REPLY_WORDS)}]
        begun = time.perf_counter() - epoch
        return begun, await connection.chat({**body, "messages": messages})

    spoken = await asyncio.gather(*map(one, connections))
    await asyncio.gather(*(connection.close() for connection in connections))
    return [[begun + at for at in answer.arrivals_s] for begun, answer in spoken]


def stalls(arrivals: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the gaps between events while all streams run, in milliseconds.

    A stall is what a gap exceeds the usual gap by: the engine's own step is not the gateway's.
    """
    first, last = max(one[0] for one in arrivals), min(one[-1] for one in arrivals)
    gaps = [
        (now - before) * 1e3
        for one in arrivals
        for before, now in itertools.pairwise(one)
        if before >= first and now <= last
    ]
    usual = statistics.median(gaps) if gaps else 0.0
    return {
        "window_s": round(last - first, 2),
        "usual_gap_ms": round(usual, 2),
        "longest_stall_ms": round(max(gaps) - usual, 2) if gaps else float("inf"),
        "gaps_ms": [round(gap, 2) for gap in gaps],
    }


async def long_chats(
    place: Place, cpu_time: CpuTime, *, tokens: int, conversations: int, turns: int
) -> list[dict[str, float]]:
    """Return one entry per round: each conversation says a turn more, one after the other."""
    rng = random.Random(3)
    histories = [chat_of(rng, tokens) for _ in range(conversations)]
    connections = [await Connection.open(place.gateway) for _ in histories]

    async def turn(number: int) -> None:
        body = {"model": place.model, "messages": histories[number], "max_tokens": 4, "temperature": 0}
        answer = await connections[number].chat({**body, "conversation_id": f"long-{number}"})
        histories[number] += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": words(rng, _REPLY_WORDS)},
        ]

    rounds: list[dict[str, float]] = []
    for number in range(turns + 2):
        used, begun = cpu_time(), time.perf_counter()
        for conversation in range(conversations):
            await turn(conversation)
        # The first rounds fill the cache.
        if number >= 2:
            rounds.append(
                {
                    "cpu_ms_per_turn": (cpu_time() - used) * 1e3 / conversations,
                    "wall_ms_per_turn": (time.perf_counter() - begun) * 1e3 / conversations,
                }
            )
    for connection in connections:
        await connection.close()
    return rounds


def turns_per_cpu_s(rounds: Sequence[dict[str, float]]) -> float:
    """Return the turns that a core serves in a second."""
    return 1e3 / statistics.fmean(one["cpu_ms_per_turn"] for one in rounds)


def missed(record: dict[str, Any]) -> list[str]:
    """Return a sentence for every target that the record misses."""
    over = [
        f"{name} is {record[name]:.2f}, at most {limit:g} wanted"
        for name, limit in AT_MOST.items()
        if record[name] > limit
    ]
    return over + [
        f"{name} is {record[name]:.1f}, at least {limit:g} wanted"
        for name, limit in AT_LEAST.items()
        if record[name] < limit
    ]
