"""Which ids of an answer stay in the history: those of what was shown, found with little decoding."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvloop.gateway.history import History
from kvloop.gateway.segments import Rendering
from kvloop.gateway.settings import GatewaySettings
from kvloop.v1alpha1 import turn_pb2

NAMES = ["<|im_start|>", "<|im_end|>", "<file>"]
END, FILE = 1, 2
STOPS = ["STOP", "\nObservation:", "中😀", "é"]
TEXTS = st.text("ab 12\n.é中😀\u200d\u0301", max_size=25)


class Plain:
    """A tokenizer as the renderer has it; counts the tokens that it decodes."""

    is_fast = True

    def __init__(self) -> None:
        self.made = Tokenizer(models.BPE())
        self.made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[AddedToken(name, normalized=False, special=True) for name in NAMES],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.made.train_from_iterator(["hello world STOP Observation: abc 中😀 é " * 20], trainer)
        self.added_tokens_decoder = self.made.get_added_tokens_decoder()
        self.all_special_ids = [0, 1, 2]
        self.decoded = 0

    def __call__(self, text: str, **_how: Any) -> dict[str, list[int]]:
        return {"input_ids": self.made.encode(text, add_special_tokens=False).ids}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, **_how: Any) -> str:
        self.decoded += len(ids)
        return str(self.made.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def encode(self, text: str) -> list[int]:
        return self(text)["input_ids"]


class Uncounted:
    """Metrics that nobody reads."""

    def rendered(self, *_told: Any) -> None:
        pass


def history_of(tokenizer: Plain, **values: Any) -> History:
    renderer = SimpleNamespace(tokenizer=tokenizer, _executor=None)
    return History(renderer, GatewaySettings.load(flags=values), Uncounted())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer() -> Plain:
    return Plain()


async def kept(tokenizer: Plain, ids: list[int], text: str, *, hides: bool = True) -> tuple[list[int], str]:
    """Return the ids that are remembered of an answer, and their text."""
    history = history_of(tokenizer)
    told: list[Any] = []
    cache: Any = history._cache
    cache.remember = lambda _tenant, _rendering, exact, ids: told.append((ids, exact))
    rendering = await cache.render("t", "<|im_start|>", history._encode_pieces)
    tokenizer.decoded = 0
    summary = turn_pb2.Summary(stop_reason="STOP")
    history.remember("t", rendering, ids, text, summary, hides=hides)
    ((ids, exact),) = told
    return ids, exact


@given(
    parts=st.lists(st.one_of(TEXTS, st.just("<file>")), max_size=5),
    stop=st.sampled_from(STOPS),
    after=TEXTS,
    seed=st.integers(0, 10**6),
    hides=st.booleans(),
)
@settings(max_examples=300, deadline=None)
async def test_the_ids_are_those_of_what_was_shown(
    tokenizer: Plain, parts: list[str], stop: str, after: str, seed: int, hides: bool
) -> None:
    rng = random.Random(seed)
    said = "".join(parts) + stop + after
    at = rng.randint(0, len(said))
    ids = tokenizer.encode(said[:at]) + tokenizer.encode(said[at:])

    def shown(end: int) -> str:
        return tokenizer.decode(ids[:end], skip_special_tokens=hides)

    whole = shown(len(ids))
    text = whole[: whole.index(stop)]
    end = max(end for end in range(len(ids) + 1) if len(shown(end)) <= len(text))
    while hides and end and ids[end - 1] == FILE:
        end -= 1
    assert (await kept(tokenizer, ids, text, hides=hides))[0] == ids[:end]


async def test_special_tokens_inside_cost_no_real_ones(tokenizer: Plain) -> None:
    before = [*tokenizer.encode("hello "), FILE, *tokenizer.encode("world"), FILE]
    ids = [*before, *tokenizer.encode("STOP")]
    # The last one was not shown: what comes back has none there.
    assert await kept(tokenizer, ids, "hello world") == (before[:-1], "hello <file>world")
    assert await kept(tokenizer, [*ids, END], "hello <file>world<file>", hides=False) == (
        before,
        "hello <file>world<file>",
    )


@pytest.mark.parametrize("stop", ["STOP", "STOP" * 200], ids=["short", "long"])
async def test_long_answers_are_decoded_few_times(tokenizer: Plain, stop: str) -> None:
    before = tokenizer.encode("hello world abc " * 2000)
    ids = [*before, *tokenizer.encode(stop)]
    assert (await kept(tokenizer, ids, "hello world abc " * 2000))[0] == before
    assert tokenizer.decoded < 10 * len(ids)


async def test_an_answer_that_shows_nothing_keeps_nothing(tokenizer: Plain) -> None:
    assert await kept(tokenizer, tokenizer.encode("STOP"), "") == ([], "")


async def test_a_chat_outlives_the_cache_that_another_has_given_up(tokenizer: Plain) -> None:
    history = history_of(tokenizer)
    whole = tokenizer.encode("<|im_start|>hello<|im_end|>")

    async def given_up(texts: list[str]) -> list[list[int]]:
        history._give_up("check")
        return [tokenizer.encode(text) for text in texts]

    history._encode_pieces = given_up  # type: ignore[method-assign]

    async def all_at_once() -> list[int]:
        return whole

    assert await history.render("<|im_start|>hello<|im_end|>", all_at_once) == whole
    assert not history.active
    history.accept("t")
    history.remember("t", _nothing(), [5], "x", turn_pb2.Summary(), hides=True)


def _nothing() -> Rendering:
    return None  # type: ignore[return-value]
