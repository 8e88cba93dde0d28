"""What a caller asks for a turn: the "kvloop_turn" entry of its kv_transfer_params.

{"id": lease or attempt id, "kind": "prefill" | "decode",
 "hold": {"ttl_s": seconds, "on_cancel": bool, "tenant": whose share it counts against} | null}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloop.connector.hold import Kind

KEY = "kvloop_turn"
PREFILL_TTL_S = 30.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of one turn; a ttl_s of 0 holds nothing."""

    turn_id: str
    kind: Kind
    ttl_s: float
    on_cancel: bool = False
    tenant: str = ""


def parse_terms(params: Mapping[str, Any], request_id: str) -> Terms:
    """Return the terms in kv_transfer_params; what is malformed counts as not asked for.

    A prefill turn holds for 30 s unless it says otherwise, since its blocks are of use only while held.
    """
    entry = params.get(KEY)
    entry = entry if isinstance(entry, Mapping) else {}
    kind: Kind = "prefill" if params.get("do_remote_decode") else "decode"
    turn_id = entry.get("id")
    turn_id = turn_id if isinstance(turn_id, str) and turn_id else request_id
    hold = entry.get("hold")
    if not isinstance(hold, Mapping):
        return Terms(turn_id, kind, PREFILL_TTL_S if kind == "prefill" else 0.0)
    ttl_s = hold.get("ttl_s")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < float("inf"):
        ttl_s = PREFILL_TTL_S if kind == "prefill" else 0.0
    return Terms(
        turn_id,
        kind,
        float(ttl_s),
        on_cancel=bool(hold.get("on_cancel")),
        tenant=str(hold.get("tenant", "")),
    )
