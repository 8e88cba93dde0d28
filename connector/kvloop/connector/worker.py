"""The worker side: reads of remote KV under guard, and notices of those who read from here.

A read counts only if its completion is noticed before the handle's deadline, on a clock that errs on the
early side; otherwise its request fails and nothing of it is cached. A read that is still in flight at the
deadline fails its request at once, but its blocks stay allocated until the transfer really ends, since the
peer's data may yet arrive in them.
"""

import functools
import logging
import os
import threading
import time
from collections import OrderedDict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from kvloop.connector import compat
from kvloop.connector.guard import Refusal
from kvloop.connector.metadata import Orders, Read, WorkerReport

_log = logging.getLogger("vllm.kvloop")

_MAX_PARTIAL_NOTICES = 65536


class KvloopWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's reader of remote KV, made to refuse what may be wrong."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._report_lock = threading.Lock()
        self._worker_report = WorkerReport()
        self._reads: dict[str, Read] = {}
        self._abandoned: set[str] = set()
        """Requests that have failed while transfers of theirs are still in flight."""
        self._refused_now: set[str] = set()
        self._guards_off: frozenset[str] = frozenset()
        self._stalled = False
        self._partial_notices: OrderedDict[str, int] = OrderedDict()
        transfer = vllm_config.kv_transfer_config
        self._start_margin_s = float(transfer.get_from_extra_config("kvloop_start_margin_s", 2.0))
        if current_platform.device_type == "cpu":
            _construct_on_cpu(super().__init__, vllm_config, engine_id, kv_cache_config)
        else:
            super().__init__(vllm_config, engine_id, kv_cache_config)

    # -- reading --------------------------------------------------------------------------------------

    def start_load_kv(self, metadata: Any) -> None:
        """Begin the step's reads; fail those that the scheduler side refused."""
        orders: Orders = metadata.kvloop
        self._guards_off, self._stalled = orders.guards_off, orders.stalled
        super().start_load_kv(metadata)
        for request_id, blocks in orders.refused.items():
            self._invalid_block_ids.put(set(blocks))
            self._refused_now.add(request_id)
        for engine_id, remote_request_id in orders.notices:
            self._send_notice(engine_id, remote_request_id)

    def _nixl_handshake(self, *args: Any, **kwargs: Any) -> Any:
        # The peer's clock is estimated at the middle of the round trip. The true offset is larger by at
        # most half of it, so with half of the whole handshake on top, deadlines err on the early side.
        began = time.perf_counter()
        agents, offset = super()._nixl_handshake(*args, **kwargs)
        return agents, offset + (time.perf_counter() - began) / 2

    def _is_turn2_read_expired(self, meta: Any) -> bool:
        return False  # decided in _read_blocks_for_req, with our own margin

    def _deadline(self, meta: Any) -> float:
        """Return the latest moment, on this process's clock, at which a completed read counts."""
        expiry = meta.remote.blocks_expiry_time
        offset = self._engine_clock_offset.get(meta.remote.engine_id)
        if "deadline" in self._guards_off:
            return float("inf")
        return float("-inf") if expiry is None or offset is None else float(expiry - offset)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if time.perf_counter() + self._start_margin_s >= self._deadline(meta):
            self._fail(req_id, "deadline")
            return
        if "counts" not in self._guards_off and not self._blocks_exist(meta):
            self._fail(req_id, "counts")
            return
        self._reads[req_id] = Read()
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
        with self._report_lock:
            self._worker_report.failed.setdefault(req_id, reason)
        self._handle_failed_transfer(req_id, None)

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        """Fail a read; the request's blocks are its own until all its transfers have ended."""
        with self._report_lock:
            self._worker_report.failed.setdefault(req_id, "transfer")
        if handle is not None and not self._release_handle(handle):
            self._recving_transfers.setdefault(req_id, []).append(handle)
        if req_id not in self._recving_transfers:
            super()._handle_failed_transfer(req_id, None)
            return
        # _pop_done_transfers reports it, exactly once, when nothing of it is in flight any more.
        self._abandon(req_id)

    def _abandon(self, req_id: str) -> None:
        if req_id not in self._abandoned:
            self._abandoned.add(req_id)
            meta = self._recving_metadata.get(req_id)
            if meta is not None:
                self._invalid_block_ids.put(set(meta.local_block_ids[0]))

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        done: set[str] = set()
        for req_id, handles in list(transfers.items()):
            pending = handles if self._stalled else [h for h in handles if not self._ended(req_id, h)]
            meta = self._recving_metadata.get(req_id)
            late = meta is None or time.perf_counter() >= self._deadline(meta)
            if late and req_id not in self._abandoned:
                with self._report_lock:
                    self._worker_report.failed.setdefault(req_id, "deadline")
                self._abandon(req_id)
            if pending:
                transfers[req_id] = pending
                continue
            del transfers[req_id]
            read = self._reads.pop(req_id, Read())
            if req_id in self._abandoned:
                self._abandoned.discard(req_id)
                self.xfer_stats.record_failed_transfer()
                self._failed_recv_reqs.put(req_id)
            else:
                with self._report_lock:
                    self._worker_report.reads[req_id] = read
                done.add(req_id)
        return done

    def _ended(self, req_id: str, handle: int) -> bool:
        """Return whether a transfer is over, noting how."""
        try:
            state = self.nixl_wrapper.check_xfer_state(handle)
            if state == "PROC":
                return False
            if state == "DONE":
                telemetry = self.nixl_wrapper.get_xfer_telemetry(handle)
                self.xfer_stats.record_transfer(telemetry)
                read = self._reads.setdefault(req_id, Read())
                read.ms = max(read.ms, telemetry.xferDuration / 1e3)
                read.bytes += telemetry.totalBytes
                read.descriptors += telemetry.descCount
                self.nixl_wrapper.release_xfer_handle(handle)
                return True
        except Exception:  # noqa: BLE001 - NIXL raises its own kinds
            if req_id not in self._abandoned:
                _log.exception("kvloop: transfer failed")
        with self._report_lock:
            self._worker_report.failed.setdefault(req_id, "transfer")
        self._abandon(req_id)
        return self._release_handle(handle)

    def _release_handle(self, handle: int) -> bool:
        """Release a failed transfer; one that can't be released may still write, so it is not over."""
        try:
            self.nixl_wrapper.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001 - NIXL raises its own kinds
            _log.debug("kvloop: transfer handle could not be released yet", exc_info=True)
            return False
        return True

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return requests whose reads are over, failed ones included."""
        sent, received = super().get_finished()
        received |= self._refused_now
        self._refused_now = set()
        return sent, received

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
        if text.startswith("HB:") or not expected.isdecimal():
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
            report, self._worker_report = self._worker_report, WorkerReport()
            return report


def _construct_on_cpu(construct: Any, *args: Any) -> None:
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
