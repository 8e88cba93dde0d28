"""The store as metrics show it."""

from kvloop.metastore.factory import Store
from kvloop.runtime.metrics import Metrics


def watch_store(metrics: Metrics, store: Store) -> None:
    """Take over what the store's link keeps of its own; a store in memory is always well."""
    metrics.put("kvloop_store_degraded", value=store.degraded)
    if store.link is not None:
        metrics.put_sums("kvloop_store_outages", {str(why): n for why, n in store.link.outages.items()})
        metrics.put("kvloop_store_operations", value=store.link.attempts)
