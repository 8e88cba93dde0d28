"""`kvloop leases advise`: which hold time and share of the pool fit the pauses that conversations make."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kvloop.cli.errors import CommandFailed, sentences
from kvloop.cli.top.samples import Sample, Series, quantile, total

FEW = 50
"""Pauses from which nothing is concluded."""
COVER = 0.95
"""Share of pauses that the hold time should outlast."""
CUT_OFF = 0.02
"""Share of pauses in the last fifth of the hold time from which more are taken to lie beyond it."""
_EVICTED = 0.02
_MAX_SHARE = 0.8
_STEP = 0.05
GAPS = "kvloop_turn_gap_seconds"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set, and why."""

    pauses: int
    """Pauses that were measured."""
    pause_p50_s: float | None
    pause_p95_s: float | None
    hold_s: float
    """decoder_kv_blocks_ttl as it is."""
    suggested_hold_s: float | None
    """None: leave it."""
    held_share: float
    """Share of the pools that leases hold now."""
    hold_share: float | None
    """hold_share as it is; None: the workers do not tell."""
    evicted_share: float
    """Leases that ended for want of blocks, of all that ended."""
    suggested_hold_share: float | None
    """At least so much; None: leave it."""
    why: Sequence[str]


def advise(series: Series, hold_s: float, held_share: float) -> Advice:
    """Return the advice. series: sums over decode workers; hold_s: the hold time in force."""
    pauses = int(total(series, f"{GAPS}_count"))
    median, most = (quantile(share, series, GAPS) for share in (0.5, COVER))
    ended = total(series, "kvloop_leases_ended_total")
    evicted = total(series, "kvloop_leases_ended_total", reason="evicted") / ended if ended else 0.0
    expired = total(series, "kvloop_leases_ended_total", reason="expired") / ended if ended else 0.0
    why: list[str] = []
    suggested = None
    if pauses < FEW or most is None:
        why.append(f"{pauses} pauses were measured; {FEW} are needed to say something about hold time")
    else:
        suggested = _hold(series, hold_s, most, expired, why)
    if suggested is not None and suggested > hold_s:
        why.append(f"max_ttl_s must be {suggested:g} or more as well")
    in_force = _share_in_force(series)
    share = None
    if ended >= FEW and evicted > _EVICTED:
        # What leases hold just now may be less than what they were refused.
        wanted = max(in_force or 0.0, held_share) / (1 - min(evicted, 0.9))
        share = min(_MAX_SHARE, math.ceil(wanted / _STEP + 1e-9) * _STEP)
        why.append(f"{evicted:.0%} of leases ended for want of blocks: without that, they would hold more")
        if wanted > _MAX_SHARE:
            why.append(f"even {_MAX_SHARE:.0%} of the pools would not do: add decode workers")
        if in_force is not None and share <= in_force:
            share = None
    return Advice(
        pauses,
        median,
        most,
        hold_s,
        suggested,
        held_share,
        in_force,
        evicted,
        round(share, 2) if share is not None else None,
        why,
    )


def _share_in_force(series: Series) -> float | None:
    blocks = total(series, "kvloop_pool_blocks", state="total")
    may_hold = total(series, "kvloop_pool_hold_limit_blocks")
    return round(may_hold / blocks, 3) if blocks and may_hold else None


def _hold(series: Series, hold_s: float, most_s: float, expired: float, why: list[str]) -> float | None:
    late = 1 - _below(series, 0.8 * hold_s)
    if late > CUT_OFF and expired > CUT_OFF:
        why.append(
            f"{late:.0%} of pauses end in the last fifth of the hold time and {expired:.0%} of leases "
            "expire: longer pauses are likely, and not seen"
        )
        return 2 * hold_s
    # A quarter more than nearly all pauses take, in whole half minutes.
    enough = max(30.0, math.ceil(most_s * 1.25 / 30) * 30.0)
    if enough > hold_s:
        why.append(f"{COVER:.0%} of pauses end within {most_s:.0f} s; the hold time has little to spare")
        return enough
    if expired > 0.2 and enough <= hold_s / 2:
        why.append(
            f"{COVER:.0%} of pauses end within {most_s:.0f} s, and {expired:.0%} of leases are held to their "
            "end for nobody"
        )
        return enough
    why.append(f"{COVER:.0%} of pauses end within {most_s:.0f} s: the hold time fits")
    return None


def _below(series: Series, bound_s: float) -> float:
    """Return the share of pauses that ended within a time, between buckets in a straight line."""
    counts: dict[float, float] = {0.0: 0.0}
    for (name, labels), value in series.items():
        if name == f"{GAPS}_bucket":
            bound = float(dict(labels)["le"])
            counts[bound] = counts.get(bound, 0.0) + value
    everything = counts.get(math.inf, 0.0)
    if not everything:
        return 1.0
    low = max(bound for bound in counts if bound <= bound_s)
    high = min((bound for bound in counts if bound > bound_s), default=math.inf)
    part = 0.0 if math.isinf(high) else (bound_s - low) / (high - low)
    return (counts[low] + part * (counts[high] - counts[low])) / everything


@sentences
def command(
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVLOOP_METRICS_ENDPOINTS",
            help="host:port of /metrics of a decode worker (metrics_listen); repeatable.",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(envvar="KVLOOP_DECODE_ENDPOINTS", help="host:port of a decode worker; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Suggest decoder_kv_blocks_ttl and hold_share from the pauses between turns that were measured."""
    from kvloop.cli.top.collecting import Places, collect

    places = Places(decode=_split(decode), metrics=_split(metrics))
    if not (places.decode and places.metrics):
        raise CommandFailed("name the decode workers with --decode, and their metrics with --metrics")
    sample = asyncio.run(collect(places, None))
    advice = advise(sample.series, *_in_force(sample))
    if as_json:
        typer.echo(json.dumps(asdict(advice), indent=1))
        return
    for line in told(advice):
        typer.echo(line)


def told(advice: Advice) -> list[str]:
    """Return the advice as lines."""
    lines = [f"pauses      {advice.pauses} measured"]
    if advice.pause_p50_s is not None and advice.pause_p95_s is not None:
        lines[0] += f", half end within {advice.pause_p50_s:.1f} s, 95% within {advice.pause_p95_s:.1f} s"
    hold, share = advice.suggested_hold_s, advice.suggested_hold_share
    lines.append(
        f"hold time   decoder_kv_blocks_ttl is {advice.hold_s:g} s: "
        + (f"set {hold:g}" if hold is not None else "leave it")
    )
    limit = f" and may hold {advice.hold_share:.0%}" if advice.hold_share is not None else ""
    lines.append(
        f"budget      leases hold {advice.held_share:.0%} of the pools{limit}: "
        + (f"set hold_share to {share:g} or more" if share is not None else "leave hold_share")
    )
    return [*lines, *(f"- {reason}" for reason in advice.why)]


def _in_force(sample: Sample) -> tuple[float, float]:
    """Return hold time (the shortest) and share held. Raises CommandFailed."""
    if sample.silent:
        raise CommandFailed(f"no metrics at {', '.join(sample.silent)}; set metrics_listen on the workers")
    infos = [worker.info for worker in sample.workers if worker.info is not None]
    if not infos:
        raise CommandFailed("no decode worker answers; name the workers with --decode")
    blocks = sum(info.pool.total_blocks for info in infos)
    held = sum(info.pool.held_blocks for info in infos) / max(1, blocks)
    return min(info.hold_time.ToNanoseconds() / 1e9 for info in infos), held


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())
