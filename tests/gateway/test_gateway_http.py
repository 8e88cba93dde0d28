"""The door as bare HTTP sees it: bad input, traps, disconnects, deadlines, health."""

import json
import threading
from typing import Any

import httpx
import pytest
from gateway_kit import Gateway, wait_until
from gateway_router import FakeRouter, Turn, fail

from kvloop.runtime.errors import Failure, Reason

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "smollm2", "messages": HI}
LONG = "word " * 3000
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
STEER = {"do_remote_prefill": True, "remote_host": "h"}
BY_NAME = {"type": "function", "function": {"name": "g"}}
ANTHROPIC = {"model": "smollm2", "messages": HI, "max_tokens": 5}
NAN = b'{"model":"smollm2","messages":[{"role":"user","content":"x"}],"temperature":NaN}'
LONE = b'{"model":"smollm2","messages":[{"role":"user","content":"\\ud800"}]}'
SECRET = "xyzzy-secret"


def chat(**changes: Any) -> dict[str, Any]:
    return {**BODY, **changes}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def part(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [value]}]


def tool(parameters: Any, name: Any = "f") -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


BAD: list[tuple[str, str, Any, int]] = [
    ("malformed JSON", CHAT, b'{"model": "smollm2", "messages": [', 400),
    ("no JSON at all", CHAT, b"\xff\xfe\x00", 400),
    ("an empty body", CHAT, b"", 400),
    ("a list", CHAT, [1], 400),
    ("a number", CHAT, 5, 400),
    ("deep nesting", CHAT, b"[" * 100_000, 400),
    ("no messages", CHAT, {"model": "smollm2"}, 400),
    ("empty messages", CHAT, chat(messages=[]), 400),
    ("messages of another kind", CHAT, chat(messages="hi"), 400),
    ("a message that is none", CHAT, chat(messages=[5]), 400),
    ("no role", CHAT, chat(messages=[{"content": "hi"}]), 400),
    ("content of another kind", CHAT, chat(messages=[{"role": "user", "content": 5}]), 400),
    ("a lone surrogate", CHAT, LONE, 400),
    ("an unknown model", CHAT, chat(model="other"), 404),
    ("too hot", CHAT, chat(temperature=9), 400),
    ("temperature as text", CHAT, chat(temperature="hot"), 400),
    ("temperature NaN", CHAT, NAN, 400),
    ("top_p of 0", CHAT, chat(top_p=0), 400),
    ("n of 0", CHAT, chat(n=0), 400),
    ("n of a million", CHAT, chat(n=1_000_000), 400),
    ("greedy n", CHAT, chat(n=2, temperature=0), 400),
    ("negative max_tokens", CHAT, chat(max_tokens=-1), 400),
    ("seed out of range", CHAT, chat(seed=2**70), 400),
    ("min above max", CHAT, chat(max_tokens=2, min_tokens=3), 400),
    ("bias of no token", CHAT, chat(logit_bias={"x": 1}), 400),
    ("bias beyond the vocabulary", CHAT, chat(logit_bias={"999999": 1}), 400),
    ("negative bias token", CHAT, chat(logit_bias={"-5": 1}), 400),
    ("stop that is empty", CHAT, chat(stop=[""]), 400),
    ("negative stop token", CHAT, chat(stop_token_ids=[-1]), 400),
    ("huge stop token", CHAT, chat(stop_token_ids=[2**40]), 400),
    ("too many logprobs", CHAT, chat(logprobs=True, top_logprobs=10_000), 400),
    ("logprobs not asked for", CHAT, chat(top_logprobs=2), 400),
    ("context overflow", CHAT, chat(messages=[{"role": "user", "content": LONG}]), 400),
    ("too many answer tokens", CHAT, chat(max_tokens=10**6), 400),
    ("tools of another kind", CHAT, chat(tools="x"), 400),
    ("a tool without a name", CHAT, chat(tools=tool({"type": "object"}, name=None)), 400),
    ("tool parameters of another kind", CHAT, chat(tools=tool("x")), 400),
    ("a schema of no type", CHAT, chat(tools=tool({"type": "nonsense"}), tool_choice="required"), 400),
    ("a tool nobody offers", CHAT, chat(tools=tool({}), tool_choice=BY_NAME), 400),
    ("required without tools", CHAT, chat(tool_choice="required"), 400),
    ("a choice of nonsense", CHAT, chat(tools=tool({}), tool_choice="perhaps"), 400),
    ("a bad schema", CHAT, chat(response_format=schema({"type": "nonsense"})), 400),
    ("a schema without a schema", CHAT, chat(response_format={"type": "json_schema"}), 400),
    ("a bad regex", CHAT, chat(structured_outputs={"regex": "("}), 400),
    ("a bad grammar", CHAT, chat(structured_outputs={"grammar": "root ::= ("}), 400),
    ("an image", CHAT, chat(messages=part(IMAGE)), 400),
    ("an unknown part", CHAT, chat(messages=part({"type": "smell", "smell": "x"})), 400),
    ("a template", CHAT, chat(chat_template="{{ 1 }}"), 400),
    ("transfer parameters", CHAT, chat(kv_transfer_params=STEER), 400),
    ("transfer parameters in xargs", CHAT, chat(vllm_xargs={"kv_transfer_params": "x"}), 400),
    ("xargs of another kind", CHAT, chat(vllm_xargs=[1]), 400),
    ("a conversation of another kind", CHAT, chat(conversation_id=5), 400),
    ("a long conversation", CHAT, chat(conversation_id="x" * 300), 400),
    ("a long salt", CHAT, chat(cache_salt="x" * 300), 400),
    ("an empty salt", CHAT, chat(cache_salt=""), 400),
    ("beam search", CHAT, chat(use_beam_search=True, n=2), 400),
    ("a budget without reasoning", CHAT, chat(thinking_token_budget=5), 400),
    ("no prompt", TEXT, {"model": "smollm2"}, 400),
    ("an empty prompt", TEXT, {"model": "smollm2", "prompt": ""}, 400),
    ("an empty list", TEXT, {"model": "smollm2", "prompt": []}, 400),
    ("a token beyond the vocabulary", TEXT, {"model": "smollm2", "prompt": [10**9]}, 400),
    ("a negative token", TEXT, {"model": "smollm2", "prompt": [-1]}, 400),
    ("a suffix", TEXT, {"model": "smollm2", "prompt": "x", "suffix": "y"}, 400),
    ("a long text", TEXT, {"model": "smollm2", "prompt": LONG}, 400),
    ("embeddings", TEXT, {"model": "smollm2", "prompt_embeds": "AAAA"}, 400),
    ("no input", RESPONSES, {"model": "smollm2"}, 400),
    ("input of another kind", RESPONSES, {"model": "smollm2", "input": 5}, 400),
    ("a stored response", RESPONSES, {"model": "smollm2", "input": "x", "previous_response_id": "r"}, 400),
    (
        "an item stored elsewhere",
        RESPONSES,
        {"model": "smollm2", "input": [{"type": "item_reference", "id": "x"}]},
        400,
    ),
    ("in the background", RESPONSES, {"model": "smollm2", "input": "x", "background": True}, 400),
    ("a long input", RESPONSES, {"model": "smollm2", "input": LONG}, 400),
    ("no limit", MESSAGES, {"model": "smollm2", "messages": HI}, 400),
    ("a limit of 0", MESSAGES, {"model": "smollm2", "messages": HI, "max_tokens": 0}, 400),
    ("another model", MESSAGES, {"model": "other", "messages": HI, "max_tokens": 5}, 404),
    ("transfer in messages", MESSAGES, {**ANTHROPIC, "kv_transfer_params": {"x": 1}}, 400),
    ("text to tokenize missing", "/tokenize", {"model": "smollm2"}, 400),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_input(
    http: httpx.Client, router: FakeRouter, path: str, body: Any, status: int, stream: bool
) -> None:
    if stream and isinstance(body, dict):
        body = {**body, "stream": True}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    told = answer.json()
    if path == MESSAGES:
        assert set(told) == {"type", "error"}
        assert set(told["error"]) == {"type", "message"}
    else:
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert told["error"]["code"] == status
    assert told["error"]["message"]
    assert len(answer.text) < 2000
    assert not router.turns


def test_errors_do_not_repeat_the_prompt(http: httpx.Client, router: FakeRouter) -> None:
    secret = [{"role": "user", "content": SECRET}]
    for changes in ({"temperature": "hot"}, {"top_p": 7}, {"tools": 5}, {"max_tokens": 10**6}):
        answer = http.post(CHAT, json=chat(messages=secret, **changes))
        assert answer.status_code == 400
        assert SECRET not in answer.text


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "first"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}],
        [{"role": "tool", "content": "x", "tool_call_id": "none"}],
    ],
    ids=["assistant first", "twice user", "late system", "tool without a call"],
)
def test_roles_out_of_order_are_the_templates_affair(
    http: httpx.Client, router: FakeRouter, messages: list[dict[str, str]]
) -> None:
    assert http.post(CHAT, json=chat(messages=messages)).status_code == 200


def test_unknown_fields_are_ignored(http: httpx.Client, router: FakeRouter) -> None:
    assert http.post(CHAT, json=chat(nonsense={"x": [1]})).status_code == 200


def test_only_what_is_meant_is_served(http: httpx.Client) -> None:
    for method, path in (
        ("POST", "/scale_elastic_ep"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/chat/completions/batch"),
        ("POST", "/invocations"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/load"),
        ("GET", "/"),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 404, path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get(CHAT).status_code == 405


def test_a_body_too_large(http: httpx.Client, router: FakeRouter) -> None:
    answer = http.post(CHAT, json=chat(messages=[{"role": "user", "content": "x" * 2_000_000}]))
    assert answer.status_code == 413
    assert not router.turns


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.ERROR_REASON_INVALID_FIELD, 400),
        (Reason.ERROR_REASON_PROMPT_TOO_LONG, 400),
        (Reason.ERROR_REASON_UNAUTHENTICATED, 401),
        (Reason.ERROR_REASON_MODEL_NOT_FOUND, 404),
        (Reason.ERROR_REASON_SUPERSEDED, 409),
        (Reason.ERROR_REASON_OVERLOADED, 429),
        (Reason.ERROR_REASON_INTERNAL, 500),
        (Reason.ERROR_REASON_NO_WORKER, 503),
        (Reason.ERROR_REASON_WORKER_FAILED, 503),
        (Reason.ERROR_REASON_DRAINING, 503),
        (Reason.ERROR_REASON_DEADLINE_EXCEEDED, 504),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_failures_before_the_first_token_have_their_status(
    http: httpx.Client, router: FakeRouter, path: str, stream: bool, reason: "Reason.ValueType", status: int
) -> None:
    # A router that goes away is asked twice: another one may be behind its address by then.
    router.scripts += [fail(Failure(reason, "told by the router", field="sampling.top_p"))] * 2
    body: dict[str, Any] = {"model": "smollm2", "stream": stream}
    body |= {"prompt": "x"} if path == TEXT else {"input": "x"} if path == RESPONSES else {"messages": HI}
    body |= {"max_tokens": 5} if path == MESSAGES else {}
    answer = http.post(path, json=body)
    assert answer.status_code == status
    told = answer.json()["error"]
    assert told["message"] == "told by the router"
    if path != MESSAGES:
        assert told["param"] == "top_p"
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_a_failure_later_is_an_event(http: httpx.Client, router: FakeRouter, path: str) -> None:
    def broken(request: Any) -> Any:
        yield next(iter(router.say("Hello there.")(request)))
        raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "lost in the middle")

    router.scripts.append(broken)
    body: dict[str, Any] = {"model": "smollm2", "stream": True}
    body |= {"prompt": "x"} if path == TEXT else {"input": "x"} if path == RESPONSES else {"messages": HI}
    body |= {"max_tokens": 5} if path == MESSAGES else {}
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    assert "Hello" in answer.text
    assert "lost in the middle" in answer.text
    assert answer.text.rstrip().endswith("data: [DONE]") == (path in (CHAT, TEXT))
    assert "pydantic" not in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert "response.completed" not in answer.text


def test_a_stream_without_a_summary_is_a_failure(http: httpx.Client, router: FakeRouter) -> None:
    router.scripts.append(lambda request: iter(list(router.say("Hello there.")(request))[:-1]))
    answer = http.post(CHAT, json=BODY)
    assert answer.status_code == 503
    assert "broke off" in answer.text


def test_ids_ranks_and_priorities_of_clients_do_not_count(http: httpx.Client, router: FakeRouter) -> None:
    headers = {"X-Request-Id": "mine", "X-data-parallel-rank": "7", "X-Vllm-Priority": "-100"}
    for _ in range(2):
        answer = http.post(CHAT, json=chat(request_id="own", priority=-5), headers=headers)
        assert answer.status_code == 200
        # The client finds its own id again, for its logs.
        assert answer.headers["x-request-id"] == "mine"
    first, second = (turn.request for turn in router.turns)
    assert len({first.request_id, second.request_id, "mine", "own"}) == 4
    assert answer.headers["x-kvloop-request-id"] == second.request_id
    assert not first.HasField("priority")


def test_handles_never_reach_the_client(http: httpx.Client, router: FakeRouter) -> None:
    answer = http.post(CHAT, json=chat(kv_transfer_params=None)).json()
    assert answer["kv_transfer_params"] is None


def test_salts_travel(http: httpx.Client, router: FakeRouter) -> None:
    http.post(CHAT, json=chat(cache_salt="pepper"))
    assert router.turns[0].request.cache_salt == "pepper"


def test_deadlines_travel(http: httpx.Client, router: FakeRouter) -> None:
    http.post(CHAT, json=BODY, headers={"X-Request-Timeout": "7"})
    assert 0 < router.turns[0].time_left_s <= 7
    gone = threading.Event()
    router.scripts.append(router.say("Hello", pause=lambda turn: gone.wait(20)))
    answer = http.post(CHAT, json=BODY, headers={"X-Request-Timeout": "0.5"})
    gone.set()
    assert answer.status_code == 504
    assert http.post(CHAT, json=BODY, headers={"X-Request-Timeout": "soon"}).status_code == 400


def test_trace_context_travels(http: httpx.Client, router: FakeRouter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    http.post(CHAT, json=BODY, headers={"traceparent": parent, "tracestate": "vendor=1"})
    http.post(CHAT, json=BODY, headers={"traceparent": "of nonsense", "tracestate": "vendor=1"})
    first, second = (turn.metadata for turn in router.turns)
    assert (first["traceparent"], first["tracestate"]) == (parent, "vendor=1")
    assert not {"traceparent", "tracestate"} & second.keys()


def test_reuse_can_be_forbidden(http: httpx.Client, router: FakeRouter) -> None:
    http.post(CHAT, json=BODY, headers={"X-Kvloop-Reuse": "forbid"})
    assert router.turns[0].request.reuse_policy == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_client_that_leaves_cancels_its_turn(
    gateway: Gateway, router: FakeRouter, path: str, stream: bool
) -> None:
    begun, left = threading.Event(), threading.Event()

    def pause(turn: Turn) -> None:
        begun.set()
        turn.ended.wait(20)

    router.scripts.append(router.say("Hello there.", pause=pause))
    body: dict[str, Any] = {"model": "smollm2", "stream": stream, "conversation_id": "c"}
    body |= {"input": "x"} if path == RESPONSES else {"messages": HI, "max_tokens": 9}

    def leave() -> None:
        with httpx.Client(base_url=gateway.url) as client:
            if stream:
                with client.stream("POST", path, json=body) as answer:
                    next(answer.iter_bytes())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(path, json=body, timeout=0.5)
        left.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert begun.wait(20)
    thread.join(20)
    assert left.is_set()
    (turn,) = router.turns
    assert turn.ended.wait(10)
    assert turn.cancelled
    assert turn.request.retention.hold_on_cancel


def test_the_first_event_does_not_wait_for_the_last(http: httpx.Client, router: FakeRouter) -> None:
    seen = threading.Event()
    router.scripts.append(router.say("Hello there.", pause=lambda turn: seen.wait(20)))
    with http.stream("POST", CHAT, json=chat(stream=True)) as answer:
        lines = answer.iter_lines()
        assert any("Hello" in line for line in lines)
        seen.set()
        assert any("DONE" in line for line in lines)


def test_health_follows_the_router(http: httpx.Client, router: FakeRouter) -> None:
    assert http.get("/health").status_code == 200
    router.set_ready(False)
    assert http.get("/health").status_code == 503
    assert http.get("/livez").status_code == 200
    router.set_ready(True)
    wait_until(lambda: http.get("/health").status_code == 200)


def test_metrics_and_tokenize(http: httpx.Client, router: FakeRouter) -> None:
    http.post(CHAT, json=BODY)
    figures = http.get("/metrics").text
    assert "kvloop_gateway_turns_total{" in figures
    told = http.post("/tokenize", json=BODY).json()
    assert told["tokens"] == [
        int.from_bytes(router.turns[0].request.prompt_token_ids[i : i + 4], "little")
        for i in range(0, len(router.turns[0].request.prompt_token_ids), 4)
    ]
