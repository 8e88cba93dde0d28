"""Requests that workers refuse: status, reason, field; nothing is held, nothing harmed."""

from collections.abc import Callable
from typing import Any

import pytest
from worker_kit import Pair, decode_request, failing, prefill_request, prompt, read_answer, scope_of, until

from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import decode_service_pb2, lease_pb2, prefill_service_pb2

GOOD = prompt(50)
Change = Callable[[Any], None]


def put(path: str, value: Any) -> Change:
    """Return a change of one field."""

    def change(request: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            request = getattr(request, parent)
        if isinstance(value, list):
            getattr(request, name).extend(value)
        else:
            setattr(request, name, value)

    return change


BAD: list[tuple[Change, str, str]] = [
    (put("request_id", ""), "INVALID_FIELD", "request_id"),
    (put("request_id", "x" * 129), "INVALID_FIELD", "request_id"),
    (put("request_id", "ü"), "INVALID_FIELD", "request_id"),
    (put("model.name", "unknown"), "MODEL_NOT_FOUND", "model.name"),
    (put("model.revision", "unknown"), "MODEL_NOT_FOUND", "model.revision"),
    (put("model.adapter", "unknown"), "MODEL_NOT_FOUND", "model.adapter"),
    (put("prompt_token_ids", b""), "EMPTY_PROMPT", "prompt_token_ids"),
    (put("prompt_token_ids", b"12345"), "INVALID_FIELD", "prompt_token_ids"),
    (put("prompt_token_ids", b"\xff\xff\xff\xff"), "INVALID_FIELD", "prompt_token_ids"),
    (put("prompt_token_ids", tokens.pack([32_000])), "INVALID_FIELD", "prompt_token_ids"),
    (put("prompt_token_ids", tokens.pack(prompt(4096))), "PROMPT_TOO_LONG", "prompt_token_ids"),
    (put("prompt_token_ids", tokens.pack(prompt(4097))), "PROMPT_TOO_LONG", "prompt_token_ids"),
    (put("sampling.max_tokens", 4096), "PROMPT_TOO_LONG", "sampling.max_tokens"),
    (put("sampling.max_tokens", 0), "INVALID_FIELD", "sampling.max_tokens"),
    (put("sampling.n", 2), "MULTIPLE_COMPLETIONS", "sampling.n"),
    (put("sampling.temperature", float("nan")), "INVALID_FIELD", "sampling.temperature"),
    (put("sampling.stop_token_ids", [32_000]), "INVALID_FIELD", "sampling.stop_token_ids"),
    (
        put("sampling.extra_args_json", '{"a": [{"kv_transfer_params": {}}]}'),
        "TRANSFER_PARAMS_REFUSED",
        "sampling.extra_args_json",
    ),
    (
        put("sampling.structured_outputs.json_schema", "{"),
        "INVALID_FIELD",
        "sampling.structured_outputs.json_schema",
    ),
    (put("scope.scope", b"x" * 65), "INVALID_FIELD", "scope.scope"),
    (put("scope.digest_key", b""), "INVALID_FIELD", "scope.digest_key"),
]
BAD_DECODE = [
    (put("handle.params_json", "{"), "INVALID_FIELD", "handle.params_json"),
    (put("handle.params_json", "[" * 100_000), "INVALID_FIELD", "handle.params_json"),
    (put("handle.params_json", "[]"), "INVALID_FIELD", "handle.params_json"),
    (put("retention.ttl.seconds", -1), "INVALID_FIELD", "retention.ttl"),
    (put("retention.ttl.nanos", -1), "INVALID_FIELD", "retention.ttl"),
]


async def assert_unharmed(pair: Pair) -> None:
    await until(pair.all_free)
    assert len((await pair.play(GOOD, "after")).ids) == 24


@pytest.mark.parametrize(("change", "reason", "field"), BAD + BAD_DECODE)
async def test_decode_refuses(pair: Pair, change: Change, reason: str, field: str) -> None:
    request = decode_request(GOOD, scope_of("c", start=1))
    change(request)
    with pytest.raises(Failure) as raised:
        await read_answer(pair.decode.Decode(request, timeout=10))
    assert (raised.value.reason_name, raised.value.field) == (reason, field)
    await assert_unharmed(pair)


@pytest.mark.parametrize(("change", "reason", "field"), BAD)
async def test_prefill_refuses(pair: Pair, change: Change, reason: str, field: str) -> None:
    request = prefill_request(GOOD, scope_of("c", start=1))
    change(request)
    with pytest.raises(Failure) as raised:
        await failing(pair.prefill.Prefill(request, timeout=10))
    assert (raised.value.reason_name, raised.value.field) == (reason, field)
    await assert_unharmed(pair)


@pytest.mark.parametrize("params", ['{"do_remote_prefill": true}', '{"unknown": 1}'])
async def test_handles_that_no_engine_can_read(pair: Pair, params: str) -> None:
    request = decode_request(GOOD, scope_of("c", start=1))
    request.handle.CopyFrom(lease_pb2.KvHandle(params_json=params))
    with pytest.raises(Failure) as raised:
        await read_answer(pair.decode.Decode(request, timeout=10))
    assert raised.value.reason == Reason.ERROR_REASON_KV_READ_FAILED
    await assert_unharmed(pair)


async def test_the_longest_prompt_is_served(pair: Pair) -> None:
    request = decode_request(prompt(4095), scope_of("c", start=1))
    request.sampling.max_tokens = 1
    assert len((await read_answer(pair.decode.Decode(request, timeout=20))).ids) == 1
    request = decode_request(prompt(4090), scope_of("c", start=1))
    request.sampling.ClearField("max_tokens")
    assert len((await read_answer(pair.decode.Decode(request, timeout=20))).ids) == 6


async def test_calls_without_a_deadline(pair: Pair) -> None:
    calls = [
        pair.prefill.Prefill(prefill_request(GOOD, scope_of("c"))),
        pair.prefill.ReleasePrefill(prefill_service_pb2.ReleasePrefillRequest(request_id="x")),
        pair.decode.BeginRead(decode_service_pb2.BeginReadRequest()),
        pair.decode.EndRead(decode_service_pb2.EndReadRequest()),
        pair.decode.ReleaseLease(decode_service_pb2.ReleaseLeaseRequest(lease_id="x")),
        pair.decode.ListLeases(decode_service_pb2.ListLeasesRequest()),
    ]
    for call in calls:
        with pytest.raises(Failure) as raised:
            await failing(call)
        assert raised.value.reason == Reason.ERROR_REASON_DEADLINE_REQUIRED
    with pytest.raises(Failure) as raised:
        await read_answer(pair.decode.Decode(decode_request(GOOD, scope_of("c"))))
    assert raised.value.reason == Reason.ERROR_REASON_DEADLINE_REQUIRED


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("BeginRead", decode_service_pb2.BeginReadRequest(), "lease_id"),
        ("EndRead", decode_service_pb2.EndReadRequest(lease_id="x"), "read_id"),
        ("ReleaseLease", decode_service_pb2.ReleaseLeaseRequest(), "lease_id"),
        ("ListLeases", decode_service_pb2.ListLeasesRequest(page_size=-1), "page_size"),
        ("ListLeases", decode_service_pb2.ListLeasesRequest(page_token="x"), "page_token"),
    ],
)
async def test_lease_calls_name_the_field_at_fault(
    pair: Pair, method: str, request_: Any, field: str
) -> None:
    with pytest.raises(Failure) as raised:
        await failing(getattr(pair.decode, method)(request_, timeout=10))
    assert (raised.value.reason_name, raised.value.field) == ("INVALID_FIELD", field)


async def test_unknown_leases_and_pins(pair: Pair) -> None:
    ended = decode_service_pb2.EndReadRequest(lease_id="x", read_id="y")
    await failing(pair.decode.EndRead(ended, timeout=10))
    released = decode_service_pb2.ReleaseLeaseRequest(lease_id="x")
    assert not (await failing(pair.decode.ReleaseLease(released, timeout=10))).released


@pytest.mark.parametrize("method", ["BeginRead", "EndRead", "Decode", "GetInfo"])
async def test_random_bytes(pair: Pair, method: str) -> None:
    name = f"/kvloop.v1alpha1.DecodeService/{method}"
    channel = pair.channels[0]
    callable_: Any = channel.unary_stream(name) if method == "Decode" else channel.unary_unary(name)
    call = callable_(b"\xff" * 100, timeout=10)
    with pytest.raises(Failure) as raised:
        await (read_answer(call) if method == "Decode" else failing(call))
    assert (raised.value.reason_name, raised.value.field) == ("INVALID_FIELD", "request")
    await assert_unharmed(pair)


async def test_facts(pair: Pair) -> None:
    answer = await failing(pair.decode.GetInfo(decode_service_pb2.DecodeServiceGetInfoRequest(), timeout=10))
    engine: SimulatedEngine = pair.decode_engine
    assert answer.info.epoch == engine.facts.epoch
    assert answer.info.worker_id == pair.decode_app.worker_id
    assert answer.info.pool.total_blocks == 1024
    answer = await failing(
        pair.prefill.GetInfo(prefill_service_pb2.PrefillServiceGetInfoRequest(), timeout=10)
    )
    assert answer.info.max_model_len == 4096
