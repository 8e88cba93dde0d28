"""What each way to D's first token of a turn costs, in milliseconds: pure functions of measured rates.

    RECOMPUTE  wait for P + compute the prompt             + hand it over + first step
    READBACK   wait for P + read + compute the new suffix  + hand it over + first step
    DIRECT     wait for D                                  + compute the new suffix on D

Every term is linear in a few features, so that one estimator learns them all (learning.py): computing
positions [start, end) costs base + per token + per (end^2 - start^2), the latter for attention; moving KV
costs base + per byte + per descriptor. A D that holds the conversation is handed the suffix only.

P may have told the answer's first token before the hand-over (beginning.py). It is D's first one that is
weighed: from there on the answer flows, and until then the turn is work for both.
"""

from dataclasses import dataclass

Features = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """Coefficients of one kind of work, in milliseconds per unit of its features."""

    values: Features

    def ms(self, features: Features) -> float:
        """Return the milliseconds of a piece of work."""
        return sum(value * feature for value, feature in zip(self.values, features, strict=True))


def compute_features(start: int, end: int) -> Features:
    """Return the features of computing positions start to end of a prompt."""
    return (1.0, float(end - start), float(end * end - start * start))


def transfer_features(num_bytes: float, descriptors: float) -> Features:
    """Return the features of one KV read."""
    return (1.0, float(num_bytes), float(descriptors))


@dataclass(frozen=True, slots=True)
class Rates:
    """What a pair of workers was measured to need."""

    prefill: Terms
    """P computing; see compute_features."""
    decode: Terms
    """D computing."""
    transfer: Terms
    """A read between the two; see transfer_features."""
    first_step_ms: float
    """D's first token once the KV is there."""
    bytes_per_token: float
    descriptors_per_token: float


@dataclass(frozen=True, slots=True)
class Work:
    """One turn, as far as it is known before its first leg. Tokens."""

    prompt: int
    reusable: int
    """Expected to be shared with what is held, at most prompt - 1."""
    at_holder: bool
    """Whether the turn would be decoded where the history is held."""
    prefill_wait_ms: float = 0.0
    decode_wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected milliseconds to D's first token."""

    direct: float
    readback: float
    recompute: float


def expected(work: Work, rates: Rates) -> Costs:
    """Return what each way would cost, whether or not it is open."""
    suffix = compute_features(work.reusable, work.prompt)
    handed = work.prompt - (work.reusable if work.at_holder else 0)
    after = _move(handed, rates) + rates.first_step_ms
    return Costs(
        direct=work.decode_wait_ms + rates.decode.ms(suffix),
        readback=work.prefill_wait_ms + prefill_leg(work.reusable, work.prompt, rates) + after,
        recompute=work.prefill_wait_ms + prefill_leg(0, work.prompt, rates) + after,
    )


def prefill_leg(read: int, prompt: int, rates: Rates) -> float:
    """Return the milliseconds in which P reads so many tokens of a prompt and computes the rest."""
    return _move(read, rates) + rates.prefill.ms(compute_features(read, prompt))


def _move(tokens: int, rates: Rates) -> float:
    if tokens <= 0:
        return 0.0
    features = transfer_features(tokens * rates.bytes_per_token, tokens * rates.descriptors_per_token)
    return rates.transfer.ms(features)
