"""Refusals by the door itself: readable for browsers, and naming what is too much."""

from typing import Any

import httpx
import pytest
from gateway_router import FakeRouter, fail

from kvloop.runtime.errors import Failure, Reason

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}


def chat(**changes: Any) -> dict[str, Any]:
    return {**BODY, **changes}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, BODY, 200),
        (CHAT, chat(n=65), 400),
        (TEXT, {"model": "smollm2", "prompt": ["x"] * 65}, 400),
        (CHAT, chat(temperature=9), 400),
        (CHAT, chat(user="x" * 1_000_000), 413),
        ("/nowhere", {}, 404),
    ],
)
def test_a_browser_may_read_every_answer(http: httpx.Client, path: str, body: Any, status: int) -> None:
    answer = http.post(path, json=body, headers={"origin": "https://a.example"})
    assert answer.status_code == status
    assert answer.headers.get_list("access-control-allow-origin") == ["*"]


def test_a_failed_turn_is_readable_too(http: httpx.Client, router: FakeRouter) -> None:
    router.scripts.append(fail(Failure(Reason.ERROR_REASON_OVERLOADED, "no")))
    answer = http.post(CHAT, json=BODY, headers={"origin": "https://a.example"})
    assert answer.status_code == 429
    assert answer.headers["access-control-allow-origin"] == "*"


def test_too_many_answers_name_their_field(http: httpx.Client, router: FakeRouter) -> None:
    for path, body, field in (
        (CHAT, chat(n=65, temperature=1), "n"),
        (TEXT, {"model": "smollm2", "prompt": ["x"] * 65}, "prompt"),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not router.turns
