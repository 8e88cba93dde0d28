"""The decode worker as metrics show it."""

from kvloop.decode.servicer import Parts
from kvloop.runtime.metrics import Metrics


def watch_leases(metrics: Metrics, parts: Parts) -> None:
    """Take over what keeper and readings keep of their own."""
    table = parts.keeper.table
    table.sweep(parts.clock.monotonic())
    live = sum(lease.is_live() for lease in table.held())
    metrics.put("kvloop_leases", "live", value=live)
    metrics.put("kvloop_leases", "doomed", value=len(table) - live)
    metrics.put("kvloop_leases_prolonged", value=parts.prolonger.prolonged)
    metrics.put("kvloop_lease_pins", value=table.pins)
    metrics.put_sums("kvloop_leases_ended", {str(why): n for why, n in table.endings.items()})
    metrics.put_sums("kvloop_lease_publications", parts.keeper.publications)
    metrics.put("kvloop_reads_granted", value=parts.reading.granted)
    metrics.put_sums("kvloop_reads_refused", parts.reading.refused)
    metrics.put("kvloop_legs_in_flight", value=len(parts.turns))
