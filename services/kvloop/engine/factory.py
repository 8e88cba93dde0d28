"""The one place that knows which engine the settings mean."""

from kvloop.engine.port import Engine
from kvloop.engine.settings import EngineSettings, Role


def create_engine(settings: EngineSettings, role: Role) -> Engine:
    """Return an engine, not yet started. vLLM is imported only when it is asked for.

    Raises ValueError with what to change when the machine contradicts the settings.
    """
    if settings.engine == "simulated":
        from kvloop.engine.simulated.engine import SimulatedEngine

        return SimulatedEngine(settings, role)
    from kvloop.engine.vllm.adapter import VllmEngine

    return VllmEngine(settings, role)
