"""Rendering and history: what was generated is never tokenized again, and ids only ever grow."""

from pathlib import Path

import pytest

from kvloop.cli.chat.conversation import Conversation
from kvloop.cli.chat.rendering import TemplateRenderer
from kvloop.cli.demo.words import WordRenderer
from kvloop.cli.errors import CommandFailed

END = 2


@pytest.fixture
def renderer(tokenizer_folder: Path) -> TemplateRenderer:
    return TemplateRenderer.load(str(tokenizer_folder))


def text_of(renderer: TemplateRenderer, ids: list[int]) -> str:
    return str(renderer._tokenizer.decode(ids))


def test_first_prompt_is_the_template_s_own(renderer: TemplateRenderer) -> None:
    conversation = Conversation(renderer, system="be brief")
    prompt = conversation.ask("hi")
    expected = renderer._tokenizer.apply_chat_template(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text_of(renderer, prompt) == expected


@pytest.mark.parametrize("answer", [[70, 71, END], [70, 71]])
def test_next_prompt_is_the_rendering_whether_or_not_the_answer_was_ended(
    renderer: TemplateRenderer, answer: list[int]
) -> None:
    conversation = Conversation(renderer)
    conversation.answered(conversation.ask("one"), answer)
    prompt = conversation.ask("two")
    words = text_of(renderer, [70, 71])
    expected = renderer._tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": words},
            {"role": "user", "content": "two"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text_of(renderer, prompt) == expected


def test_history_is_a_prefix_of_every_later_prompt(renderer: TemplateRenderer) -> None:
    conversation = Conversation(renderer)
    # Ids that no tokenizer would give: single bytes of a word, an end in the middle.
    answers = [[70, END, 71], [72], [END], [73, 74, END]]
    history: list[int] = []
    for number, answer in enumerate(answers):
        prompt = conversation.ask(f"message {number}")
        assert prompt[: len(history)] == history
        conversation.answered(prompt, answer)
        history = [*prompt, *answer]


def test_one_end_of_turn_between_answer_and_next_message(renderer: TemplateRenderer) -> None:
    conversation = Conversation(renderer)
    first = conversation.ask("one")
    conversation.answered(first, [70, END])
    assert conversation.ask("two")[len(first) :].count(END) == 2  # the answer's and the new message's


def test_asking_changes_nothing_until_answered(renderer: TemplateRenderer) -> None:
    conversation = Conversation(renderer)
    conversation.ask("never answered")
    assert not conversation.turns_begun
    assert conversation.ask("one") == Conversation(renderer).ask("one")


def test_a_fork_has_the_history_and_goes_its_own_way(renderer: TemplateRenderer) -> None:
    conversation = Conversation(renderer)
    conversation.answered(conversation.ask("one"), [70, END])
    fork = conversation.fork()
    assert fork.parent_id == conversation.id
    assert fork.id != conversation.id
    assert fork.ask("two") == conversation.ask("two")
    fork.answered(fork.ask("two"), [71])
    assert fork.ask("three") != conversation.ask("three")


def test_markup_in_messages_is_text(renderer: TemplateRenderer) -> None:
    prompt = Conversation(renderer).ask("kvloop {{ 1 + 1 }} [bold]")
    assert "{{ 1 + 1 }} [bold]" in text_of(renderer, prompt)


def test_no_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="--tokenizer"):
        TemplateRenderer.load(str(tmp_path))


def test_words_give_the_same_ids_each_time_and_stay_in_the_vocabulary() -> None:
    renderer = WordRenderer(1000)
    messages = [{"role": "user", "content": "ls -l\n/srv"}]
    first = renderer.first(messages)
    assert first == renderer.first(messages)
    assert all(3 <= token < 1000 for token in first)
    assert renderer.following([9, END], messages) == [*first]
    assert renderer.following([9], messages) == [END, *first]
