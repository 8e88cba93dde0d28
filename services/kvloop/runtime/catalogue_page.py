"""docs/metrics.md, from the catalogue.

python -m kvloop.runtime.catalogue_page docs/metrics.md
"""

import sys
from pathlib import Path

from kvloop.runtime.catalogue import CATALOGUE, OTHER, PROCESSES, Metric

_HEAD = """# Metrics

Made from the catalogue in `services/kvloop/runtime/catalogue.py` by `make docs`; don't edit.

Each router, prefill and decode process serves `/metrics`, `/livez` and `/readyz` over HTTP where
`metrics_listen` says (`--metrics-listen 127.0.0.1:9601`); without that setting it serves none. An address
that other hosts reach needs `metrics_open` as well. Ready means the same as in gRPC's health checks. The
gateway has `/metrics` on its own port, with those of vLLM's HTTP server beside its own. Alerts on these
metrics are in `deploy/prometheus/alerts.yml`.

Labels take only the values listed; anything else is counted as `{other}`.
"""


def page() -> str:
    """Return the document."""
    parts = [_HEAD.format(other=OTHER)]
    for process in PROCESSES:
        parts.append(
            f"\n## {process.capitalize()}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        )
        parts += [_row(metric) for metric in CATALOGUE if process in metric.processes]
    parts.append("\n## Values of labels\n\n")
    known = {label: values for metric in CATALOGUE for label, values in _labels(metric)}
    parts += [f"- `{label}`: {', '.join(values)}\n" for label, values in known.items()]
    return "".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label, _ in metric.labels)
    return f"| `{metric.exposed}` | {metric.kind} | {labels} | {metric.help} |\n"


def _labels(metric: Metric) -> list[tuple[str, tuple[str, ...]]]:
    return [(f"{metric.exposed}.{label}", values) for label, values in metric.labels]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
