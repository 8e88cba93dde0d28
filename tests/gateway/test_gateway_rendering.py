"""The rendering cache on a real model's chat template and tokenizer: ids equal to a full rendering's."""

import asyncio
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvloop.gateway.segments import Rendering, SegmentCache

pytestmark = pytest.mark.vllm

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(
            [
                "<|im_start|>",
                "<|im_end|>",
                "<|im_",
                "|>",
                "hello",
                "  ",
                "12",
                "\n\n",
                "é中😀",
                "\u200d",
                "def f():",
            ]
        ),
        max_size=8,
    ).map("".join),
).map(lambda text: text.encode("utf-8", "replace").decode())
MESSAGES = st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=8)
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


class Model:
    """SmolLM2's template and tokenizer, and a cache before them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = jinja2.Environment(keep_trailing_newline=True).from_string(
            (folder / "chat_template.jinja").read_text()
        )
        added = self.tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: number for number, token in added.items()}
        self.cache = self.fresh()

    def fresh(self) -> SegmentCache:
        return SegmentCache(self.specials, max_bytes=10**7, tenant_bytes=10**7)

    def text(self, messages: list[tuple[str, str]]) -> str:
        said = [{"role": role, "content": content} for role, content in messages]
        return self._template.render(messages=said, add_generation_prompt=True)

    def plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def render(self, cache: SegmentCache, text: str) -> Rendering:
        async def encode(texts: list[str]) -> list[list[int]]:
            return [self.plain(one) for one in texts]

        return asyncio.run(cache.render("t", text, encode))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Model:
    return Model(model_dir)


@given(messages=MESSAGES, other=MESSAGES, keep=st.integers(0, 8))
@settings(max_examples=200, **SETTINGS)
def test_every_turn_of_every_branch_is_a_full_rendering(
    model: Model, messages: list[tuple[str, str]], other: list[tuple[str, str]], keep: int
) -> None:
    """A conversation grows message by message; then another goes on from somewhere in its middle."""
    branch = [*messages[:keep], *other]
    for history in (messages, branch, messages):
        for count in range(1, len(history) + 1):
            text = model.text(history[:count])
            assert model.render(model.cache, text).ids == model.plain(text)


@given(
    turns=st.lists(st.tuples(TEXTS, TEXTS.filter(bool), st.integers(0, 10**6)), min_size=1, max_size=5),
    twice=st.booleans(),
)
@settings(max_examples=200, **SETTINGS)
def test_generated_ids_stay_through_all_later_turns(
    model: Model, turns: list[tuple[str, str, int]], twice: bool
) -> None:
    cache = model.fresh()
    messages: list[tuple[str, str]] = []
    expected: list[int] = []
    known = 0
    """Characters whose ids are expected."""
    for question, answer, seed in turns:
        messages.append(("user", question))
        text = model.text(messages)
        expected = expected + model.plain(text[known:])
        for _ in range(1 + twice):
            rendering = model.render(cache, text)
            assert rendering.ids == expected
        at = seed % (len(answer) + 1)
        said = model.plain(answer[:at]) + model.plain(answer[at:])
        if model.decode(said) != answer:
            said = model.plain(answer)
        if model.decode(said) != answer:
            return
        cache.remember("t", rendering, answer, said)
        expected = expected + said
        known = len(text) + len(answer)
        messages.append(("assistant", answer))
