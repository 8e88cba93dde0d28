"""ChatService's requests as the bodies that OpenAI's chat completions take. Pure functions."""

import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from kvloop.runtime import checks
from kvloop.runtime.errors import invalid
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import sampling_pb2

_ROLES = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
    pb.CHAT_ROLE_DEVELOPER: "developer",
}
_MODES = {
    pb.TOOL_CHOICE_MODE_AUTO: "auto",
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}
# As they are in both; the others below have another name or form there.
_SCALARS = (
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ),
    *("seed", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("spaces_between_special_tokens", "thinking_token_budget"),
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "logprob_token_ids", "allowed_token_ids")
_CONSTRAINTS = {"json_schema": "json"}


def to_body(request: pb.ChatRequest, *, vocab_size: int) -> dict[str, Any]:
    """Return the body of a streamed chat completion, without identity.

    Failures: INVALID_FIELD, MULTIPLE_COMPLETIONS, TRANSFER_PARAMS_REFUSED.
    """
    if not request.messages:
        raise invalid("messages", "must not be empty")
    checks.check_sampling(request.sampling, vocab_size=vocab_size)
    body: dict[str, Any] = {
        "messages": [_message(message, index) for index, message in enumerate(request.messages)],
        "stream": True,
        **_sampling(request.sampling),
    }
    if request.tools:
        body["tools"] = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    choice = _tool_choice(request.tool_choice)
    if choice is not None:
        body["tool_choice"] = choice
    if request.HasField("parallel_tool_calls"):
        body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.chat_template_kwargs_json:
        body["chat_template_kwargs"] = _object("chat_template_kwargs_json", request.chat_template_kwargs_json)
    for name in ("model", "reasoning_effort", "cache_salt"):
        if value := getattr(request, name):
            body[name] = value
    return body


def _message(message: pb.ChatMessage, index: int) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"messages[{index}].role", "must be one of those that are known")
    body: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls:
        if role != "assistant":
            raise invalid(f"messages[{index}].tool_calls", "only an assistant calls tools")
        body["content"] = message.content or None
        body["tool_calls"] = [
            _tool_call(call, f"messages[{index}].tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    for name in ("tool_call_id", "reasoning", "name"):
        if value := getattr(message, name):
            body[name] = value
    return body


def _tool_call(call: pb.ToolCall, field: str) -> dict[str, Any]:
    # Templates take the arguments apart; the text itself is what goes on.
    _object(f"{field}.arguments_json", call.arguments_json)
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: pb.Tool, index: int) -> dict[str, Any]:
    if not tool.name:
        raise invalid(f"tools[{index}].name", "must not be empty")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _object(f"tools[{index}].parameters_json", tool.parameters_json)
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: pb.ToolChoice) -> str | dict[str, Any] | None:
    kind = choice.WhichOneof("choice")
    if kind == "name":
        return {"type": "function", "function": {"name": choice.name}}
    return _MODES.get(choice.mode) if kind == "mode" else None


def _sampling(sampling: sampling_pb2.SamplingParams) -> dict[str, Any]:
    if sampling.HasField("prompt_logprobs"):
        raise invalid("sampling.prompt_logprobs", "is not served for chats; use RouterService")
    if sampling.HasField("detokenize") and not sampling.detokenize:
        raise invalid("sampling.detokenize", "must be true for chats; use RouterService")
    body: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in _SCALARS
        if sampling.HasField(name)  # type: ignore[arg-type]
    }
    body |= {name: list(values) for name in _LISTS if (values := getattr(sampling, name))}
    if sampling.HasField("max_tokens"):
        body["max_completion_tokens"] = sampling.max_tokens
    if sampling.HasField("logprobs"):
        body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.HasField("structured_outputs"):
        body["structured_outputs"] = _structured(sampling.structured_outputs)
    if sampling.HasField("repetition_detection"):
        body["repetition_detection"] = MessageToDict(
            sampling.repetition_detection, preserving_proto_field_name=True
        )
    if sampling.extra_args_json:
        body["vllm_xargs"] = _object("sampling.extra_args_json", sampling.extra_args_json)
    return body


def _structured(structured: sampling_pb2.StructuredOutputs) -> dict[str, Any]:
    kind = structured.WhichOneof("constraint")
    if kind is None:
        raise invalid("sampling.structured_outputs", "must name one constraint")
    if structured.HasField("reasoning_ended") or structured.chat_template_kwargs_json:
        raise invalid("sampling.structured_outputs", "reasoning is the gateway's to tell; leave it out")
    value = list(structured.choice.values) if kind == "choice" else getattr(structured, kind)
    body: dict[str, Any] = {_CONSTRAINTS.get(kind, kind): value}
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if structured.HasField(name):
            body[name] = getattr(structured, name)
    return body


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON object")
    return value
