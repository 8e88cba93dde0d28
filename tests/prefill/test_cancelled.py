"""A leg that is cancelled in the middle of a read: the pin stays until the engine has let go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from worker_kit import Pair, open_pair, prefill_request, prompt, scope_of, until

from kvloop.runtime.errors import Failure, Reason

HISTORY = prompt(150, 1)
SUFFIX = prompt(40, 2)


class Word:
    """The engine's word that a cancelled prefill is over, when a test gives it."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = asyncio.Event()
        self.given: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.request_id = ""
        self.patience_s = 0.0
        monkeypatch.setattr(pair.prefill_engine, "prefill_ended", self.prefill_ended)

    async def prefill_ended(self, request_id: str, patience_s: float) -> bool:
        self.request_id, self.patience_s = request_id, patience_s
        self.asked.set()
        return await self.given


async def pins(pair: Pair) -> int:
    return sum(lease.pins for lease in await pair.leases())


@asynccontextmanager
async def cancelled(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Word]:
    """Cancel a leg in the middle of its read, up to where the engine's word is waited for."""
    one = await pair.play(HISTORY)
    scope = scope_of("c")
    word = Word(pair, monkeypatch)
    pair.prefill_engine.faults.stall_at("start")
    request = prefill_request([*HISTORY, *one.ids, *SUFFIX], scope, await pair.source(scope))
    call = pair.prefill.Prefill(request, timeout=20)

    async def reading() -> bool:
        pool = await pair.prefill_engine.pool()
        return await pins(pair) == 1 and pool.free_blocks < pool.total_blocks

    await until(reading)
    call.cancel()
    async with asyncio.timeout(10):
        await word.asked.wait()
    assert word.request_id == request.request_id
    assert await pins(pair) == 1
    yield word


async def unpinned(pair: Pair) -> bool:
    return await pins(pair) == 0


async def test_the_pin_is_ended_on_the_engine_s_word(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cancelled(pair, monkeypatch) as word:
        assert 0 < word.patience_s <= 30.0
        word.given.set_result(True)
        await until(lambda: unpinned(pair))


@pytest.mark.parametrize("silence", ["too long", "gone"])
async def test_without_its_word_the_pin_lapses(silence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair() as pair, cancelled(pair, monkeypatch) as word:
        if silence == "gone":
            word.given.set_exception(Failure(Reason.ERROR_REASON_WORKER_FAILED, "the engine is gone"))
        else:
            word.given.set_result(False)
        await pair.prefill_app.stop()  # every message on its way has come by then
        assert await pins(pair) == 1
        pair.decode_engine.faults.jump_clock(30.0)
        await until(lambda: unpinned(pair))


async def test_a_worker_that_stops_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair(prefill={"end_read_timeout_s": 0.05}) as pair, cancelled(pair, monkeypatch):
        await pair.prefill_app.stop()
        assert await pins(pair) == 1
