"""kv_transfer_params: the one place that knows their keys. Handles are carried otherwise unread."""

import json
from typing import Any

from kvloop.engine.port import DecodeJob, HoldTerms, PrefillJob
from kvloop.runtime.endpoints import Endpoint
from kvloop.runtime.errors import Failure, Reason, invalid

TURN = "kvloop_turn"
_COLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill(job: PrefillJob, hold_s: float) -> dict[str, Any]:
    """Return the parameters of a prefill, to be held so long: a read of the granted handle, or none.

    Raises KV_READ_FAILED when the handle names another place than its holder's: nobody must dial that.
    """
    turn = {"id": job.request_id, "hold": {"ttl_s": hold_s}, "kind": "prefill"}
    if job.read is None:
        return {**_COLD, TURN: turn}
    handle = _handle("read.handle", job.read.handle_json)
    if job.read.side_channel and _place(handle) != job.read.side_channel:
        raise Failure(
            Reason.ERROR_REASON_KV_READ_FAILED,
            "the handle names another place than its holder's side channel",
            metadata={"guard": "place"},
        )
    return {**handle, TURN: turn}


def decode(job: DecodeJob) -> dict[str, Any]:
    """Return the parameters of a decode: a read of the prefill engine's handle, or DIRECT."""
    turn = {"id": decode_turn_id(job), "hold": _terms(job.hold), "kind": "decode"}
    if job.handle_json is None:
        return {"do_remote_prefill": False, "do_remote_decode": False, TURN: turn}
    return {**_handle("handle", job.handle_json), TURN: turn}


def decode_turn_id(job: DecodeJob) -> str:
    """Return the id under which the connector knows a decode: its lease, if it leaves one."""
    return job.hold.lease_id if job.hold is not None else job.request_id


def _terms(terms: HoldTerms | None) -> dict[str, Any] | None:
    if terms is None:
        return None
    return {"ttl_s": terms.ttl_s, "on_cancel": terms.on_cancel, "tenant": terms.tenant}


def _place(handle: dict[str, Any]) -> str:
    """Return where a read of a handle begins, written as in the holder's facts."""
    host, port = handle.get("remote_host"), handle.get("remote_port")
    return str(Endpoint(host, port)) if isinstance(host, str) and isinstance(port, int) else ""


def _handle(field: str, text: str) -> dict[str, Any]:
    try:
        handle = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(field, "is not a handle") from None
    if not isinstance(handle, dict):
        raise invalid(field, "is not a handle")
    return handle
