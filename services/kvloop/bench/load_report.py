"""What a load run's records say."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvloop.bench import statistics
from kvloop.bench.load import Outgrown
from kvloop.bench.records import Record
from kvloop.bench.workload.agentic import fitting_scale

_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NOT_TOLD = "not told"
_METRICS = ("ttft_ms", "tpot_ms", "latency_ms", "input_num_tokens", "output_num_tokens")


def summarise_load(
    records: Sequence[Record],
    settings: Mapping[str, Any],
    *,
    complete: bool,
    planned: int = 0,
    outgrown: Outgrown | None = None,
) -> dict[str, Any]:
    """Return a run's summary; what does not count is left out.

    planned: requests that the workload has. outgrown: those not played since they had no room.
    """
    counted = [record for record in records if record.measured and not record.error]
    failures = [record.error for record in records if record.error]
    summary: dict[str, Any] = {
        "complete": complete,
        "settings": dict(settings),
        "requests": len(records),
        "planned_requests": planned,
        "outgrown": asdict(outgrown or Outgrown()),
        "measured": len(counted),
        "failures": {"count": len(failures), "first": failures[0] if failures else ""},
    }
    if not counted:
        return summary
    if count := sum(record.retokenized for record in counted):
        summary["retokenized"] = count
    if stops := [record for record in counted if record.stop_asked]:
        summary["stop_strings"] = {
            "asked": len(stops),
            "hit": sum(record.stop_hit for record in stops),
            "not_told": sum(not record.finish_reason for record in stops),
        }
    span_s = _span_s(counted)
    verdicts: dict[str, int] = {}
    sources: dict[str, int] = {}
    for record in counted:
        way = f"{record.verdict}, {record.reason}" if record.verdict else NOT_TOLD
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


def caveats(summary: Mapping[str, Any]) -> list[str]:
    """Return what makes a run something else than what was asked for, for people."""
    return [
        said for said in (retokenized(summary), outgrown(summary), stops(summary), reuse(summary)) if said
    ]


def outgrown(summary: Mapping[str, Any]) -> str:
    """Return what was not played for want of room; empty when that is nothing."""
    lost, settings = summary["outgrown"], summary["settings"]
    if not lost["conversations"]:
        return ""
    scale = fitting_scale(settings.get("max_model_len") or 0) if settings.get("workload") == "agentic" else 0
    return (
        f"{lost['conversations']} conversations outgrew --max-model-len {settings.get('max_model_len')}:"
        f" {lost['turns']} of {summary['planned_requests']} requests were not played, among them"
        f" {lost['forks']} whole forks and {lost['compactions']} compactions"
        + (f"; at --scale {scale} all fit" if scale else "")
    )


def stops(summary: Mapping[str, Any]) -> str:
    """Return how often stop strings ended an answer; empty when none was asked for."""
    if not (found := summary.get("stop_strings")):
        return ""
    unknown = f", not told {found['not_told']}" if found["not_told"] else ""
    return f"stop strings: asked {found['asked']}, hit {found['hit']}{unknown}"


def reuse(summary: Mapping[str, Any]) -> str:
    """Return whether reuse may have gone on though it was forbidden; empty when that is known."""
    unknown = summary.get("verdicts", {}).get(NOT_TOLD, 0)
    if summary["settings"].get("reuse", True) or not unknown:
        return ""
    return (
        f"{unknown} of {summary['measured']} answers do not tell how they came by their KV: only kvloop's"
        " gateway knows --no-reuse, other servers reuse what they have"
    )


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
