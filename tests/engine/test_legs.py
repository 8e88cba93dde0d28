"""Every sampling parameter, by the leg that it reaches."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvloop.engine import legs
from kvloop.v1alpha1 import sampling_pb2

FIELDS = list(sampling_pb2.SamplingParams.DESCRIPTOR.fields)


def everything() -> sampling_pb2.SamplingParams:
    """Return parameters with every field set to something that is no default."""
    sampling = sampling_pb2.SamplingParams(
        n=1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        temperature=0.7,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        seed=7,
        stop=["x"],
        stop_token_ids=[5],
        bad_words=["bad"],
        include_stop_str_in_output=True,
        ignore_eos=False,
        max_tokens=50,
        min_tokens=10,
        logprobs=3,
        prompt_logprobs=2,
        logprob_token_ids=[3],
        detokenize=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logit_bias={3: 1.0},
        allowed_token_ids=[1, 2],
        thinking_token_budget=4,
        extra_args_json="{}",
    )
    sampling.structured_outputs.regex = "a+"
    sampling.repetition_detection.max_pattern_size = 3
    return sampling


def is_set(sampling: sampling_pb2.SamplingParams, field: FieldDescriptor) -> bool:
    return field in [known for known, _ in sampling.ListFields()]


def test_everything_is_everything() -> None:
    assert all(is_set(everything(), field) for field in FIELDS)


def test_prefill_samples_one_greedy_token() -> None:
    leg = legs.prefill_leg(sampling_pb2.SamplingParams(max_tokens=50, min_tokens=20, temperature=1.0))
    assert leg == sampling_pb2.SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False
    )


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_what_reaches_prefill(field: FieldDescriptor) -> None:
    leg = legs.prefill_leg(everything())
    reaches = {"temperature", "max_tokens", "ignore_eos", "detokenize", "prompt_logprobs"}
    assert is_set(leg, field) == (field.name in reaches)
    assert (leg.temperature, leg.max_tokens, leg.ignore_eos) == (0.0, 1, True)


def test_prompt_logprobs_keep_their_text() -> None:
    assert legs.prefill_leg(sampling_pb2.SamplingParams(prompt_logprobs=0)).detokenize
    silent = sampling_pb2.SamplingParams(prompt_logprobs=0, detokenize=False)
    assert not legs.prefill_leg(silent).detokenize


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_what_reaches_decode(field: FieldDescriptor) -> None:
    assert is_set(legs.decode_leg(everything()), field) == (field.name != "prompt_logprobs")


def test_the_turns_own_parameters_stay() -> None:
    given = everything()
    legs.prefill_leg(given)
    legs.decode_leg(given)
    assert given == everything()
