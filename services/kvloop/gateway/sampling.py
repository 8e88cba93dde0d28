"""What of vLLM's SamplingParams travels to the router.

Every scalar is sent, also when it equals vLLM's default: the serving code has already applied the model's
own defaults, and a worker must not apply others. What the gateway does itself (n, output kinds) stays here.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvloop.engine.vllm.sampling import from_vllm
from kvloop.runtime.channels import MAX_MESSAGE_BYTES
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import sampling_pb2

# Parameters that mean an engine of one's own, or that the router's API has no field for.
_UNSERVED = ("trace_decode_token_ids", "routed_experts_prompt_start")
MAX_CANDIDATES = MAX_MESSAGE_BYTES // 40
"""How many log probabilities fit into a message: each has a token, its text, a rank and a number."""
_TRANSFER = ("kv_transfer_params", "ec_transfer_params")


def tell_reasoning(
    proto: sampling_pb2.SamplingParams, ended: bool | None, parser_kwargs: Mapping[str, Any] | None
) -> None:
    """Write what vLLM's serving code tells an engine of a prompt's reasoning.

    An engine asks for it where a constraint begins with the answer, and nowhere else. Failure INVALID_FIELD.
    """
    if not proto.HasField("structured_outputs"):
        return
    if ended is not None:
        proto.structured_outputs.reasoning_ended = ended
    kwargs = (parser_kwargs or {}).get("chat_template_kwargs")
    if kwargs:
        try:
            proto.structured_outputs.chat_template_kwargs_json = json.dumps(kwargs, allow_nan=False)
        except (TypeError, ValueError):
            raise invalid("chat_template_kwargs", "has a value that JSON does not have") from None


def check_prompt_logprobs(params: Any, positions: int, model_config: Any) -> None:
    """Refuse more of a prompt's log probabilities than one message holds: they all come with the summary.

    Failure INVALID_FIELD.
    """
    if params.prompt_logprobs is None:
        return
    asked = model_config.get_vocab_size() if params.prompt_logprobs == -1 else params.prompt_logprobs
    # The prompt's own token comes beside those that were asked for.
    if positions * (asked + 1) > MAX_CANDIDATES:
        raise invalid(
            "prompt_logprobs",
            f"at most {MAX_CANDIDATES} of all positions together are served; {positions} positions have"
            f" {positions * (asked + 1)}",
        )


def to_proto(params: Any, *, room: int) -> sampling_pb2.SamplingParams:
    """Return the proto of a vllm.SamplingParams.

    room: tokens that the context leaves for the answer. A max_tokens of just that is left open, so that the
    worker, who knows its own context, fills it in.

    Failure INVALID_FIELD or TRANSFER_PARAMS_REFUSED.
    """
    extra = dict(params.extra_args or {})
    if any(extra.get(name) is not None for name in _TRANSFER):
        raise Failure(
            Reason.ERROR_REASON_TRANSFER_PARAMS_REFUSED,
            "transfer parameters come from workers, never from clients",
            field="kv_transfer_params",
        )
    for name in _UNSERVED:
        if getattr(params, name, None):
            raise invalid(name, "is not served")
    try:
        proto = from_vllm(params)
        # The session is the turn's conversation by now.
        left = {name: value for name, value in extra.items() if name != "session_id" and value is not None}
        text = json.dumps(left, allow_nan=False) if left else ""
    except (TypeError, ValueError, OverflowError):
        raise invalid("sampling", "has a value that is out of range") from None
    proto.ClearField("n")
    proto.ClearField("extra_args_json")
    if text:
        proto.extra_args_json = text
    if params.max_tokens == room:
        proto.ClearField("max_tokens")
    return proto
