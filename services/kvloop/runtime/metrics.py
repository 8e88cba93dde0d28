"""One process's metrics: what the catalogue names, in a registry of its own.

Two kinds of sources. Events are counted and observed where they happen. What a room keeps anyway (a table's
length, the engine's own sums) is asked for when somebody scrapes: a probe fills in gauges and sums then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvloop.runtime import catalogue, logs
from kvloop.runtime.catalogue import OTHER, Metric, Process
from kvloop.runtime.errors import Failure

PROBE_S = 2.0
"""A scrape does not wait longer for any probe; what it would have told is left as it was."""

Probe = Callable[[], Awaitable[None]]
_log = logs.get("metrics")


class Metrics:
    """The metrics of one process. Cheap enough to be kept whether or not anybody scrapes."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.registry = CollectorRegistry()
        self._known = {metric.name: metric for metric in catalogue.of_process(process)}
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._sound: set[tuple[str, tuple[str, ...]]] = set()
        self._probes: list[Probe] = []
        for metric in self._known.values():
            if metric.kind == "histogram":
                names = [name for name, _ in metric.labels]
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.help, names, buckets=metric.buckets, registry=self.registry
                )
            else:
                # Series without labels are there from the start, so that a rate has a beginning.
                self._values[metric.name] = {} if metric.labels else {(): 0.0}
        self.registry.register(_Values(self._known, self._values))

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter. labels: values in the catalogue's order. Raises KeyError for unknown names."""
        values, key = self._values[name], self._key(name, labels)
        values[key] = values.get(key, 0.0) + amount

    def put(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge, or the sum of a counter that is kept elsewhere."""
        self._values[name][self._key(name, labels)] = float(value)

    def clear(self, name: str) -> None:
        """Leave a gauge out until it is set."""
        self._values[name].clear()

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Add one observation to a histogram."""
        histogram = self._histograms[name]
        if labels:
            key = self._key(name, labels)
            child = self._children.get((name, key))
            if child is None:
                child = self._children[(name, key)] = histogram.labels(*key)
            histogram = child
        histogram.observe(value)

    def put_sums(self, name: str, sums: Mapping[str, float]) -> None:
        """Set the sums of a counter with one label."""
        for label, value in sums.items():
            self.put(name, str(label), value=value)

    def probe(self, probe: Probe) -> None:
        """Ask this before each exposition; it fills in what is kept elsewhere."""
        self._probes.append(probe)

    async def exposition(self) -> bytes:
        """Return the text that Prometheus reads."""
        await asyncio.gather(*(self._ask(probe) for probe in self._probes))
        return generate_latest(self.registry)

    def _key(self, name: str, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the labels with values that the catalogue does not know replaced."""
        if (name, labels) in self._sound:
            return labels
        allowed = self._known[name].labels
        key = tuple(v if v in values else OTHER for v, (_, values) in zip(labels, allowed, strict=True))
        if key == labels:
            self._sound.add((name, labels))
        return key

    async def _ask(self, probe: Probe) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await probe()
        except (Failure, TimeoutError) as error:
            _log.debug("probe_failed", error=type(error).__name__)


class _Values(Collector):
    """Counters and gauges, from plain numbers."""

    def __init__(
        self, known: Mapping[str, Metric], values: Mapping[str, Mapping[tuple[str, ...], float]]
    ) -> None:
        self._known = known
        self._values = values

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Yield a family per metric."""
        for name, values in self._values.items():
            metric = self._known[name]
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            made = family(metric.name, metric.help, labels=[label for label, _ in metric.labels])
            for labels, value in values.items():
                made.add_metric(labels, value)
            yield made
