"""One HTTP exchange, as the door (outside) and the engine client (inside) both see it.

vLLM's serving code sits between the two and passes on neither identity nor credentials nor deadlines.
A context variable does: every task that serves an exchange inherits it.
"""

import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kvloop.gateway.identity import Identity
from kvloop.gateway.problems import Problem
from kvloop.gateway.segments import Rendering
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

TurnSummary = turn_pb2.Summary


def mint_request_id() -> str:
    """Return a fresh request id. The client's own never reaches an engine: it need not be unique."""
    return uuid.uuid4().hex


@dataclass(slots=True)
class Exchange:
    """What the door knows of a request, and what the turns made of it."""

    request_id: str = field(default_factory=mint_request_id)
    identity: Identity = field(default_factory=Identity)
    tenant: str = ""
    """Digest of the credentials: separates caches here. The router decides who the tenant is."""
    authorization: str | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + 600.0)
    """By time.monotonic()."""
    priority: int | None = None
    reuse_policy: "router_service_pb2.ReusePolicy.ValueType" = router_service_pb2.REUSE_POLICY_UNSPECIFIED

    retention: "turn_pb2.Retention | None" = None
    """What the client wants to be held; None: what a conversation usually keeps."""
    trace: tuple[tuple[str, str], ...] = ()
    """The caller's trace context, for the router."""

    failure: Failure | None = None
    """The first failure of a turn."""
    problem: Problem | None = None
    """The first failure, in the form in which HTTP tells it."""
    answered: bool = False
    """Whether a turn has given its first output."""
    turns: int = 0
    """Turns started."""
    running: int = 0
    """Turns not ended yet."""
    summaries: list[TurnSummary] = field(default_factory=list)
    rendering: Rendering | None = None
    """The last chat rendered to token ids."""

    def time_left_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def reused_tokens(self) -> int:
        """Return the prompt tokens, over all turns, whose KV was not computed."""
        return sum(reused_tokens(summary) for summary in self.summaries)

    def report(self) -> dict[str, Any]:
        """Return what a client may know: identity, and where the prompts' KV came from."""
        report: dict[str, Any] = {"identity": self.identity.source, "request_id": self.request_id}
        if self.summaries:
            first = self.summaries[0]
            report["verdict"] = verdict_name(first.reuse.verdict)
            report["reason"] = reason_name(first.reuse.reason)
            report["reused_tokens"] = self.reused_tokens
            if first.HasField("lease"):
                report["held_tokens"] = first.lease.num_tokens
        return report


def reused_tokens(summary: TurnSummary) -> int:
    """Return the prompt tokens whose KV was not computed."""
    sources = summary.reuse.tokens
    return sources.p_local + sources.readback + sources.d_local


def verdict_name(verdict: "turn_pb2.Verdict.ValueType") -> str:
    """Return a verdict as clients see it: "direct", "readback", "recompute" or "unspecified"."""
    name = turn_pb2.Verdict.Name(verdict) if verdict in turn_pb2.Verdict.values() else "VERDICT_UNSPECIFIED"
    return name.removeprefix("VERDICT_").lower()


def reason_name(reason: "turn_pb2.ReuseReason.ValueType") -> str:
    """Return a reason as clients see it, such as "proven"."""
    known = reason in turn_pb2.ReuseReason.values()
    name = turn_pb2.ReuseReason.Name(reason) if known else "REUSE_REASON_UNSPECIFIED"
    return name.removeprefix("REUSE_REASON_").lower()


_current: ContextVar[Exchange | None] = ContextVar("kvloop_exchange", default=None)


def current() -> Exchange | None:
    """Return the exchange that this task serves."""
    return _current.get()


def enter(exchange: Exchange) -> None:
    """Make an exchange this task's, and that of the tasks it starts."""
    _current.set(exchange)
