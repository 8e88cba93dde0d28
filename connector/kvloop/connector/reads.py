"""Reads in flight, from their start to their one report, as two families of vLLM versions want it.

A read that has failed while transfers of it are in flight fails its request at once, but its blocks are its
own until the last of them has ended: the peer's data may yet arrive there. How vLLM is told differs. Up to
0.31 a worker queues failed requests and reports them as received, next to their invalid blocks; from 0.32 it
reports results, in which failed requests have a place of their own.
"""

import logging
import threading
from typing import Any

from kvloop.connector import compat
from kvloop.connector.clocks import Moment
from kvloop.connector.guard import Refusal
from kvloop.connector.handshakes import Handshakes
from kvloop.connector.metadata import Read, WorkerReport

_log = logging.getLogger("vllm.kvloop")


class _Reads(Handshakes):
    """What both families share: transfers are polled under their deadlines."""

    _worker_report: WorkerReport

    def _init_reads(self) -> None:
        self._report_lock = threading.Lock()
        self._worker_report = WorkerReport()
        self._reads: dict[str, Read] = {}
        self._init_handshakes()
        self._began: dict[str, Moment] = {}
        """When reads began, by request id."""
        self._abandoned: set[str] = set()
        """Requests that have failed while transfers of theirs are still in flight."""
        self._refused_now: set[str] = set()
        self._guards_off: frozenset[str] = frozenset()
        self._stalled = False

    def _deadline(self, meta: Any) -> float:
        """Return the latest moment, on this process's clock, at which a completed read counts."""
        if "deadline" in self._guards_off:
            return float("inf")
        expiry = meta.remote.blocks_expiry_time
        if expiry is None:
            return float("-inf")
        return self._clocks.deadline(meta.remote.engine_id, expiry)

    def _is_late(self, req_id: str) -> bool:
        """Tell whether a read that completes now may have been overtaken by its blocks' next owner."""
        meta, began = self._recving_metadata.get(req_id), self._began.get(req_id)
        if meta is None or self._clocks.now().counter >= self._deadline(meta):
            return True
        jumped = began is not None and self._clocks.jumped(began)
        return jumped and "deadline" not in self._guards_off

    def _note_failed(self, req_id: str, reason: Refusal) -> None:
        with self._report_lock:
            self._worker_report.failed.setdefault(req_id, reason)

    def _abandon(self, req_id: str) -> None:
        if req_id not in self._abandoned:
            self._abandoned.add(req_id)
            meta = self._recving_metadata.get(req_id)
            if meta is not None:
                self._invalid_block_ids.put(set(meta.local_block_ids[0]))

    def _poll(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Return requests with nothing in flight any more: those that have their KV, those that failed."""
        done: set[str] = set()
        failed: set[str] = set()
        for req_id, handles in list(transfers.items()):
            pending = handles if self._stalled else [h for h in handles if not self._ended(req_id, h)]
            if req_id not in self._abandoned and self._is_late(req_id):
                self._note_failed(req_id, "deadline")
                self._abandon(req_id)
                if (meta := self._recving_metadata.get(req_id)) is not None:
                    self._doubt_clock(meta.remote.engine_id)
            if pending:
                transfers[req_id] = pending
                continue
            del transfers[req_id]
            read = self._reads.pop(req_id, Read())
            self._began.pop(req_id, None)
            if req_id in self._abandoned:
                self._abandoned.discard(req_id)
                self.xfer_stats.record_failed_transfer()
                failed.add(req_id)
            else:
                with self._report_lock:
                    self._worker_report.reads[req_id] = read
                done.add(req_id)
        return done, failed

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
        self._note_failed(req_id, "transfer")
        self._suspect(req_id)
        self._abandon(req_id)
        return self._release_handle(handle)

    def _suspect(self, req_id: str) -> None:
        """Take note that the peer of a read may be gone."""

    def _release_handle(self, handle: int) -> bool:
        """Release a failed transfer; one that can't be released may still write, so it is not over."""
        try:
            self.nixl_wrapper.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001 - NIXL raises its own kinds
            _log.debug("kvloop: transfer handle could not be released yet", exc_info=True)
            return False
        return True


class _QueuedFailures(_Reads):
    """vLLM up to 0.31."""

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        """Fail a read; the request's blocks are its own until all its transfers have ended."""
        self._note_failed(req_id, "transfer")
        if handle is not None and not self._release_handle(handle):
            self._recving_transfers.setdefault(req_id, []).append(handle)
        if req_id not in self._recving_transfers:
            super()._handle_failed_transfer(req_id, None)
            return
        # _pop_done_transfers reports it, exactly once, when nothing of it is in flight any more.
        self._abandon(req_id)

    def _refuse(self, req_id: str) -> None:
        """Fail a read that has not begun."""
        self._handle_failed_transfer(req_id, None)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        done, failed = self._poll(transfers)
        for req_id in failed:
            self._failed_recv_reqs.put(req_id)
        return done

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return requests whose reads are over, failed ones included."""
        sent, received = super().get_finished()
        received |= self._refused_now
        self._refused_now = set()
        return sent, received


class _ReportedFailures(_Reads):
    """vLLM from 0.32 on."""

    def _handle_failed_transfer(
        self,
        req_id: str,
        handle: int | None,
        failed_req_ids: set[str] | None = None,
        record_failed_transfer: bool = True,
    ) -> bool:
        """Fail a read; False when the caller has to keep the transfer, since it may still write."""
        self._note_failed(req_id, "transfer")
        if req_id in self._recving_transfers:
            self._abandon(req_id)
        failures = self._recv_failures if failed_req_ids is None else failed_req_ids
        return bool(super()._handle_failed_transfer(req_id, handle, failures, record_failed_transfer))

    def _refuse(self, req_id: str) -> None:
        """Fail a read that has not begun; nothing speaks against the peer."""
        self._handle_failed_transfer(req_id, None, None, False)

    def _suspect(self, req_id: str) -> None:
        """Have vLLM probe the peer of a read that broke."""
        meta = self._recving_metadata.get(req_id)
        if meta is not None and meta.remote is not None:
            self._failed_remote_engines.add(meta.remote.engine_id)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        return self._poll(transfers)

    def get_transfer_results(self) -> Any:
        """Return what is over, failed reads named as such."""
        results = super().get_transfer_results()
        results.finished_recving |= self._refused_now
        results.failed_recving |= self._refused_now
        self._refused_now = set()
        return results


Reads: Any = _ReportedFailures if compat.REPORTS_FAILURES else _QueuedFailures
"""The family of the vLLM that is installed."""
