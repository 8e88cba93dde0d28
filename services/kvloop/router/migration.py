"""How an answer goes on when the decode worker that gave it is lost after tokens were passed on.

Three ways, none of which passes on a token twice or leaves one out:

- what was passed on ends the answer: only the summary is missing, and is made here;
- CONTINUE: prompt and answer so far become the prompt of a new attempt. Exact where the next token depends
  on the tokens before it alone: greedy answers go on as they would have, sampled ones with a fresh sample;
- REPLAY: the turn is served again from its own prompt, and what was passed on is compared and left out.
  For whatever keeps state of the answer (a grammar, penalties, stop strings, a seed's random numbers, ...),
  which thereby is rebuilt. An answer that does not repeat itself can't be continued.

A replay needs an answer that can repeat itself. So a sampled turn that keeps such state and brings no seed is
given one when it is admitted.
"""

import secrets
from dataclasses import dataclass

from kvloop.router.relay import merge
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import decode_service_pb2, router_service_pb2, sampling_pb2, turn_pb2

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Sent:
    """What was passed on of an answer."""

    token_ids: bytes
    """Packed little-endian uint32."""
    text: str
    ending: turn_pb2.Chunk | None
    """The last chunk, if it says how the answer ended."""

    @classmethod
    def of(cls, chunks: list[bytes]) -> "Sent":
        """Return what serialized GenerateResponses with chunks held."""
        chunk = router_service_pb2.GenerateResponse.FromString(merge(chunks)).chunk
        return cls(chunk.token_ids, chunk.text, chunk if chunk.finish_reason else None)

    def summary(self) -> decode_service_pb2.DecodeSummary:
        """Return the summary of an answer that has ended; nothing is known to be held of it."""
        assert self.ending is not None
        summary = decode_service_pb2.DecodeSummary(
            finish_reason=self.ending.finish_reason, output_tokens=tokens.count(self.token_ids)
        )
        if self.ending.HasField("stop_reason"):
            summary.stop_reason = self.ending.stop_reason
        return summary


class Replay:
    """Compares an answer given again with what was passed on, and lets through what follows."""

    def __init__(self, sent: Sent) -> None:
        self._ids = sent.token_ids
        self._text = sent.text

    @property
    def over(self) -> bool:
        """Tell whether all that was passed on has come again."""
        return not self._ids and not self._text

    def rest(self, raw: bytes) -> bytes | None:
        """Return a serialized chunk less what was passed on; None when nothing is left of it.

        Failure WORKER_FAILED: the answer is another one.
        """
        chunk = router_service_pb2.GenerateResponse.FromString(raw).chunk
        ids, text = chunk.token_ids, chunk.text
        old_ids, old_text = min(len(ids), len(self._ids)), min(len(text), len(self._text))
        if ids[:old_ids] != self._ids[:old_ids] or text[:old_text] != self._text[:old_text]:
            raise lost("the answer can't be repeated")
        self._ids, self._text = self._ids[old_ids:], self._text[old_text:]
        rest = turn_pb2.Chunk(
            token_ids=ids[old_ids:],
            text=text[old_text:],
            logprobs=chunk.logprobs[old_ids // tokens.TOKEN_BYTES :],
            finish_reason=chunk.finish_reason,
        )
        if chunk.HasField("stop_reason"):
            rest.stop_reason = chunk.stop_reason
        if not rest.token_ids and not rest.text and not rest.finish_reason:
            return None
        return router_service_pb2.GenerateResponse(chunk=rest).SerializeToString()


def keeps_state(sampling: sampling_pb2.SamplingParams) -> bool:
    """Tell whether an answer's next token or its end depends on more than the tokens before it.

    repetition_penalty does not: it counts the prompt's tokens like the answer's. An absent max_tokens does:
    the model may have a default of its own, which would be granted anew.
    """
    return bool(
        sampling.HasField("seed")
        or sampling.HasField("structured_outputs")
        or sampling.HasField("repetition_detection")
        or sampling.HasField("thinking_token_budget")
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.stop
        or sampling.bad_words
        or not sampling.HasField("max_tokens")
        or sampling.extra_args_json not in {"", "{}"}
        or (sampling.HasField("spaces_between_special_tokens") and not sampling.spaces_between_special_tokens)
    )


def is_greedy(sampling: sampling_pb2.SamplingParams) -> bool:
    """Tell whether the answer is surely greedy; without a temperature the model's own default decides."""
    return sampling.HasField("temperature") and sampling.temperature == 0


def repeatable(sampling: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """Return sampling with a seed where a replay would need one; otherwise what was given."""
    if sampling.HasField("seed") or is_greedy(sampling) or not keeps_state(sampling):
        return sampling
    seeded = sampling_pb2.SamplingParams()
    seeded.CopyFrom(sampling)
    seeded.seed = secrets.randbits(_SEED_BITS)
    return seeded


def continued(sampling: sampling_pb2.SamplingParams, count: int) -> sampling_pb2.SamplingParams:
    """Return the sampling of an answer that goes on after so many tokens."""
    rest = sampling_pb2.SamplingParams()
    rest.CopyFrom(sampling)
    rest.max_tokens = sampling.max_tokens - count
    if sampling.HasField("min_tokens"):
        rest.min_tokens = max(0, sampling.min_tokens - count)
    # The first attempt has told them.
    rest.ClearField("prompt_logprobs")
    return rest


def only(sampling: sampling_pb2.SamplingParams, token: bytes) -> sampling_pb2.SamplingParams:
    """Return the sampling of an answer whose one token, packed, is known."""
    rest = sampling_pb2.SamplingParams()
    rest.CopyFrom(sampling)
    rest.ClearField("allowed_token_ids")
    rest.allowed_token_ids.extend(tokens.unpack(token))
    return rest


def bounded(
    sampling: sampling_pb2.SamplingParams, default: int | None, left: int
) -> sampling_pb2.SamplingParams:
    """Return sampling with the limit that a worker would fill in; unchanged where that is not known.

    default: the model's own, 0 for none. left: tokens that the context leaves.
    """
    if default is None or sampling.HasField("max_tokens"):
        return sampling
    limited = sampling_pb2.SamplingParams()
    limited.CopyFrom(sampling)
    limited.max_tokens = min(left, max(default, sampling.min_tokens)) if default else left
    return limited


def lost(why: str) -> Failure:
    """Return the failure of an answer that nobody can go on with."""
    return Failure(
        Reason.ERROR_REASON_WORKER_FAILED,
        f"the decode worker failed after the answer had begun, and {why}",
        metadata={"migration": why},
    )
