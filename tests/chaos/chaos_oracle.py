"""What an undisturbed fleet answers."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from chaos_fleet import SIMULATED
from chaos_traffic import Routers, Said

from kvloop.engine.port import DecodeJob
from kvloop.engine.settings import EngineSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime import tokens
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2


class Oracle(Protocol):
    """Knows right answers."""

    late: bool
    """Whether it has to be asked once the faults are over."""

    async def answer(self, prompt: Sequence[int], sampling: sampling_pb2.SamplingParams) -> Said:
        """Return the answer."""
        ...


class SimulatedOracle:
    """An engine of its own that nothing disturbs."""

    late = False

    def __init__(self) -> None:
        settings = EngineSettings.model_validate(SIMULATED)
        made = SimulatedSettings.from_engine_settings(settings)
        self._engine = SimulatedEngine(replace(made, preset="instant"), "decode")
        self._serial = itertools.count()

    async def start(self) -> None:
        """Bring the engine up."""
        await self._engine.start()

    async def stop(self) -> None:
        """End the engine."""
        await self._engine.stop()

    async def answer(self, prompt: Sequence[int], sampling: sampling_pb2.SamplingParams) -> Said:
        """Return the answer, computed here."""
        said = Said()
        job = DecodeJob(request_id=str(next(self._serial)), prompt=tokens.pack(prompt), sampling=sampling)
        async for delta in self._engine.decode(job):
            said.token_ids += delta.token_ids
            said.text += delta.text
        return said


class ColdOracle:
    """The fleet itself once it is left alone: turns that can reuse nothing and leave nothing."""

    late = True

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._serial = itertools.count()

    async def answer(self, prompt: Sequence[int], sampling: sampling_pb2.SamplingParams) -> Said:
        """Return the answer of a cold turn."""
        request = router_service_pb2.GenerateRequest(
            prompt_token_ids=tokens.pack(prompt),
            sampling=sampling,
            cache_salt=f"cold-{next(self._serial)}",
            reuse_policy=router_service_pb2.REUSE_POLICY_FORBID,
            retention=turn_pb2.Retention(hold=False),
        )
        said = await self._routers.say(self._routers.pick(), request)
        assert said.summary is not None
        assert said.summary.reuse.tokens.computed == len(prompt)
        return said
