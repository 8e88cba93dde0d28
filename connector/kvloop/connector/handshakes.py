"""Handshakes with peers, each of which compares the peer's clock with this process's, too.

A comparison holds until one of the two hosts stands still. That shows as reads refused by their deadlines, so
such a refusal has the peer's clock compared anew: the handshake's question is asked once more, in the
background, by vLLM's own thread for it. Of a peer that vLLM knows, nothing else changes by that.
"""

import logging
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvloop.connector.clocks import PeerClocks

_log = logging.getLogger("vllm.kvloop")

_HANDSHAKE_S = 2.0
"""One that takes longer is done again,"""
_HANDSHAKES = 3
"""so many in all."""
_AGAIN_S = 30.0
"""A peer's clock is compared anew no more often: one that doesn't answer keeps others' handshakes waiting."""


class Handshakes(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's handshakes, with clocks that are compared carefully, and more than once."""

    def _init_handshakes(self) -> None:
        self._clocks = PeerClocks()
        self._shaken: dict[str, tuple[Any, ...]] = {}
        """What handshakes were done with, by engine id."""
        self._compared_again: dict[str, float] = {}
        """When clocks were last compared anew, on this process's."""

    def _nixl_handshake(self, *args: Any) -> Any:
        # The peer's clock is estimated at the middle of the round trip. The true offset is larger by at
        # most half of it, so with half of the whole handshake on top, deadlines err on the early side.
        # A pause of this process would stay in the offset: then another try tells it better.
        for _ in range(_HANDSHAKES):
            began = self._clocks.now()
            agents, offset = super()._nixl_handshake(*args)
            took_s = self._clocks.now().counter - began.counter
            if took_s < _HANDSHAKE_S:
                break
        offset += took_s / 2
        _host, _port, _tp_size, engine_id, *_ = args
        self._clocks.compare(engine_id, offset, began)
        self._shaken[engine_id] = args
        return agents, offset

    def _doubt_clock(self, engine_id: str) -> None:
        """Have a known peer's clock compared anew, unless it was a moment ago."""
        now = self._clocks.now().counter
        with self._handshake_lock:
            if engine_id not in self._remote_agents or engine_id in self._handshake_futures:
                return
            if now < self._compared_again.get(engine_id, float("-inf")) + _AGAIN_S:
                return
            self._compared_again[engine_id] = now
            # vLLM forgets peers that were not read from for long, but not in the middle of a handshake.
            self._engine_last_active[engine_id] = now
            future = self._handshake_initiation_executor.submit(
                self._nixl_handshake, *self._shaken[engine_id]
            )
            self._handshake_futures[engine_id] = future

        def done(future: Future[Any]) -> None:
            with self._handshake_lock:
                del self._handshake_futures[engine_id]
            if not future.cancelled() and (error := future.exception()) is not None:
                _log.warning("kvloop: a peer's clock could not be compared: %s", type(error).__name__)

        future.add_done_callback(done)
