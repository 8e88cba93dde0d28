"""Sampling parameters between the proto and vLLM. Imports vLLM, runs no engine."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from kvloop.engine.vllm import grammar, sampling
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import sampling_pb2

pytestmark = pytest.mark.vllm

finite = {"allow_nan": False, "allow_infinity": False}
ids = st.lists(st.integers(0, 49_151), min_size=1, max_size=5, unique=True)
texts = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True)

SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    # Below 0.01 vLLM raises it; at 0 it clears top_p, top_k and min_p.
    "temperature": st.floats(0.01, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 1000),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**63 - 1),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "max_tokens": st.integers(100, 10_000),
    "min_tokens": st.integers(0, 100),
    "logprobs": st.integers(-1, 20),
    "prompt_logprobs": st.integers(-1, 20),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "thinking_token_budget": st.integers(0, 1000),
}
LISTS: dict[str, st.SearchStrategy[Any]] = {
    "stop": texts,
    "stop_token_ids": ids,
    "bad_words": texts,
    "logprob_token_ids": ids,
    "allowed_token_ids": ids,
}


def to_vllm(values: dict[str, Any], **more: Any) -> SamplingParams:
    return sampling.to_vllm(sampling_pb2.SamplingParams(**values), defaults={}, **more)


@given(values=st.fixed_dictionaries({}, optional={**SCALARS, **LISTS}))
def test_fields_arrive_and_return(values: dict[str, Any]) -> None:
    params = to_vllm(values)
    standard = SamplingParams()
    for name in (*SCALARS, *LISTS):
        expected = values.get(name, getattr(standard, name))
        if name == "max_tokens":
            expected = values.get(name)
        assert getattr(params, name) == expected, name
    assert params.output_kind == RequestOutputKind.DELTA
    assert params.n == 1
    back = sampling.from_vllm(params)
    again = sampling.to_vllm(back, defaults={"temperature": 0.123, "top_k": 3, "max_tokens": 5})
    for name in (*SCALARS, *LISTS):
        if name == "max_tokens" and name not in values:
            continue  # None there means "what fits", and a worker's default may say less
        assert getattr(again, name) == getattr(params, name), name


@pytest.mark.parametrize("name", ["temperature", "top_k", "min_tokens", "presence_penalty", "logprobs"])
def test_zero_is_a_value(name: str) -> None:
    params = to_vllm({name: 0})
    assert getattr(params, name) == 0
    assert getattr(sampling.to_vllm(sampling_pb2.SamplingParams(**{name: 0}), defaults={name: 1}), name) == 0


def test_absent_takes_the_models_default_then_vllms() -> None:
    absent = sampling_pb2.SamplingParams()
    defaults = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 77, "unrelated": 1}
    params = sampling.to_vllm(absent, defaults=defaults)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 0.9, 77)
    plain = sampling.to_vllm(absent, defaults={})
    assert (plain.temperature, plain.max_tokens) == (1.0, None)


@given(bias=st.dictionaries(st.integers(0, 49_151), st.floats(-1000, 1000, **finite), max_size=5))
def test_logit_bias_is_clamped_as_vllm_does(bias: dict[int, float]) -> None:
    params = to_vllm({"logit_bias": bias})
    expected = SamplingParams.from_optional(logit_bias=bias or None).logit_bias
    assert (params.logit_bias or None) == expected


def test_extra_args_and_transfer_meet() -> None:
    params = to_vllm({"extra_args_json": '{"mine": [1]}'}, transfer={"do_remote_decode": True})
    assert params.extra_args == {"mine": [1], "kv_transfer_params": {"do_remote_decode": True}}
    assert sampling.from_vllm(params).extra_args_json == '{"mine": [1]}'
    assert to_vllm({}).extra_args is None


def test_repetition_detection_arrives() -> None:
    proto = sampling_pb2.SamplingParams()
    proto.repetition_detection.max_pattern_size = 5
    proto.repetition_detection.min_count = 3
    params = sampling.to_vllm(proto, defaults={})
    assert params.repetition_detection.max_pattern_size == 5
    assert params.repetition_detection.min_pattern_size == 0
    assert sampling.from_vllm(params).repetition_detection.min_count == 3


REFUSED = [
    ("n", {"n": 2}, Reason.ERROR_REASON_MULTIPLE_COMPLETIONS),
    ("presence_penalty", {"presence_penalty": 2.1}, Reason.ERROR_REASON_INVALID_FIELD),
    ("frequency_penalty", {"frequency_penalty": float("nan")}, Reason.ERROR_REASON_INVALID_FIELD),
    ("repetition_penalty", {"repetition_penalty": 0.0}, Reason.ERROR_REASON_INVALID_FIELD),
    ("temperature", {"temperature": float("inf")}, Reason.ERROR_REASON_INVALID_FIELD),
    ("temperature", {"temperature": -0.1, "top_p": 0.5}, Reason.ERROR_REASON_INVALID_FIELD),
    ("top_p", {"top_p": 0.0}, Reason.ERROR_REASON_INVALID_FIELD),
    ("top_k", {"top_k": -2}, Reason.ERROR_REASON_INVALID_FIELD),
    ("min_p", {"min_p": 1.1}, Reason.ERROR_REASON_INVALID_FIELD),
    ("max_tokens", {"max_tokens": 0}, Reason.ERROR_REASON_INVALID_FIELD),
    ("min_tokens", {"min_tokens": -1}, Reason.ERROR_REASON_INVALID_FIELD),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}, Reason.ERROR_REASON_INVALID_FIELD),
    ("logprobs", {"logprobs": -2}, Reason.ERROR_REASON_INVALID_FIELD),
    ("prompt_logprobs", {"prompt_logprobs": -2}, Reason.ERROR_REASON_INVALID_FIELD),
    ("stop", {"stop": [""]}, Reason.ERROR_REASON_INVALID_FIELD),
    ("bad_words", {"bad_words": [""]}, Reason.ERROR_REASON_INVALID_FIELD),
    ("thinking_token_budget", {"thinking_token_budget": -2}, Reason.ERROR_REASON_INVALID_FIELD),
    ("logit_bias", {"logit_bias": {1: float("nan")}}, Reason.ERROR_REASON_INVALID_FIELD),
    ("extra_args_json", {"extra_args_json": "[]"}, Reason.ERROR_REASON_INVALID_FIELD),
    (
        "extra_args_json",
        {"extra_args_json": '{"kv_transfer_params": {}}'},
        Reason.ERROR_REASON_TRANSFER_PARAMS_REFUSED,
    ),
]


@pytest.mark.parametrize(("name", "values", "reason"), REFUSED)
def test_refusals_name_the_field(name: str, values: dict[str, Any], reason: Any) -> None:
    with pytest.raises(Failure) as caught:
        to_vllm(values)
    assert caught.value.field == f"sampling.{name}"
    assert caught.value.reason == reason


def test_blame_prefers_what_vllm_names() -> None:
    failure = sampling.blame(VLLMValidationError("too many", parameter="logprobs", value=99))
    assert (failure.field, failure.message) == ("sampling.logprobs", "too many")
    failure = sampling.blame(VLLMValidationError("Failed to transform regex into a grammar: x\nstack"))
    assert (failure.field, failure.message) == (
        "sampling.structured_outputs",
        "Failed to transform regex into a grammar: x",
    )
    failure = sampling.blame(VLLMValidationError("thinking_token_budget is set but x is not"))
    assert failure.field == "sampling.thinking_token_budget"
    assert sampling.blame(ValueError("something about the prompt")).field == "sampling"


CONSTRAINTS = [
    ("json_schema", '{"type": "object"}', "json"),
    ("json_object", True, "json_object"),
    ("regex", "a+", "regex"),
    ("grammar", 'root ::= "a"', "grammar"),
    ("structural_tag", '{"type": "structural_tag"}', "structural_tag"),
]


@pytest.mark.parametrize(("name", "value", "attribute"), CONSTRAINTS)
def test_constraints_arrive_and_return(name: str, value: Any, attribute: str) -> None:
    proto = sampling_pb2.StructuredOutputs(**{name: value})
    params = grammar.to_vllm(proto)
    assert getattr(params, attribute) == value
    assert grammar.from_vllm(params) == proto


def test_choices_arrive_and_return() -> None:
    proto = sampling_pb2.StructuredOutputs(choice=sampling_pb2.Choices(values=["a", "b"]))
    assert grammar.to_vllm(proto).choice == ["a", "b"]
    assert grammar.from_vllm(grammar.to_vllm(proto)) == proto


def test_a_schema_without_white_space_becomes_a_grammar() -> None:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    proto = sampling_pb2.StructuredOutputs(json_schema=json.dumps(schema), disable_any_whitespace=True)
    compact = xgrammar.Grammar.from_ebnf(grammar.to_vllm(proto).grammar)
    assert accepts(compact, '{"a":1}')
    assert not accepts(compact, '{"a": 1}')


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("", {}),
        (".json_schema", {"json_schema": "{"}),
        (".json_schema", {"json_schema": nested(grammar.MAX_DEPTH)}),
        (".json_schema", {"json_schema": nested(100_000)}),
        (".json_schema", {"json_schema": " " * (grammar.MAX_SCHEMA_CHARS + 1)}),
        (".json_schema", {"json_schema": '{"type": "nonsense"}', "disable_any_whitespace": True}),
        (".structural_tag", {"structural_tag": "{"}),
        (".regex", {"regex": "a" * (grammar.MAX_PATTERN_CHARS + 1)}),
        (".grammar", {"grammar": "a" * (grammar.MAX_PATTERN_CHARS + 1)}),
        (".choice", {"choice": sampling_pb2.Choices(values=["a" * grammar.MAX_PATTERN_CHARS, "b"])}),
        (".whitespace_pattern", {"json_object": True, "whitespace_pattern": " "}),
        (".disable_any_whitespace", {"regex": "a", "disable_any_whitespace": True}),
    ],
)
def test_constraints_that_are_refused(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(Failure) as caught:
        grammar.to_vllm(sampling_pb2.StructuredOutputs(**values))
    assert caught.value.field == f"sampling.structured_outputs{field}"


def test_depth_is_counted_outside_strings() -> None:
    deepest = nested(grammar.MAX_DEPTH - 1)
    assert isinstance(
        grammar.to_vllm(sampling_pb2.StructuredOutputs(json_schema=deepest)), StructuredOutputsParams
    )
    quoted = json.dumps({"const": "[" * 1000 + '\\"' + "{" * 1000})
    assert grammar.to_vllm(sampling_pb2.StructuredOutputs(json_schema=quoted)).json == quoted


class Marked:
    """A tokenizer that knows the marks of reasoning."""

    def get_vocab(self) -> dict[str, int]:
        return {"<think>": 1, "</think>": 2}


def reasoning_config(name: str) -> Any:
    return SimpleNamespace(structured_outputs_config=SimpleNamespace(reasoning_parser=name))


def constrained(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(structured_outputs=sampling_pb2.StructuredOutputs(regex="a", **fields))


def test_reasoning_is_told_where_the_core_asks() -> None:
    told = constrained(reasoning_ended=False, chat_template_kwargs_json='{"enable_thinking": true}')
    assert grammar.reasoning(told, reasoning_config("qwen3"), Marked()) == {
        "reasoning_ended": False,
        "reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    assert grammar.reasoning(told, reasoning_config(""), Marked()) == {}
    assert grammar.reasoning(constrained(), reasoning_config("qwen3"), Marked()) == {}
    plain = sampling_pb2.SamplingParams(temperature=0)
    assert grammar.reasoning(plain, reasoning_config("qwen3"), Marked()) == {}


def test_what_a_reasoning_parser_refuses_never_reaches_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(_name: str) -> Any:
        def make(_tokenizer: Any, **_kwargs: Any) -> Any:
            raise RuntimeError("no such mode")

        return make

    monkeypatch.setattr(grammar, "_reasoning_parser", refusing)
    told = constrained(chat_template_kwargs_json='{"mode": 7}')
    with pytest.raises(Failure) as caught:
        grammar.reasoning(told, reasoning_config("qwen3"), Marked())
    assert caught.value.field == "sampling.structured_outputs.chat_template_kwargs_json"
