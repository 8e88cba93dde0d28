"""What the router's measurements mean, and the pieces that they are made of."""

import asyncio
from typing import Any

import numpy as np
import pytest

from kvloop.bench.router import added, chunks_per_cpu_second, cpu, first_chunks, memory, missed, per_turn_ms
from kvloop.bench.router_traffic import Played, Talk, as_handle, talk
from kvloop.bench.statistics import slope
from kvloop.runtime import tokens
from kvloop.v1alpha1 import decode_service_pb2, prefill_service_pb2

AT = list(range(0, 50_000, 250))


def walk(step: float, seed: int) -> list[float]:
    """Return memory that grows in steps, and now and then gives some back."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 20_000, len(AT)) + np.repeat(rng.normal(0, 100_000, len(AT) // 10), 10)
    return [80e6 + step * at + float(wobble) for at, wobble in zip(AT, noise, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_growth_is_told_from_wobbling(seed: int) -> None:
    steady, growing = slope(AT, walk(0.0, seed)), slope(AT, walk(40.0, seed))
    assert steady.low is not None
    assert steady.high is not None
    assert steady.low < 0 < steady.high
    assert growing.low is not None
    assert 0 < growing.low < growing.value
    assert growing.value == pytest.approx(40, abs=15)


def test_a_handle_changes_hands_unread() -> None:
    prefilled = prefill_service_pb2.PrefillResponse(held_ms=5)
    prefilled.handle.params_json = "x" * 1000
    request = decode_service_pb2.DecodeRequest(request_id="r").SerializeToString()
    joined = decode_service_pb2.DecodeRequest.FromString(request + as_handle(prefilled.SerializeToString()))
    assert (joined.request_id, joined.handle.params_json) == ("r", "x" * 1000)


def test_a_talk_has_a_prompt_of_its_length() -> None:
    made = talk(100, 4, 50)
    assert tokens.count(made.prompt) == 100
    assert tokens.largest(made.prompt) < 50


class Fake:
    """A way whose turns take no time, and a process that charges for each."""

    def __init__(self, cost_s: float) -> None:
        self.cost_s = cost_s
        self.turns = 0

    async def play(self, talk: Talk) -> Played:
        await asyncio.sleep(0)
        self.turns += 1
        return Played(self.cost_s * 1000, talk.output_tokens)

    async def close(self) -> None:
        return None

    def cpu_s(self) -> float:
        return self.turns * self.cost_s

    def rss(self) -> int:
        return 10_000_000


async def test_cpu_is_charged_to_the_way_that_spent_it() -> None:
    cheap, dear = Fake(0.001), Fake(0.002)
    ways: Any = {"cheap": (cheap, cheap), "dear": (dear, dear)}
    measured = await cpu(ways, 10, conversations=4, turns=80, rounds=4, limit_s=60)
    assert [m.way for m in measured] == ["cheap", "dear", "dear", "cheap"] * 2
    assert per_turn_ms(measured, "cheap") == pytest.approx(1.0)
    assert per_turn_ms(measured, "dear") == pytest.approx(2.0)
    assert chunks_per_cpu_second(measured, "dear") == pytest.approx(16_000)


async def test_a_busy_machine_gets_an_even_number_of_rounds() -> None:
    way = Fake(0.001)
    measured = await cpu({"one": (way, way)}, 10, conversations=1, turns=80, rounds=8, limit_s=0)  # type: ignore[dict-item]
    assert len(measured) == 2


async def test_first_chunks_are_compared_at_percentiles() -> None:
    samples = await first_chunks({"router": Fake(0.003), "direct": Fake(0.001)}, 10, rounds=10, limit_s=60)
    assert [len(values) for values in samples.values()] == [10, 10]
    assert added(samples) == {"p50": 2.0, "p99": 2.0}


async def test_memory_that_stays_has_no_slope() -> None:
    way = Fake(0.0)
    record = await memory(way, way, turns=10_000, limit_s=60)  # type: ignore[arg-type]
    assert (record["turns"], record["bytes_per_turn"], record["growth_bytes"]) == (10_000, 0, 0)


def test_missed_targets_are_named() -> None:
    record: dict[str, Any] = {
        "added_first_chunk_ms": {"24k": {"p50": 1.0}, "500": {"p50": 1.0}},
        "cpu_per_turn_vs_passthrough": 0.9,
        "chunks_per_cpu_second": 15_000,
        "lookups_per_turn": 1.0,
        "memory_slope": {"ci_low": -1.0, "bytes_per_turn": 0.5},
        "turns_per_cpu_second": {"router": 300, "vllm-router": 299},
    }
    assert missed(record) == []
    record["added_first_chunk_ms"]["24k"]["p50"] = 1.6
    record["memory_slope"]["ci_low"] = 0.1
    record["turns_per_cpu_second"]["vllm-router"] = 300
    assert len(missed(record)) == 3
