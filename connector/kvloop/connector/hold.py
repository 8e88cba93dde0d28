"""One hold: blocks kept beyond their turn."""

import secrets
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["decode", "prefill"]


@dataclass(eq=False, slots=True)
class Hold:
    """One hold. Fields change under the table's lock only."""

    lease_id: str
    kind: Kind
    tenant: str
    blocks: tuple[int, ...]
    num_tokens: int
    deadline: float
    payload: object = None
    """What the owner needs to make a handle; never looked at by the table."""
    pins: dict[str, float] = field(default_factory=dict)
    """Deadline by read id."""
    token: str = field(default_factory=lambda: secrets.token_hex(6))
    """Names this hold in the notice of a prefill hold's reader."""
    last_used: int = 0
    doomed: bool = False
    gone: bool = False
