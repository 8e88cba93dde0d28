"""One turn of the engine client: when it ends, what is kept of it, what it may ask for."""

import hashlib
from array import array
from typing import Any

import pytest
from gateway_client import PROMPT, Recorder, Remembering, client_of, sampling

from kvloop.gateway import exchange
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.sampling import MAX_CANDIDATES
from kvloop.gateway.segments import Rendering

pytestmark = pytest.mark.vllm


def rendering_of(ids: list[int]) -> Rendering:
    return Rendering("x", ids, 0, 0, 0, 0, hashlib.blake2b(), array("I"))


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_ends_its_turns_at_once(n: int) -> None:
    routers = Recorder(said=1000)
    outputs = client_of(routers).generate(PROMPT, sampling(n=n, temperature=1, max_tokens=1000), "r")
    assert not (await anext(outputs)).finished
    assert routers.open
    await outputs.aclose()
    assert routers.open == 0


@pytest.mark.parametrize("own", [True, False], ids=["its own", "another prompt's"])
async def test_an_answer_is_remembered_after_its_own_prompt_only(own: bool) -> None:
    ids = [5, 6, 7]
    here = Exchange(tenant="t", rendering=rendering_of(ids if own else list(ids)))
    exchange.enter(here)
    history = Remembering()
    turn = client_of(Recorder(said=2), history).generate(
        {"type": "token", "prompt_token_ids": ids}, sampling(), "r"
    )
    assert [output async for output in turn][-1].finished
    assert history.remembered == ([here.rendering] if own else [])
    assert history.accepted == ["t"]


async def test_a_tenant_whose_turn_fails_is_not_accepted() -> None:
    class Failing(Recorder):
        async def generate(self, request: Any, **_call: Any) -> Any:
            raise KeyError("Xyzzy, says the prompt")
            yield

    here = Exchange(tenant="t")
    exchange.enter(here)
    history = Remembering()
    with pytest.raises(KeyError):
        _ = [output async for output in client_of(Failing(), history).generate(PROMPT, sampling(), "r")]
    assert not history.accepted
    assert here.problem is not None
    assert (here.problem.status, here.problem.message) == (500, "unexpected failure")


@pytest.mark.parametrize(
    ("asked", "positions", "served"),
    [
        (0, MAX_CANDIDATES, True),
        (0, MAX_CANDIDATES + 1, False),
        (20, MAX_CANDIDATES // 21, True),
        (20, MAX_CANDIDATES // 21 + 1, False),
        (-1, 8, True),
        (-1, 9, False),
        (None, MAX_CANDIDATES + 1, True),
    ],
)
async def test_prompt_logprobs_fit_into_a_message(asked: int | None, positions: int, served: bool) -> None:
    from vllm.exceptions import VLLMValidationError

    routers = Recorder()
    prompt = {"type": "token", "prompt_token_ids": [5] * positions}
    turn = client_of(routers).generate(prompt, sampling(prompt_logprobs=asked), "r")
    if served:
        assert [output async for output in turn][-1].finished
        return
    with pytest.raises(VLLMValidationError) as caught:
        await anext(turn)
    assert caught.value.parameter == "prompt_logprobs"
    assert not routers.asked
