"""Growing conversations on legs in turns, and what is made of them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bench_fakes import FakeTarget

from kvloop.bench.peers_real import (
    Leg,
    Real,
    RealPlan,
    RealTurn,
    events_of,
    identical,
    summarise,
    ttft_lines,
)
from kvloop.bench.peers_serve import DONE, with_handles
from kvloop.bench.router_traffic import TurnLost
from kvloop.bench.workload.words import WordEncoder
from kvloop.cli.bench import peers_vllm
from kvloop.engine.settings import EngineSettings


async def play(legs: dict[str, Leg], plan: RealPlan) -> Real:
    real = Real(plan, legs, WordEncoder(32_000))
    await real.play()
    return real


async def test_legs_play_the_same_turns_and_a_shadow_what_the_first_was_sent() -> None:
    one, two, alone = FakeTarget(), FakeTarget(), FakeTarget()
    legs = {"kvloop": Leg(one.send), "proxy": Leg(two.send), "alone": Leg(alone.send, shadow=True)}
    real = await play(legs, RealPlan(conversations=2, turns=3, opening=8, input=4, output=2))
    assert [len(target.asked) for target in (one, two, alone)] == [8, 8, 8]
    for first, second, shadow in zip(one.asked, two.asked, alone.asked, strict=True):
        assert first.prompt == second.prompt == shadow.prompt
        assert len({first.cache_salt, second.cache_salt, shadow.cache_salt}) == 3
    assert [len(request.prompt) for request in one.asked[2:5]] == [12, 18, 24]
    # A conversation keeps its name and salt; a shadow meets nothing of an earlier turn.
    assert len({request.cache_salt for request in one.asked[2:5]}) == 1
    assert len({request.cache_salt for request in alone.asked[2:5]}) == 3
    assert identical(real.turns) == {"turns": 6, "same_prompt": 6, "same_answer": 6}


async def test_a_leg_that_fails_has_a_reason_and_ends_nobody_else() -> None:
    legs = {"kvloop": Leg(FakeTarget().send), "proxy": Leg(FakeTarget(fails_at=5).send)}
    real = await play(legs, RealPlan(conversations=2, turns=3, opening=8, input=4, output=2))
    assert real.lost == {"proxy": "turn 3: TargetFailed: no answer"}
    record = summarise(real.turns, "kvloop")
    assert (record["kvloop"]["samples"], record["proxy"]["samples"]) == (6, 2)
    assert record["kvloop"]["turns"]["3"]["prompt_tokens"] == 24
    assert record["proxy"]["times_kvloop"]["value"] == pytest.approx(1.0)
    assert record["kvloop"]["later_verdicts"] == {"READBACK": 4}
    shown = ttft_lines({name: {"real": figures} for name, figures in record.items()} | {"none": {"real": {}}})
    assert shown[1:] == ["kvloop: 100 ms", "proxy: 100 ms, 1.00 times ours"]


def test_how_many_times_ours_is_told_turn_by_turn_with_its_interval() -> None:
    def turn(leg: str, number: int, ttft_ms: float) -> RealTurn:
        return RealTurn(leg, 0, number, 100 * number, ttft_ms, ttft_ms, "", "", "")

    # Each takes the other leg twice as long: medians of turns that grow would hide that in a wide interval.
    turns = [turn("kvloop", number, 3.0**number) for number in range(1, 9)]
    turns += [turn("proxy", number, 2 * 3.0**number) for number in range(1, 8)]
    record = summarise(turns, "kvloop")
    # The last was not played by both.
    assert record["proxy"]["times_kvloop"] == {"value": 2.0, "ci_low": 2.0, "ci_high": 2.0, "n": 6}
    assert ttft_lines({"proxy": {"real": record["proxy"]}})[1:] == [
        "proxy: 324 ms, 2.00 times ours (2.00 to 2.00)"
    ]


async def test_answers_that_differ_are_told() -> None:
    class Other(FakeTarget):
        async def send(self, request: Any) -> Any:
            outcome = await super().send(request)
            outcome.token_ids[0] += 1
            return outcome

    legs = {"kvloop": Leg(FakeTarget().send), "proxy": Leg(Other().send)}
    real = await play(legs, RealPlan(conversations=1, turns=2, opening=8, input=4, output=2))
    assert identical(real.turns) == {"turns": 2, "same_prompt": 1, "same_answer": 0}


def test_each_leg_of_ours_is_one_way_whatever_is_the_cheapest() -> None:
    settings = EngineSettings(model="smollm2-135m-cpu", max_model_len=4096)
    plan = peers_vllm.plan_of(settings, {"prefill": False, "decode": True})
    assert [(router["direct"], router["by_cost"]) for router in plan.routers] == [
        (False, False),
        (True, False),
    ]
    assert {name: leg for name, leg in peers_vllm.VERDICTS.items() if name in peers_vllm.LEGS} == {
        "kvloop": "READBACK",
        "kvloop-direct": "DIRECT",
    }


def test_an_error_in_a_stream_is_a_lost_turn() -> None:
    assert events_of(b'data: {"choices": []}\n\ndata: [DONE]\n\n') == [{"choices": []}]
    with pytest.raises(TurnLost):
        events_of(b'data: {"error": {"message": "no"}}\n\n')


class Output:
    def __init__(self, handle: dict[str, Any] | None) -> None:
        self.kv_transfer_params = handle


async def test_streams_tell_the_handle_before_their_end() -> None:
    class Serving:
        async def stream(
            self, request: str, result_generator: AsyncIterator[Any], name: str
        ) -> AsyncIterator[str]:
            async for _ in result_generator:
                yield f"data: {request}{name}\n\n"
            yield DONE

    async def outputs(*handles: dict[str, Any] | None) -> AsyncIterator[Any]:
        for handle in handles:
            yield 0, Output(handle)

    told = with_handles(Serving.stream)
    events = [event async for event in told(Serving(), "a", outputs(None, {"remote_port": 7}), name="b")]
    assert events[:2] == ["data: ab\n\n"] * 2
    assert json.loads(events[2].removeprefix("data: ")) == {
        "choices": [],
        "kv_transfer_params": {"remote_port": 7},
    }
    assert events[3:] == [DONE]
    assert [event async for event in told(Serving(), "a", outputs(None), "b")] == ["data: ab\n\n", DONE]
