"""What tests on real engines do again and again."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from connector_harness import Engine, fresh_prompt, new_id

from kvloop.connector.control import Grant

ANSWER = 24


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - other processes have no event to wait for
        await asyncio.sleep(0.02)


async def cold(plain: Engine, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = (await plain.generate(prompt, count))["tokens"]
    return tokens


async def first_turn(d: Engine, length: int = 140, **more: Any) -> tuple[str, list[int], Any]:
    """Run a DIRECT turn on D, held: (lease, prompt + answer, result)."""
    lease, prompt = new_id("lease"), fresh_prompt(length)
    result = await d.decode(prompt, more.pop("max_tokens", ANSWER), lease=lease, **more)
    return lease, prompt + result["tokens"], result


async def refused(engine: Engine, turn_id: str) -> str | None:
    report = await engine.control.report(turn_id, 5.0)
    assert report is not None
    return report["refused"]


async def read(
    p: Engine, d: Engine, lease: str, prompt: list[int], k: int, pin_s: float = 20.0
) -> tuple[Any, Grant]:
    grant = await d.control.begin_read(lease, k, pin_s)
    return await p.prefill(prompt, grant["params"]), grant


class Balance:
    """Free blocks of engines, to be the same at the end."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines

    async def __aenter__(self) -> None:
        self.before = await self._free()

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for engine in self.engines:
                for hold in await engine.control.list():
                    await engine.control.release(hold["lease_id"])
            # A step that was on its way when a turn was cancelled has its blocks until it is over.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until(self._is_whole), 20.0)
            assert await self._free() == self.before

    async def _is_whole(self) -> bool:
        return await self._free() == self.before

    async def _free(self) -> list[int]:
        return [await engine.free() for engine in self.engines]


async def nothing_held(engine: Engine) -> bool:
    return not await engine.control.list()


async def has_free(engine: Engine, free: int) -> bool:
    return await engine.free() == free


async def has_less(engine: Engine, free: int) -> bool:
    return await engine.free() < free
