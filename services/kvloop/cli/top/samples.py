"""What is known of a deployment at one moment, and what two moments tell together."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvloop.v1alpha1 import worker_pb2

Labels = frozenset[tuple[str, str]]
Series = Mapping[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker, as it tells of itself."""

    role: str
    """"prefill" or "decode"."""
    name: str
    info: worker_pb2.WorkerInfo | None
    """None when it did not answer."""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. at: monotonic seconds."""

    at: float
    workers: Sequence[Seen] = ()
    store: str = ""
    """"" when none was named, "ok", or why it can't be used."""
    scraped: int = 0
    """Processes whose metrics were read."""
    silent: Sequence[str] = ()
    """Metrics endpoints that did not answer."""
    series: Series = field(default_factory=dict)
    """Metrics, summed over processes."""


def summed(samples: Iterable[tuple[str, Mapping[str, str], float]]) -> dict[tuple[str, Labels], float]:
    """Return the sums of samples with equal names and labels."""
    sums: dict[tuple[str, Labels], float] = defaultdict(float)
    for name, labels, value in samples:
        sums[name, frozenset(labels.items())] += value
    return dict(sums)


def total(series: Series, name: str, **labels: str) -> float:
    """Return the sum of a metric's series that have these labels."""
    wanted = labels.items()
    return sum(
        value for (found, has), value in series.items() if found == name and wanted <= dict(has).items()
    )


def grown(before: Series, after: Series) -> dict[tuple[str, Labels], float]:
    """Return what counters have grown by; one that went down was restarted and counts from zero."""
    growth = {}
    for key, value in after.items():
        was = before.get(key, 0.0)
        growth[key] = value - was if value >= was else value
    return growth


def quantile(share: float, series: Series, histogram: str, **labels: str) -> float | None:
    """Return a quantile of a histogram's growth, between buckets in a straight line; None without any.

    What lies beyond the last bound is told as that bound.
    """
    wanted = labels.items()
    counts: dict[float, float] = defaultdict(float)
    for (name, has), value in series.items():
        of = dict(has)
        if name == f"{histogram}_bucket" and wanted <= of.items():
            counts[float(of["le"])] += value
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    rank = share * counts[bounds[-1]]
    for low, high in pairwise([0.0, *bounds]):
        below = counts.get(low, 0.0)
        if counts[high] >= rank and counts[high] > below:
            if high == float("inf"):
                return low
            return low + (high - low) * (rank - below) / (counts[high] - below)
    return bounds[-1]
