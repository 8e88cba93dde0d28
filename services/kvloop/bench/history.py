"""What re-tokenizing costs: agents send text back, and a tokenizer need not cut it as it was generated.

The agentic trace is played as chats through two gateways over the same engines: one puts generated ids back
where their text comes back, the other leaves all text to the tokenizer. What a decode worker held of a turn
and the next one did not reuse is what was lost.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvloop.bench.sse import Connection
from kvloop.bench.workload.model import Conversation, Kind, Step

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn after another of the same conversation."""

    leg: str
    conversation: str
    number: int
    held_tokens: int
    """What the turn before left on its decode worker."""
    reused_tokens: int
    reason: str


def ask(messages: Messages, step: Step, opening: str) -> Messages:
    """Return the history as a step's request has it."""
    if step.kind is Kind.COMPACT:
        return [{"role": "system", "content": opening}, {"role": "user", "content": step.text}]
    if step.kind is Kind.REGENERATE:
        return messages[:-1]
    return [*messages, {"role": step.role, "content": step.text}]


async def play(
    endpoint: str, model: str, conversation: Conversation, *, leg: str, turns: int, temperature: float
) -> list[Turn]:
    """Play the first turns of a conversation; the entries are those that went on from the turn before.

    A rewritten history (compacted, regenerated) is no re-tokenized one and is left out. Raises StreamFailed.
    """
    connection = await Connection.open(endpoint)
    messages: Messages = [{"role": "system", "content": conversation.opening}]
    found: list[Turn] = []
    held = 0
    try:
        for number, step in enumerate(conversation.steps[:turns]):
            messages = ask(messages, step, conversation.opening)
            body: dict[str, Any] = {
                "model": model,
                "messages": messages,
                "max_tokens": step.output_tokens,
                "temperature": temperature,
                "seed": number,
                "conversation_id": f"{leg}-{conversation.conversation_id}",
            }
            if step.stop:
                body["stop"] = list(step.stop)
            answer = await connection.chat(body)
            told = answer.told
            if number and step.kind is Kind.TURN and held:
                reused = int(told["reused_tokens"])
                found.append(
                    Turn(leg, conversation.conversation_id, number, held, min(reused, held), told["reason"])
                )
            held = int(told.get("held_tokens", 0))
            messages = [*messages, {"role": "assistant", "content": answer.text}]
    finally:
        await connection.close()
    return found


async def play_all(
    endpoints: Mapping[str, str], model: str, conversations: Sequence[Conversation], **how: Any
) -> list[Turn]:
    """Play every conversation on every leg; the legs of one conversation at the same time."""
    found: list[Turn] = []
    for conversation in conversations:
        legs = (play(endpoint, model, conversation, leg=leg, **how) for leg, endpoint in endpoints.items())
        found += [turn for turns in await asyncio.gather(*legs) for turn in turns]
    return found


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return what each leg reused of what was held."""
    legs: dict[str, Any] = {}
    for leg in dict.fromkeys(turn.leg for turn in turns):
        own = [turn for turn in turns if turn.leg == leg]
        held, reused = sum(turn.held_tokens for turn in own), sum(turn.reused_tokens for turn in own)
        legs[leg] = {
            "turns": len(own),
            "held_tokens": held,
            "reused_tokens": reused,
            "reused_share": round(reused / held, 4) if held else 0.0,
            "turns_that_lost": sum(1 for turn in own if turn.reused_tokens < turn.held_tokens),
            "lost_tokens_per_turn": round((held - reused) / len(own), 2),
        }
    return legs


def rows(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return every turn as plain data."""
    return [asdict(turn) for turn in turns]
