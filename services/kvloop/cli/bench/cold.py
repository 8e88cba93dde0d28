"""A cold engine of our own: what every answer of simulated workers is compared with."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvloop.engine.port import DecodeJob
from kvloop.engine.settings import EngineSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.runtime import tokens
from kvloop.v1alpha1 import sampling_pb2


class ColdEngine:
    """A context. It has the workers' weights, no prefix cache, and nobody to read from."""

    def __init__(self, workers: Mapping[str, Any]) -> None:
        """Take the workers' settings."""
        own = {"enable_prefix_caching": False, "extra_engine_args": {"preset": "instant"}}
        self._engine = SimulatedEngine(EngineSettings(**{**workers, **own}), "decode")
        self._asked = 0

    async def __aenter__(self) -> Self:
        """Start it."""
        await self._engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        await self._engine.stop()

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the greedy answer of exactly max_tokens tokens, everything computed."""
        self._asked += 1
        sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ids: list[int] = []
        async for delta in self._engine.decode(
            DecodeJob(f"cold-{self._asked}", tokens.pack(prompt), sampling)
        ):
            ids.extend(delta.token_ids)
            if delta.finish is not None and delta.finish.sources.computed != len(prompt):
                raise AssertionError("the cold engine was not cold")
        return ids
