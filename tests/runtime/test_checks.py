"""Checks of a turn's parameters: what passes, what does not, and which field is named."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.runtime import checks
from kvloop.runtime.errors import Failure
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

VOCAB = 100
LIMIT = 10
NAN = float("nan")
INF = float("inf")


def outcome(call: object, *args: object, **kwargs: object) -> tuple[str, str | None]:
    with pytest.raises(Failure) as raised:
        call(*args, **kwargs)  # type: ignore[operator]
    return raised.value.reason_name, raised.value.field


def sampling(**fields: object) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        {"temperature": 2.0, "top_p": 0.01, "top_k": 0, "min_p": 1.0},
        {"max_tokens": 1, "min_tokens": 1},
        {"logprobs": -1, "prompt_logprobs": 0},
        {"stop": ["x"], "bad_words": ["y"], "detokenize": True},
        {"stop_token_ids": [0, VOCAB - 1], "allowed_token_ids": [5], "logit_bias": {99: -100.0}},
        {"extra_args_json": '{"mine": {"list": [1, {"two": null}]}}'},
        {"structured_outputs": {"json_schema": '{"type": "object"}'}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": {"values": ["a"]}}},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"regex": "a+", "chat_template_kwargs_json": '{"a": [1]}'}},
        {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
        {"repetition_detection": {}},
    ],
)
def test_sampling_that_passes(fields: dict[str, object]) -> None:
    checks.check_sampling(sampling(**fields), vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"presence_penalty": -2.01}, "presence_penalty"),
        ({"frequency_penalty": 2.01}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": INF}, "repetition_penalty"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 257}, "stop"),
        ({"stop": ["x" * 4097]}, "stop"),
        ({"stop": ["x"], "detokenize": False}, "stop"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"allowed_token_ids": [2**32 - 1]}, "allowed_token_ids"),
        ({"logprob_token_ids": [VOCAB]}, "logprob_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: NAN}}, "logit_bias"),
        ({"structured_outputs": {}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "chat_template_kwargs_json": "[]"}},
            "structured_outputs.chat_template_kwargs_json",
        ),
        (
            {"structured_outputs": {"regex": "a", "chat_template_kwargs_json": " " * 65_537}},
            "structured_outputs.chat_template_kwargs_json",
        ),
        ({"structured_outputs": {"json_schema": "{"}}, "structured_outputs.json_schema"),
        ({"structured_outputs": {"json_schema": "[" * 99_999}}, "structured_outputs.json_schema"),
        ({"structured_outputs": {"json_schema": "3"}}, "structured_outputs.json_schema"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": {}}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": {"values": [""]}}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"min_pattern_size": 1}}, "repetition_detection.min_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 1, "min_count": 1}}, "repetition_detection.min_count"),
        ({"extra_args_json": "{"}, "extra_args_json"),
        ({"extra_args_json": "[]"}, "extra_args_json"),
        ({"extra_args_json": "[" * 60_000}, "extra_args_json"),
        ({"extra_args_json": json.dumps({"a": "x" * 70_000})}, "extra_args_json"),
    ],
)
def test_sampling_that_is_refused(fields: dict[str, object], field: str) -> None:
    found = outcome(checks.check_sampling, sampling(**fields), vocab_size=VOCAB)
    assert found == ("INVALID_FIELD", f"sampling.{field}")


@pytest.mark.parametrize("n", [0, 2, -1])
def test_one_completion_only(n: int) -> None:
    found = outcome(checks.check_sampling, sampling(n=n), vocab_size=VOCAB)
    assert found == ("MULTIPLE_COMPLETIONS", "sampling.n")


@pytest.mark.parametrize(
    "key",
    [
        "kv_transfer_params",
        "KV_Transfer_Params",
        "ec_transfer_params",
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_host",
        "transfer_mode",
        "kvloop",
    ],
)
@pytest.mark.parametrize("wrap", ["{%s}", '{"a": {%s}}', '{"a": [1, [{"b": {%s}}]]}'])
def test_transfer_parameters_are_refused_at_any_depth(key: str, wrap: str) -> None:
    text = wrap % f'"{key}": 1'
    found = outcome(checks.check_sampling, sampling(extra_args_json=text), vocab_size=VOCAB)
    assert found == ("TRANSFER_PARAMS_REFUSED", "sampling.extra_args_json")


@pytest.mark.parametrize(
    ("length", "max_tokens", "min_tokens", "allowed"),
    [
        (9, None, 0, 1),
        (1, None, 0, 9),
        (4, 6, 0, 6),
        (4, 5, 5, 5),
        (4, None, 6, 6),
    ],
)
def test_lengths_that_fit(length: int, max_tokens: int | None, min_tokens: int, allowed: int) -> None:
    params = sampling(max_tokens=max_tokens, min_tokens=min_tokens)
    assert checks.check_lengths(length, params, LIMIT) == allowed


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 7), ("min_tokens", 7)])
def test_lengths_that_do_not_fit_say_by_how_much(field: str, value: int) -> None:
    with pytest.raises(Failure) as raised:
        checks.check_lengths(4, sampling(**{field: value}), LIMIT)
    assert raised.value.field == f"sampling.{field}"
    assert raised.value.metadata == {"limit": "10", "actual": "11"}


@given(st.binary(max_size=60))
def test_any_bytes_are_a_prompt_or_a_failure(packed: bytes) -> None:
    try:
        length = checks.check_prompt(packed, max_model_len=LIMIT, vocab_size=VOCAB)
    except Failure:
        found = outcome(checks.check_prompt, packed, max_model_len=LIMIT, vocab_size=VOCAB)
        assert found[1] == "prompt_token_ids"
        return
    assert 0 < length < LIMIT
    assert length * 4 == len(packed)
    assert all(token < VOCAB for token in struct.unpack(f"<{length}I", packed))


def test_the_longest_prompt() -> None:
    assert checks.check_prompt(pack([1] * 9), max_model_len=LIMIT, vocab_size=VOCAB) == 9
    with pytest.raises(Failure) as raised:
        checks.check_prompt(pack([1] * 10), max_model_len=LIMIT, vocab_size=VOCAB)
    assert raised.value.metadata == {"limit": "9", "actual": "10"}


@pytest.mark.parametrize(("left", "reason"), [(None, "DEADLINE_REQUIRED"), (0.0, "DEADLINE_EXCEEDED")])
def test_deadlines(left: float | None, reason: str) -> None:
    assert checks.check_deadline(0.1) == 0.1
    assert outcome(checks.check_deadline, left)[0] == reason


@pytest.mark.parametrize(
    ("seconds", "nanos", "fits"),
    [(1, 0, True), (0, 1, True), (0, 0, False), (-1, 0, False), (1, -1, False), (2**62, 0, False)],
)
def test_retention_times(seconds: int, nanos: int, fits: bool) -> None:
    retention = turn_pb2.Retention()
    retention.ttl.seconds, retention.ttl.nanos = seconds, nanos
    if fits:
        checks.check_retention(retention)
    else:
        assert outcome(checks.check_retention, retention) == ("INVALID_FIELD", "retention.ttl")


def test_request_ids() -> None:
    checks.check_request_id("", required=False)
    checks.check_request_id("a b-c~" + "x" * 122, required=True)
    for bad in ("x" * 129, "tab\t", "é", "\x7f"):
        assert outcome(checks.check_request_id, bad, required=False) == ("INVALID_FIELD", "request_id")
    assert outcome(checks.check_request_id, "", required=True) == ("INVALID_FIELD", "request_id")
