"""vLLM's own NIXL connector, for engines on machines without a GPU.

Its progress thread would spin on one core and its worker would be pinned to the last one, on which the other
engine's is as well. kvloop's connector is spared both, so that peers are too.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.platforms import current_platform

from kvloop.connector.worker import construct_on_cpu


class QuietNixlConnector(NixlConnector):  # type: ignore[misc]
    """vLLM's connector; only how it starts on a CPU differs."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if current_platform.device_type == "cpu":
            construct_on_cpu(super().__init__, vllm_config, role, kv_cache_config)
        else:
            super().__init__(vllm_config, role, kv_cache_config)
