"""Identity, admission, problems and the last events of streams, as pure functions."""

import json

import pytest

from kvloop.gateway import admission, problems, sse
from kvloop.gateway.identity import Identity, identify
from kvloop.gateway.problems import Problem
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime.config import ConfigError
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import router_service_pb2

ALL_BODY = {"conversation_id": "a", "session_id": "b", "vllm_xargs": {"session_id": "c"}}
ALL_HEADERS = {
    "x-session-id": "d",
    "x-dynamo-session-id": "e",
    "x-claude-code-session-id": "f",
    "session-id": "g",
}
ORDER = [
    ("conversation_id", "a"),
    ("session_id", "b"),
    ("vllm_xargs.session_id", "c"),
    ("x-session-id", "d"),
    ("x-dynamo-session-id", "e"),
    ("x-claude-code-session-id", "f"),
    ("session-id", "g"),
]


@pytest.mark.parametrize("start", range(len(ORDER)))
def test_the_first_name_counts(start: int) -> None:
    left = dict(ORDER[start:])
    body: dict[str, object] = {name: left[name] for name in ("conversation_id", "session_id") if name in left}
    if "vllm_xargs.session_id" in left:
        body["vllm_xargs"] = {"session_id": "c"}
    headers = {name: value for name, value in ALL_HEADERS.items() if name in left}
    source, value = ORDER[start]
    assert identify(body, headers) == Identity(value, source)


def test_without_any_there_is_no_conversation() -> None:
    assert identify({}, {}) == Identity("", "none")
    assert identify({"conversation_id": "", "session_id": None}, {"x-session-id": ""}) == Identity()


def test_a_parent_is_carried_along() -> None:
    assert identify({"conversation_id": "a", "parent_conversation_id": "p"}, {}).parent_conversation_id == "p"


@pytest.mark.parametrize("value", [7, ["x"], {"x": 1}, "x" * 257, "\ud800"])
def test_names_that_are_no_names_are_refused(value: object) -> None:
    with pytest.raises(Failure) as caught:
        identify({"conversation_id": value}, {})
    assert caught.value.field == "conversation_id"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
        ({"vllm_xargs": {"nested": [{"remote_host": "x"}]}}, "vllm_xargs"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": "x"}, {"id": "x"}]}, "input"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"response_format": "json"}, "response_format"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_what_would_steer_is_refused(body: dict[str, object], field: str) -> None:
    with pytest.raises(Failure) as caught:
        admission.check_body(body)
    assert caught.value.field == field


def test_what_is_absent_or_null_passes() -> None:
    admission.check_body({"input": [{"role": "user", "content": "x"}, {"type": "reasoning"}]})
    admission.check_body({"kv_transfer_params": None, "previous_response_id": None, "background": False})
    admission.check_body({"vllm_xargs": {"session_id": "s", "top_n": 3}, "cache_salt": "x" * 256})


@pytest.mark.parametrize("value", [65, "65", 65.0, 1e300, "1e400"])
def test_too_many_answers_are_refused(value: object) -> None:
    with pytest.raises(Failure, match="at most 64 answers") as caught:
        admission.check_body({"n": value}, max_turns=64)
    assert caught.value.field == "n"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ["x"] * 64}, None),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": [[1, 2]] * 65}, "prompt"),
        ({"prompt": [1] * 65, "n": 64}, None),
        ({"prompt": ["x"] * 8, "n": 8}, None),
        ({"prompt": ["x"] * 13, "n": 5}, "n"),
        ({"prompt": "x" * 65, "n": None}, None),
        ({"prompt": [], "n": "many"}, None),
        ({"n": -5}, None),
        ({"n": float("nan")}, None),
    ],
)
def test_answers_are_those_to_all_prompts(body: dict[str, object], field: str | None) -> None:
    if field is None:
        admission.check_body(body, max_turns=64)
        return
    with pytest.raises(Failure) as caught:
        admission.check_body(body, max_turns=64)
    assert caught.value.field == field


def test_deadlines() -> None:
    def timeout(text: str | None) -> float:
        headers = {} if text is None else {"x-request-timeout": text}
        return admission.timeout_of(headers, default_s=5, longest_s=10)

    assert [timeout(None), timeout("2.5"), timeout("10"), timeout("11")] == [5, 2.5, 10, 10]
    for bad in ("", "soon", "0", "-1", "nan"):
        with pytest.raises(Failure):
            timeout(bad)


def test_priorities() -> None:
    assert admission.priority_of({}) is None
    assert admission.priority_of({"x-vllm-priority": "-3"}) == -3
    for bad in ("x", "99999999999"):
        with pytest.raises(Failure):
            admission.priority_of({"x-vllm-priority": bad})


def test_reuse_policies() -> None:
    assert admission.reuse_of({"x-kvloop-reuse": "forbid"}) == router_service_pb2.REUSE_POLICY_FORBID
    assert admission.reuse_of({}) == router_service_pb2.REUSE_POLICY_UNSPECIFIED
    with pytest.raises(Failure):
        admission.reuse_of({"x-kvloop-reuse": "perhaps"})


def test_credentials() -> None:
    assert admission.credentials_of({}) == (None, "")
    value, tenant = admission.credentials_of({"authorization": "Bearer k"})
    assert value == "Bearer k"
    assert admission.credentials_of({"x-api-key": "k"}) == (value, tenant)
    assert admission.credentials_of({"authorization": "Bearer other"})[1] != tenant
    with pytest.raises(Failure) as caught:
        admission.credentials_of({"authorization": "Bearer \x01"})
    assert caught.value.reason == Reason.ERROR_REASON_UNAUTHENTICATED


def test_every_reason_has_a_status_of_its_own() -> None:
    server_faults = {
        name for name, value in Reason.items() if problems.from_failure(Failure(value, "x")).status == 500
    }
    assert server_faults == {
        "ERROR_REASON_UNSPECIFIED",
        "ERROR_REASON_INTERNAL",
        # The gateway always sets a deadline, so this one would be its own fault.
        "ERROR_REASON_DEADLINE_REQUIRED",
    }


def test_problems_in_both_forms() -> None:
    problem = problems.from_failure(
        Failure(Reason.ERROR_REASON_INVALID_FIELD, "must be positive", field="sampling.top_p")
    )
    assert problem.body()["error"] == {
        "message": "must be positive",
        "type": "BadRequestError",
        "param": "top_p",
        "code": 400,
    }
    assert problem.body(anthropic=True) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "must be positive"},
    }
    overloaded = problems.from_failure(Failure(Reason.ERROR_REASON_OVERLOADED, "later", retry_after_s=0.2))
    assert overloaded.headers() == {"x-kvloop-reason": "overloaded", "retry-after": "1"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "m", "param": "p"}}, "m"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "gone"}, "gone"),
        (None, "Not Found"),
        ([1], "Not Found"),
    ],
)
def test_other_bodies_are_understood(body: object, message: str) -> None:
    assert problems.from_body(404, body) == Problem(404, message, "p" if message == "m" else None)


def test_what_a_server_says_of_its_own_fault_is_not_repeated() -> None:
    said = {"error": {"message": "'user\\nXyzzy'", "param": "Xyzzy"}}
    assert problems.from_body(500, said) == Problem(500, "unexpected failure")
    assert problems.from_body(499, said).message == "'user\\nXyzzy'"


def test_errors_in_streams_are_told_from_answers() -> None:
    assert sse.is_error(b'data: {"error": {"message": "m"}}\n\n')
    assert sse.is_error(b"event: error\ndata: {}\n\n")
    for other in (b"", b"data: [DONE]\n\n", b'data: {"id":"x","error":{}}\n\n', b"event: ping\ndata: {}\n\n"):
        assert not sse.is_error(other)


def completed(event: dict[str, object], cached: int = 5) -> dict[str, object]:
    raw = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    done = sse.complete(raw, lambda: {"identity": "none"}, lambda: cached)
    assert done.endswith(b"\n\n")
    parsed: dict[str, object] = json.loads(done.removeprefix(b"data: "))
    return parsed


def test_the_usage_of_a_stream_gets_its_cached_tokens() -> None:
    event = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}
    assert completed(event)["usage"] == {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}


def test_anthropic_counts_cached_tokens_apart() -> None:
    event = {"type": "message_delta", "delta": {}, "usage": {"input_tokens": 9, "output_tokens": 1}}
    usage = {"input_tokens": 4, "output_tokens": 1, "cache_read_input_tokens": 5}
    assert completed(event)["usage"] == usage
    assert completed(completed(event))["usage"] == usage


def test_other_events_pass_untouched() -> None:
    said = {
        "choices": [
            {"delta": {"content": 'quoting "finish_reason":"stop" and "usage":{'}, "finish_reason": None}
        ]
    }
    raw = b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"
    assert sse.complete(raw, dict, lambda: 0) == raw
    assert sse.complete(b": keep-alive\n\n", dict, lambda: 0) == b": keep-alive\n\n"
    assert sse.complete(b'data: "usage":{ broken }\n\n', dict, lambda: 0) == b'data: "usage":{ broken }\n\n'


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"router": " , "}, "router is empty"),
        ({"turn_timeout_s": 10, "max_turn_timeout_s": 5}, "turn_timeout_s exceeds"),
    ],
)
def test_contradicting_settings_are_refused(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        GatewaySettings.load(flags=values)
