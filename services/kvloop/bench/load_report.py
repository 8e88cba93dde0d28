"""What a load run's records say."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvloop.bench import statistics
from kvloop.bench.records import Record

_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_METRICS = ("ttft_ms", "tpot_ms", "latency_ms", "input_num_tokens", "output_num_tokens")


def summarise_load(
    records: Sequence[Record], settings: Mapping[str, Any], *, complete: bool
) -> dict[str, Any]:
    """Return a run's summary; what does not count is left out."""
    counted = [record for record in records if record.measured and not record.error]
    failures = [record.error for record in records if record.error]
    summary: dict[str, Any] = {
        "complete": complete,
        "settings": dict(settings),
        "requests": len(records),
        "measured": len(counted),
        "failures": {"count": len(failures), "first": failures[0] if failures else ""},
    }
    if not counted:
        return summary
    if count := sum(record.retokenized for record in counted):
        summary["retokenized"] = count
    span_s = _span_s(counted)
    verdicts: dict[str, int] = {}
    sources: dict[str, int] = {}
    for record in counted:
        way = f"{record.verdict}, {record.reason}" if record.verdict else "not told"
        verdicts[way] = verdicts.get(way, 0) + 1
        for source, count in record.tokens.items():
            sources[source] = sources.get(source, 0) + count
    return summary | {
        "conversations": len({record.conversation_id for record in counted}),
        "span_s": span_s,
        "requests_per_s": len(counted) / span_s,
        "output_tokens_per_s": sum(record.output_num_tokens for record in counted) / span_s,
        "verdicts": verdicts,
        "tokens_by_source": sources,
        "distribution": {name: _distribution([getattr(r, name) for r in counted]) for name in _METRICS},
    }


def retokenized(summary: Mapping[str, Any]) -> str:
    """Return what answers without token ids do to the figures, for people; empty when all had some."""
    if not (count := summary.get("retokenized", 0)):
        return ""
    return (
        f"{count} of {summary['measured']} answers came without token ids and were encoded again from their"
        " text: later prompts may not go on from what the server holds, and it may seem to reuse less than it"
        " can"
    )


def _span_s(records: Sequence[Record]) -> float:
    begun = min(record.start_time_ms for record in records)
    ended = max(record.start_time_ms + record.latency_ms for record in records)
    return max(ended - begun, 1e-3) / 1e3


def _distribution(values: Sequence[float]) -> dict[str, Any]:
    found = dict(zip(_SHARES, statistics.percentiles(values, list(_SHARES.values())), strict=True))
    return {"mean": sum(values) / len(values), **found, "median": statistics.median(values).as_dict()}
