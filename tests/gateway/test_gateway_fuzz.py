"""Whatever a client sends, the answer is in the API's own form and no fault of the gateway's."""

import json
from typing import Any

import httpx
import pytest
from gateway_router import FakeRouter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_NAMES = (
    *("type", "function", "name", "parameters", "schema", "json_schema", "strict", "role", "content"),
    *("text", "image_url", "url", "tool_calls", "id", "arguments", "regex", "x"),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(
            ["user", "system", "tool", "auto", "required", "function", "text", "image_url", "\ud800"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4)
    ),
    max_leaves=8,
)
_FIELDS = (
    *("messages", "prompt", "input", "model", "system", "max_tokens", "temperature", "top_p", "top_k", "n"),
    *("stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice"),
    *("response_format", "structured_outputs", "stream", "stream_options", "metadata", "user", "echo"),
    *("conversation_id", "cache_salt", "vllm_xargs", "reasoning", "reasoning_effort", "thinking", "suffix"),
    *("chat_template_kwargs", "continue_final_message", "add_generation_prompt", "documents", "text"),
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(("role", "content", "tool_calls", "name")), VALUES), max_size=3
)
BODIES = st.dictionaries(st.sampled_from(_FIELDS), VALUES, max_size=3)


@given(path=st.sampled_from(PATHS), changes=BODIES, messages=st.one_of(st.none(), MESSAGES))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_is_the_gateways_fault(
    http: httpx.Client, router: FakeRouter, path: str, changes: dict[str, Any], messages: Any
) -> None:
    hi = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": 5}
    body["input" if path.endswith("responses") else "messages"] = hi if messages is None else messages
    if path.endswith("/v1/completions"):
        body["prompt"] = "x"
    answer = http.post(
        path, content=json.dumps({**body, **changes}), headers={"content-type": "application/json"}
    )
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        told = answer.json()["error"]
        assert told["message"]
        assert told["type"]
