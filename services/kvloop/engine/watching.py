"""Engines as metrics show them."""

from kvloop.engine.port import TransferFacts
from kvloop.runtime.metrics import Metrics
from kvloop.v1alpha1 import worker_pb2


def watch_engine(metrics: Metrics, pool: worker_pb2.PoolState, counters: worker_pb2.EngineCounters) -> None:
    """Take over the engine's pool and its own counters."""
    for source in ("local", "external", "computed"):
        value = getattr(counters, f"{source}_tokens")
        metrics.put("kvloop_engine_prompt_tokens", source, value=value)
    metrics.put("kvloop_engine_generated_tokens", value=counters.generated_tokens)
    metrics.put("kvloop_engine_transfers", value=counters.transfers)
    metrics.put("kvloop_engine_transfer_bytes", value=counters.transfer_bytes)
    metrics.put("kvloop_engine_preemptions", value=counters.preemptions)
    for state in ("free", "held", "total"):
        metrics.put("kvloop_pool_blocks", state, value=getattr(pool, f"{state}_blocks"))
    metrics.put("kvloop_pool_held_share", value=pool.held_blocks / max(1, pool.total_blocks))


def watch_transfer(metrics: Metrics, transfer: TransferFacts | None) -> None:
    """Count one KV read, if there was one."""
    if transfer is not None:
        metrics.observe("kvloop_transfer_seconds", value=transfer.duration_ms / 1000)
        metrics.add("kvloop_transfer_bytes", amount=transfer.bytes)
        metrics.add("kvloop_transfer_descriptors", amount=transfer.descriptors)
