"""The scheduler side: what is held, what is read, and what makes room.

Blocks are held by a second reference in vLLM's own pool, taken when a request finishes and given back on
this, the engine's, thread. The table says which; it is shared with the control socket's thread.
"""

import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from kvloop.connector import compat, guard, pressure
from kvloop.connector.control import Report
from kvloop.connector.hold import Hold, Kind
from kvloop.connector.hooks import Hooks, spoiled
from kvloop.connector.metadata import Orders, Read, WorkerReport
from kvloop.connector.server import ControlServer
from kvloop.connector.table import HoldTable
from kvloop.connector.tails import Tail, Tails
from kvloop.connector.terms import parse_terms
from kvloop.connector.turns import Kept, Turn, TurnLog

_COMPLETED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)

_MAX_PARTIAL_NOTICES = 65536


def _is_plain_text(request: Any) -> bool:
    """Whether a request's KV is told by token ids, adapter and salt alone."""
    return not request.mm_features and request.prompt_embeds is None and bool(request.prompt_token_ids)


def _scope(request: Any) -> str:
    adapter = request.lora_request
    return guard.scope_digest(request.cache_salt, adapter.lora_name if adapter is not None else None)


@dataclass(slots=True)
class _Failed:
    turn: Turn
    report: Report = field(repr=False)


class KvloopScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Holds, reads under guard, and eviction before anybody has to wait."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        self._table = HoldTable()
        self._log = TurnLog()
        self._requests: dict[str, Any] = {}
        self._turns: dict[str, Turn] = {}
        self._failed: dict[str, _Failed] = {}
        self._orders = Orders()
        self._notice_counts: dict[str, int] = {}
        self._hold_share = float(extra("kvloop_hold_share", 0.5))
        self._hash_unit = compat.hash_unit(vllm_config, kv_cache_config)
        self._step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._tails = Tails(self.block_size)
        self._copies_tails = compat.copies_blocks(vllm_config, kv_cache_config, current_platform.device_type)
        self._copying: dict[str, int] = {}
        """Held blocks that are kept until the step which copies them is over, by request id."""
        self._step_for_readers = current_platform.device_type == "cpu"
        self._hooks = Hooks()
        self._weights_version = str(extra("kvloop_weights_version", ""))
        self._waker = compat.EngineWaker()
        self._poked = False
        self._unheard: Exception | None = None
        """Why the handshake listener could not listen."""
        self._pool: Any = None
        path = extra("kvloop_control_path", None)
        if path is not None and vllm_config.parallel_config.data_parallel_size > 1:
            path = f"{path}.{vllm_config.parallel_config.data_parallel_index}"
        self._server = ControlServer(
            self._table,
            self._log,
            path=None if path is None else Path(path),
            handle=self._give_out,
            wake=self._wake,
            pool=lambda: (self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks()),
            reloaded=self._note_reload,
            hooks=self._hooks if extra("kvloop_test_hooks", False) else None,
        )

    # -- life -----------------------------------------------------------------------------------------

    def bind_pool(self, pool: Any) -> None:
        """Take the block pool and open the control socket."""
        self._pool = pool
        self._table.budget = int(self._hold_share * (pool.num_gpu_blocks - 1))
        self._server.start()

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Serve handshakes; also the moment at which the engine core can be found.

        Raises OSError when nothing can listen at the side channel: no peer could read from this engine.
        """
        self._waker.find_core()
        super().set_xfer_handshake_metadata(metadata)
        if self._unheard is not None:
            raise OSError(
                f"the NIXL side channel can't listen at {self.side_channel_host}, "
                f"port {self.side_channel_port}: {self._unheard}"
            )

    def _nixl_handshake_listener(self, encoded_data: Any, ready_event: Any, *rest: Any) -> None:
        # vLLM's own waits for ever for a listener that could not bind.
        try:
            super()._nixl_handshake_listener(encoded_data, ready_event, *rest)
        except Exception as error:
            if ready_event.is_set():
                raise
            self._unheard = error
            ready_event.set()

    def shutdown(self) -> None:
        """Close the control socket and the handshake listener."""
        self._server.stop()
        super().shutdown()

    def _wake(self) -> None:
        if not self._poked:
            self._poked = True
            self._waker.wake()

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step though it has no request to work on."""
        return (
            self._poked
            or self._table.has_freeable
            or bool(self._orders.notices)
            or bool(self._orders.refused)
            or (self._step_for_readers and self._table.has_readers)
        )

    # -- a request comes in ---------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Note a turn. Heartbeats are not sent: holds have fixed deadlines."""
        self._requests[request.request_id] = request
        params = request.kv_transfer_params
        if isinstance(params, dict):
            self._turns[request.request_id] = Turn(parse_terms(params, request.request_id))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Make room for the request, and decide what of its prompt is read."""
        self._make_room(request, num_computed_tokens)
        turn = self._turns.get(request.request_id)
        if turn is None or turn.admitted:
            return 0, False
        turn.cached = num_computed_tokens
        params = request.kv_transfer_params
        is_readback = not params.get("do_remote_prefill")
        if is_readback and not (params.get("do_remote_decode") and params.get("remote_block_ids")):
            turn.tail = self._find_tail(request, num_computed_tokens)
            return (0 if turn.tail is None else turn.tail.count), False
        if self._hooks.stall == "start":
            return None, False
        if turn.readable is None and turn.refused is None:
            try:
                if not _is_plain_text(request):
                    raise guard.RefusedError("hash")
                prompt = guard.Text(request.prompt_token_ids, request.block_hashes, _scope(request))
                turn.readable = guard.examine(params, self._rules(), prompt, self._hooks.guards_off)
            except guard.RefusedError as error:
                turn.refused = error.reason
        if turn.readable is None:
            # The request fails by the same way as a failed read: one block is allocated and never filled.
            return 1, True
        count = turn.readable - num_computed_tokens
        if count <= 0 or (is_readback and count < self.kv_recompute_threshold):
            return 0, False
        return count, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the read that was decided on; at most one in the life of a request."""
        turn = self._turns.get(request.request_id)
        if turn is None or turn.admitted:
            return
        turn.admitted = True
        turn.local = turn.cached
        if turn.tail is not None and num_external_tokens > 0:
            self._copy_tail(request.request_id, turn, turn.tail, blocks)
            return
        if num_external_tokens <= 0:
            self._decline(request)
            return
        turn.loading = True
        if turn.refused is not None:
            (allocated,) = blocks.get_unhashed_block_ids_all_groups()
            self._orders.refused[request.request_id] = list(allocated)
            self._decline(request)
            return
        turn.external = num_external_tokens
        turn.unscheduled = True
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        # vLLM's worker tracks requests whose blocks it may have to free later; ours are never among them.
        self._reqs_in_batch.discard(request.request_id)

    def _find_tail(self, request: Any, num_computed_tokens: int) -> Tail | None:
        if not self._copies_tails or not len(self._tails) or not _is_plain_text(request):
            return None
        prompt = guard.Text(request.prompt_token_ids, request.block_hashes, _scope(request))
        return self._tails.find(prompt, num_computed_tokens)

    def _copy_tail(self, request_id: str, turn: Turn, tail: Tail, blocks: Any) -> None:
        """Order the copy of a held block's head into the request's own block."""
        (allocated,) = blocks.get_block_ids()
        target = allocated[turn.cached // self.block_size]
        # The hold and the turn may end, and a peer's data arrive in the block, before the copy has been made.
        self._pool.touch([self._pool.blocks[tail.block]])
        self._copying[request_id] = tail.block
        turn.local += tail.count
        self._orders.copies[request_id] = (tail.block, target)

    def _decline(self, request: Any) -> None:
        """Tell the prefill engine that its blocks are not needed; a lease's reader ends its own pin."""
        params = request.kv_transfer_params
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            engine_id, remote_id = params.get("remote_engine_id"), params.get("remote_request_id")
            if isinstance(engine_id, str) and isinstance(remote_id, str):
                self._orders.notices.append((engine_id, remote_id))

    # -- a step ---------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Give back what was let go of, keep room for the next step, and write the orders."""
        self._poked = False
        self._settle_failed()
        self._give_back()
        if self._pool is not None:
            wanting = self._wanting(scheduler_output.num_scheduled_tokens)
            needed = pressure.next_step(wanting, self.block_size, self._step_tokens)
            pressure.relieve_step(self._table, self._pool, needed, self._give_back)
        meta = super().build_connector_meta(scheduler_output)
        self._orders.guards_off = frozenset(self._hooks.guards_off)
        self._orders.stalled = self._hooks.stall == "end"
        meta.kvloop, self._orders = self._orders, Orders()
        return meta

    def _wanting(self, scheduled: dict[str, int]) -> list[tuple[Any, int]]:
        """Return who wants blocks in the next step, and how many of its tokens there are by then."""
        wanting = []
        for name, count in scheduled.items():
            if (turn := self._turns.get(name)) is not None:
                turn.unscheduled = False
            if (request := self._requests.get(name)) is not None:
                # vLLM has yet to count them as computed.
                wanting.append((request, request.num_computed_tokens + count))
        for name, turn in self._turns.items():
            if turn.unscheduled:
                wanting.append((self._requests[name], turn.local + turn.external))
        return wanting

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers saw."""
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for remote_request_id in report.notices:
                self._take_notice(remote_request_id)
            for request_id, read in report.reads.items():
                if (turn := self._turns.get(request_id)) is not None:
                    self._note_read(turn, read)
            for request_id in report.copied:
                if (block := self._copying.pop(request_id, None)) is not None:
                    self._free([block])
            for request_id, reason in report.failed.items():
                if (failed := self._failed.get(request_id)) is not None:
                    failed.report["refused"] = failed.turn.refused or reason
        self._settle_failed()
        self._give_back()

    def _note_read(self, turn: Turn, read: Read) -> None:
        """Add up what the ranks have read, each in its own time."""
        turn.ranks_read += read.ranks
        turn.loading = turn.ranks_read < self._ranks
        before = turn.transfer or {"ms": 0.0, "bytes": 0, "descriptors": 0}
        turn.transfer = {
            "ms": max(before["ms"], read.ms),
            "bytes": before["bytes"] + read.bytes,
            "descriptors": before["descriptors"] + read.descriptors,
        }

    def _take_notice(self, remote_request_id: str) -> None:
        lease_id, mark, token = remote_request_id.rpartition("#")
        if not mark:
            return
        if self._ranks > 1:
            seen = self._notice_counts.pop(remote_request_id, 0) + 1
            if seen < self._ranks:
                self._notice_counts[remote_request_id] = seen
                if len(self._notice_counts) > _MAX_PARTIAL_NOTICES:
                    self._notice_counts.pop(next(iter(self._notice_counts)))
                return
        self._table.read_done(lease_id, token)

    # -- a request ends -------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Hold what is to be held, and report. Never delays vLLM's own free."""
        self._requests.pop(request.request_id, None)
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return False, None
        if not turn.admitted:
            self._decline(request)
        hold = self._hold(request, turn, block_ids) if self._wants_hold(request, turn) else None
        report = self._report(request, turn, hold)
        if request.status == RequestStatus.FINISHED_ERROR and turn.loading:
            # The workers say why in this very step, a moment later.
            report["refused"] = turn.refused or "transfer"
            self._failed[request.request_id] = _Failed(turn, report)
            return False, None
        self._settle(turn, report)
        if hold is None or turn.terms.kind == "decode":
            return False, {"kvloop_report": report}
        handle = self._handle(hold, hold.num_tokens, hold.token, hold.deadline)
        handle |= {"do_remote_prefill": True, "do_remote_decode": False, "kvloop_report": report}
        return False, handle

    def _wants_hold(self, request: Any, turn: Turn) -> bool:
        cancelled = self._log.take_cancelled(turn.terms.turn_id)
        if turn.terms.ttl_s <= 0 or not _is_plain_text(request):
            return False
        if request.status in _COMPLETED:
            return True
        if request.status != RequestStatus.FINISHED_ABORTED or turn.terms.kind != "decode":
            return False
        if not request.num_output_tokens:
            return False
        # A stop string is found by the front end, which then aborts as for a client that has gone.
        by_stop_string = bool(request.sampling_params.stop) and not cancelled
        return by_stop_string or turn.terms.on_cancel

    def _hold(self, request: Any, turn: Turn, block_ids: Any) -> Hold | None:
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        kind: Kind = turn.terms.kind
        written = request.num_prompt_tokens + (request.num_output_tokens - 1 if kind == "decode" else 0)
        covered = min(request.num_computed_tokens - in_flight, written)
        count = -(-covered // self.block_size)
        held = list(block_ids[0][:count])
        if covered <= 0 or len(held) < count:
            return None
        text = guard.Text(
            array("I", request.all_token_ids[:covered]),
            list(request.block_hashes[: covered // self._hash_unit]),
            _scope(request),
        )
        kept = Kept(text, self._template(request, block_ids))
        self._pool.touch([self._pool.blocks[block] for block in held])
        hold = self._table.hold(
            turn.terms.turn_id,
            kind=kind,
            blocks=held,
            num_tokens=covered,
            ttl_s=turn.terms.ttl_s,
            tenant=turn.terms.tenant,
            payload=kept,
        )
        if hold is None:
            self._free(held)
        elif kind == "decode":
            self._tails.add(hold, text)
        self._give_back()
        return hold

    def _template(self, request: Any, block_ids: Any) -> dict[str, Any]:
        """Let vLLM write its handle, and have it forget that it did."""
        status, request.status = request.status, RequestStatus.FINISHED_STOPPED
        try:
            _, params = super().request_finished(request, block_ids)
        finally:
            request.status = status
            self._reqs_need_send.pop(request.request_id, None)
        return dict(params or {})

    def _handle(self, hold: Hold, num_tokens: int, token: str, deadline: float) -> dict[str, Any]:
        """Return kv_transfer_params for one reader of a hold's first num_tokens tokens. Any thread."""
        kept = hold.payload
        assert isinstance(kept, Kept)
        return kept.template | {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_request_id": f"{hold.lease_id}#{token}",
            "remote_block_ids": [list(hold.blocks[: -(-num_tokens // self.block_size)])],
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": deadline,
            guard.SEAL: guard.seal(self._rules(), num_tokens, kept.text),
        }

    def _give_out(self, hold: Hold, num_tokens: int, token: str, deadline: float) -> dict[str, Any]:
        params = self._handle(hold, num_tokens, token, deadline)
        return spoiled(params, self._hooks.spoil) if self._hooks.spoil is not None else params

    def _rules(self) -> guard.Rules:
        seed = compat.hash_seed() + self._weights_version.encode()
        return guard.Rules(self.block_size, self._hash_unit, guard.seed_digest(seed))

    def _note_reload(self, version: str) -> None:
        # Only while nothing is held: what is sealed later is of the new weights.
        self._weights_version = version

    # -- reports --------------------------------------------------------------------------------------

    @staticmethod
    def _report(request: Any, turn: Turn, hold: Hold | None) -> Report:
        computed = request.num_prompt_tokens - turn.local - turn.external if turn.admitted else 0
        report: Report = {
            "local": turn.local,
            "external": turn.external,
            "computed": computed,
            "transfer": turn.transfer,
            "hold": None,
            "held_s": 0.0,
            "refused": turn.refused,
        }
        if hold is not None:
            remaining = max(0.0, hold.deadline - time.perf_counter())
            report["hold"] = {
                "num_tokens": hold.num_tokens,
                "num_blocks": len(hold.blocks),
                "remaining_s": remaining,
            }
            report["held_s"] = remaining if hold.kind == "prefill" else 0.0
        return report

    def _settle(self, turn: Turn, report: Report) -> None:
        self._log.settle(turn.terms.turn_id, report)
        self._server.turn_settled(turn.terms.turn_id)

    def _settle_failed(self) -> None:
        for failed in self._failed.values():
            self._settle(failed.turn, failed.report)
        self._failed.clear()

    # -- the pool -------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        for blocks in self._table.take_freeable():
            self._tails.forget(blocks[-1])
            self._free(blocks)

    def _free(self, blocks: Any) -> None:
        # Tail first: the head of a prompt is what the prefix cache is likeliest to serve again.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def _make_room(self, request: Any, num_computed_tokens: int) -> None:
        if self._pool is None:
            return
        self._give_back()
        loading = sum(turn.loading for turn in self._turns.values())
        needed = pressure.whole_request(request, num_computed_tokens, self.block_size, loading)
        cached = pressure.CachedPrefix(self._pool, request, num_computed_tokens // self._hash_unit)
        pressure.relieve_request(self._table, self._pool, needed, self._give_back, cached)
