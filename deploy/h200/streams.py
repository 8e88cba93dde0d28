"""What second turns of long conversations do to streams that run beside them.

    python streams.py ROUTER DIRECT_ROUTER VOCABULARY OUT.json [TOKENS]

Per leg: STREAMS answers of LENGTH tokens stream at once, and TURNS second turns of TOKENS tokens arrive
among them, EVERY_S seconds apart. The leg "alone" has no such turns. Told are the streams' time per token
(TPOT) and their gaps, and the turns' TTFT, which is here that of a busy D. What fails is left out and told
under "failed"; the rest counts, and the command ends with 1.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvloop.bench.target import Request, RouterTarget, TargetFailed
from kvloop.client import ONCE, CallFailed, Client, Retention, SamplingParams

LEGS = ("alone", "off-cold", "readback", "direct")
STREAMS = 4
LENGTH = 480
PROMPT = 1_024
TURNS = 2
EVERY_S = 4.0
AFTER_S = 0.5
"""From the streams' begin to the first of the turns."""
ANSWER = 32
SUFFIX = 160
BEGIN_S = 60.0


class Bench:
    """Plays the legs against two routers of one fleet."""

    def __init__(self, router: str, direct: str, vocabulary: int, tokens: int) -> None:
        self._targets = {leg: RouterTarget(direct if leg == "direct" else router) for leg in LEGS}
        self._client = Client(router, retry=ONCE, timeout_s=600.0)
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._rng = random.Random(0)

    async def play(self) -> dict[str, Any]:
        """Return what came of each leg."""
        legs: dict[str, Any] = {}
        for leg in LEGS:
            seconds, failed = [], list[str]()
            for number in range(TURNS if leg != "alone" else 0):
                try:
                    seconds.append(await self._first(leg, number))
                except TargetFailed as failure:
                    failed.append(f"first turn: {failure}")
            await self._leg(leg, [])  # what is new to the engines, such as a batch of this size
            legs[leg] = await self._leg(leg, seconds)
            legs[leg]["failed"] = [*failed, *legs[leg]["failed"]]
        await self._client.close()
        for target in self._targets.values():
            await target.close()
        return legs

    async def _leg(self, leg: str, seconds: list[Request]) -> dict[str, Any]:
        length = LENGTH if seconds or leg == "alone" else 32
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(self._stream(event, length)) for event in begun]
        async with asyncio.timeout(BEGIN_S):
            await asyncio.gather(*(event.wait() for event in begun))
        turns = []
        for number, request in enumerate(seconds):
            await asyncio.sleep(EVERY_S if number else AFTER_S)
            turns.append(asyncio.create_task(self._targets[leg].send(request)))
        gaps, lost = _told(await asyncio.gather(*streams, return_exceptions=True), "stream")
        outcomes, failed = _told(await asyncio.gather(*turns, return_exceptions=True), "turn")
        every = sorted(gap for stream in gaps for gap in stream)
        return {
            "tpot_ms": statistics.mean(every) if every else None,
            "tpot_ms_by_stream": [statistics.mean(stream) for stream in gaps if stream],
            "gap_ms_p50": every[len(every) // 2] if every else None,
            "gap_ms_p99": every[len(every) * 99 // 100] if every else None,
            "gap_ms_max": every[-1] if every else None,
            "failed": [*lost, *failed],
            "turns": [
                {"verdict": outcome.verdict, "ttft_ms": outcome.ttft_ms, "tokens": outcome.tokens}
                for outcome in outcomes
            ],
        }

    async def _stream(self, begun: asyncio.Event, length: int) -> list[float]:
        """Return the gaps between an answer's tokens, in ms; a chunk of several tokens counts as so many."""
        gaps: list[float] = []
        last = 0.0
        try:
            async for event in self._client.turn(
                self._prompt(PROMPT),
                conversation_id=f"stream-{self._rng.random()}",
                sampling=SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
                retention=Retention(hold=False),
                reuse=False,
            ):
                if not event.token_ids:
                    continue
                now = time.perf_counter()
                if last:
                    gaps += [(now - last) * 1000 / len(event.token_ids)] * len(event.token_ids)
                last = now
                begun.set()
        finally:
            # Of one that fails nobody waits for the begin.
            begun.set()
        return gaps

    async def _first(self, leg: str, number: int) -> Request:
        """Play a conversation's first turn; return its second."""
        prompt = self._prompt(self._tokens - SUFFIX - ANSWER)
        name = f"streams-{leg}-{number}-{self._rng.random()}"
        first = Request(prompt, ANSWER, name, cache_salt=name, reuse=leg != "off-cold")
        answer = await self._targets[leg].send(first)
        second = [*prompt, *answer.token_ids, *self._prompt(SUFFIX)]
        return Request(second, 16, name, cache_salt=name, reuse=leg != "off-cold")

    def _prompt(self, count: int) -> list[int]:
        return [self._rng.randrange(1_000, self._vocabulary) for _ in range(count)]


T = TypeVar("T")


def _told(results: Sequence[T | BaseException], what: str) -> tuple[list[T], list[str]]:
    """Return what came, and what is to be told of what failed. Raises what is no failure of a turn."""
    came, failed = list[T](), list[str]()
    for result in results:
        if isinstance(result, TargetFailed | CallFailed):
            failed.append(f"{what}: {result}")
        elif isinstance(result, BaseException):
            raise result
        else:
            came.append(result)
    return came, failed


def main(arguments: list[str]) -> None:
    """Play, and write what came of it."""
    router, direct, vocabulary, out, *tokens = arguments
    bench = Bench(router, direct, int(vocabulary), int(tokens[0]) if tokens else 24_576)
    legs = asyncio.run(bench.play())
    Path(out).write_text(json.dumps(legs, indent=1) + "\n", encoding="utf-8")
    for leg, told in legs.items():
        ttft = " ".join(f"{turn['verdict']} {turn['ttft_ms']:.0f}" for turn in told["turns"])
        times = "no stream came to its end"
        if told["tpot_ms"] is not None:
            times = f"TPOT {told['tpot_ms']:6.2f} ms, gaps p99 {told['gap_ms_p99']:6.1f} "
            times += f"max {told['gap_ms_max']:6.1f}"
        failed = f"; {len(told['failed'])} failed: {told['failed'][0]}" if told["failed"] else ""
        sys.stdout.write(f"{leg:9} {times}; turns: {ttft}{failed}\n")
    if any(told["failed"] for told in legs.values()):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
