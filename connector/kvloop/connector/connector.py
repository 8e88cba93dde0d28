"""KvloopConnector: what vLLM instantiates. A thin facade over the scheduler side and the worker side.

Use it as kv_connector "KvloopConnector" with kv_connector_module_path "kvloop.connector.connector", on
prefill and decode engines alike, with kv_load_failure_policy "fail". kv_connector_extra_config, besides
vLLM's own keys (bidirectional_kv_xfer must be true):

- kvloop_control_path: unix socket of the table of holds; with data parallelism ".<rank>" is appended
- kvloop_hold_share: share of the pool's blocks that decode holds may keep (0.5)
- kvloop_start_margin_s: a read starts only this long before its handle's deadline (2.0)
- kvloop_allow_untested: run on vLLM versions and models that the plugin was not tested with (false)
- kvloop_weights_version: name of the weights under the model's name: handles of others are refused ("")
- kvloop_test_hooks: let the control socket break things, see kvloop.connector.hooks (false)
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

from kvloop.connector import compat
from kvloop.connector.metadata import WorkerReport
from kvloop.connector.scheduler import KvloopScheduler
from kvloop.connector.worker import KvloopWorker


class KvloopConnector(NixlConnector):  # type: ignore[misc]
    """NIXL transfers over holds in the block pool, with a guard on every read."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        compat.check_supported(vllm_config, kv_cache_config)
        # NixlConnector's own constructor would build the parts that ours replace.
        super(NixlConnector, self).__init__(vllm_config, role, kv_cache_config)
        parts = (vllm_config, self.engine_id, kv_cache_config)
        self.connector_scheduler = KvloopScheduler(*parts) if role == KVConnectorRole.SCHEDULER else None
        self.connector_worker = KvloopWorker(*parts) if role == KVConnectorRole.WORKER else None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool in which blocks are held."""
        assert self.connector_scheduler is not None
        self.connector_scheduler.bind_pool(gpu_block_pool)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return what the worker has to tell the scheduler side."""
        assert self.connector_worker is not None
        report: WorkerReport | None = self.connector_worker.take_report()
        return report
