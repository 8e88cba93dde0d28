"""Conversations as data.

A conversation is a list of steps. A step says what is added to the history, and how long the answer may be;
the prompt is the history after that. Answers are the target's own, so token ids are made while it is played.

A session is one conversation and those forked from it (subagents). A fork starts with its parent's history as
it was after one of the parent's steps; the parent goes on when its forks have ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Kind(StrEnum):
    """What a step does to the history."""

    TURN = "turn"
    """Text is added."""
    REGENERATE = "regenerate"
    """The last answer is dropped and asked for again; no text."""
    COMPACT = "compact"
    """The opening stays, everything after it is replaced by the text (a summary)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request."""

    text: str
    output_tokens: int
    """Longest answer."""
    kind: Kind = Kind.TURN
    role: str = "user"
    """Who says the text: user or tool."""
    gap_s: float = 0.0
    """Pause between the previous answer and this request."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""
    answer: str | None = None
    """The answer in the trace that this was read from; None when it was generated."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A list of steps under one name."""

    conversation_id: str
    steps: tuple[Step, ...]
    opening: str = ""
    """What stands before the first step: instructions, tools, documents. Forks have none of their own."""
    fork_after: int = 0
    """Number of the parent's step (from 1) whose end a fork starts from; 0: no fork."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation and its forks."""

    main: Conversation
    forks: tuple[Conversation, ...] = ()

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return len(self.main.steps) + sum(len(fork.steps) for fork in self.forks)

    def forks_after(self, step: int) -> Iterator[Conversation]:
        """Yield the forks that start when a step of the main conversation (from 1) has ended."""
        return (fork for fork in self.forks if fork.fork_after == step)


class Encoder(Protocol):
    """Turns text into token ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...


@dataclass
class History:
    """Token ids of a conversation that is being played."""

    encoder: Encoder
    opening: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """Prompt of the last step."""
    answer: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, encoder: Encoder, opening: str) -> "History":
        """Return a history that has only the opening."""
        ids = encoder.encode(opening)
        return cls(encoder, opening=ids, prompt=list(ids))

    def fork(self) -> "History":
        """Return a history of its own that starts as this one stands."""
        return History(self.encoder, list(self.opening), list(self.prompt), list(self.answer))

    def ask(self, step: Step) -> list[int]:
        """Return the prompt of the next step."""
        if step.kind is Kind.TURN:
            self.prompt = [*self.prompt, *self.answer, *self.encoder.encode(step.text)]
        elif step.kind is Kind.COMPACT:
            self.prompt = [*self.opening, *self.encoder.encode(step.text)]
        self.answer = []
        return self.prompt

    def answered(self, token_ids: Sequence[int]) -> None:
        """Take the answer in."""
        self.answer = list(token_ids)
