"""How an answer goes: which token a digest means under the sampling parameters, and what ends it."""

import hashlib
import random
from dataclasses import dataclass
from typing import NamedTuple

from kvloop.engine.simulated.lexicon import Lexicon
from kvloop.engine.simulated.model import Model
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

STOP = turn_pb2.FinishReason.FINISH_REASON_STOP
LENGTH = turn_pb2.FinishReason.FINISH_REASON_LENGTH

_TRIES = 64
"""How often another token is looked for in place of a stop token that may not come yet."""


class Ending(NamedTuple):
    """What ended an answer."""

    reason: "turn_pb2.FinishReason.ValueType"
    stop_reason: str | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, as far as they mean something to digests.

    Penalties, bias and structured outputs do not. Temperature 0, the default of this model, is greedy;
    above it a seed names the answer, and without one nobody does.
    """

    limit: int
    min_tokens: int
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    eos: int
    ignore_eos: bool
    mix: bytes
    allowed: tuple[int, ...]
    include_stop: bool
    with_text: bool
    logprobs: int | None

    @classmethod
    def of(
        cls, params: sampling_pb2.SamplingParams, *, left: int, eos: int, dice: random.Random
    ) -> "Sampling":
        """Return the parameters of a turn of which max_model_len leaves so many tokens."""
        mix = b""
        if params.temperature > 0:
            seed = params.seed if params.HasField("seed") else dice.getrandbits(63)
            mix = b"seed" + seed.to_bytes(8, "little", signed=True)
        return cls(
            limit=min(params.max_tokens, left) if params.HasField("max_tokens") else left,
            min_tokens=params.min_tokens,
            stops=tuple(params.stop),
            stop_ids=frozenset(params.stop_token_ids),
            eos=eos,
            ignore_eos=params.ignore_eos,
            mix=mix,
            allowed=tuple(sorted(set(params.allowed_token_ids))),
            include_stop=params.include_stop_str_in_output,
            with_text=params.detokenize or not params.HasField("detokenize"),
            logprobs=params.logprobs if params.HasField("logprobs") else None,
        )

    def choose(self, model: Model, digest: bytes, produced: int) -> int:
        """Return the next token after so many."""
        if self.mix:
            digest = hashlib.blake2b(digest + self.mix, digest_size=32).digest()
        early = produced < self.min_tokens
        may_end = self.ignore_eos or not early
        if may_end and model.ends(digest) and (not self.allowed or self.eos in self.allowed):
            return self.eos
        token = self._ordinary(model, digest)
        for _ in range(_TRIES):
            if not early or token not in self.stop_ids:
                break
            digest = hashlib.blake2b(digest, digest_size=32).digest()
            token = self._ordinary(model, digest)
        return token

    def _ordinary(self, model: Model, digest: bytes) -> int:
        token = model.token(digest)
        return self.allowed[token % len(self.allowed)] if self.allowed else token


class Answer:
    """One answer as it grows: text, held back where a stop string may have begun, and its end."""

    __slots__ = ("_hold_back", "_lexicon", "_sampling", "_sent", "_text", "count")

    def __init__(self, sampling: Sampling, lexicon: Lexicon) -> None:
        self._sampling = sampling
        self._lexicon = lexicon
        self._text = ""
        self._sent = 0
        self.count = 0
        longest = max(map(len, sampling.stops), default=0)
        self._hold_back = longest - 1 if longest and not sampling.include_stop else 0

    def add(self, token: int) -> tuple[str, Ending | None]:
        """Take the next token; returns the text that may be shown now, and the end if this is it."""
        s = self._sampling
        self.count += 1
        count = self.count
        ending: Ending | None = None
        shown = True
        if count >= s.min_tokens:
            if token == s.eos and not s.ignore_eos:
                ending = Ending(STOP, None)
            elif token in s.stop_ids:
                ending = Ending(STOP, str(token))
                shown = s.include_stop
        if ending is None and count >= s.limit:
            ending = Ending(LENGTH, None)
        if not s.with_text:
            return "", ending
        if not s.stops:
            return self._lexicon.word(token) if shown else "", ending
        if shown:
            self._text += self._lexicon.word(token)
            if count > s.min_tokens and (ending is None or ending.reason == LENGTH):
                ending = self._stopped() or ending
        end = len(self._text) if ending else max(self._sent, len(self._text) - self._hold_back)
        new = self._text[self._sent : end]
        self._sent = end
        return new, ending

    def _stopped(self) -> Ending | None:
        found = [(at, stop) for stop in self._sampling.stops if (at := self._text.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._text = self._text[: at + (len(stop) if self._sampling.include_stop else 0)]
        return Ending(STOP, stop)
