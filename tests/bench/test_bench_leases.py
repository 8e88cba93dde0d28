"""The arithmetic and the schedule of the lease measurements; real services measure in `make bench-leases`."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvloop.bench.leases import Oversubscription, family, percentiles
from kvloop.bench.stock import StockTarget
from kvloop.bench.target import Outcome, Request, Target, TargetFailed
from kvloop.cli.bench import stock
from kvloop.engine.settings import EngineSettings, resolve


class FakeHolder:
    """A decode worker with 24 blocks of 16 tokens, and two preemptions per round without leases."""

    def __init__(self) -> None:
        pool = SimpleNamespace(total_blocks=24)
        self.info = SimpleNamespace(pool=pool, block_size=16)
        self.preemptions = 0

    def prompt(self, length: int) -> list[int]:
        return [7] * length

    async def facts(self) -> Any:
        return SimpleNamespace(counters=SimpleNamespace(preemptions=self.preemptions))


class FakeTarget:
    """Remembers the last few conversations that were held."""

    def __init__(self, holder: FakeHolder) -> None:
        self.holder = holder
        self.held: list[str] = []
        self.ended: list[str] = []

    async def send(self, request: Request) -> Outcome:
        await asyncio.sleep(0)
        again = request.conversation_id in self.held
        if request.reuse and request.conversation_id:
            self.held = [*self.held, request.conversation_id][-8:]
        elif request.conversation_id:
            self.holder.preemptions += 1
        read = len(request.prompt) // 2 if again else 0
        return Outcome(
            [1, 2],
            10.0,
            20.0,
            len(request.prompt),
            2,
            verdict="READBACK" if again else "RECOMPUTE",
            tokens={"p_local": 0, "readback": read, "d_local": 0, "computed": len(request.prompt) - read},
        )

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        self.ended.append(conversation_id)

    async def close(self) -> None:
        pass


async def test_both_ways_are_played_and_told_apart() -> None:
    holder = FakeHolder()
    target = FakeTarget(holder)
    play = Oversubscription(factor=2.0, blocks=6, rounds=2)
    found = await play.measure(target, holder)  # type: ignore[arg-type]
    assert found["conversations"] == 8
    assert found["leases"]["reuse_rate"] == 1.0
    assert found["leases"]["preemptions"] == 0
    assert found["retention_off"]["reuse_rate"] == 0.0
    assert found["retention_off"]["preemptions"] == 2 * 16
    assert found["leases"]["second_turns"] == found["retention_off"]["second_turns"] == 16
    assert len(target.ended) == 32
    assert found["stock"] is None


async def test_stock_starts_anew_with_every_round_and_ends_it_at_a_stand() -> None:
    holder = FakeHolder()
    started: list[FakeTarget] = []

    class Stuck(FakeTarget):
        async def send(self, request: Request) -> Outcome:
            if len(self.held) == 6:
                raise TargetFailed("no room")
            return await super().send(request)

    @asynccontextmanager
    async def beside() -> AsyncIterator[Target]:
        started.append(Stuck(holder))
        yield started[-1]

    play = Oversubscription(factor=2.0, blocks=6, rounds=2)
    found = await play.measure(FakeTarget(holder), holder, beside)  # type: ignore[arg-type]
    assert len(started) == 2
    # Four first turns, a second one, the fifth first turn; then there is no room.
    assert found["stock"] == {"second_turns": 16, "served": 2, "reuse_rate": 0.125}
    assert found["leases"]["served"] == 16


def answer(ids: list[int], cached: int, params: dict[str, Any] | None) -> httpx.Response:
    return httpx.Response(
        200,
        json={
            "choices": [{"token_ids": ids}],
            "usage": {"prompt_tokens_details": {"cached_tokens": cached} if cached else None},
            "kv_transfer_params": params,
        },
    )


async def test_stock_hands_decode_answers_to_prefill() -> None:
    sent: list[tuple[str, dict[str, Any]]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        sent.append((request.url.host, body["kv_transfer_params"]))
        if request.url.host == "p":
            read = 48 if "remote_request_id" in body["kv_transfer_params"] else 0
            return answer([1], read, {"do_remote_prefill": True, "remote_request_id": "at-p"})
        return answer([1, 2], 0, {"do_remote_decode": True, "remote_request_id": f"at-d{len(sent)}"})

    target = StockTarget("http://p", "http://d/", "m", transport=httpx.MockTransport(serve))
    one = await target.send(Request([5] * 50, 2, "a"))
    two = await target.send(Request([5] * 60, 2, "a"))
    other = await target.send(Request([5] * 60, 2, "b"))
    await target.close()
    assert (one.verdict, two.verdict, other.verdict) == ("RECOMPUTE", "READBACK", "RECOMPUTE")
    assert two.tokens["readback"] == 48
    assert two.token_ids == [1, 2]
    assert sent[1] == ("d", {"do_remote_prefill": True, "remote_request_id": "at-p"})
    assert sent[2] == (
        "p",
        {"do_remote_decode": True, "do_remote_prefill": False, "remote_request_id": "at-d2"},
    )


@pytest.mark.parametrize("how", ["refuses", "is late", "has no handle"])
async def test_stock_turns_fail_as_others_do(how: str) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        if how == "is late":
            raise httpx.ReadTimeout("late", request=request)
        return httpx.Response(500) if how == "refuses" else answer([1], 0, None)

    target = StockTarget("http://p", "http://d", "m", transport=httpx.MockTransport(serve))
    with pytest.raises(TargetFailed):
        await target.send(Request([5] * 50, 2, "a"))
    await target.close()


def test_stock_engines_are_like_ours() -> None:
    settings = resolve(EngineSettings.model_validate({"model": "m", "max_model_len": 2048, "device": "cpu"}))
    prefill = stock.arguments(settings, "prefill", 1, None)
    decode = stock.arguments(settings, "decode", 2, 97)
    assert "--no-enable-prefix-caching" in prefill
    assert "--no-enable-prefix-caching" not in decode
    assert decode[decode.index("--num-gpu-blocks-override") + 1] == "97"
    assert decode[decode.index("--block-size") + 1] == str(settings.block_size)
    transfer = json.loads(decode[decode.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "NixlConnector"
    assert transfer["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 480


def test_percentiles_are_samples() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "samples": 3}


def test_a_family_has_its_own_front() -> None:
    assert family(os.getpid())["front"] == [os.getpid()]
