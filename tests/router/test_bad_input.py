"""Every bad input: its code, its reason, its field; and afterwards nothing is lost.

Everything a client sends here that could be told from other content holds a mark, and neither statuses nor
logs may hold it.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from router_sim import MAX_LEN, VOCAB, SimClient, SimFleet, ask, ids, sim_fleet

from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2

MARK = "XyZZyMARKxYzzY"
MARKED_IDS = [31_337, 27_182, 31_415, 14_142]
PROMPT = [*MARKED_IDS, *ids(60)]
GET = router_service_pb2.GetConversationRequest
END = router_service_pb2.EndConversationRequest


def sampled(**fields: Any) -> router_service_pb2.GenerateRequest:
    request = ask(PROMPT)
    request.sampling.MergeFrom(sampling_pb2.SamplingParams(**fields))
    return request


def structured(**fields: Any) -> router_service_pb2.GenerateRequest:
    return sampled(structured_outputs=sampling_pb2.StructuredOutputs(**fields))


def packed(raw: bytes) -> router_service_pb2.GenerateRequest:
    request = ask([1])
    request.prompt_token_ids = raw
    return request


def changed(**fields: Any) -> router_service_pb2.GenerateRequest:
    request = ask(PROMPT)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def retained(seconds: int) -> router_service_pb2.GenerateRequest:
    request = ask(PROMPT)
    request.retention.ttl.seconds = seconds
    return request


def with_args(value: Any) -> router_service_pb2.GenerateRequest:
    return sampled(extra_args_json=value if isinstance(value, str) else json.dumps(value))


STEER = {"remote_host": MARK, "remote_port": 1, "do_remote_prefill": True}
INVALID, NOT_FOUND = "INVALID_ARGUMENT", "NOT_FOUND"

ROWS: dict[str, tuple[router_service_pb2.GenerateRequest, str, str, str | None]] = {
    "empty prompt": (packed(b""), INVALID, "EMPTY_PROMPT", "prompt_token_ids"),
    "odd bytes": (packed(b"\1\0\0\0\1"), INVALID, "INVALID_FIELD", "prompt_token_ids"),
    "random bytes": (packed(b"\xff" * 400), INVALID, "INVALID_FIELD", "prompt_token_ids"),
    "id at the vocabulary": (ask([1, VOCAB]), INVALID, "INVALID_FIELD", "prompt_token_ids"),
    "prompt of max_model_len": (ask(ids(MAX_LEN)), INVALID, "PROMPT_TOO_LONG", "prompt_token_ids"),
    "prompt above max_model_len": (ask(ids(MAX_LEN + 1)), INVALID, "PROMPT_TOO_LONG", "prompt_token_ids"),
    "no room for max_tokens": (
        ask(ids(MAX_LEN - 1), max_tokens=2),
        INVALID,
        "PROMPT_TOO_LONG",
        "sampling.max_tokens",
    ),
    "n of 2": (sampled(n=2), INVALID, "MULTIPLE_COMPLETIONS", "sampling.n"),
    "n of 0": (sampled(n=0), INVALID, "MULTIPLE_COMPLETIONS", "sampling.n"),
    "steering": (with_args({"kv_transfer_params": STEER}), INVALID, "TRANSFER_PARAMS_REFUSED", None),
    "steering, upper case": (with_args({"KV_Transfer_Params": 1}), INVALID, "TRANSFER_PARAMS_REFUSED", None),
    "steering, nested": (with_args({"a": [{"b": STEER}]}), INVALID, "TRANSFER_PARAMS_REFUSED", None),
    "steering, flat": (with_args(STEER), INVALID, "TRANSFER_PARAMS_REFUSED", None),
    "arguments not JSON": (with_args("{" + MARK), INVALID, "INVALID_FIELD", "sampling.extra_args_json"),
    "arguments no object": (with_args([MARK]), INVALID, "INVALID_FIELD", "sampling.extra_args_json"),
    "arguments too long": (with_args({"a": MARK * 9000}), INVALID, "INVALID_FIELD", None),
    "unknown model": (changed(model=MARK), NOT_FOUND, "MODEL_NOT_FOUND", "model"),
    "unknown adapter": (changed(adapter=MARK), NOT_FOUND, "MODEL_NOT_FOUND", "adapter"),
    "long conversation": (changed(conversation_id="x" * 257), INVALID, "INVALID_FIELD", "conversation_id"),
    "long parent": (
        changed(parent_conversation_id="x" * 257),
        INVALID,
        "INVALID_FIELD",
        "parent_conversation_id",
    ),
    "long salt": (changed(cache_salt="x" * 257), INVALID, "INVALID_FIELD", "cache_salt"),
    "long request id": (changed(request_id="x" * 129), INVALID, "INVALID_FIELD", "request_id"),
    "request id with a line break": (changed(request_id="a\nb"), INVALID, "INVALID_FIELD", "request_id"),
    "request id not ASCII": (changed(request_id="é"), INVALID, "INVALID_FIELD", "request_id"),
    "unknown policy": (changed(reuse_policy=99), INVALID, "INVALID_FIELD", "reuse_policy"),
    "no time to hold": (retained(0), INVALID, "INVALID_FIELD", "retention.ttl"),
    "negative time to hold": (retained(-1), INVALID, "INVALID_FIELD", "retention.ttl"),
    "temperature": (sampled(temperature=-0.1), INVALID, "INVALID_FIELD", "sampling.temperature"),
    "temperature not a number": (
        sampled(temperature=float("nan")),
        INVALID,
        "INVALID_FIELD",
        "sampling.temperature",
    ),
    "top_p of 0": (sampled(top_p=0.0), INVALID, "INVALID_FIELD", "sampling.top_p"),
    "top_k": (sampled(top_k=-2), INVALID, "INVALID_FIELD", "sampling.top_k"),
    "min_p": (sampled(min_p=1.5), INVALID, "INVALID_FIELD", "sampling.min_p"),
    "presence": (sampled(presence_penalty=3.0), INVALID, "INVALID_FIELD", "sampling.presence_penalty"),
    "repetition": (sampled(repetition_penalty=0.0), INVALID, "INVALID_FIELD", "sampling.repetition_penalty"),
    "max_tokens of 0": (sampled(max_tokens=0), INVALID, "INVALID_FIELD", "sampling.max_tokens"),
    "min above max": (sampled(min_tokens=17), INVALID, "INVALID_FIELD", "sampling.min_tokens"),
    "empty stop": (sampled(stop=["", MARK]), INVALID, "INVALID_FIELD", "sampling.stop"),
    "many stops": (sampled(stop=[MARK] * 300), INVALID, "INVALID_FIELD", "sampling.stop"),
    "stop token": (sampled(stop_token_ids=[VOCAB]), INVALID, "INVALID_FIELD", "sampling.stop_token_ids"),
    "bias": (sampled(logit_bias={VOCAB: 1.0}), INVALID, "INVALID_FIELD", "sampling.logit_bias"),
    "bad schema": (
        structured(json_schema="{" + MARK),
        INVALID,
        "INVALID_FIELD",
        "sampling.structured_outputs.json_schema",
    ),
    "schema no object": (
        structured(json_schema="[]"),
        INVALID,
        "INVALID_FIELD",
        "sampling.structured_outputs.json_schema",
    ),
    "no constraint": (structured(), INVALID, "INVALID_FIELD", "sampling.structured_outputs"),
}


def seen_by_the_client(error: grpc.aio.AioRpcError) -> bytes:
    """Return all that a status carries."""
    metadata = [*(error.initial_metadata() or ()), *(error.trailing_metadata() or ())]
    values = [v.encode() if isinstance(v, str) else bytes(v) for _, v in metadata]
    return b"\n".join([(error.details() or "").encode(), *values])


def assert_clean(seen: bytes) -> None:
    """No mark, no marked ids, packed or spelled out."""
    assert MARK.encode() not in seen
    for token in MARKED_IDS:
        assert str(token).encode() not in seen
    assert tokens.pack(MARKED_IDS[:2]) not in seen
    assert b"remote_block_ids" not in seen
    assert b"params_json" not in seen


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[SimFleet]:
    async with sim_fleet() as running:
        yield running


@pytest_asyncio.fixture
async def client(fleet: SimFleet) -> SimClient:
    return await fleet.client()


async def refused(call: Any) -> tuple[grpc.aio.AioRpcError, Failure]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value, from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED)


async def test_each_bad_request_is_named_and_nothing_is_lost(
    fleet: SimFleet, client: SimClient, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong: list[str] = []
    for name, (request, code, reason, field) in ROWS.items():
        error, failure = await refused(client.turn(request))
        if error.code().name != code or failure.reason_name != reason:
            wrong.append(f"{name}: {error.code().name} {failure.reason_name}")
        elif field is not None and failure.field != field:
            wrong.append(f"{name}: field {failure.field}")
        assert failure.field is not None, name
        assert_clean(seen_by_the_client(error))
    assert not wrong
    await fleet.whole()
    answer = await client.say(PROMPT)
    assert answer.token_ids == await client.cold(PROMPT)
    longest = await client.say(ids(MAX_LEN - 1), max_tokens=1)
    assert len(longest.token_ids) == 1
    assert await client.end()
    await fleet.whole()
    assert_clean("".join(capfd.readouterr()).encode())


@pytest.mark.parametrize(
    ("call", "request_", "code", "reason", "field"),
    [
        ("GetConversation", GET(), INVALID, "INVALID_FIELD", "conversation_id"),
        ("EndConversation", END(), INVALID, "INVALID_FIELD", "conversation_id"),
        ("GetConversation", GET(conversation_id="x" * 257), INVALID, "INVALID_FIELD", "conversation_id"),
        ("EndConversation", END(conversation_id="x" * 257), INVALID, "INVALID_FIELD", "conversation_id"),
        (
            "GetConversation",
            GET(conversation_id="c", cache_salt="x" * 257),
            INVALID,
            "INVALID_FIELD",
            "cache_salt",
        ),
        ("GetConversation", GET(conversation_id="c", model=MARK), NOT_FOUND, "MODEL_NOT_FOUND", "model"),
        ("EndConversation", END(conversation_id="c", adapter=MARK), NOT_FOUND, "MODEL_NOT_FOUND", "adapter"),
        ("GetConversation", GET(conversation_id=MARK), NOT_FOUND, "CONVERSATION_NOT_FOUND", None),
    ],
)
async def test_bad_questions_about_conversations(
    client: SimClient, call: str, request_: Any, code: str, reason: str, field: str | None
) -> None:
    error, failure = await refused(getattr(client.stub, call)(request_, timeout=5))
    assert (error.code().name, failure.reason_name, failure.field) == (code, reason, field)
    assert_clean(seen_by_the_client(error))


async def test_a_turn_needs_a_deadline(fleet: SimFleet, client: SimClient) -> None:
    error, failure = await refused(client.turn(ask(PROMPT), timeout=None))
    assert (error.code().name, failure.reason_name) == (INVALID, "DEADLINE_REQUIRED")
    await fleet.whole()


async def test_bytes_that_are_no_request_at_all(fleet: SimFleet, client: SimClient) -> None:
    raw: Callable[..., Any] = client.channel.unary_stream("/kvloop.v1alpha1.RouterService/Generate")
    for body in (b"\xff" * 100, b"\x0a\xff", MARK.encode()):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in raw(body, timeout=5):
                pass
        assert_clean(seen_by_the_client(error.value))
    await fleet.whole()


async def test_a_prompt_beyond_the_message_size_is_refused(fleet: SimFleet, client: SimClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.turn(packed(b"\1\0\0\0" * (5 * 1024 * 1024)))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await client.say(PROMPT)).summary is not None
    assert await client.end()
    await fleet.whole()


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_content_in_logs_or_statuses_on_good_and_on_failing_turns(form: str) -> None:
    script = Path(__file__).with_name("router_leak_scenario.py")
    # A process of its own: how a process logs is set once and for all.
    run = subprocess.run([sys.executable, str(script), form], capture_output=True, timeout=100, check=False)
    seen = run.stdout + run.stderr
    assert run.returncode == 0, seen[-2000:]
    for event in (b"turn_done", b"turn_started_again", b"unexpected_failure", b"statuses:"):
        assert event in seen
    for mark in (MARK.encode(), b"900, 901", b"<901>", b"remote_host", b'"at"', tokens.pack([900, 901])):
        assert mark not in seen
