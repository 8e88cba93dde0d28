"""The worker side: reads of remote KV under guard, and notices of those who read from here.

A read counts only if its completion is noticed before the handle's deadline, on a clock that errs on the
early side (kvloop.connector.clocks); otherwise its request fails and nothing of it is cached. A read that is
still in flight at the deadline fails its request at once, but its blocks stay allocated until the transfer
really ends, since the peer's data may yet arrive in them.
"""

import functools
import logging
import os
from collections import OrderedDict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.platforms import current_platform

from kvloop.connector import compat
from kvloop.connector.blocks import BlockCopier
from kvloop.connector.guard import Refusal
from kvloop.connector.metadata import Orders, Read, WorkerReport
from kvloop.connector.reads import Reads

_log = logging.getLogger("vllm.kvloop")

_MAX_PARTIAL_NOTICES = 65536
_MAX_COUNT_DIGITS = 9


class KvloopWorker(Reads):  # type: ignore[misc]
    """vLLM's reader of remote KV, made to refuse what may be wrong."""

    _worker_report: WorkerReport

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._init_reads()
        self._partial_notices: OrderedDict[str, int] = OrderedDict()
        self._copier: BlockCopier | None = None
        self._copies = compat.copies_blocks(vllm_config, kv_cache_config, current_platform.device_type)
        transfer = vllm_config.kv_transfer_config
        self._start_margin_s = float(transfer.get_from_extra_config("kvloop_start_margin_s", 2.0))
        if current_platform.device_type == "cpu":
            construct_on_cpu(super().__init__, vllm_config, engine_id, kv_cache_config)
        else:
            super().__init__(vllm_config, engine_id, kv_cache_config)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Take the memory of the KV cache. Raises ValueError when blocks can't be copied in it."""
        super().register_kv_caches(kv_caches)
        pieces = len(compat.block_regions(self))
        if current_platform.device_type != "cpu" and pieces > 1:
            _log.warning("kvloop: a block's KV lies in %d pieces; reads are faster in one", pieces)
        if self._copies:
            # Now rather than at the first copy: a failure here is a refused start, one there a dead engine.
            self._copier = BlockCopier(self)

    # -- reading --------------------------------------------------------------------------------------

    def start_load_kv(self, metadata: Any) -> None:
        """Begin the step's reads; fail those that the scheduler side refused."""
        orders: Orders = metadata.kvloop
        self._guards_off, self._stalled = orders.guards_off, orders.stalled
        if orders.copies:
            assert self._copier is not None
            for source, target in orders.copies.values():
                self._copier.copy(source, target)
            with self._report_lock:
                self._worker_report.copied.update(orders.copies)
        super().start_load_kv(metadata)
        for request_id, blocks in orders.refused.items():
            self._invalid_block_ids.put(set(blocks))
            self._refused_now.add(request_id)
        for engine_id, remote_request_id in orders.notices:
            self._send_notice(engine_id, remote_request_id)

    def _is_turn2_read_expired(self, meta: Any) -> bool:
        return False  # decided in _read_blocks_for_req, with our own margin

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        # vLLM 0.32 shakes hands with an engine that it does not know, and comes back.
        if meta.remote.engine_id in self._remote_agents:
            began = self._clocks.now()
            if began.counter + self._start_margin_s >= self._deadline(meta):
                self._fail(req_id, "deadline")
                self._doubt_clock(meta.remote.engine_id)
                return
            if "counts" not in self._guards_off and not self._blocks_exist(meta):
                self._fail(req_id, "counts")
                return
            self._reads[req_id], self._began[req_id] = Read(), began
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception:  # noqa: BLE001 - a handle must not be able to end the engine
            _log.exception("kvloop: read could not be started")
            self._fail(req_id, "transfer")

    def _blocks_exist(self, meta: Any) -> bool:
        engine_id = meta.remote.engine_id
        remote = self.transfer_topo.get_engine_info(engine_id)
        logical = self.dst_num_blocks[engine_id] // remote.remote_physical_blocks_per_logical
        return all(0 < block < logical for group in meta.remote.block_ids for block in group)

    def _fail(self, req_id: str, reason: Refusal) -> None:
        self._note_failed(req_id, reason)
        self._refuse(req_id)

    # -- being read -----------------------------------------------------------------------------------

    def _get_new_notifs(self) -> set[str]:
        """Collect readers' notices; the scheduler side knows what they mean, late ones included."""
        for messages in self.nixl_wrapper.get_new_notifs().values():
            for message in messages:
                self._take_notice(message)
        return set()

    def _take_notice(self, message: bytes) -> None:
        text = message.decode("utf-8", "replace")
        remote_request_id, _, expected = text.rpartition(":")
        if text.startswith("HB:") or not expected.isdecimal() or len(expected) > _MAX_COUNT_DIGITS:
            return  # heartbeats renew vLLM's own leases; ours have fixed deadlines
        seen = self._partial_notices.pop(remote_request_id, 0) + 1
        if seen >= compat.notices_awaited(self, int(expected)):
            with self._report_lock:
                self._worker_report.notices.append(remote_request_id)
            return
        self._partial_notices[remote_request_id] = seen
        while len(self._partial_notices) > _MAX_PARTIAL_NOTICES:
            self._partial_notices.popitem(last=False)

    def _send_notice(self, engine_id: str, remote_request_id: str) -> None:
        """Tell a peer that a handle will not be read, if the peer is known; its deadline does the rest."""
        agents = self._remote_agents.get(engine_id)
        if not agents or engine_id not in self.tp_mappings:
            return
        message = f"{remote_request_id}:{compat.readers_told(self, engine_id)}".encode()
        for agent in agents.values():
            try:
                self.nixl_wrapper.send_notif(agent, notif_msg=message)
            except Exception:  # noqa: BLE001 - NIXL raises its own kinds
                _log.warning("kvloop: a notice could not be sent")

    def take_report(self) -> WorkerReport | None:
        """Return what happened since the last call, if anything did."""
        with self._report_lock:
            if not self._worker_report:
                return None
            report: WorkerReport = self._worker_report
            self._worker_report = WorkerReport()
            return report


def construct_on_cpu(construct: Any, *args: Any) -> None:
    """Run vLLM's constructor without what makes NIXL take whole cores on a machine without a GPU.

    NIXL's progress thread spins on one core, and vLLM pins the worker's main thread to the last one.
    """
    config = base_worker.nixl_agent_config
    cores = os.sched_getaffinity(0)
    if config is not None:
        base_worker.nixl_agent_config = functools.partial(config, enable_prog_thread=False)
    try:
        construct(*args)
    finally:
        base_worker.nixl_agent_config = config
        os.sched_setaffinity(0, cores)
