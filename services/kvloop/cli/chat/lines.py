"""What chat prints about a turn."""

from kvloop.v1alpha1 import turn_pb2


def verdict_of(reuse: turn_pb2.Reuse) -> str:
    """Return the verdict's short name."""
    return turn_pb2.Verdict.Name(reuse.verdict).removeprefix("VERDICT_")


def reason_of(reuse: turn_pb2.Reuse) -> str:
    """Return the reason's short name."""
    return turn_pb2.ReuseReason.Name(reuse.reason).removeprefix("REUSE_REASON_")


def size(count: int) -> str:
    """Return a byte count for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def turn_line(summary: turn_pb2.Summary, ttft_s: float | None) -> str:
    """Return one line: verdict (reason), tokens reused and computed, TTFT, transfer."""
    reuse = summary.reuse
    tokens = reuse.tokens
    sources = [
        f"{count} {name}"
        for name, count in (
            ("from P's cache", tokens.p_local),
            ("read back from D", tokens.readback),
            ("held by D", tokens.d_local),
        )
        if count
    ]
    reused = " + ".join(sources) if sources else "0 reused"
    reason = reason_of(reuse).lower().replace("_", " ")
    parts = [
        f"{verdict_of(reuse)} ({reason})",
        f"{summary.prompt_tokens} prompt tokens: {reused}, {tokens.computed} computed",
    ]
    if ttft_s is not None:
        parts.append(f"first token {ttft_s * 1e3:.0f} ms")
    if reuse.HasField("readback") and reuse.readback.bytes:
        parts.append(f"{size(reuse.readback.bytes)} in {reuse.readback.duration_ms:.1f} ms")
    if reuse.retried:
        parts.append("started again once")
    return " | ".join(parts)
