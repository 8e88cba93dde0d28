"""Structured outputs: from the proto to vLLM, with limits that keep a constraint from harming anybody.

vLLM 0.29.0 parses every constraint in the front end (SamplingParams.verify) and compiles it on a thread of
the engine core, where a failure ends only that request. What neither bounds is size and depth: parsing a
schema nested a thousand deep takes minutes. So they are bounded here.
"""

import json
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from kvloop.runtime.errors import invalid
from kvloop.v1alpha1 import sampling_pb2

MAX_SCHEMA_CHARS = 64 * 1024
MAX_PATTERN_CHARS = 16 * 1024
MAX_DEPTH = 64
_FIELD = "sampling.structured_outputs"


def to_vllm(structured: sampling_pb2.StructuredOutputs) -> StructuredOutputsParams:
    """Return vLLM's form of a constraint.

    Raises Failure INVALID_FIELD, naming the field, for what is too large, too deep, not parseable as JSON,
    or asks for what the backend does not honour.
    """
    kind = structured.WhichOneof("constraint")
    if kind is None:
        raise invalid(_FIELD, "must name one constraint")
    _refuse_ignored(structured, kind)
    if kind in {"json_schema", "json_object"} and structured.disable_any_whitespace:
        schema = _json(kind, structured.json_schema) if kind == "json_schema" else {"type": "object"}
        return StructuredOutputsParams(grammar=_compact_grammar(schema))
    return StructuredOutputsParams(**_constraint(structured, kind))


def _constraint(structured: sampling_pb2.StructuredOutputs, kind: str) -> dict[str, Any]:
    value = getattr(structured, kind)
    if kind in {"json_schema", "structural_tag"}:
        _json(kind, value)
    elif kind == "choice":
        value = list(structured.choice.values)
        if sum(map(len, value)) > MAX_PATTERN_CHARS:
            raise _invalid(kind, f"must have at most {MAX_PATTERN_CHARS} characters in all")
    elif kind in {"regex", "grammar"} and len(value) > MAX_PATTERN_CHARS:
        raise _invalid(kind, f"must have at most {MAX_PATTERN_CHARS} characters")
    return {"json" if kind == "json_schema" else kind: value}


def from_vllm(params: StructuredOutputsParams) -> sampling_pb2.StructuredOutputs:
    """Return the proto form of vLLM's constraint."""
    structured = sampling_pb2.StructuredOutputs()
    if params.json is not None:
        structured.json_schema = params.json if isinstance(params.json, str) else json.dumps(params.json)
    elif params.json_object is not None:
        structured.json_object = params.json_object
    elif params.regex is not None:
        structured.regex = params.regex
    elif params.choice is not None:
        structured.choice.values.extend(params.choice)
    elif params.grammar is not None:
        structured.grammar = params.grammar
    elif params.structural_tag is not None:
        structured.structural_tag = params.structural_tag
    if params.disable_any_whitespace:
        structured.disable_any_whitespace = True
    if params.disable_additional_properties:
        structured.disable_additional_properties = True
    if params.whitespace_pattern is not None:
        structured.whitespace_pattern = params.whitespace_pattern
    return structured


def reasoning(sampling: sampling_pb2.SamplingParams, vllm_config: Any, tokenizer: Any) -> dict[str, Any]:
    """Return what the core has to know of the reasoning before a constrained answer, as add_request takes it.

    Nothing where it makes no difference: without a constraint, or without a reasoning parser. The core makes
    its parser of what it is told, where an exception would be everybody's: so one is made here first.

    Raises Failure INVALID_FIELD.
    """
    name = vllm_config.structured_outputs_config.reasoning_parser
    if not name or not sampling.HasField("structured_outputs"):
        return {}
    structured = sampling.structured_outputs
    told: dict[str, Any] = {}
    if structured.HasField("reasoning_ended"):
        told["reasoning_ended"] = structured.reasoning_ended
    if structured.chat_template_kwargs_json:
        kwargs = _json("chat_template_kwargs_json", structured.chat_template_kwargs_json)
        try:
            _reasoning_parser(name)(tokenizer, chat_template_kwargs=kwargs)
        except Exception:  # noqa: BLE001 - parsers raise whatever they like
            raise _invalid("chat_template_kwargs_json", "is refused by the reasoning parser") from None
        told["reasoning_parser_kwargs"] = {"chat_template_kwargs": kwargs}
    return told


def _reasoning_parser(name: str) -> Any:
    from vllm.reasoning import ReasoningParserManager

    return ReasoningParserManager.get_reasoning_parser(name)


def _refuse_ignored(structured: sampling_pb2.StructuredOutputs, kind: str) -> None:
    """Refuse options that the backend would drop unseen.

    xgrammar allows no properties but a schema's own anyway, so disable_additional_properties holds by itself.
    """
    if structured.HasField("whitespace_pattern"):
        raise _invalid("whitespace_pattern", "is not supported by the engine's grammar backend")
    if structured.disable_any_whitespace and kind not in {"json_schema", "json_object"}:
        raise _invalid("disable_any_whitespace", "applies only to json_schema and json_object")


def _compact_grammar(schema: Any) -> str:
    """Return a schema's grammar without white space: vLLM takes that option only for a whole engine."""
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
        raise _invalid("json_schema", "has features that the grammar backend does not support")
    try:
        grammar = xgrammar.Grammar.from_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(",", ":")
        )
    except RuntimeError:
        raise _invalid("json_schema", "can't be turned into a grammar") from None
    return str(grammar)


def _json(kind: str, text: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARS:
        raise _invalid(kind, f"must have at most {MAX_SCHEMA_CHARS} characters")
    if _depth(text) > MAX_DEPTH:
        raise _invalid(kind, f"must be nested at most {MAX_DEPTH} deep")
    try:
        return json.loads(text)
    except ValueError:
        raise _invalid(kind, "is not valid JSON") from None


def _depth(text: str) -> int:
    """Return the nesting depth of JSON text, brackets within strings left out."""
    depth = deepest = 0
    quoted = escaped = False
    for char in text:
        if quoted:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                quoted = False
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _invalid(name: str, message: str) -> Exception:
    return invalid(f"{_FIELD}.{name}", message)
