"""The engine's own counters, as its scheduler and connector report them (vLLM 0.29.0).

vllm is imported late: see env.
"""

from typing import Any

from kvloop.engine.port import EngineLoad
from kvloop.v1alpha1 import worker_pb2


class Counters:
    """Sums since the engine's start."""

    def __init__(self) -> None:
        self._sums = worker_pb2.EngineCounters()
        self._load = EngineLoad()

    def factory(self) -> Any:
        """Return what AsyncLLM takes as a stat logger factory."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counters = self

        class _Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """One per engine; all add to the same sums."""

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                """Add one step's statistics."""
                counters.add(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return _Logger

    def add(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Add one step's statistics; either may be None."""
        if iteration_stats is not None:
            prompt = iteration_stats.prompt_token_stats
            self._sums.local_tokens += prompt.local_cache_hit
            self._sums.external_tokens += prompt.external_kv_transfer
            self._sums.computed_tokens += prompt.computed
            self._sums.generated_tokens += iteration_stats.num_generation_tokens
            self._sums.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self._load.running = scheduler_stats.num_running_reqs
            self._load.waiting = scheduler_stats.num_waiting_reqs
            self._load.extra["kv_cache_usage"] = scheduler_stats.kv_cache_usage
            self._add_transfers(scheduler_stats.kv_connector_stats or {})

    def _add_transfers(self, stats: dict[str, Any]) -> None:
        self._sums.transfers += len(stats.get("bytes_transferred", ()))
        self._sums.transfer_bytes += int(sum(stats.get("bytes_transferred", ())))
        self._sums.transfer_descriptors += int(sum(stats.get("num_descriptors", ())))

    def snapshot(self) -> worker_pb2.EngineCounters:
        """Return a copy of the sums."""
        copy = worker_pb2.EngineCounters()
        copy.CopyFrom(self._sums)
        return copy

    @property
    def load(self) -> EngineLoad:
        """Return what the last step left to do."""
        return self._load
