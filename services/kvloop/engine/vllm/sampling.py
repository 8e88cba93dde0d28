"""Sampling parameters between the proto and vLLM (checked on 0.29.0).

An absent field takes the model's own default (generation_config), else vLLM's; zero is a value like any
other.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from vllm import exceptions
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

from kvloop.engine.vllm import grammar
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import sampling_pb2

REFUSALS: tuple[type[Exception], ...] = (
    getattr(exceptions, "VLLMClientError", exceptions.VLLMValidationError),
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
)
"""What vLLM raises for parameters that it refuses; some of its checks raise plain Python errors."""

_SCALARS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "thinking_token_budget",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "logprob_token_ids", "allowed_token_ids")
_DEFAULTED = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_tokens")
_FIELDS = frozenset(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_MESSAGE_CHARS = 300


def to_vllm(
    sampling: sampling_pb2.SamplingParams,
    *,
    defaults: Mapping[str, Any],
    transfer: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Return vLLM's parameters, streaming deltas.

    defaults: the model's generation_config as vLLM reads it. transfer: kv_transfer_params.
    Raises Failure INVALID_FIELD, MULTIPLE_COMPLETIONS or TRANSFER_PARAMS_REFUSED.
    """
    if sampling.HasField("n") and sampling.n != 1:
        raise invalid(
            "sampling.n",
            "only 1 is served; fork a conversation for more",
            Reason.ERROR_REASON_MULTIPLE_COMPLETIONS,
        )
    values = _values(sampling)
    for name in _DEFAULTED:
        if name in defaults:
            values.setdefault(name, defaults[name])
    if not sampling.HasField("max_tokens") and values.get("max_tokens") is not None:
        # A default gives way to what is asked for.
        values["max_tokens"] = max(values["max_tokens"], sampling.min_tokens)
    values.setdefault("max_tokens", None)
    extra = _extra_args(sampling)
    if transfer is not None:
        extra = {**extra, "kv_transfer_params": dict(transfer)}
    try:
        if sampling.HasField("repetition_detection"):
            values["repetition_detection"] = _repetition(sampling.repetition_detection)
        if sampling.HasField("structured_outputs"):
            values["structured_outputs"] = grammar.to_vllm(sampling.structured_outputs)
        return SamplingParams(**values, extra_args=extra or None, output_kind=RequestOutputKind.DELTA)
    except REFUSALS as error:
        raise _at_fault(values, error) from None


def from_vllm(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return the proto form of vLLM's parameters, defaults spelled out.

    vLLM's parameters are complete: what they leave at a default must not take a worker's own default.
    """
    sampling = sampling_pb2.SamplingParams(n=params.n)
    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            setattr(sampling, name, value)
    for name in _LISTS:
        value = getattr(params, name)
        if value:
            getattr(sampling, name).extend(value)
    for token, bias in (params.logit_bias or {}).items():
        sampling.logit_bias[token] = bias
    if params.structured_outputs is not None:
        sampling.structured_outputs.CopyFrom(grammar.from_vllm(params.structured_outputs))
    if params.repetition_detection is not None:
        detection = params.repetition_detection
        sampling.repetition_detection.max_pattern_size = detection.max_pattern_size
        sampling.repetition_detection.min_pattern_size = detection.min_pattern_size
        sampling.repetition_detection.min_count = detection.min_count
    extra = {key: value for key, value in (params.extra_args or {}).items() if key != "kv_transfer_params"}
    if extra:
        sampling.extra_args_json = json.dumps(extra)
    return sampling


def blame(error: Exception) -> Failure:
    """Return the failure of a request that vLLM refused before it reached the engine core."""
    text = str(error.args[0]) if error.args else type(error).__name__
    parameter = getattr(error, "parameter", None)
    if parameter in _FIELDS:
        return invalid(f"sampling.{parameter}", _plain(text))
    lowered = text.lower()
    if any(word in lowered for word in ("grammar", "regex", "schema", "structur", "choice")):
        return invalid("sampling.structured_outputs", _plain(text))
    named = [match.group() for match in re.finditer(r"\w+", text) if match.group() in _FIELDS]
    if not named:
        return invalid("sampling", "the engine refuses these parameters")
    return invalid(f"sampling.{named[0]}", _plain(text))


def _values(sampling: sampling_pb2.SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in _SCALARS
        if sampling.HasField(name)  # type: ignore[arg-type]
    }
    for name in _LISTS:
        if entries := list(getattr(sampling, name)):
            values[name] = entries
    if sampling.logit_bias:
        if not all(map(math.isfinite, sampling.logit_bias.values())):
            raise invalid("sampling.logit_bias", "must be finite")
        # vLLM's own clamp, which only its from_optional applies.
        values["logit_bias"] = {
            token: min(100.0, max(-100.0, bias)) for token, bias in sampling.logit_bias.items()
        }
    return values


def _repetition(detection: sampling_pb2.RepetitionDetection) -> RepetitionDetectionParams:
    given = {field.name: value for field, value in detection.ListFields()}
    try:
        return RepetitionDetectionParams(**given)
    except REFUSALS as error:
        raise invalid("sampling.repetition_detection", _plain(str(error))) from None


def _extra_args(sampling: sampling_pb2.SamplingParams) -> dict[str, Any]:
    if not sampling.HasField("extra_args_json"):
        return {}
    from kvloop.runtime import checks

    checks.check_extra_args(sampling.extra_args_json)
    extra: dict[str, Any] = json.loads(sampling.extra_args_json)
    return extra


def _at_fault(values: Mapping[str, Any], error: Exception) -> Failure:
    """Return the failure that names the one parameter that vLLM refuses on its own, if there is one."""
    for name, value in values.items():
        try:
            SamplingParams(**{name: value})
        except REFUSALS as own:
            return invalid(f"sampling.{name}", _plain(str(own.args[0]) if own.args else "refused"))
    return blame(error)


def _plain(text: str) -> str:
    """Return the first line without source positions, bounded."""
    line = text.strip().splitlines()[0] if text.strip() else "refused"
    line = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", line)
    return line[:_MESSAGE_CHARS]
