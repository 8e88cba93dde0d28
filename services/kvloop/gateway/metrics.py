"""The gateway's own figures on /metrics, beside those of vLLM's serving code."""

from prometheus_client import Counter, Gauge

from kvloop.gateway.exchange import Exchange, reason_name, verdict_name
from kvloop.gateway.segments import Rendering
from kvloop.runtime.catalogue import BY_NAME, OTHER, Metric
from kvloop.v1alpha1 import turn_pb2


class _Counted:
    """One counter of the catalogue; a label's value that is not listed there is counted as "other"."""

    def __init__(self, name: str) -> None:
        self._metric: Metric = BY_NAME[name]
        self._counter = Counter(name, self._metric.help, [label for label, _ in self._metric.labels])

    def add(self, *labels: str, amount: int = 1) -> None:
        """Add to it."""
        listed = zip(labels, self._metric.labels, strict=True)
        self._counter.labels(*(value if value in known else OTHER for value, (_, known) in listed)).inc(
            amount
        )


# vLLM's serving code counts into the process's own registry, and so do these.
_TURNS = _Counted("kvloop_gateway_turns")
_FAILURES = _Counted("kvloop_gateway_failures")
_PROMPT = _Counted("kvloop_gateway_prompt_tokens")
_RENDERED = _Counted("kvloop_gateway_rendered_tokens")
_CACHE = Gauge("kvloop_gateway_render_cache_bytes", BY_NAME["kvloop_gateway_render_cache_bytes"].help)


class Metrics:
    """Counts into the process's registry; instances share it."""

    def ended(self, here: Exchange, summary: turn_pb2.Summary) -> None:
        """Count a turn that ended by itself."""
        reuse = summary.reuse
        _TURNS.add(verdict_name(reuse.verdict), reason_name(reuse.reason), here.identity.source)
        for source in ("p_local", "readback", "d_local", "computed"):
            _PROMPT.add(source, amount=getattr(reuse.tokens, source))

    def failed(self, reason: str | None) -> None:
        """Count a turn that failed; None: refused by vLLM's own checks."""
        _FAILURES.add((reason or "refused").lower())

    def rendered(self, rendering: Rendering, cache_bytes: int) -> None:
        """Count a chat's tokens."""
        _RENDERED.add("cached", amount=rendering.cached_tokens)
        _RENDERED.add("restored", amount=rendering.restored_tokens)
        fresh = len(rendering.ids) - rendering.cached_tokens - rendering.restored_tokens
        _RENDERED.add("tokenized", amount=max(0, fresh))
        _CACHE.set(cache_bytes)
