"""Conversations as JSON: the format of vLLM's multi-turn benchmark, and ShareGPT's own.

    [{"id": "...", "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}]
    [{"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]

Both are read, the first is written, as vLLM's benchmark wants it: messages of a user and an assistant in
turns, with no key but role and content, and answers of about as many tokens as are to be generated, from
which it takes the limit. So the opening stands in the first message, results of tools are a user's, and
answers that nobody gave are filled in. That is told under the key "kvloop" of the conversation, which others
pass over, with what such a file can't say at all (pauses, stop strings, kinds, forks).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvloop.bench.workload.model import Conversation, Kind, Session, Step
from kvloop.bench.workload.words import rng_of, words

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES |= {"tool": "tool", "function": "tool", "observation": "tool"}
_EXTRA = "kvloop"
_AFTER_OPENING = "\n\n"
DEFAULT_OUTPUT_TOKENS = 256
_Message = tuple[str, str, Mapping[str, Any]]
"""Role, text, and what else is told of it."""


class BadWorkload(ValueError):
    """A file is no workload; the text says where and why."""


def load(file: Path, *, output_tokens: int = DEFAULT_OUTPUT_TOKENS) -> list[Session]:
    """Return a file's sessions; output_tokens limits answers where the file names no length.

    Raises BadWorkload.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadWorkload(f"{file}: {error}") from None
    return from_json(content, output_tokens=output_tokens)


def save(file: Path, sessions: Iterable[Session]) -> None:
    """Write sessions to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(to_json(sessions)) + "\n", encoding="utf-8")


def to_json(sessions: Iterable[Session]) -> list[dict[str, Any]]:
    """Return sessions as JSON values, one entry per conversation."""
    entries = []
    for session in sessions:
        entries.append(_entry(session.main, ""))
        entries += [_entry(fork, session.main.conversation_id) for fork in session.forks]
    return entries


def from_json(content: Any, *, output_tokens: int = DEFAULT_OUTPUT_TOKENS) -> list[Session]:
    """Return the sessions of JSON values. Raises BadWorkload."""
    if not isinstance(content, list) or not content:
        raise BadWorkload("a workload is a list of conversations, and not an empty one")
    mains: dict[str, Conversation] = {}
    forks: dict[str, list[Conversation]] = {}
    for number, entry in enumerate(content):
        where = f"conversation {number}"
        if not isinstance(entry, Mapping):
            raise BadWorkload(f"{where} is no object")
        conversation, parent = _conversation(entry, where, output_tokens)
        if not parent:
            if conversation.conversation_id in mains:
                raise BadWorkload(f"{where} has the id of an earlier one")
            mains[conversation.conversation_id] = conversation
        elif parent in mains:
            forks.setdefault(parent, []).append(conversation)
        else:
            raise BadWorkload(f"{where} is a fork of a conversation that does not stand before it")
    return [Session(main, tuple(forks.get(name, ()))) for name, main in mains.items()]


def _entry(conversation: Conversation, parent: str) -> dict[str, Any]:
    name, messages = conversation.conversation_id, []
    for number, step in enumerate(conversation.steps):
        opening = f"{conversation.opening}{_AFTER_OPENING}" if conversation.opening and not number else ""
        answer = step.answer
        if answer is None:
            answer = words(rng_of(0, "answer", name, number), step.output_tokens)
        messages.append({"role": "user", "content": f"{opening}{step.text}"})
        messages.append({"role": "assistant", "content": answer})
    extra: dict[str, Any] = {"steps": [_own(step) for step in conversation.steps]}
    if conversation.opening:
        extra["opening_chars"] = len(conversation.opening)
    if parent:
        extra |= {"parent": parent, "fork_after": conversation.fork_after}
    return {"id": name, "messages": messages, _EXTRA: extra}


def _own(step: Step) -> dict[str, Any]:
    """Return what messages of the benchmark can't say of a step."""
    own: dict[str, Any] = {"output_tokens": step.output_tokens, "gap_s": step.gap_s}
    own |= {"role": step.role} if step.role != "user" else {}
    own |= {"kind": step.kind.value} if step.kind is not Kind.TURN else {}
    own |= {"stop": list(step.stop)} if step.stop else {}
    return own | ({"generate": True} if step.answer is None else {})


def _conversation(entry: Mapping[str, Any], where: str, output_tokens: int) -> tuple[Conversation, str]:
    extra = entry.get(_EXTRA) or {}
    messages = [
        _message(message, where) for message in entry.get("messages") or entry.get("conversations") or ()
    ]
    opening: list[str] = []
    if "steps" in extra:
        first, messages = _told(messages, extra, where)
        opening += [first] if first else []
    steps: list[Step] = []
    said: list[_Message] = []
    for role, text, own in messages:
        if role == "system" and not steps and not said:
            opening.append(text)
        elif role != "assistant":
            said.append((role, text, own))
        elif said:
            steps.append(_step(said, text, own, output_tokens))
            said = []
    # A last question without an answer is a request too.
    if said:
        steps.append(_step(said, "", {"generate": True}, output_tokens))
    if not steps:
        raise BadWorkload(f"{where} asks nothing")
    name = str(entry.get("id") or where.replace(" ", "-"))
    made = Conversation(name, tuple(steps), "\n".join(opening), int(extra.get("fork_after", 0)))
    return made, str(extra.get("parent", ""))


def _told(messages: Sequence[_Message], extra: Mapping[str, Any], where: str) -> tuple[str, list[_Message]]:
    """Return the opening, and the messages with what the conversation tells of them."""
    steps, length = extra["steps"], extra.get("opening_chars", 0)
    known = isinstance(steps, list) and all(isinstance(own, Mapping) for own in steps)
    roles = [role for role, _, _ in messages]
    if not known or not isinstance(length, int) or roles != ["user", "assistant"] * len(steps):
        raise BadWorkload(f'{where} has a "{_EXTRA}" that does not go with its messages')
    told = [(role, text, steps[place // 2]) for place, (role, text, _) in enumerate(messages)]
    if not length or not told:
        return "", told
    role, text, own = told[0]
    return text[:length], [(role, text[length + len(_AFTER_OPENING) :], own), *told[1:]]


def _step(
    said: Sequence[_Message],
    answer: str,
    own: Mapping[str, Any],
    output_tokens: int,
) -> Step:
    role, _, extra = said[-1]
    try:
        kind = Kind(extra.get("kind", Kind.TURN))
    except ValueError:
        raise BadWorkload(f"a message is of the unknown kind {extra['kind']!r}") from None
    generate = bool(own.get("generate"))
    # Roughly a token and a third per word of English.
    guess = output_tokens if generate else max(1, min(output_tokens, len(answer.split()) * 4 // 3))
    return Step(
        text="\n".join(text for _, text, _ in said),
        output_tokens=int(extra.get("output_tokens", guess)),
        kind=kind,
        role=str(extra.get("role", role)),
        gap_s=float(extra.get("gap_s", 0.0)),
        stop=tuple(extra.get("stop", ())),
        answer=None if generate else answer,
    )


def _message(message: Any, where: str) -> _Message:
    if not isinstance(message, Mapping):
        raise BadWorkload(f"{where} has a message that is no object")
    role = _ROLES.get(str(message.get("role", message.get("from"))))
    text = message.get("content", message.get("value"))
    if role is None or not isinstance(text, str):
        raise BadWorkload(f"{where} has a message without a known role, or whose content is no text")
    return role, text, message.get(_EXTRA) or {}
