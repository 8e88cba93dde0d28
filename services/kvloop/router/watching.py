"""Turns and workers as metrics and traces show them."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvloop.runtime import tracing
from kvloop.runtime.errors import Failure
from kvloop.runtime.metrics import Metrics
from kvloop.v1alpha1 import turn_pb2

if TYPE_CHECKING:
    from kvloop.router.turn import Turn
    from kvloop.router.workers import WorkerPool

_SOURCES = ("p_local", "readback", "d_local", "computed")


class TurnWatch:
    """Told of every turn's way and end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def refused(self, failure: Failure) -> None:
        """Count a call that was not admitted."""
        self._metrics.add("kvloop_turns_refused", failure.reason_name.lower())

    def retried(self, failure: Failure, *, migrated: bool) -> None:
        """Count a turn that starts again, or whose answer goes on elsewhere."""
        name = "kvloop_turn_migrations" if migrated else "kvloop_turn_retries"
        self._metrics.add(name, failure.reason_name.lower())

    @contextlib.contextmanager
    def serving(self, turn: "Turn") -> Iterator[None]:
        """Span a turn's life; what it raises is how it ended."""
        with tracing.span("router.turn", root=True) as span:
            span.note(request_id=turn.request_id, prompt_tokens=turn.prompt_tokens)
            try:
                yield
            except Exception as error:
                reason = error.reason_name.lower() if isinstance(error, Failure) else "internal"
                self._metrics.add("kvloop_turn_failures", reason)
                span.note(failure=reason)
                raise
            except BaseException:
                self._metrics.add("kvloop_turns_cancelled")
                span.note(failure="cancelled")
                raise
            finally:
                self._steps(turn)

    def answered(self, turn: "Turn", summary: turn_pb2.Summary) -> None:
        """Count a turn that was answered to its end."""
        metrics, reuse = self._metrics, summary.reuse
        verdict = turn_pb2.Verdict.Name(reuse.verdict).removeprefix("VERDICT_").lower()
        reason = turn_pb2.ReuseReason.Name(reuse.reason).removeprefix("REUSE_REASON_").lower()
        metrics.add("kvloop_turns", verdict, reason)
        sources = {source: int(getattr(reuse.tokens, source)) for source in _SOURCES}
        for source, tokens in sources.items():
            metrics.add("kvloop_prompt_tokens", source, amount=tokens)
        metrics.add("kvloop_output_tokens", amount=summary.output_tokens)
        expected = turn.expected_tokens
        actual = min(expected, summary.prompt_tokens - sources["computed"])
        metrics.add("kvloop_reuse_expected_tokens", amount=expected)
        metrics.add("kvloop_reuse_actual_tokens", amount=actual)
        if turn.first_event_at is not None:
            metrics.observe("kvloop_turn_ttft_seconds", verdict, value=summary.ttft_ms / 1000)
            if summary.output_tokens > 1:
                spent = turn.clock.monotonic() - turn.first_event_at
                each = spent / (summary.output_tokens - 1)
                metrics.observe("kvloop_turn_tpot_seconds", verdict, value=each)
        tracing.note(
            verdict=verdict,
            reason=reason,
            attempts=turn.attempt,
            retried=reuse.retried,
            migrated=summary.migrated,
            ttft_ms=summary.ttft_ms,
            output_tokens=summary.output_tokens,
            expected_tokens=expected,
            readback_bytes=reuse.readback.bytes,
            readback_ms=reuse.readback.duration_ms,
            handoff_bytes=reuse.handoff.bytes,
            prefill_worker=summary.prefill_worker,
            decode_worker=summary.decode_worker,
            **{f"{source}_tokens": tokens for source, tokens in sources.items()},
        )

    def _steps(self, turn: "Turn") -> None:
        for step, spent_ms in turn.timings.items():
            self._metrics.observe("kvloop_turn_step_seconds", step, value=spent_ms / 1000)


def watch_workers(metrics: Metrics, pool: "WorkerPool") -> None:
    """Take over how many workers there are, and how well."""
    for role, workers in (("prefill", pool.prefill), ("decode", pool.decode)):
        ready = sum(worker.ready for worker in workers)
        present = sum(worker.present for worker in workers)
        metrics.put("kvloop_router_workers", role, "ready", value=ready)
        metrics.put("kvloop_router_workers", role, "paused", value=present - ready)
        metrics.put("kvloop_router_workers", role, "gone", value=len(workers) - present)
