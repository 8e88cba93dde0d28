"""Checks of a turn's parameters, the same at the router and at the workers.

Pure functions: each returns what it worked out, or raises the Failure that names the field. What only an
engine can judge (whether a grammar compiles, how many logprobs it gives) is left to the engine. Ranges
are vLLM's own (checked on 0.29.0), so that a value refused here would have been refused there.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from google.protobuf import duration_pb2

from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

MAX_REQUEST_ID = 128
MAX_CONVERSATION_ID = 256
MAX_SCOPE_BYTES = 64
MAX_CACHE_SALT = 256
MAX_STRINGS = 256
MAX_STRING_CHARS = 4096
MAX_EXTRA_ARGS_CHARS = 64 * 1024

# Keys by which vLLM's connectors are steered (0.29.0). A client that sets one could point an engine at
# another host, or at blocks of another tenant.
_TRANSFER_KEYS = frozenset({"kv_transfer_params", "ec_transfer_params", "transfer_mode", "transfer_id"})
_TRANSFER_PREFIXES = ("do_remote_", "remote_", "kvloop")

_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "presence_penalty": (lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "must be positive and finite"),
    "temperature": (lambda value: 0 <= value <= 2, "must be in [0, 2]"),
    "top_p": (lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "top_k": (lambda value: value >= -1, "must be -1, 0 or more"),
    "min_p": (lambda value: 0 <= value <= 1, "must be in [0, 1]"),
    "max_tokens": (lambda value: value >= 1, "must be at least 1"),
    "min_tokens": (lambda value: value >= 0, "must not be negative"),
    "logprobs": (lambda value: value >= -1, "must be -1, 0 or more"),
    "prompt_logprobs": (lambda value: value >= -1, "must be -1, 0 or more"),
    "thinking_token_budget": (lambda value: value >= -1, "must be -1, 0 or more"),
}
# What needs more than a comparison.
_COMPOUND = frozenset(
    {
        "stop_token_ids",
        "allowed_token_ids",
        "logprob_token_ids",
        "logit_bias",
        "stop",
        "bad_words",
        "structured_outputs",
        "repetition_detection",
        "extra_args_json",
    }
)


def check_deadline(time_left_s: float | None) -> float:
    """Return the seconds left; Failure DEADLINE_REQUIRED when the call has no deadline."""
    if time_left_s is None:
        raise Failure(Reason.ERROR_REASON_DEADLINE_REQUIRED, "the call needs a deadline")
    if time_left_s <= 0:
        raise Failure(Reason.ERROR_REASON_DEADLINE_EXCEEDED, "the call's deadline is over")
    return time_left_s


def check_request_id(request_id: str, *, required: bool) -> None:
    """Accept printable ASCII up to 128 characters, and nothing only where it may be minted."""
    if required and not request_id:
        raise invalid("request_id", "must not be empty")
    if len(request_id) > MAX_REQUEST_ID:
        raise invalid("request_id", f"must have at most {MAX_REQUEST_ID} characters")
    if not (request_id.isascii() and (request_id.isprintable() or not request_id)):
        raise invalid("request_id", "must be printable ASCII")


def check_conversation_id(conversation_id: str, field: str = "conversation_id") -> None:
    """Accept up to 256 characters."""
    if len(conversation_id) > MAX_CONVERSATION_ID:
        raise invalid(field, f"must have at most {MAX_CONVERSATION_ID} characters")


def check_scope(scope: turn_pb2.TurnScope) -> None:
    """Check what a router derives for P and D; a scope without a digest key could prove nothing."""
    if len(scope.scope) > MAX_SCOPE_BYTES:
        raise invalid("scope.scope", f"must have at most {MAX_SCOPE_BYTES} bytes")
    if len(scope.digest_key) > MAX_SCOPE_BYTES:
        raise invalid("scope.digest_key", f"must have at most {MAX_SCOPE_BYTES} bytes")
    if scope.scope and not scope.digest_key:
        raise invalid("scope.digest_key", "is required along with a scope")
    if len(scope.cache_salt) > MAX_CACHE_SALT:
        raise invalid("scope.cache_salt", f"must have at most {MAX_CACHE_SALT} characters")
    check_conversation_id(scope.conversation_id, "scope.conversation_id")
    if len(scope.tenant) > MAX_CONVERSATION_ID:
        raise invalid("scope.tenant", f"must have at most {MAX_CONVERSATION_ID} characters")
    if scope.turn_start_us < 0:
        raise invalid("scope.turn_start_us", "must not be negative")


def check_model(model: turn_pb2.ModelRef, *, name: str, revision: str, adapters: Sequence[str]) -> None:
    """Accept the served model and its adapters; an empty name or revision means the served one."""
    if model.name and model.name != name:
        raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such model is served", field="model.name")
    if model.revision and model.revision != revision:
        raise Failure(
            Reason.ERROR_REASON_MODEL_NOT_FOUND,
            "the model is served in another revision",
            field="model.revision",
        )
    if model.adapter and model.adapter not in adapters:
        raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such adapter is served", field="model.adapter")


def check_prompt(
    packed: bytes, *, max_model_len: int, vocab_size: int, field: str = "prompt_token_ids"
) -> int:
    """Return the tokens of a packed prompt: at least one, all in the vocabulary, with room for one more.

    Failures: EMPTY_PROMPT, INVALID_FIELD, PROMPT_TOO_LONG (metadata limit, actual).
    """
    if not packed:
        raise invalid(field, "the prompt is empty", Reason.ERROR_REASON_EMPTY_PROMPT)
    if len(packed) % tokens.TOKEN_BYTES:
        raise invalid(field, f"length must be a multiple of {tokens.TOKEN_BYTES} bytes")
    length = tokens.count(packed)
    if length >= max_model_len:
        raise _too_long(field, limit=max_model_len - 1, actual=length, what="the prompt")
    if tokens.largest(packed) >= vocab_size:
        raise invalid(field, f"token ids must be below {vocab_size}")
    return length


def check_lengths(prompt_len: int, sampling: sampling_pb2.SamplingParams, max_model_len: int) -> int:
    """Return how many tokens the answer may have.

    As vLLM's OpenAI server: without max_tokens it is what max_model_len leaves; more than that, when asked
    for, is refused rather than cut short unseen.
    """
    left = max_model_len - prompt_len
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens > left:
            total = prompt_len + sampling.max_tokens
            raise _too_long(
                "sampling.max_tokens", limit=max_model_len, actual=total, what="prompt plus max_tokens"
            )
        return sampling.max_tokens
    if sampling.min_tokens > left:
        total = prompt_len + sampling.min_tokens
        raise _too_long(
            "sampling.min_tokens", limit=max_model_len, actual=total, what="prompt plus min_tokens"
        )
    return left


def check_retention(retention: turn_pb2.Retention) -> None:
    """Accept a positive ttl; its cap is the worker's affair."""
    if retention.HasField("ttl") and seconds(retention.ttl, "retention.ttl") <= 0:
        raise invalid("retention.ttl", "must be greater than zero")


def seconds(duration: duration_pb2.Duration, field: str) -> float:
    """Return a Duration in seconds; INVALID_FIELD when seconds and nanos are not a valid pair."""
    if abs(duration.seconds) > 315_576_000_000 or abs(duration.nanos) > 999_999_999:
        raise invalid(field, "is not a valid duration")
    if duration.seconds * duration.nanos < 0:
        raise invalid(field, "is not a valid duration")
    return duration.seconds + duration.nanos / 1e9


def check_sampling(sampling: sampling_pb2.SamplingParams, *, vocab_size: int) -> None:
    """Check sampling parameters; fields are named "sampling.<name>".

    Failures: INVALID_FIELD, MULTIPLE_COMPLETIONS, TRANSFER_PARAMS_REFUSED.
    """
    given = {descriptor.name for descriptor, _ in sampling.ListFields()}
    if "n" in given and sampling.n != 1:
        raise invalid(
            "sampling.n",
            "only 1 is served; fork a conversation for more",
            Reason.ERROR_REASON_MULTIPLE_COMPLETIONS,
        )
    _check_ranges(sampling, given)
    if given.isdisjoint(_COMPOUND):
        return
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        _check_ids(f"sampling.{name}", getattr(sampling, name), vocab_size)
    _check_ids("sampling.logit_bias", sampling.logit_bias.keys(), vocab_size)
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise invalid("sampling.logit_bias", "must be finite")
    _check_strings("sampling.stop", sampling.stop)
    _check_strings("sampling.bad_words", sampling.bad_words)
    if sampling.stop and "detokenize" in given and not sampling.detokenize:
        raise invalid("sampling.stop", "needs detokenize")
    if "structured_outputs" in given:
        _check_structured(sampling.structured_outputs)
    if "repetition_detection" in given:
        _check_repetition(sampling.repetition_detection)
    if "extra_args_json" in given:
        check_extra_args(sampling.extra_args_json)


def check_extra_args(text: str) -> None:
    """Accept a JSON object that steers no KV transfer, at any depth."""
    field = "sampling.extra_args_json"
    if len(text) > MAX_EXTRA_ARGS_CHARS:
        raise invalid(field, f"must have at most {MAX_EXTRA_ARGS_CHARS} characters")
    value = _json(field, text)
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON object")
    if any(_steers_transfer(key) for key in _keys(value)):
        raise invalid(
            field,
            "transfer parameters come from workers, never from clients",
            Reason.ERROR_REASON_TRANSFER_PARAMS_REFUSED,
        )


def _check_ranges(sampling: sampling_pb2.SamplingParams, given: Set[str]) -> None:
    for name, (fits, rule) in _RANGES.items():
        if name in given and not fits(getattr(sampling, name)):
            raise invalid(f"sampling.{name}", rule)
    if "max_tokens" in given and sampling.min_tokens > sampling.max_tokens:
        raise invalid("sampling.min_tokens", "must not exceed max_tokens")


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    if any(token >= vocab_size for token in ids):
        raise invalid(field, f"token ids must be below {vocab_size}")


def _check_strings(field: str, values: Sequence[str]) -> None:
    if len(values) > MAX_STRINGS:
        raise invalid(field, f"must have at most {MAX_STRINGS} entries")
    if not all(values):
        raise invalid(field, "must not contain an empty string")
    if any(len(value) > MAX_STRING_CHARS for value in values):
        raise invalid(field, f"entries must have at most {MAX_STRING_CHARS} characters")


def _check_template_kwargs(field: str, text: str) -> None:
    if len(text) > MAX_EXTRA_ARGS_CHARS:
        raise invalid(field, f"must have at most {MAX_EXTRA_ARGS_CHARS} characters")
    if not isinstance(_json(field, text), dict):
        raise invalid(field, "must be a JSON object")


def _check_structured(structured: sampling_pb2.StructuredOutputs) -> None:
    field = "sampling.structured_outputs"
    kind = structured.WhichOneof("constraint")
    if kind is None:
        raise invalid(field, "must name one constraint")
    if structured.chat_template_kwargs_json:
        _check_template_kwargs(f"{field}.chat_template_kwargs_json", structured.chat_template_kwargs_json)
    field = f"{field}.{kind}"
    if kind == "json_schema":
        if not isinstance(_json(field, structured.json_schema), dict):
            raise invalid(field, "must be a JSON object")
    elif kind == "structural_tag":
        _json(field, structured.structural_tag)
    elif kind == "json_object":
        if not structured.json_object:
            raise invalid(field, "must be true when given")
    elif kind == "choice":
        if not structured.choice.values:
            raise invalid(field, "must have at least one value")
        _check_strings(field, structured.choice.values)
    elif not getattr(structured, kind):
        raise invalid(field, "must not be empty")


def _check_repetition(repetition: sampling_pb2.RepetitionDetection) -> None:
    field = "sampling.repetition_detection"
    if not 0 <= repetition.min_pattern_size <= max(repetition.max_pattern_size, 0):
        raise invalid(f"{field}.min_pattern_size", "must be in [0, max_pattern_size]")
    if repetition.max_pattern_size < 0:
        raise invalid(f"{field}.max_pattern_size", "must not be negative")
    if repetition.max_pattern_size > 0 and repetition.min_count < 2:
        raise invalid(f"{field}.min_count", "must be at least 2")


def _too_long(field: str, *, limit: int, actual: int, what: str) -> Failure:
    return Failure(
        Reason.ERROR_REASON_PROMPT_TOO_LONG,
        f"{what} has {actual} tokens, at most {limit} fit",
        field=field,
        metadata={"limit": str(limit), "actual": str(actual)},
    )


def _json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(field, "is not valid JSON") from None


def _keys(value: Any) -> Iterable[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield from item
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def _steers_transfer(key: str) -> bool:
    return key.lower() in _TRANSFER_KEYS or key.lower().startswith(_TRANSFER_PREFIXES)
