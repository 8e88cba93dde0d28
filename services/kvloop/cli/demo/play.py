"""Playing the conversation.

Each turn is played without reuse first, then with reuse, from the same prompt; the cold answer goes into the
history of both. The legs share engines but nothing else: the cold leg has another conversation and another
cache salt, so that no prefix cache of one serves the other.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvloop.cli.chat.conversation import Conversation
from kvloop.cli.chat.lines import reason_of, verdict_of
from kvloop.cli.chat.rendering import Renderer
from kvloop.cli.demo import script
from kvloop.cli.demo.record import TurnRecord
from kvloop.cli.errors import CommandFailed
from kvloop.client import Client
from kvloop.runtime.channels import open_channel
from kvloop.v1alpha1 import prefill_service_pb2, prefill_service_pb2_grpc, sampling_pb2, turn_pb2, worker_pb2

_INFO_TIMEOUT_S = 5.0
_COUNTED_WITHIN_S = 5.0
_POLL_S = 0.02

Told = Callable[[str, int, TurnRecord | None], None]
"""Called with leg, turn, and the turn's record once there is one."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One way of playing the conversation."""

    name: str
    reuse: bool
    conversation_id: str
    cache_salt: str


class PrefillInfo:
    """Reads what the prefill worker says about itself."""

    def __init__(self, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        self._stub = prefill_service_pb2_grpc.PrefillServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def read(self) -> worker_pb2.WorkerInfo:
        """Return the worker's facts and counters. Raises CommandFailed."""
        request = prefill_service_pb2.PrefillServiceGetInfoRequest()
        try:
            answer = await self._stub.GetInfo(request, timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise CommandFailed(
                f"the prefill worker does not tell its counters: {error.code().name}"
            ) from None
        return answer.info

    async def after(self, before: worker_pb2.EngineCounters, prompt_tokens: int) -> worker_pb2.EngineCounters:
        """Return the counters once they have taken a prompt in, or what they are after some seconds."""
        until = asyncio.get_running_loop().time() + _COUNTED_WITHIN_S
        while True:
            now = (await self.read()).counters
            if _total(now) - _total(before) >= prompt_tokens or asyncio.get_running_loop().time() > until:
                return now
            await asyncio.sleep(_POLL_S)


class Player:
    """Plays the script over one router."""

    def __init__(
        self, router: Client, info: PrefillInfo, renderer: Renderer, max_tokens: int, told: Told
    ) -> None:
        self._router = router
        self._info = info
        self._renderer = renderer
        self._sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._told = told

    async def warm_up(self) -> None:
        """Play one turn on other text, so that no measured turn pays for firsts."""
        prompt = self._renderer.first([{"role": "user", "content": script.WARM_UP}])
        salt = secrets.token_hex(8)
        await self._turn(
            0, prompt, Leg("warm-up", reuse=True, conversation_id=f"demo-{salt}", cache_salt=salt)
        )

    async def play(self) -> tuple[list[TurnRecord], list[TurnRecord]]:
        """Return the records of the legs with and without reuse. Raises CommandFailed, CallFailed."""
        run = secrets.token_hex(6)
        off = Leg("off", reuse=False, conversation_id=f"demo-{run}-off", cache_salt=f"{run}-off")
        on = Leg("on", reuse=True, conversation_id=f"demo-{run}-on", cache_salt=f"{run}-on")
        history = Conversation(self._renderer, script.SYSTEM)
        records: dict[str, list[TurnRecord]] = {"on": [], "off": []}
        for number, message in enumerate(script.turns(), start=1):
            if number == script.STARTED_OVER:
                await self._router.end(on.conversation_id, cache_salt=on.cache_salt)
                history = Conversation(self._renderer, script.SYSTEM)
            prompt = history.ask(message)
            for leg in (off, on):
                records[leg.name].append(await self._turn(number, prompt, leg))
            history.answered(prompt, records["off"][-1].token_ids)
        await self._router.end(on.conversation_id, cache_salt=on.cache_salt)
        return records["on"], records["off"]

    async def _turn(self, number: int, prompt: list[int], leg: Leg) -> TurnRecord:
        self._told(leg.name, number, None)
        before = (await self._info.read()).counters
        begun = time.perf_counter()
        events = self._router.turn(
            prompt,
            conversation_id=leg.conversation_id,
            cache_salt=leg.cache_salt,
            sampling=self._sampling,
            retention=turn_pb2.Retention(hold=leg.reuse),
            reuse=leg.reuse,
        )
        ids: list[int] = []
        texts: list[str] = []
        ttft_s: float | None = None
        summary: turn_pb2.Summary | None = None
        async for event in events:
            if event.token_ids and ttft_s is None:
                ttft_s = time.perf_counter() - begun
            ids.extend(event.token_ids)
            texts.append(event.text)
            summary = event.summary or summary
        if summary is None or ttft_s is None:
            raise CommandFailed(f"turn {number} of the leg {leg.name} got no answer")
        reuse = summary.reuse
        # A prompt that goes to D directly is never P's to count.
        through_p = 0 if reuse.verdict == turn_pb2.VERDICT_DIRECT else len(prompt)
        after = await self._info.after(before, through_p)
        record = TurnRecord(
            turn=number,
            prompt_tokens=summary.prompt_tokens,
            verdict=verdict_of(reuse),
            reason=reason_of(reuse),
            tokens={
                "p_local": reuse.tokens.p_local,
                "readback": reuse.tokens.readback,
                "d_local": reuse.tokens.d_local,
                "computed": reuse.tokens.computed,
            },
            engine_external_tokens=after.external_tokens - before.external_tokens,
            prefill_ms=round(reuse.prefill_ms, 3),
            ttft_ms=round(ttft_s * 1e3, 3),
            transfer_ms=round(reuse.readback.duration_ms, 3),
            transfer_bytes=reuse.readback.bytes,
            descriptors=reuse.readback.descriptors,
            token_ids=ids,
            text="".join(texts),
        )
        self._told(leg.name, number, record)
        return record


def _total(counters: worker_pb2.EngineCounters) -> int:
    return counters.local_tokens + counters.external_tokens + counters.computed_tokens
