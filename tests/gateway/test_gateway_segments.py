"""The segment cache gives the tokenizer's own ids, and generated ids where their text comes back."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvloop.gateway import segments
from kvloop.gateway.segments import Rendering, SegmentCache
from kvloop.runtime import tokens

NAMES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>>", "<file_sep>", "<filename>"]
SPECIALS = {name: number for number, name in enumerate(NAMES)}
FILENAME, FILE_SEP = SPECIALS["<filename>"], SPECIALS["<file_sep>"]
ALPHABET = "ab 1234\n\t.,{}\"'éü中文😀\u200d\u0301"
WORDS = [*SPECIALS, "<|im_", "|>", "hello", "  ", "12", "\n\n"]
TEXTS = st.one_of(
    st.text(ALPHABET, max_size=40),
    st.lists(st.sampled_from([*SPECIALS, "<|im_", "|>", "hello", "  ", "12", "\n\n"]), max_size=6).map(
        "".join
    ),
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6)


def rendered(messages: list[tuple[str, str]]) -> str:
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return said + "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A small byte-level BPE, of the kind that the models of today have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[AddedToken(name, normalized=False, special=True) for name in NAMES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(segments.__file__).read_text(), "hello world " * 50], trainer)
    return made


class Chat:
    """A cache over a tokenizer, and how often the tokenizer was asked."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = 10**7, tenant_bytes: int = 10**7) -> None:
        self.tokenizer = tokenizer
        self.cache = SegmentCache(SPECIALS, max_bytes=max_bytes, tenant_bytes=tenant_bytes)
        self.asked: list[str] = []

    def plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, text: str, tenant: str = "t") -> Rendering:
        async def encode(texts: list[str]) -> list[list[int]]:
            self.asked.extend(texts)
            return [self.plain(one) for one in texts]

        rendering = asyncio.run(self.cache.render(tenant, text, encode))
        assert rendering.packed() == tokens.pack(rendering.ids)
        self.cache.accept(tenant)
        return rendering

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Chat:
    return Chat(tokenizer)


@given(conversation=MESSAGES, cut=st.integers(0, 5))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_the_tokenizers(shared: Chat, conversation: list[tuple[str, str]], cut: int) -> None:
    for messages in (conversation[:cut], conversation, conversation[cut:]):
        text = rendered(messages)
        assert shared.render(text).ids == shared.plain(text)


@given(conversation=MESSAGES)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tiny_cache_changes_nothing_but_the_work(
    tokenizer: Tokenizer, conversation: list[tuple[str, str]]
) -> None:
    chat = Chat(tokenizer, max_bytes=6000, tenant_bytes=3500)
    for tenant in ("a", "b", "c", "a"):
        text = rendered(conversation)
        assert chat.render(text, tenant).ids == chat.plain(text)
        assert chat.cache.size_bytes <= 6000


def test_only_new_messages_are_tokenized(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    first = [("system", "Be brief."), ("user", "One?")]
    chat.render(rendered(first))
    chat.asked.clear()
    again = chat.render(rendered([*first, ("assistant", "1"), ("user", "Two?")]))
    assert set(chat.asked) == {"assistant\n1", "user\nTwo?"}
    assert again.cached_tokens > 0


def test_tenants_do_not_share(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    text = rendered([("user", "secret")])
    chat.render(text, "a")
    chat.asked.clear()
    chat.render(text, "b")
    assert "user\nsecret" in chat.asked


def odd_ids(chat: Chat, text: str, seed: int) -> list[int]:
    """Ids that decode to the text, cut where the tokenizer would not cut."""
    rng = random.Random(seed)
    at = rng.randint(0, len(text))
    ids = chat.plain(text[:at]) + chat.plain(text[at:])
    return ids if chat.decode(ids) == text else chat.plain(text)


@given(question=TEXTS, answer=st.text(ALPHABET, min_size=1, max_size=30), seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_generated_ids_come_back_where_their_text_does(
    tokenizer: Tokenizer, question: str, answer: str, seed: int
) -> None:
    chat = Chat(tokenizer)
    prompt = rendered([("user", question)])
    first = chat.render(prompt)
    said = odd_ids(chat, answer, seed)
    chat.cache.remember("t", first, chat.decode(said), said)

    history = [("user", question), ("assistant", answer)]
    text = rendered([*history, ("user", "and then?")])
    again = chat.render(text)
    assert again.ids[: len(first.ids) + len(said)] == first.ids + said
    assert chat.decode(again.ids) == text
    # The rest, and other histories, are the tokenizer's.
    rest = text[len(prompt) + len(answer) :]
    assert again.ids[len(first.ids) + len(said) :] == chat.plain(rest)
    for other in (
        rendered([("user", question + "!"), ("assistant", answer)]),
        rendered([("user", question), ("assistant", answer + "x")]),
        rendered([("assistant", answer)]),
    ):
        assert chat.render(other).ids == chat.plain(other)
    assert chat.render(text, "another").ids == chat.plain(text)


def test_answers_follow_one_another(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    messages: list[tuple[str, str]] = []
    expected: list[int] = []
    for number in range(4):
        messages.append(("user", f"question {number}"))
        rendering = chat.render(rendered(messages))
        assert rendering.ids[: len(expected)] == expected
        answer = "hello world"
        said = chat.plain("hel") + chat.plain("lo wor") + chat.plain("ld")
        assert chat.decode(said) == answer
        assert said != chat.plain(answer)
        chat.cache.remember("t", rendering, answer, said)
        expected = rendering.ids + said
        messages.append(("assistant", answer))
    assert chat.render(rendered(messages)).restored_tokens > 3 * len(said)


def test_answers_with_special_tokens_inside(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    rendering = chat.render(rendered([("user", "make a file")]))
    said = [*chat.plain("a"), *chat.plain("b"), FILENAME, *chat.plain("x"), *chat.plain("y"), FILE_SEP]
    chat.cache.remember("t", rendering, chat.decode(said), said)
    text = rendered([("user", "make a file"), ("assistant", chat.decode(said))])
    again = chat.render(text)
    assert again.ids[: len(rendering.ids) + len(said)] == rendering.ids + said
    assert again.ids != chat.plain(text)


@pytest.mark.parametrize("after", ["z", "v"], ids=["what was said", "something else"])
def test_text_after_an_answer_with_special_tokens_inside(tokenizer: Tokenizer, after: str) -> None:
    chat = Chat(tokenizer)
    prompt = "say it "
    rendering = chat.render(prompt)
    said = [*chat.plain("hel"), *chat.plain("lo wor"), *chat.plain("ld"), FILENAME, *chat.plain("x")]
    answer = chat.decode(said)
    assert len(said) != len(chat.plain(answer))
    chat.cache.remember("t", rendering, answer, said)
    # No special token ends what comes next either: what is kept of it must not be cut inside the answer.
    again = chat.render(prompt + answer)
    assert again.ids == rendering.ids + said
    chat.cache.remember("t", again, "z", chat.plain("z"))
    text = prompt + answer + after
    whole = again.ids + chat.plain("z") if after == "z" else chat.plain(text)
    assert chat.render(text).ids == whole
    end = [SPECIALS["<|im_end|>"], *chat.plain("w")]
    assert chat.render(text + "<|im_end|>w").ids == whole + end


def test_a_longer_chat_starts_from_the_one_before(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    messages = [("user", f"question {number}") for number in range(30)]
    for count in range(1, 31):
        text = rendered(messages[:count])
        assert chat.render(text).ids == chat.plain(text)
    tenant = chat.cache._tenants.find("t")
    # One beginning for the whole conversation, however long it was.
    assert len(tenant.beginnings) == 1
    assert tenant.beginnings_bytes == sum(one.size for one in tenant.beginnings.values())
    # It is found although nothing else is left.
    tenant.pieces.clear()
    chat.asked.clear()
    text = rendered([*messages, ("assistant", "yes"), ("user", "and?")])
    assert chat.render(text).ids == chat.plain(text)
    assert set(chat.asked) == {"assistant\nyes", "user\nand?", "\n", "assistant\n"}


def test_a_beginning_of_another_text_is_not_taken(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    for word in ("abc", "abd", "xyz"):
        text = rendered([("user", word), ("assistant", "12"), ("user", "ab")])
        assert chat.render(text).ids == chat.plain(text)


def test_the_bounds_hold(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer, max_bytes=30_000, tenant_bytes=10_000)
    for tenant in range(6):
        for number in range(30):
            rendering = chat.render(rendered([("user", f"number {number} of {tenant}")]), str(tenant))
            said = chat.plain(f"answer {number}")
            chat.cache.remember(str(tenant), rendering, f"answer {number}", said)
            assert chat.cache.size_bytes <= 30_000


def test_a_piece_too_large_for_its_share_is_not_kept(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer, tenant_bytes=6_000)
    text = rendered([("user", "word " * 2_000)])
    assert chat.render(text).ids == chat.plain(text)
    assert chat.cache.size_bytes < 6_000
    assert chat.render(text).ids == chat.plain(text)


async def test_chats_beside_each_other_on_a_tiny_cache(tokenizer: Tokenizer) -> None:
    cache = SegmentCache(SPECIALS, max_bytes=10_000, tenant_bytes=3_000)
    cache.accept("t")

    def plain(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    async def at_once(texts: list[str]) -> list[list[int]]:
        return [plain(text) for text in texts]

    waiting, go_on = asyncio.Event(), asyncio.Event()

    async def late(texts: list[str]) -> list[list[int]]:
        waiting.set()
        await go_on.wait()
        return [plain(text) for text in texts]

    await cache.render("t", "known<|im_end|>", at_once)
    text = "known<|im_start|>new<|im_end|>"
    slow = asyncio.create_task(cache.render("t", text, late))
    await waiting.wait()
    for number in range(30):
        await cache.render("t", f"another {number}<|im_end|>", at_once)
    assert "known" not in cache._tenants.find("t").pieces
    go_on.set()
    assert (await slow).ids == plain(text)
    assert cache.size_bytes <= 3_000
