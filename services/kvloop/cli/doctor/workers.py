"""Whether the workers fit together. Pure functions of what they say about themselves."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloop.cli.doctor.findings import Finding, fail, ok, warn
from kvloop.runtime import endpoints
from kvloop.v1alpha1 import worker_pb2

MIN_HOLD_S = 30.0
"""Agents' tools take seconds to minutes; holds shorter than this are mostly over by the next turn."""

Info = worker_pb2.WorkerInfo


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker."""

    role: str
    endpoint: str
    info: Info | None
    """None when it did not answer."""

    @property
    def name(self) -> str:
        """Return the worker's name, or where it should be."""
        return self.info.worker_id if self.info is not None and self.info.worker_id else self.endpoint


def check_all(workers: Sequence[Seen]) -> list[Finding]:
    """Return the findings about workers that were asked for their facts."""
    findings = [check_present(workers, role) for role in ("prefill", "decode")]
    known = [worker for worker in workers if worker.info is not None]
    if known:
        checks = (check_model, check_block_size, check_compatibility, check_reads, check_threshold)
        findings += [check(known) for check in checks]
        findings.append(check_hold_time(known))
    return findings


def check_present(workers: Sequence[Seen], role: str) -> Finding:
    """Tell whether every worker of a role answers."""
    name = f"{role}-workers"
    mine = [worker for worker in workers if worker.role == role]
    if not mine:
        return fail(
            name, f"no {role} worker is known", f"name the workers with --{role}, or --config or --store"
        )
    gone = [worker.endpoint for worker in mine if worker.info is None]
    if gone:
        return fail(
            name,
            f"no {role} worker answers at {', '.join(gone)}",
            f"start it with kvloop serve {role}, or take it out of the routers' settings",
        )
    return ok(name, f"{len(mine)} answer")


def check_model(workers: Sequence[Seen]) -> Finding:
    """Tell whether all serve the same weights."""
    groups = _groups(workers, lambda info: f"{info.model.name} ({info.model.revision or 'no revision'})")
    if len(groups) > 1:
        return fail(
            "model",
            f"workers serve different weights: {_told(groups)}",
            "start all with the same model and revision; KV is never shared between weights",
        )
    return ok("model", next(iter(groups)))


def check_block_size(workers: Sequence[Seen]) -> Finding:
    """Tell whether all cut KV into blocks of one size."""
    groups = _groups(workers, lambda info: str(info.block_size))
    if len(groups) > 1:
        return fail(
            "block-size", f"block sizes differ: {_told(groups)}", "set the same block_size on all workers"
        )
    return ok("block-size", f"{next(iter(groups))} tokens")


def check_compatibility(workers: Sequence[Seen]) -> Finding:
    """Tell whether all engines can exchange KV."""
    groups = _groups(workers, lambda info: info.compatibility)
    if len(groups) > 1:
        versions = {worker.info.engine_version for worker in workers if worker.info is not None}
        versions_differ = f" (engine versions {', '.join(sorted(versions))})" if len(versions) > 1 else ""
        return fail(
            "compatibility",
            f"workers can't exchange KV: {_told(groups)}{versions_differ}",
            "make equal: versions of vllm, nixl and kvloop, model, dtype, block_size, tensor_parallel_size, "
            "and PYTHONHASHSEED",
        )
    return ok("compatibility", "versions, layout and hashing agree")


def check_reads(workers: Sequence[Seen]) -> Finding:
    """Tell whether KV may travel back, on both sides."""
    off = [worker.name for worker in workers if worker.info and not worker.info.bidirectional_kv_xfer]
    if off:
        return fail(
            "bidirectional",
            f"KV does not travel back: bidirectional_kv_xfer is off on {', '.join(off)}",
            "set bidirectional_kv_xfer on every prefill and decode worker",
        )
    return ok("bidirectional", "on everywhere")


def check_threshold(workers: Sequence[Seen]) -> Finding:
    """Tell whether prompts reach the size from which they are read back."""
    name = "threshold"
    groups = _groups(workers, lambda info: str(info.kv_recompute_threshold))
    infos = [worker.info for worker in workers if worker.info is not None]
    unreachable = [i for i in infos if i.kv_recompute_threshold >= i.max_model_len]
    if unreachable:
        return fail(
            name,
            f"kv_recompute_threshold ({unreachable[0].kv_recompute_threshold}) is not below max_model_len "
            f"({unreachable[0].max_model_len}): nothing is ever read back",
            "lower kv_recompute_threshold; 64 suits most",
        )
    if len(groups) > 1:
        return warn(
            name,
            f"kv_recompute_threshold differs: {_told(groups)}",
            "set the same value everywhere; routers go by the highest",
        )
    return ok(name, f"{next(iter(groups))} tokens")


def check_hold_time(workers: Sequence[Seen]) -> Finding:
    """Tell whether decode workers hold long enough for the next turn to come."""
    name = "hold-time"
    held = {
        worker.name: worker.info.hold_time.ToNanoseconds() / 1e9
        for worker in workers
        if worker.role == "decode" and worker.info is not None and worker.info.HasField("hold_time")
    }
    if not held:
        return ok(name, "no decode worker tells its own")
    short = {worker: hold for worker, hold in held.items() if hold < MIN_HOLD_S}
    remedy = "raise decoder_kv_blocks_ttl (480 s unless set) above the longest usual gap between turns"
    if short:
        told = ", ".join(f"{worker} {hold:g} s" for worker, hold in short.items())
        return warn(name, f"leases end before most next turns come: {told}", remedy)
    if len(set(held.values())) > 1:
        told = ", ".join(f"{worker} {hold:g} s" for worker, hold in held.items())
        return warn(name, f"decoder_kv_blocks_ttl differs: {told}", "set the same on all decode workers")
    return ok(name, f"{next(iter(held.values())):g} s")


def left_at_loopback(worker: Seen) -> bool:
    """Tell whether other hosts reach the worker, but not its engine's side channel."""
    if worker.info is None or not worker.info.side_channel:
        return False
    try:
        at, side = endpoints.parse(worker.endpoint), endpoints.parse(worker.info.side_channel)
    except ValueError:
        return False
    return side.is_loopback and not at.is_loopback


def _groups(workers: Sequence[Seen], key: Callable[[Info], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for worker in workers:
        if worker.info is not None:
            groups[key(worker.info)].append(worker.name)
    return dict(groups)


def _told(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{what[:40]} on {', '.join(names)}" for what, names in groups.items())
