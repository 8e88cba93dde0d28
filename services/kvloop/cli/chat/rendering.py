"""Messages to token ids, with history that is never tokenized twice.

A conversation's ids only ever grow: prompt, then the ids that were generated, then the text the template puts
between an answer and the next one. That text is cut out of a rendering of a small stand-in
conversation, so any template works whose text around a message does not depend on the other messages. The
text begins with the template's end-of-turn token; an answer that ended by itself already has it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvloop.cli.errors import CommandFailed

Message = dict[str, str]

# Plain letters: templates strip white space and split at markup.
_ANSWER = "kvloopstandsinforananswer"


def spare_torch() -> None:
    """Make transformers believe that there is no torch: tokenizers need none, and importing it takes seconds.

    For a command's own process alone, before transformers is imported: nothing in it can import torch after.
    """
    if "transformers" not in sys.modules:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # how Python marks a name as absent


class Renderer(Protocol):
    """Turns messages into token ids."""

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt that opens a conversation, up to where the answer begins."""
        ...

    def following(self, answer: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return what comes after the answer's ids: end of turn, new messages, up to the next answer."""
        ...


class TemplateRenderer:
    """Renders with the chat template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise CommandFailed(
                "the tokenizer has no chat template; name the instruct version of the model with --tokenizer"
            )
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, place: str) -> "TemplateRenderer":
        """Read a tokenizer from a folder or by its Hugging Face name. Takes seconds.

        Raises CommandFailed.
        """
        # Nothing here needs a hub when the files are on this machine.
        if Path(place).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # Silences the advice that no deep-learning framework was found: none is needed here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            import transformers
        except ImportError:
            raise CommandFailed(
                "chat templates need transformers; install it with: pip install 'kvloop[chat]'"
            ) from None
        try:
            return cls(transformers.AutoTokenizer.from_pretrained(place))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CommandFailed(
                f"no tokenizer at {place}: {reason}\n"
                "Name a folder or a Hugging Face model with --tokenizer, or run: kvloop model fetch smollm2"
            ) from None

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the rendered conversation, ready for an answer."""
        return self._encode(self._render(messages))

    def following(self, answer: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the ids between an answer and the next one."""
        stand_in = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
        text = self._render([*stand_in, *messages])
        _, found, between = text.rpartition(_ANSWER)
        if not found:
            raise CommandFailed("the chat template hides earlier answers; kvloop chat can't continue with it")
        ids = self._encode(between)
        if answer and ids and answer[-1] == ids[0]:
            del ids[0]
        return ids

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # noqa: BLE001 - templates raise whatever they like
            raise CommandFailed(f"the chat template refuses these messages: {error}") from None
        return str(text)

    def _encode(self, text: str) -> list[int]:
        # The template writes the special tokens itself.
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
