"""The prompt-length sweep: two turns whose second prompt has exactly the nominal length.

first prompt                                    answer         new input
|<- nominal - answer_tokens - suffix_tokens ->|<- answer ->|<- suffix_tokens ->|
|<-------------------------- second prompt: nominal ------------------------->|
"""

from dataclasses import dataclass

from kvloop.bench.workload.words import rng_of, words


@dataclass(frozen=True, slots=True)
class LengthSample:
    """Two turns."""

    nominal_tokens: int
    repetition: int
    opening: str
    suffix: str


@dataclass(frozen=True, slots=True)
class LengthSweep:
    """Sizes in tokens, under WordEncoder."""

    suffix_tokens: int = 160
    answer_tokens: int = 32

    def sample(self, seed: int, nominal_tokens: int, repetition: int) -> LengthSample:
        """Return one sample. Raises ValueError when the length leaves no history."""
        opening = nominal_tokens - self.suffix_tokens - self.answer_tokens
        if opening < 1:
            raise ValueError(
                f"a prompt of {nominal_tokens} tokens leaves no history before an answer of"
                f" {self.answer_tokens} and an input of {self.suffix_tokens};"
                " raise the first or lower the others"
            )
        rng = rng_of(seed, "lengths", nominal_tokens, repetition)
        return LengthSample(nominal_tokens, repetition, words(rng, opening), words(rng, self.suffix_tokens))
