"""What an answer is, and what ends it."""

from typing import Any

import pytest
from sim_rig import Rig, greedy, prefill, say, some_ids, terms

from kvloop.engine.simulated import text
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

STOP = turn_pb2.FinishReason.FINISH_REASON_STOP
LENGTH = turn_pb2.FinishReason.FINISH_REASON_LENGTH
PROMPT = some_ids(30)


def test_text_and_ids_are_each_others_image() -> None:
    ids = [3, 99, 100, 101, 9_999, 31_999, 151_935]
    assert text.encode(text.decode(ids)) == ids
    with pytest.raises(ValueError, match="not a text"):
        text.encode("hello world")


async def test_an_answer_depends_on_every_token_of_the_prompt(rig: Rig) -> None:
    engine = await rig.engine()
    first = await say(engine, PROMPT)
    assert first.ids == (await say(engine, PROMPT)).ids
    assert first.text == text.decode(first.ids)
    for at in (0, 13, 29):
        other = PROMPT.copy()
        other[at] += 1
        assert (await say(engine, other)).ids != first.ids


async def test_an_answer_goes_on_as_if_it_had_been_the_prompt(rig: Rig) -> None:
    engine = await rig.engine()
    whole = await rig.cold(PROMPT, sampling=greedy(20))
    rest = await say(engine, PROMPT + whole[:9], sampling=greedy(11))
    assert rest.ids == whole[9:]


async def test_block_size_changes_nothing_weights_do(rig: Rig) -> None:
    ids = (await say(await rig.engine(), PROMPT)).ids
    assert (await say(await rig.engine(block_size=16), PROMPT)).ids == ids
    assert (await say(await rig.engine(revision="other"), PROMPT)).ids != ids
    adapted = await rig.engine(adapters=("lora",))
    assert (await say(adapted, PROMPT)).ids == ids
    assert (await say(adapted, PROMPT, adapter="lora")).ids != ids


async def test_length_and_what_is_held_of_it(rig: Rig) -> None:
    engine = await rig.engine()
    said = await say(engine, PROMPT, sampling=greedy(1), hold=terms("a"))
    assert (said.done.reason, len(said.ids)) == (LENGTH, 1)
    assert said.done.hold is not None
    assert said.done.hold.num_tokens == len(PROMPT)
    said = await say(engine, PROMPT, sampling=greedy(7), hold=terms("b"))
    assert said.done.hold is not None
    assert said.done.hold.num_tokens == len(PROMPT) + 6
    assert said.done.hold.num_blocks == 9


async def test_eos_ends_unless_ignored_and_not_before_min_tokens(rig: Rig) -> None:
    engine = await rig.engine(eos_every=5)
    free = await say(engine, PROMPT, sampling=greedy(200, ignore_eos=False))
    assert free.done.reason == STOP
    assert free.done.stop_reason is None
    assert free.ids[-1] == engine.settings.eos_token_id
    assert free.text == text.decode(free.ids)
    ignoring = await say(engine, PROMPT, sampling=greedy(200))
    assert ignoring.ids[: len(free.ids)] == free.ids
    assert len(ignoring.ids) == 200
    longer = await say(engine, PROMPT, sampling=greedy(200, ignore_eos=False, min_tokens=len(free.ids) + 5))
    assert len(longer.ids) >= len(free.ids) + 5
    assert engine.settings.eos_token_id not in longer.ids[:-1]


async def test_a_stop_token_ends_is_not_shown_and_waits_for_min_tokens(rig: Rig) -> None:
    engine = await rig.engine()
    whole = await say(engine, PROMPT, sampling=greedy(12))
    stop = whole.ids[5]
    said = await say(engine, PROMPT, sampling=greedy(12, stop_token_ids=[stop]))
    assert said.ids == whole.ids[:6]
    assert said.text == text.decode(whole.ids[:5])
    assert (said.done.reason, said.done.stop_reason) == (STOP, str(stop))
    said = await say(engine, PROMPT, sampling=greedy(12, stop_token_ids=[stop], min_tokens=9))
    assert stop not in said.ids[:8]


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_within_a_token_and_is_held(rig: Rig, include: bool) -> None:
    engine = await rig.engine()
    whole = await say(engine, PROMPT, sampling=greedy(12))
    stop = text.word(whole.ids[5])[2:] + text.word(whole.ids[6])[:1]
    sampling = greedy(12, stop=[stop, "never"], include_stop_str_in_output=include)
    said = await say(engine, PROMPT, sampling=sampling, hold=terms("a"))
    assert said.ids == whole.ids[:7]
    assert (said.done.reason, said.done.stop_reason) == (STOP, stop)
    expected = whole.text[: whole.text.index(stop) + (len(stop) if include else 0)]
    assert said.text == expected
    assert said.done.hold is not None
    assert said.done.hold.num_tokens == len(PROMPT) + 6


async def test_seeds_name_answers_and_nothing_names_the_others(rig: Rig) -> None:
    engine = await rig.engine()

    def warm(**seed: Any) -> sampling_pb2.SamplingParams:
        return sampling_pb2.SamplingParams(temperature=0.7, max_tokens=8, ignore_eos=True, **seed)

    seeded = (await say(engine, PROMPT, sampling=warm(seed=1))).ids
    assert (await say(engine, PROMPT, sampling=warm(seed=1))).ids == seeded
    assert (await say(engine, PROMPT, sampling=warm(seed=2))).ids != seeded
    assert (await say(engine, PROMPT, sampling=warm())).ids != (
        await say(engine, PROMPT, sampling=warm())
    ).ids


async def test_allowed_tokens_and_logprobs(rig: Rig) -> None:
    engine = await rig.engine()
    said = await say(engine, PROMPT, sampling=greedy(8, allowed_token_ids=[7, 9], logprobs=3))
    assert set(said.ids) <= {7, 9}
    assert [entry.candidates[0].token_id for entry in said.logprobs] == said.ids
    outcome = await prefill(engine, PROMPT, sampling=greedy(1, prompt_logprobs=0))
    assert len(outcome.prompt_logprobs) == len(PROMPT)
    assert outcome.sources.computed == len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1}, "sampling.temperature"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"prompt_logprobs": -1}, "sampling.prompt_logprobs"),
        ({"stop_token_ids": [32_000]}, "sampling.stop_token_ids"),
        ({"max_tokens": 483}, "sampling.max_tokens"),
    ],
)
async def test_bad_parameters_are_named(rig: Rig, sampling: dict[str, Any], field: str) -> None:
    engine = await rig.engine()
    with pytest.raises(Failure) as caught:
        await say(engine, PROMPT, sampling=sampling_pb2.SamplingParams(**sampling))
    assert caught.value.field == field


async def test_prompts_that_cannot_be_are_refused(rig: Rig) -> None:
    engine = await rig.engine()
    for ids, reason in (
        ([], "EMPTY_PROMPT"),
        (some_ids(512), "PROMPT_TOO_LONG"),
        ([32_000], "INVALID_FIELD"),
    ):
        with pytest.raises(Failure) as caught:
            await prefill(engine, ids)
        assert caught.value.reason_name == reason
    with pytest.raises(Failure) as caught:
        await prefill(engine, PROMPT, adapter="unknown")
    assert caught.value.reason_name == "MODEL_NOT_FOUND"
