"""Every metric of kvloop's own processes, as data: docs/metrics.md is made from it, alerts are checked by it.

Labels take values from closed sets only; a value that is not in its set is counted as "other", so that no
client can make a process remember ever more series.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvloop.v1alpha1 import errors_pb2, turn_pb2

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["router", "prefill", "decode", "gateway"]

OTHER = "other"


def _names(enum: Sequence[str], prefix: str) -> tuple[str, ...]:
    names = (name.removeprefix(prefix).lower() for name in enum)
    return tuple(name for name in names if name != "unspecified")


VERDICTS = _names(turn_pb2.Verdict.keys(), "VERDICT_")
REUSE_REASONS = _names(turn_pb2.ReuseReason.keys(), "REUSE_REASON_")
ERROR_REASONS = _names(errors_pb2.ErrorReason.keys(), "ERROR_REASON_")
SOURCES = ("p_local", "readback", "d_local", "computed")
STEPS = ("admit", "queue", "lookup", "verdict", "place", "prefill", "lookup_again", "first_chunk", "decode")
OUTAGES = (
    *("timeout", "connection", "loading", "readonly", "moved", "cluster_down", "out_of_memory"),
    *("authentication", "permission", "pool", "breaker", "closed", "unfit"),
)
IDENTITIES = (
    *("conversation_id", "session_id", "vllm_xargs.session_id"),
    *("x-session-id", "x-dynamo-session-id", "x-claude-code-session-id", "session-id", "none"),
)
"""Where a gateway finds a conversation's name."""
ENDINGS = ("superseded", "expired", "evicted", "released", "revoked", "lost", "unpublished")

VERDICT = ("verdict", VERDICTS)
REASON = ("reason", REUSE_REASONS)
FAILED = ("reason", ERROR_REASONS)

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
STEP_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
GAP_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 3600.0)
TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)

ALL: tuple[Process, ...] = ("router", "prefill", "decode")
"""Those with a server for metrics; a gateway has them beside those of vLLM's serving code."""
PROCESSES: tuple[Process, ...] = (*ALL, "gateway")
WORKERS: tuple[Process, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter's name is written without the _total that Prometheus sees."""

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Label names with the values that they may take."""
    processes: tuple[Process, ...] = ("router",)
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """Return the name in queries; a histogram's own, without _bucket, _sum and _count."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names that a query may select."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.exposed,)


def _counter(name: str, text: str, *labels: tuple[str, tuple[str, ...]], of: tuple[Process, ...]) -> Metric:
    return Metric(f"kvloop_{name}", "counter", text, labels, of)


def _gauge(name: str, text: str, *labels: tuple[str, tuple[str, ...]], of: tuple[Process, ...]) -> Metric:
    return Metric(f"kvloop_{name}", "gauge", text, labels, of)


def _histogram(
    name: str,
    text: str,
    buckets: tuple[float, ...],
    *labels: tuple[str, tuple[str, ...]],
    of: tuple[Process, ...],
) -> Metric:
    return Metric(f"kvloop_{name}", "histogram", text, labels, of, buckets)


_ROUTER: tuple[Process, ...] = ("router",)
_PREFILL: tuple[Process, ...] = ("prefill",)
_DECODE: tuple[Process, ...] = ("decode",)
_GATEWAY: tuple[Process, ...] = ("gateway",)

CATALOGUE: tuple[Metric, ...] = (
    # Turns, as routers see them.
    _histogram(
        "turn_ttft_seconds",
        "Time to first token: from admission to the first chunk.",
        LATENCY_S,
        VERDICT,
        of=_ROUTER,
    ),
    _histogram(
        "turn_tpot_seconds",
        "Time per output token after the first, of answers of two tokens and more.",
        PER_TOKEN_S,
        VERDICT,
        of=_ROUTER,
    ),
    _histogram(
        "turn_step_seconds", "Time spent in each step of a turn.", STEP_S, ("step", STEPS), of=_ROUTER
    ),
    _counter("turns", "Turns that were answered, by the way taken and why.", VERDICT, REASON, of=_ROUTER),
    _counter("turn_failures", "Admitted turns that failed.", FAILED, of=_ROUTER),
    _counter("turns_cancelled", "Admitted turns whose client went away.", of=_ROUTER),
    _counter("turns_refused", "Calls that were not admitted.", FAILED, of=_ROUTER),
    _counter(
        "turn_retries", "Turns started again before their first chunk, by what failed.", FAILED, of=_ROUTER
    ),
    _counter(
        "turn_migrations",
        "Answers that another decode worker took up after they had begun, by what failed.",
        FAILED,
        of=_ROUTER,
    ),
    _counter(
        "prompt_tokens",
        "Prompt tokens of answered turns, by where their KV came from.",
        ("source", SOURCES),
        of=_ROUTER,
    ),
    _counter("output_tokens", "Tokens of finished answers.", of=_ROUTER),
    _counter(
        "reuse_expected_tokens", "Tokens that verdicts expected to be read back: an upper bound.", of=_ROUTER
    ),
    _counter(
        "reuse_actual_tokens", "Of the expected tokens, those that were not computed again.", of=_ROUTER
    ),
    _counter(
        "canary",
        "Reused greedy turns that were due to be computed once more without reuse: the same tokens came, "
        "others of nearly the same probability, others; dropped for want of room, or failed.",
        ("result", ("match", "tie", "mismatch", "dropped", "failed")),
        of=_ROUTER,
    ),
    _gauge("turns_in_flight", "Turns being served.", of=_ROUTER),
    _gauge(
        "turns_queued", "Turns that wait for room here or at workers, ahead of their first leg.", of=_ROUTER
    ),
    _gauge("turns_limit", "Turns served at once before more wait.", of=_ROUTER),
    _gauge("sessions_open", "Sessions that agents hold open.", of=_ROUTER),
    _gauge("sessions_limit", "Sessions open at once before more are refused.", of=_ROUTER),
    _gauge(
        "router_workers",
        "Workers by role: ready for turns, paused after a failure, or gone.",
        ("role", ("prefill", "decode")),
        ("state", ("ready", "paused", "gone")),
        of=_ROUTER,
    ),
    _gauge("draining", "1 while the process takes no new turns because it is about to end.", of=ALL),
    # The store.
    _gauge("store_degraded", "1 while the store's breaker is open and turns go cold.", of=ALL),
    _counter("store_outages", "Operations on the store that failed, by why.", ("outage", OUTAGES), of=ALL),
    _counter("store_operations", "Operations that were sent to the store.", of=ALL),
    # Leases, on decode workers.
    _gauge("leases", "Leases held.", ("state", ("live", "doomed")), of=_DECODE),
    _counter("leases_ended", "Leases that ended, by why.", ("reason", ENDINGS), of=_DECODE),
    _counter(
        "lease_publications",
        "Publications: won, lost to a later turn, put off while the store was away, given up.",
        ("outcome", ("won", "lost", "deferred", "given_up")),
        of=_DECODE,
    ),
    _histogram(
        "lease_publish_seconds", "Duration of publications, those that failed included.", STEP_S, of=_DECODE
    ),
    _histogram(
        "turn_gap_seconds",
        "From a turn's end to the first read of what it left: how long a conversation pauses.",
        GAP_S,
        of=_DECODE,
    ),
    _counter(
        "leases_prolonged", "Times that a lease was prolonged because its session was open.", of=_DECODE
    ),
    _gauge("lease_pins", "Reads in progress.", of=_DECODE),
    _counter("reads_granted", "Reads that a lease's worker allowed.", of=_DECODE),
    _counter("reads_refused", "Reads that it refused, by why.", FAILED, of=_DECODE),
    # Legs, on workers.
    _gauge("legs_in_flight", "Legs in progress.", of=WORKERS),
    _counter(
        "prefills", "Prefill legs that were served, by the way taken and why.", VERDICT, REASON, of=_PREFILL
    ),
    _counter("cold_retries", "Prefill legs computed anew after a read that failed.", of=_PREFILL),
    _histogram(
        "transfer_seconds",
        "Duration of KV reads: on prefill workers D->P, on decode workers P->D.",
        TRANSFER_S,
        of=WORKERS,
    ),
    _counter("transfer_bytes", "Bytes of those reads.", of=WORKERS),
    _counter("transfer_descriptors", "Contiguous ranges of those reads.", of=WORKERS),
    # The engine's own counters and pool.
    _gauge("pool_hold_limit_blocks", "KV blocks that leases may hold: hold_share of the pool.", of=WORKERS),
    _gauge("engine_up", "1 while the engine lives, 0 when it has died; absent while it loads.", of=WORKERS),
    _counter(
        "engine_prompt_tokens",
        "Prompt tokens, by where the engine's scheduler found their KV.",
        ("source", ("local", "external", "computed")),
        of=WORKERS,
    ),
    _counter("engine_generated_tokens", "Tokens generated.", of=WORKERS),
    _counter("engine_transfers", "KV reads that the engine completed.", of=WORKERS),
    _counter("engine_transfer_bytes", "Bytes that the engine read.", of=WORKERS),
    _counter("engine_preemptions", "Running requests that the engine preempted.", of=WORKERS),
    _gauge(
        "pool_blocks",
        "KV blocks: free for new requests, held by leases, all.",
        ("state", ("free", "held", "total")),
        of=WORKERS,
    ),
    _gauge("pool_held_share", "Share of all KV blocks that leases hold.", of=WORKERS),
    # Chats, as gateways see them.
    _counter(
        "gateway_turns",
        "Turns that ended, by the way taken, why, and where the conversation's name was found.",
        VERDICT,
        REASON,
        ("identity", IDENTITIES),
        of=_GATEWAY,
    ),
    _counter(
        "gateway_failures",
        "Turns that failed, by why; refused: by vLLM's own checks of the request.",
        ("reason", (*ERROR_REASONS, "refused")),
        of=_GATEWAY,
    ),
    _counter(
        "gateway_prompt_tokens",
        "Prompt tokens of turns that ended, by where their KV came from.",
        ("source", SOURCES),
        of=_GATEWAY,
    ),
    _counter(
        "gateway_rendered_tokens",
        "Tokens of rendered chats: of messages rendered before, of answers as generated, tokenized.",
        ("source", ("cached", "restored", "tokenized")),
        of=_GATEWAY,
    ),
    _gauge("gateway_render_cache_bytes", "What the cache of rendered messages holds.", of=_GATEWAY),
)

BY_NAME = {metric.name: metric for metric in CATALOGUE}


def of_process(process: Process) -> tuple[Metric, ...]:
    """Return the metrics of one kind of process."""
    return tuple(metric for metric in CATALOGUE if process in metric.processes)
