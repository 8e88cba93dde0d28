"""Turns through a running fleet, with the pool's counts before and after: what a plugin can get wrong.

    python smoke.py ROUTER DIRECT_ROUTER PREFILL DECODE VOCABULARY OUT.json

Exit code 1 when anything is not as it must be. Tokens of different ways are compared, but bf16 does not
promise that they are equal, so a difference is told and is no failure.
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvloop.bench.target import Outcome, Request, RouterTarget
from kvloop.runtime.channels import open_channel
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    worker_pb2,
)

TOKENS = 2_048
SUFFIX = 160
AT_ONCE = 8


class Smoke:
    """Plays turns and notes what came of them."""

    def __init__(self, router: str, direct: str, prefill: str, decode: str, vocabulary: int) -> None:
        self._router = RouterTarget(router)
        self._direct = RouterTarget(direct)
        self._prefill = prefill
        self._decode = decode
        self._vocabulary = vocabulary
        self._rng = random.Random(0)
        self._ended: list[tuple[str, str]] = []
        self.steps: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    async def play(self) -> None:
        """Play all steps."""
        await self._pools("at first", held=0)
        cold, warm = await self._readback("a", reuse=False), await self._readback("b", reuse=True)
        self._note("readback gives the tokens of the cold way", equal=cold.token_ids == warm.token_ids)
        await self._pools("with a lease")
        direct = await self._go_direct()
        self._note("direct gives the tokens of the cold way", equal=direct.token_ids == cold.token_ids)
        await self._stop_string()
        await asyncio.gather(*(self._readback(f"many-{n}", reuse=True, seed=n) for n in range(AT_ONCE)))
        await self._pools("with many leases")
        for conversation, salt in self._ended:
            await self._router.end(conversation, salt)
        await self._pools("after all releases", held=0, all_free=True)
        await self._router.close()
        await self._direct.close()

    async def _readback(self, name: str, *, reuse: bool, seed: int = 1) -> Outcome:
        first, suffix = self._prompt(seed, TOKENS), self._prompt(seed + 1000, SUFFIX)
        request = Request(first, 32, f"smoke-{name}", cache_salt=name, reuse=reuse)
        answer = await self._send(f"{name}: first turn", self._router, request)
        second = replace(request, prompt=[*first, *answer.token_ids, *suffix])
        outcome = await self._send(f"{name}: second turn", self._router, second)
        if reuse:
            self._ended.append((request.conversation_id, name))
            self._expect(outcome.verdict == "READBACK", f"{name}: {outcome.verdict} {outcome.reason}")
            history = TOKENS + 31
            self._expect(outcome.tokens["readback"] >= history - 1, f"{name}: read {outcome.tokens}")
        return outcome

    async def _go_direct(self) -> Outcome:
        first, suffix = self._prompt(1, TOKENS), self._prompt(1001, SUFFIX)
        request = Request(first, 32, "smoke-direct", cache_salt="direct")
        self._ended.append((request.conversation_id, "direct"))
        answer = await self._send("direct: first turn", self._direct, request)
        second = replace(request, prompt=[*first, *answer.token_ids, *suffix])
        outcome = await self._send("direct: second turn", self._direct, second)
        self._expect(outcome.verdict == "DIRECT", f"direct: {outcome.verdict} {outcome.reason}")
        third = replace(second, prompt=[*second.prompt, *outcome.token_ids, *suffix])
        again = await self._send("direct: third turn, read back", self._router, third)
        self._expect(again.verdict == "READBACK", f"after direct: {again.verdict} {again.reason}")
        return outcome

    async def _stop_string(self) -> None:
        first, suffix = self._prompt(7, TOKENS), self._prompt(1007, SUFFIX)
        free = Request(first, 32, "smoke-free", cache_salt="free", reuse=False)
        full = await self._send("stop string: without it", self._router, free)
        word = full.token_ids[5]
        request = Request(first, 32, "smoke-stop", cache_salt="stop", stop=(f" w{word}",))
        self._ended.append((request.conversation_id, "stop"))
        answer = await self._send("stop string: with it", self._router, request)
        self._expect(answer.output_num_tokens < 32, "the stop string did not end the answer")
        second = replace(request, prompt=[*first, *answer.token_ids, *suffix], stop=())
        outcome = await self._send("stop string: next turn", self._router, second)
        self._expect(
            outcome.verdict == "READBACK", f"after a stop string: {outcome.verdict} {outcome.reason}"
        )

    async def _send(self, what: str, target: RouterTarget, request: Request) -> Outcome:
        outcome = await target.send(request)
        self.steps.append({"step": what, **asdict(outcome)})
        return outcome

    async def _pools(self, when: str, *, held: int | None = None, all_free: bool = False) -> None:
        until = time.monotonic() + 20
        while True:
            infos = {"prefill": await prefill_info(self._prefill), "decode": await decode_info(self._decode)}
            good = all(
                (held is None or info.pool.held_blocks == held)
                and (not all_free or info.pool.free_blocks == info.pool.total_blocks)
                for info in infos.values()
            )
            if good or time.monotonic() > until:
                break
            await asyncio.sleep(0.1)
        for role, info in infos.items():
            pool = info.pool
            self._note(
                f"{role}'s pool {when}",
                total=pool.total_blocks,
                free=pool.free_blocks,
                held=pool.held_blocks,
                leases=pool.leases,
                block_size=info.block_size,
                engine_version=info.engine_version,
            )
        self._expect(good, f"pools {when}: blocks are missing")

    def _prompt(self, seed: int, count: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(1_000, self._vocabulary) for _ in range(count)]

    def _note(self, what: str, **facts: Any) -> None:
        self.steps.append({"step": what, **facts})

    def _expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.wrong.append(otherwise)


async def prefill_info(endpoint: str) -> worker_pb2.WorkerInfo:
    """Return a prefill worker's facts."""
    async with open_channel(endpoint) as channel:
        stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        return (await stub.GetInfo(prefill_service_pb2.PrefillServiceGetInfoRequest(), timeout=10)).info


async def decode_info(endpoint: str) -> worker_pb2.WorkerInfo:
    """Return a decode worker's facts."""
    async with open_channel(endpoint) as channel:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        return (await stub.GetInfo(decode_service_pb2.DecodeServiceGetInfoRequest(), timeout=10)).info


async def played(arguments: list[str]) -> Smoke:
    """Return what came of the steps on the command line's fleet."""
    router, direct, prefill, decode, vocabulary = arguments
    smoke = Smoke(router, direct, prefill, decode, int(vocabulary))
    try:
        await smoke.play()
    except Exception as error:  # noqa: BLE001 - what was played until then is worth keeping
        smoke.wrong.append(f"{type(error).__name__}: {error}")
    return smoke


def main(arguments: list[str]) -> int:
    """Play, write what came of it, and return the exit code."""
    smoke = asyncio.run(played(arguments[:-1]))
    record = json.dumps({"wrong": smoke.wrong, "steps": smoke.steps}, indent=1)
    Path(arguments[-1]).write_text(record + "\n", encoding="utf-8")
    for line in smoke.wrong or ["all as it must be"]:
        sys.stdout.write(line + "\n")
    return 1 if smoke.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
