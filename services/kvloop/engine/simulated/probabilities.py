"""Log probabilities for those who ask: the right shape, and numbers that mean nothing."""

from kvloop.v1alpha1 import turn_pb2

MAX_LOGPROBS = 20
"""Alternatives that are given at most, as vLLM's default."""


def position(token: int, count: int, vocab_size: int) -> turn_pb2.PositionLogprobs:
    """Return a token, the most likely one, and count - 1 alternatives."""
    return turn_pb2.PositionLogprobs(
        candidates=[
            turn_pb2.TokenLogprob(token_id=(token + rank) % vocab_size, logprob=-0.1 - rank, rank=rank + 1)
            for rank in range(max(1, count))
        ]
    )


def prompt(token_ids: list[int], count: int, vocab_size: int) -> list[turn_pb2.PositionLogprobs]:
    """Return the entries of a prompt; the first position has no candidates."""
    entries = [turn_pb2.PositionLogprobs()]
    entries += (position(token, count, vocab_size) for token in token_ids[1:])
    return entries
