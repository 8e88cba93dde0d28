"""The exact token history of one conversation."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloop.cli.chat.rendering import Message, Renderer


def new_id() -> str:
    """Return a fresh conversation id."""
    return f"chat-{secrets.token_hex(6)}"


@dataclass(slots=True)
class Conversation:
    """Prompts and answers as ids; only ever appended to, so each prompt begins with all that D may hold."""

    renderer: Renderer
    system: str | None = None
    id: str = field(default_factory=new_id)
    parent_id: str = ""
    """The conversation this one was forked from; D may hold the history under its name."""
    prompt: list[int] = field(default_factory=list)
    """The latest turn's prompt."""
    answer: list[int] | None = None
    """The latest turn's answer; None before the first turn and after a failed one."""

    @property
    def turns_begun(self) -> bool:
        """Tell whether there is a turn to regenerate."""
        return bool(self.prompt)

    def ask(self, text: str) -> list[int]:
        """Return the prompt of the next turn. A turn that got no answer is asked again with the new text."""
        return self.ask_messages([{"role": "user", "content": text}])

    def ask_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of the next turn, opened by any messages. Nothing changes until answered()."""
        if self.answer is None:
            opening = [{"role": "system", "content": self.system}] if self.system else []
            return self.renderer.first([*opening, *messages])
        return [*self.prompt, *self.answer, *self.renderer.following(self.answer, messages)]

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take a turn into the history."""
        self.prompt, self.answer = list(prompt), list(answer)

    def fork(self) -> "Conversation":
        """Return a conversation with the same history that goes its own way."""
        return Conversation(
            self.renderer, self.system, parent_id=self.id, prompt=list(self.prompt),
            answer=None if self.answer is None else list(self.answer),
        )  # fmt: skip
