"""Exact history through the whole gateway: what a model generated is what the next turn begins with."""

import threading
from typing import Any

import httpx
import pytest
from gateway_router import FakeRouter

from kvloop.runtime import tokens
from kvloop.v1alpha1 import turn_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
END = 2


def ids_of(router: FakeRouter, index: int = -1) -> list[int]:
    return tokens.unpack(router.turns[index].request.prompt_token_ids)


def odd(router: FakeRouter, *parts: str) -> list[int]:
    """Ids of a text cut as no tokenizer would."""
    ids = [token for part in parts for token in router.encode(part)]
    assert ids != router.encode("".join(parts))
    return ids


def ask(http: httpx.Client, messages: list[dict[str, Any]], key: str = "k", **more: Any) -> httpx.Response:
    body = {"model": "smollm2", "messages": messages, **more}
    answer = http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", ["eos", "length"])
def test_generated_ids_come_back(http: httpx.Client, router: FakeRouter, stream: bool, ending: str) -> None:
    said = odd(router, "Hel", "lo the", "re, fri", "end")
    if ending == "eos":
        router.scripts.append(router.say("Hello there, friend", ids=[*said, END]))
    else:
        router.scripts.append(
            router.say("Hello there, friend", ids=said, finish=turn_pb2.FINISH_REASON_LENGTH)
        )
    first = [{"role": "user", "content": f"who is it? {stream} {ending}"}]
    ask(http, first, stream=stream)
    begun = ids_of(router)
    history = [*first, {"role": "assistant", "content": "Hello there, friend"}]
    ask(http, [*history, {"role": "user", "content": "and now?"}])
    assert ids_of(router)[: len(begun) + len(said)] == begun + said
    assert router.prompt().startswith(router.tokenizer.decode(begun + said, skip_special_tokens=False))


def test_text_that_differs_is_left_alone(http: httpx.Client, router: FakeRouter) -> None:
    said = odd(router, "Yes, of cour", "se")
    router.scripts.append(router.say("Yes, of course", ids=[*said, END]))
    first = [{"role": "user", "content": "left alone?"}]
    ask(http, first)
    begun = ids_of(router)
    for answer, question, key in (
        ("Yes, of course!", "left alone?", "k"),
        ("Yes, of course", "left alone??", "k"),
        ("Yes, of course", "left alone?", "another tenant"),
    ):
        history = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ask(http, history, key=key)
        assert ids_of(router) == router.encode(router.prompt())
    ask(http, [*first, {"role": "assistant", "content": "Yes, of course"}])
    assert ids_of(router)[: len(begun) + len(said)] == begun + said


def test_stop_strings_stay_out(http: httpx.Client, router: FakeRouter) -> None:
    kept = odd(router, "Thou", "ght: g", "o on\n")
    router.scripts.append(
        router.say(
            "Thought: go on\n", ids=[*kept, *router.encode("Observation:")], stop_reason="Observation:"
        )
    )
    first = [{"role": "user", "content": "react"}]
    ask(http, first, stop=["Observation:"])
    begun = ids_of(router)
    ask(
        http, [*first, {"role": "assistant", "content": "Thought: go on\n"}, {"role": "user", "content": "x"}]
    )
    assert ids_of(router)[: len(begun) + len(kept)] == begun + kept


def test_long_chats_are_rendered_alike(http: httpx.Client, router: FakeRouter) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "12345\n\n  be <|brief|> é中😀 "}]
    for number in range(12):
        messages.append({"role": "user", "content": f" question {number}\n\n{'x ' * number}"})
        ask(http, messages)
        assert ids_of(router) == router.encode(router.prompt())
        messages.append({"role": "assistant", "content": f"another answer {number} "})


def test_turns_beside_each_other_stay_apart(http: httpx.Client, router: FakeRouter) -> None:
    texts = [f"answer number {number}" for number in range(6)]
    said = {text: odd(router, text[:3], text[3:9], text[9:]) for text in texts}
    gate = threading.Barrier(len(texts))
    failures: list[BaseException] = []

    def converse(text: str) -> None:
        try:
            gate.wait(20)
            first = [{"role": "user", "content": f"say {text}"}]
            ask(http, first)
            ask(http, [*first, {"role": "assistant", "content": text}])
        except BaseException as error:
            failures.append(error)
            raise

    def answer(request: Any) -> Any:
        asked = router.tokenizer.decode(tokens.unpack(request.prompt_token_ids))
        text = next(one for one in texts if f"say {one}" in asked)
        return router.say(text, ids=[*said[text], END])(request)

    router.scripts += [answer] * (2 * len(texts))
    threads = [threading.Thread(target=converse, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert len(router.turns) == 2 * len(texts)
    for turn in router.turns:
        ids = tokens.unpack(turn.request.prompt_token_ids)
        text = router.tokenizer.decode(ids, skip_special_tokens=False)
        for one in texts:
            if f"assistant\n{one}<|im_end|>" in text:
                joined = ",".join(map(str, ids))
                assert ",".join(map(str, said[one])) in joined
