"""The Python client against a scripted router: what is tried again, what is told, what is cancelled."""

import asyncio
import datetime
import ipaddress
import subprocess
import sys
from typing import Any

import grpc
import pytest
from client_router import (
    ANSWER,
    DRAINING,
    END,
    ONE,
    OVERLOADED,
    QUICK,
    ScriptedRouter,
    Step,
    scripted,
)

from kvloop.client import ONCE, CallFailed, Client, RetryPolicy, SamplingParams, Summary
from kvloop.client.retry import PATIENT
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import router_service_pb2

PROMPT = [7, 8, 9]


def failure(reason: str, **details: Any) -> Failure:
    return Failure(Reason.Value(f"ERROR_REASON_{reason}"), "as told", **details)


async def played(
    client: Client, *, into: list[int] | None = None, **options: Any
) -> tuple[list[int], str, Summary | None]:
    ids = into if into is not None else []
    text, summary = "", None
    async for event in client.turn(PROMPT, **options):
        ids += event.token_ids
        text += event.text
        summary = event.summary or summary
    return ids, text, summary


async def refused(client: Client, **options: Any) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await played(client, **options)
    return caught.value


async def test_a_turn_is_asked_for_as_told_and_yields_events() -> None:
    async with scripted() as router, Client(router.endpoint, token="t", timeout_s=50) as client:
        sampling = SamplingParams(temperature=0.5, max_tokens=1)
        answer = await played(
            client, conversation_id="c", sampling=sampling, max_tokens=8, priority=0, reuse=False, model="m"
        )
        assert answer == ([1, 2, 3], "abc", END.summary)
        (request,) = router.requests
        assert tokens.unpack(request.prompt_token_ids) == PROMPT
        assert (request.conversation_id, request.model) == ("c", "m")
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 8)
        assert request.HasField("priority")
        assert request.reuse_policy == router_service_pb2.REUSE_POLICY_FORBID
        assert router.metadata[0]["authorization"] == "Bearer t"
        assert 40 < router.left_s[0] <= 50
        # The caller's own parameters are its own.
        assert sampling.max_tokens == 1


async def test_what_is_not_told_is_left_out() -> None:
    async with scripted() as router, Client(router.endpoint) as client:
        await played(client)
        request = router.requests[0]
        assert request.request_id
        assert not request.HasField("retention")
        assert not request.HasField("priority")
        assert not request.sampling.HasField("max_tokens")
        assert "authorization" not in router.metadata[0]


@pytest.mark.parametrize(
    "passing",
    [
        *(failure(reason) for reason in ("NO_WORKER", "WORKER_FAILED", "KV_READ_FAILED", "DRAINING")),
        OVERLOADED,
        grpc.StatusCode.UNAVAILABLE,
    ],
    ids=lambda step: getattr(step, "reason_name", None) or step.name,
)
async def test_what_may_pass_is_tried_again_as_the_same_request(passing: Step) -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(passing,), (passing,), ANSWER]
        assert (await played(client))[0] == [1, 2, 3]
        assert len(router.requests) == 3
        assert len({request.request_id for request in router.requests}) == 1


@pytest.mark.parametrize(
    "final",
    [
        failure("INVALID_FIELD", field="sampling.top_p"),
        failure("UNAUTHENTICATED"),
        failure("MODEL_NOT_FOUND"),
        failure("SUPERSEDED"),
        failure("INTERNAL"),
        grpc.StatusCode.INTERNAL,
    ],
    ids=lambda step: getattr(step, "reason_name", None) or f"status {step.name}",
)
async def test_what_will_not_pass_is_told_at_once(final: Step) -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(final,), ANSWER]
        error = await refused(client)
        assert len(router.requests) == 1
        assert error.target == router.endpoint
        if isinstance(final, Failure):
            assert (error.reason, error.code, error.field) == (final.reason_name, final.code, final.field)
            assert error.message == "as told"
        else:
            assert (error.reason, error.code) == ("", final)


async def test_after_the_first_token_nothing_is_tried_again() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(ONE, failure("WORKER_FAILED")), ANSWER]
        got: list[int] = []
        with pytest.raises(CallFailed, match="WORKER_FAILED"):
            await played(client, into=got)
        assert got == [1]
        assert len(router.requests) == 1


async def test_an_answer_without_summary_is_incomplete() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(ONE,)]
        with pytest.raises(CallFailed, match="without a summary"):
            await played(client)


async def test_attempts_are_bounded() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(OVERLOADED,)] * 10
        error = await refused(client)
        assert len(router.requests) == QUICK.attempts
        assert error.reason == "OVERLOADED"
        assert error.retry_after_s == pytest.approx(0.01)


async def test_a_pause_that_outlasts_the_deadline_is_not_begun() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(failure("OVERLOADED", retry_after_s=3600.0),), ANSWER]
        assert (await refused(client, timeout_s=30)).reason == "OVERLOADED"
        assert len(router.requests) == 1


async def test_the_deadline_is_of_all_tries_together() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(OVERLOADED,), (asyncio.Event(),)]
        error = await refused(client, timeout_s=0.5)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(router.requests) == 2


@pytest.mark.parametrize("tries", [1, 2, 3, 10])
def test_pauses_keep_to_retry_info_and_grow_up_to_a_limit(tries: int) -> None:
    told = CallFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "", target="t", retry_after_s=5.0)
    limit = min(0.1 * 2 ** (tries - 1), 2.0)
    pauses = [PATIENT.pause_s(told, tries) for _ in range(200)]
    assert 5.0 <= min(pauses) < max(pauses) <= 5.0 + limit
    assert max(pauses) > 5.0 + limit / 2


@pytest.mark.parametrize("away", [DRAINING, grpc.StatusCode.UNAVAILABLE], ids=["draining", "no answer"])
async def test_another_router_is_asked_when_one_is_away(away: Step) -> None:
    async with scripted() as one, scripted() as other:
        # Not one pause: with a pause of an hour the deadline would be in the way.
        patient = RetryPolicy(attempts=2, first_pause_s=3600, longest_pause_s=3600)
        async with Client([one.endpoint, other.endpoint], retry=patient, timeout_s=30) as client:
            one.scripts = [(away,)]
            assert (await played(client, request_id="r"))[0] == [1, 2, 3]
            assert [len(router.requests) for router in (one, other)] == [1, 1]
            assert other.requests[0].request_id == "r"
            # And stays in use.
            await played(client)
            assert len(other.requests) == 2


async def test_nobody_there() -> None:
    async with scripted() as gone:
        endpoint = gone.endpoint
    async with Client(endpoint, retry=ONCE) as client:
        error = await refused(client)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "")


async def test_closing_a_turn_early_cancels_it() -> None:
    async with scripted() as router, Client(router.endpoint) as client:
        router.scripts = [(ONE, asyncio.Event())]
        turn = client.turn(PROMPT)
        assert (await anext(turn)).text == "a"
        await turn.aclose()
        async with asyncio.timeout(10):
            await router.cancelled.wait()


async def test_other_calls_are_tried_again_too() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.scripts = [(failure("DIRECTORY_UNAVAILABLE"),)]
        assert await client.end("c")
        assert router.ended == ["c"]
        assert await client.get("c") is None


def test_a_client_needs_a_router() -> None:
    with pytest.raises(ValueError, match="a client needs a router"):
        Client([])


def test_the_client_loads_nothing_of_the_servers() -> None:
    heavy = "pydantic", "structlog", "redis", "prometheus_client", "typer", "rich", "yaml"
    code = f"import sys, kvloop.client; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


async def test_tls_with_a_certificate_of_its_own() -> None:
    certificate, key = self_signed()
    server_side = grpc.ssl_server_credentials([(key, certificate)])
    async with scripted(lambda server: server.add_secure_port("127.0.0.1:0", server_side)) as router:
        trusted = grpc.ssl_channel_credentials(root_certificates=certificate)
        async with Client(router.endpoint, tls=trusted, token="t", retry=ONCE) as client:
            assert (await played(client))[0] == [1, 2, 3]
            assert router.metadata[0]["authorization"] == "Bearer t"
        async with Client(router.endpoint, tls=True, retry=ONCE) as stranger:
            assert (await refused(stranger)).code is grpc.StatusCode.UNAVAILABLE


def self_signed() -> tuple[bytes, bytes]:
    """Return a certificate for 127.0.0.1 and its key, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "router")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private


async def until(router: ScriptedRouter, sessions: int) -> None:
    async with asyncio.timeout(10):
        while len(router.sessions) < sessions:  # noqa: ASYNC110 - a list without waiters
            await asyncio.sleep(0.005)


async def test_a_session_is_opened_served_and_closed() -> None:
    async with scripted() as router, Client(router.endpoint) as client:
        async with client.session("c", model="m", adapter="a", cache_salt="s") as session:
            events = [event async for event in session.turn(PROMPT, max_tokens=3)]
            assert events[-1].summary == END.summary
        opened, request = router.sessions[0], router.requests[0]
        for asked in (opened, request):
            assert (asked.conversation_id, asked.model, asked.adapter, asked.cache_salt) == (
                "c",
                "m",
                "a",
                "s",
            )
        assert (router.closes, router.ended, session.streams) == (1, [], 1)
        assert not await session.close()


async def test_a_session_left_by_an_exception_lets_go_of_nothing() -> None:
    async with scripted() as router, Client(router.endpoint) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.session("c"):
                raise ZeroDivisionError
        assert (router.closes, router.ended, len(router.sessions)) == (0, [], 1)


async def test_a_session_that_broke_is_opened_again() -> None:
    async with scripted() as one, scripted() as other:
        async with (
            Client([one.endpoint, other.endpoint], retry=QUICK) as client,
            client.session("c") as session,
        ):
            one.break_session.set()
            await until(other, 1)
            other.session_failures = [DRAINING]
            other.break_session.set()
            await until(one, 2)
            async with asyncio.timeout(10):
                while session.streams < 3:  # noqa: ASYNC110 - a counter without waiters
                    await asyncio.sleep(0.005)
        assert one.closes + other.closes == 1


async def test_a_session_that_is_broken_when_closed_is_ended_by_a_call() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        async with client.session("c"):
            router.session_failures = [DRAINING] * 1000
            router.break_session.set()
            await until(router, 3)
        assert (router.closes, router.ended) == (0, ["c"])


@pytest.mark.parametrize(("refusal", "tries"), [(failure("UNAUTHENTICATED"), 1), (OVERLOADED, 4)])
async def test_a_session_that_can_not_be_opened_says_so(refusal: Failure, tries: int) -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        router.session_failures = [refusal] * 10
        with pytest.raises(CallFailed, match=refusal.reason_name):
            async with client.session("c"):
                raise AssertionError("entered")
        assert len(router.sessions) == tries


async def test_a_session_that_is_refused_later_on_fails_no_turn() -> None:
    async with scripted() as router, Client(router.endpoint, retry=QUICK) as client:
        async with client.session("c") as session:
            router.session_failures = [failure("UNAUTHENTICATED")]
            router.break_session.set()
            await until(router, 2)
            assert [event async for event in session.turn(PROMPT)][-1].summary is not None
        assert router.ended == ["c"]


async def test_a_session_whose_client_is_closed_meanwhile_is_not_opened() -> None:
    async with scripted() as router:
        client = Client(router.endpoint, retry=QUICK)
        router.hold_sessions = True
        opening = asyncio.create_task(client.session("c").__aenter__())
        await until(router, 1)
        await client.close()
        async with asyncio.timeout(10):
            with pytest.raises((CallFailed, RuntimeError)):
                await opening


async def test_what_ends_the_opening_of_a_session_is_told() -> None:
    async with scripted() as router, Client(router.endpoint) as client:
        session = client.session("c")

        async def broken(*_asked: object) -> bool:
            raise ZeroDivisionError

        session._stream = broken  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            with pytest.raises(ZeroDivisionError):
                await session.__aenter__()


async def test_a_closed_client_connects_no_more() -> None:
    async with scripted() as router:
        client = Client(router.endpoint)
        async with client.session("c") as session:
            await client.close()
            for asked in (client.end("c"), anext(client.turn(PROMPT)), session.close()):
                with pytest.raises(RuntimeError, match="closed"):
                    await asked
        assert not router.requests
