"""One screen of 80 columns and 24 lines from two samples."""

from datetime import datetime

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvloop.cli.top.samples import Sample, Seen, Series, grown, quantile, total
from kvloop.v1alpha1 import worker_pb2

VERDICTS = {"direct": "magenta", "readback": "green", "recompute": "yellow"}
SOURCES = {
    "readback": ("read back", "green"),
    "d_local": ("D's", "magenta"),
    "p_local": ("P's", "cyan"),
    "computed": ("computed", "yellow"),
}
_BAR = 24
_MANY = 9
"""Workers for which there is room."""


def screen(before: Sample | None, now: Sample, clock: datetime) -> Group:
    """Return the screen. before: an earlier sample; without one, sums are since ever and rates left out."""
    growth = grown(before.series if before else {}, now.series)
    seconds = now.at - before.at if before else None
    parts: list[Text | Table] = [_head(now, clock), Text(), _turns(growth, now, seconds), _verdicts(growth)]
    parts += [_tokens(growth), Text(), _workers(now, before), _endings(growth, now)]
    return Group(*parts)


def _head(now: Sample, clock: datetime) -> Text:
    line = Text("kvloop ", style="bold")
    for role in ("prefill", "decode"):
        mine = [worker for worker in now.workers if worker.role == role]
        well = sum(worker.info is not None for worker in mine)
        line.append(f" {role} {well}/{len(mine)}", style="" if well == len(mine) and mine else "red")
    line.append(f"  store {now.store or 'not named'}", style="red" if now.store not in ("", "ok") else "")
    if now.store in ("", "ok") and total(now.series, "kvloop_store_degraded"):
        line.append(", cold turns", style="red")
    if now.silent:
        line.append(f"  no metrics: {len(now.silent)}", style="red")
    line.truncate(70)
    line.append(clock.strftime("  %H:%M:%S"), style="dim")
    return line


def _turns(growth: Series, now: Sample, seconds: float | None) -> Text:
    turns = total(growth, "kvloop_turns_total")
    failed = total(growth, "kvloop_turn_failures_total")
    in_flight, limit = (total(now.series, f"kvloop_turns_{name}") for name in ("in_flight", "limit"))
    rate = f"{turns / seconds:.1f}/s" if seconds else f"{turns:.0f}"
    line = Text(f"turns    {rate}   in flight {in_flight:.0f} of {limit:.0f}")
    output = total(growth, "kvloop_output_tokens_total")
    if seconds:
        line.append(f"   output {output / seconds:.0f} tokens/s")
    line.append(f"   failed {failed:.0f}", style="red" if failed else "")
    canary = total(growth, "kvloop_canary_total", result="mismatch")
    if canary:
        line.append(f"   CANARY {canary:.0f}", style="red bold")
    return line


def _verdicts(growth: Series) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("verdicts", width=10)
    table.add_column("", width=_BAR)
    for heading in ("turns", "share", "ttft p50", "p90", "p99"):
        table.add_column(heading, justify="right")
    everything = total(growth, "kvloop_turns_total")
    for verdict, style in VERDICTS.items():
        count = total(growth, "kvloop_turns_total", verdict=verdict)
        share = count / everything if everything else 0.0
        times = (quantile(q, growth, "kvloop_turn_ttft_seconds", verdict=verdict) for q in (0.5, 0.9, 0.99))
        shown = ["-" if time is None else f"{time * 1000:.0f} ms" for time in times]
        bar = Text("█" * round(share * _BAR), style=style)
        table.add_row(verdict.upper(), bar, f"{count:.0f}", f"{share:.0%}", *shown)
    return table


def _tokens(growth: Series) -> Text:
    counts = {source: total(growth, "kvloop_prompt_tokens_total", source=source) for source in SOURCES}
    everything = sum(counts.values())
    shares = {source: count / everything if everything else 0.0 for source, count in counts.items()}
    line = Text("prompts  ")
    for source, (_, style) in SOURCES.items():
        line.append("█" * round(shares[source] * _BAR), style=style)
    for source, (name, style) in SOURCES.items():
        line.append(f"  {name} {shares[source]:.0%}", style=style)
    return line


def _workers(now: Sample, before: Sample | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("worker", max_width=22, no_wrap=True, overflow="ellipsis")
    table.add_column("state", width=8)
    table.add_column("KV blocks", width=14)
    for heading in ("used", "held", "leases", "tokens/s"):
        table.add_column(heading, justify="right")
    earlier = {worker.name: worker.info for worker in before.workers} if before else {}
    seconds = now.at - before.at if before else 0.0
    for worker in now.workers[:_MANY]:
        table.add_row(*_row(worker, earlier.get(worker.name), seconds))
    if len(now.workers) > _MANY:
        table.add_row(f"and {len(now.workers) - _MANY} more")
    return table


def _row(worker: Seen, earlier: worker_pb2.WorkerInfo | None, seconds: float) -> list[str | Text]:
    info = worker.info
    if info is None:
        return [worker.name, Text("gone", style="red")]
    state = Text("draining", style="yellow") if worker.draining else Text("ready", style="green")
    pool = info.pool
    held = pool.held_blocks / max(1, pool.total_blocks)
    used = 1 - pool.free_blocks / max(1, pool.total_blocks)
    width = 14
    bar = Text("█" * round(held * width), style="green")
    bar.append("█" * (round(used * width) - round(held * width)), style="blue")
    bar.append("·" * (width - len(bar)), style="dim")
    speed = "-"
    if earlier is not None and earlier.epoch == info.epoch and seconds > 0:
        work = [i.counters.computed_tokens + i.counters.generated_tokens for i in (earlier, info)]
        speed = f"{max(0, work[1] - work[0]) / seconds:.0f}"
    leases = str(pool.leases) if worker.role == "decode" else "-"
    return [worker.name, state, bar, f"{used:.0%}", f"{held:.0%}", leases, speed]


def _endings(growth: Series, now: Sample) -> Text:
    line = Text()
    endings = {
        dict(labels)["reason"]: count
        for (name, labels), count in growth.items()
        if name == "kvloop_leases_ended_total" and count
    }
    if endings:
        told = ", ".join(f"{why} {count:.0f}" for why, count in sorted(endings.items(), key=lambda e: -e[1]))
        line.append(f"\nleases ended  {told}")
    pins = total(now.series, "kvloop_lease_pins")
    if pins:
        line.append(f"\nreads in progress  {pins:.0f}")
    return line
