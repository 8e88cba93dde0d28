"""A trace of coding agents: tool loops, subagents, compactions, regenerations, stop strings.

The figures that are published (v#57103) are the median of 43 turns, 142k tokens in, 444 out, more than 96%
prefix hits, and subagents in 44% of the sessions. The rest is chosen so that those come out; every
distribution is here:

| what | distribution |
|---|---|
| turns of a session's main conversation | log-normal, median 43, sigma 0.6, in [3, 200], whole |
| opening shared by all (instructions, tools) | 3,000 tokens |
| opening of each (files) | log-normal, median 9,000, sigma 0.7, in [1,000, 60,000] tokens |
| a turn is a user's, not a tool's | the first, then 12% of the others |
| user's input | log-normal, median 120, sigma 0.8, in [5, 2,000] tokens |
| tool's result | log-normal, median 900, sigma 1.2, in [10, 16,000] tokens |
| output | log-normal, median 300, sigma 0.9, in [16, 4,000] tokens (mean 444) |
| pause before a tool's result | log-normal, median 2 s, sigma 1.0, in [0.05, 60] s |
| pause before a user's input | log-normal, median 25 s, sigma 1.1, in [1, 600] s |
| the session has forks | 44% |
| forks of such a session | whole, uniform in [1, 5], after one step that is not the last, all at once |
| turns of a fork | log-normal, median 8, sigma 0.5, in [2, 40], whole |
| a turn regenerates the last answer | 2% (never the first) |
| a turn compacts | when the history is above 140,000 tokens, to a summary of 2,000 tokens |
| an agent asks for a stop string (ReAct's) | 30% of the sessions, at every step |

A model that is given random ids hardly ever says ReAct's "Observation:", so that its answers go on to their
length; `stop` is another string then. In the made-up words of simulated engines, "zu bi" comes about
once in 300 tokens.

`scale` shortens tokens, `time_scale` pauses, so that the trace fits small models and short runs; what happens
in it stays the same. History is counted with answers at their longest.
"""

import random
from dataclasses import dataclass

from kvloop.bench.workload.distributions import Distribution, LogNormal, UniformInt, whole
from kvloop.bench.workload.model import Conversation, Kind, Session, Step
from kvloop.bench.workload.words import rng_of, words

REACT_STOP = "Observation:"
_LONGEST_TOKENS = 160_000
"""Prompt and answer, at scale 1: just below a compaction, the longest result, the longest answer."""
_ROUNDED_UP = 4


def fitting_scale(max_model_len: int) -> float:
    """Return the largest scale, in thousandths, at which every conversation fits; 0: none does."""
    return max(0, (max_model_len - _ROUNDED_UP) * 1000 // _LONGEST_TOKENS) / 1000


@dataclass(frozen=True, slots=True)
class Agentic:
    """What sessions are like."""

    turns: Distribution = LogNormal.by_median(43, 0.6, 3, 200)
    fork_turns: Distribution = LogNormal.by_median(8, 0.5, 2, 40)
    forks: Distribution = UniformInt(1, 5)
    fork_share: float = 0.44
    user_share: float = 0.12
    regenerate_share: float = 0.02
    react_share: float = 0.30
    common_opening_tokens: int = 3_000
    opening_tokens: Distribution = LogNormal.by_median(9_000, 0.7, 1_000, 60_000)
    user_tokens: Distribution = LogNormal.by_median(120, 0.8, 5, 2_000)
    tool_tokens: Distribution = LogNormal.by_median(900, 1.2, 10, 16_000)
    output_tokens: Distribution = LogNormal.by_median(300, 0.9, 16, 4_000)
    tool_gap_s: Distribution = LogNormal.by_median(2, 1.0, 0.05, 60)
    user_gap_s: Distribution = LogNormal.by_median(25, 1.1, 1, 600)
    compact_above_tokens: int = 140_000
    summary_tokens: int = 2_000
    stop: str = REACT_STOP
    scale: float = 1.0
    time_scale: float = 1.0

    def session(self, seed: int, number: int) -> Session:
        """Return the n-th session of a seed; which others are made changes nothing."""
        rng = rng_of(seed, "agentic", number)
        name = f"agentic-{seed}-{number}"
        common = words(rng_of(seed, "instructions"), self._scaled(self.common_opening_tokens))
        own = self._tokens(self.opening_tokens, rng)
        opening = f"{common} {words(rng, own)}"
        stop = (self.stop,) if rng.random() < self.react_share else ()
        count = whole(self.turns, rng, 1)
        start = self._scaled(self.common_opening_tokens) + own
        steps, lengths = self._steps(rng, count, start, start, stop)
        forks: tuple[Conversation, ...] = ()
        if rng.random() < self.fork_share:
            after = rng.randint(1, max(1, count - 1))
            forks = tuple(
                Conversation(
                    f"{name}-fork-{index}",
                    self._steps(rng, whole(self.fork_turns, rng, 1), lengths[after - 1], start, stop)[0],
                    fork_after=after,
                )
                for index in range(whole(self.forks, rng, 1))
            )
        return Session(Conversation(name, steps, opening=opening), forks)

    def sessions(self, seed: int, count: int) -> list[Session]:
        """Return the first sessions of a seed."""
        return [self.session(seed, number) for number in range(count)]

    def _steps(
        self, rng: random.Random, count: int, length: int, opening: int, stop: tuple[str, ...]
    ) -> tuple[tuple[Step, ...], list[int]]:
        """Return steps, and the history's length after each."""
        steps: list[Step] = []
        lengths: list[int] = []
        for index in range(count):
            output = self._tokens(self.output_tokens, rng)
            if length > self._scaled(self.compact_above_tokens):
                summary = self._scaled(self.summary_tokens)
                step = Step(words(rng, summary), output, Kind.COMPACT, stop=stop)
                length = opening + summary + output
            elif index and rng.random() < self.regenerate_share:
                # The new answer takes the last one's place.
                step = Step("", output, Kind.REGENERATE, gap_s=self._gap(self.user_gap_s, rng), stop=stop)
                length += output - steps[-1].output_tokens
            else:
                by_user = not index or rng.random() < self.user_share
                size = self._tokens(self.user_tokens if by_user else self.tool_tokens, rng)
                pause = self._gap(self.user_gap_s if by_user else self.tool_gap_s, rng) if index else 0.0
                role = "user" if by_user else "tool"
                step = Step(words(rng, size), output, role=role, gap_s=pause, stop=stop)
                length += size + output
            steps.append(step)
            lengths.append(length)
        return tuple(steps), lengths

    def _scaled(self, tokens: float) -> int:
        return max(1, round(tokens * self.scale))

    def _tokens(self, distribution: Distribution, rng: random.Random) -> int:
        return self._scaled(distribution.draw(rng))

    def _gap(self, distribution: Distribution, rng: random.Random) -> float:
        return distribution.draw(rng) * self.time_scale
