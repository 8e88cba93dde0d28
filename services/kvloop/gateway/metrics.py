"""The gateway's own figures on /metrics, beside those of vLLM's serving code."""

from prometheus_client import Counter, Gauge

from kvloop.gateway.exchange import Exchange, reason_name, verdict_name
from kvloop.gateway.segments import Rendering
from kvloop.v1alpha1 import turn_pb2

_TURNS = Counter(
    "kvloop_gateway_turns",
    "Turns that ended, by the way taken.",
    ("verdict", "reason", "identity"),
)
_FAILURES = Counter("kvloop_gateway_failures", "Turns that failed, by kvloop's reason.", ("reason",))
_PROMPT = Counter("kvloop_gateway_prompt_tokens", "Prompt tokens, by source.", ("source",))
_RENDERED = Counter("kvloop_gateway_rendered_tokens", "Tokens of rendered chats, by source.", ("source",))
_CACHE = Gauge("kvloop_gateway_render_cache_bytes", "What the cache of rendered messages holds.")


class Metrics:
    """Counts into the process's registry; instances share it."""

    def ended(self, here: Exchange, summary: turn_pb2.Summary) -> None:
        """Count a turn that ended by itself."""
        reuse = summary.reuse
        _TURNS.labels(verdict_name(reuse.verdict), reason_name(reuse.reason), here.identity.source).inc()
        for source in ("p_local", "readback", "d_local", "computed"):
            _PROMPT.labels(source).inc(getattr(reuse.tokens, source))

    def failed(self, reason: str | None) -> None:
        """Count a turn that failed; None: refused by vLLM's own checks."""
        _FAILURES.labels((reason or "refused").lower()).inc()

    def rendered(self, rendering: Rendering, cache_bytes: int) -> None:
        """Count a chat's tokens."""
        _RENDERED.labels("cached").inc(rendering.cached_tokens)
        _RENDERED.labels("restored").inc(rendering.restored_tokens)
        fresh = len(rendering.ids) - rendering.cached_tokens - rendering.restored_tokens
        _RENDERED.labels("tokenized").inc(max(0, fresh))
        _CACHE.set(cache_bytes)
