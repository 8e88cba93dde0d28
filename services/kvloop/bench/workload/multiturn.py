"""Plain multi-turn conversations, with the parameters of vLLM's issue 32553.

| what | distribution |
|---|---|
| messages of a conversation | whole, uniform in [12, 18], rounded up to even: 6 to 9 turns |
| opening shared by all conversations | 500 tokens |
| opening of each conversation | log-normal, mean 4,000, median / mean 0.85, at most 10,000 tokens |
| input of a turn | whole, uniform in [120, 160] tokens |
| output of a turn | whole, uniform in [800, 1,200] tokens |
| pause before a turn | none by default |

One turn is a user's input and an answer, two messages. vLLM's generator calls each message a turn: its README
(benchmarks/multi_turn) has `num_turns` as the total of both sides, rounded to an even number.
"""

from dataclasses import dataclass

from kvloop.bench.workload.distributions import Constant, Distribution, LogNormal, UniformInt, whole
from kvloop.bench.workload.model import Conversation, Session, Step
from kvloop.bench.workload.words import rng_of, words


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """What conversations are like."""

    messages: Distribution = UniformInt(12, 18)
    """A user's and the answers, together."""
    common_opening_tokens: int = 500
    opening_tokens: Distribution = LogNormal(4_000, 0.85, high=10_000)
    input_tokens: Distribution = UniformInt(120, 160)
    output_tokens: Distribution = UniformInt(800, 1_200)
    gap_s: Distribution = Constant(0.0)

    def session(self, seed: int, number: int) -> Session:
        """Return the n-th session of a seed; which others are made changes nothing."""
        rng = rng_of(seed, "multi-turn", number)
        common = words(rng_of(seed, "common"), self.common_opening_tokens)
        own = words(rng, whole(self.opening_tokens, rng, 1))
        steps = []
        for index in range(-(-whole(self.messages, rng, 2) // 2)):
            text = words(rng, whole(self.input_tokens, rng, 1))
            output, gap = whole(self.output_tokens, rng, 1), self.gap_s.draw(rng)
            steps.append(Step(text, output, gap_s=gap if index else 0.0))
        name = f"multi-turn-{seed}-{number}"
        return Session(Conversation(name, tuple(steps), opening=f"{common} {own}".strip()))

    def sessions(self, seed: int, count: int) -> list[Session]:
        """Return the first sessions of a seed."""
        return [self.session(seed, number) for number in range(count)]
