"""How a turn comes by the KV of its prompt: one pure function of what is known before the first leg.

The directory's entry holds truncated digests of the held history at a few lengths. Those that agree with
the new prompt, and the first that does not, bound the tokens that both share to [matched, upper); P settles
the exact number with the holder. So a verdict is an expectation: a wrong one costs time, never a token.

A rule looks at the question and either answers or passes on; the first answer stands.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from kvloop.router.costs import Costs
from kvloop.runtime.digests import COARSE_BYTES, Prefixes, prefix_digests
from kvloop.runtime.tokens import count
from kvloop.v1alpha1 import lease_pb2, turn_pb2

Verdict = turn_pb2.Verdict
Why = turn_pb2.ReuseReason


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens that prompt and held history share: at least matched, fewer than upper."""

    matched: int
    upper: int
    diverged: bool
    """Whether a digest spoke against the prompt; otherwise one of the two just ended."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What the directory knows of the history."""

    num_tokens: int
    remaining_s: float
    held: bool


@dataclass(frozen=True, slots=True)
class Holder:
    """The decode worker that holds the history, as far as it is known here."""

    ready: bool
    same_epoch: bool
    can_serve_reads: bool
    """Same KV format as the model's workers, and reads are switched on."""
    can_go_on: bool = False
    """The same, and its prefix cache is on."""
    direct_tokens: int = 0
    """Suffix tokens of DIRECT turns that this router has it compute right now."""
    overloaded: bool = False
    """Whether it has so much more to do than others that a turn is decoded elsewhere if it can be."""


@dataclass(frozen=True, slots=True)
class DirectLimits:
    """What a decode worker may compute itself, in tokens."""

    max_suffix: int
    """Of one turn."""
    budget: int
    """Of all turns at a time; one that alone has more is taken when there is no other."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a verdict rests on."""

    prompt_tokens: int
    threshold: int
    """Below this many readable tokens a prompt is recomputed."""
    ruled_out: "turn_pb2.ReuseReason.ValueType | None" = None
    """Why reuse was not even tried, if so."""
    lease: Lease | None = None
    holder: Holder | None = None
    """None when no such worker is known."""
    expected: Expected | None = None
    direct: DirectLimits | None = None
    """None when DIRECT is switched off, or was refused to this turn."""
    costs: Costs | None = None
    """Expected milliseconds of each way; None leaves the choice to the limits alone."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, its reason, and how many tokens are expected to be reused (the upper bound)."""

    verdict: "turn_pb2.Verdict.ValueType"
    reason: "turn_pb2.ReuseReason.ValueType"
    expected_tokens: int = 0


Rule = Callable[[Question], Decision | None]


def decide(question: Question) -> Decision:
    """Return the decision of the first rule that has one."""
    for rule in _RULES:
        decision = rule(question)
        if decision is not None:
            return decision
    raise AssertionError("the last rule always answers")


def expect(
    key: bytes, packed: bytes, entry: lease_pb2.DirectoryEntry, prefixes: Prefixes | None = None
) -> Expected:
    """Return the bounds that an entry's digests set for a new prompt (packed token ids).

    prefixes: the prompt's, under the same key, if some were hashed before.
    """
    prompt_tokens = count(packed)
    claims = [c for c in entry.digests if 0 < c.num_tokens <= prompt_tokens]
    lengths = [c.num_tokens for c in claims]
    matched = 0
    if lengths != sorted(lengths):
        claims = []
    if claims and _proven(prefixes or Prefixes(key, packed), claims[-1]):
        # One equal digest proves all of its prefix: a history that goes on costs one hash.
        matched = lengths[-1]
    elif claims:
        for claim, digest in zip(claims, prefix_digests(key, packed, lengths), strict=True):
            if not hmac.compare_digest(digest[:COARSE_BYTES], claim.digest):
                return Expected(matched, claim.num_tokens, diverged=True)
            matched = claim.num_tokens
    # The digest of the whole prompt says nothing here: the last token is always computed.
    end = min(entry.num_tokens, prompt_tokens - 1)
    return Expected(min(matched, end), end + 1, diverged=False)


def _proven(prefixes: Prefixes, claim: lease_pb2.CoarseDigest) -> bool:
    return hmac.compare_digest(prefixes.digest(claim.num_tokens)[:COARSE_BYTES], claim.digest)


def cold(reason: "turn_pb2.ReuseReason.ValueType") -> Decision:
    """Return the decision to recompute."""
    return Decision(Verdict.VERDICT_RECOMPUTE, reason)


def _ruled_out(question: Question) -> Decision | None:
    return None if question.ruled_out is None else cold(question.ruled_out)


def _lease(question: Question) -> Decision | None:
    if question.lease is None:
        return cold(Why.REUSE_REASON_NOT_FOUND)
    if question.lease.remaining_s <= 0:
        return cold(Why.REUSE_REASON_EXPIRED)
    return None


def _holder(question: Question) -> Decision | None:
    holder = question.holder
    if holder is None:
        return cold(Why.REUSE_REASON_DECODE_UNAVAILABLE)
    # A restarted worker has lost the KV whether or not it is ready again.
    if not holder.same_epoch:
        return cold(Why.REUSE_REASON_EPOCH)
    if not holder.ready:
        return cold(Why.REUSE_REASON_DECODE_UNAVAILABLE)
    if not holder.can_serve_reads:
        return cold(Why.REUSE_REASON_INCOMPATIBLE)
    return None


def _direct(question: Question) -> Decision | None:
    lease, holder, expected, limits = question.lease, question.holder, question.expected, question.direct
    if limits is None or lease is None or holder is None or expected is None:
        return None
    # Only a prompt that is proven to go on from the whole of what is held.
    proven = not expected.diverged and expected.matched >= lease.num_tokens >= 1
    if not proven or not holder.can_go_on or holder.overloaded:
        return None
    suffix = question.prompt_tokens - lease.num_tokens
    if not 0 < suffix <= limits.max_suffix:
        return None
    if holder.direct_tokens and holder.direct_tokens + suffix > limits.budget:
        return None
    if question.costs is not None:
        # What is no longer held can't be read.
        others = (question.costs.readback, question.costs.recompute)[0 if lease.held else 1 :]
        if question.costs.direct > min(others):
            return None
    return Decision(Verdict.VERDICT_DIRECT, Why.REUSE_REASON_PROVEN, lease.num_tokens)


def _held(question: Question) -> Decision | None:
    # What is no longer held can't be read; only the worker itself may still have it.
    if question.lease is not None and not question.lease.held:
        return cold(Why.REUSE_REASON_EXPIRED)
    return None


def _read(question: Question) -> Decision:
    expected = question.expected
    most = 0 if expected is None else min(expected.upper, question.prompt_tokens) - 1
    if most < max(question.threshold, 1):
        diverged = expected is not None and expected.diverged
        return cold(Why.REUSE_REASON_DIVERGED if diverged else Why.REUSE_REASON_BELOW_THRESHOLD)
    if question.costs is not None and question.costs.readback > question.costs.recompute:
        return cold(Why.REUSE_REASON_COSTLIER)
    return Decision(Verdict.VERDICT_READBACK, Why.REUSE_REASON_PROVEN, most)


_RULES: tuple[Rule, ...] = (_ruled_out, _lease, _holder, _direct, _held, _read)
