"""Asks a deployment: the store for who is there, workers for their facts, processes for their metrics."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.cli.doctor import network
from kvloop.cli.top.samples import Sample, Seen, summed
from kvloop.metastore.factory import Store
from kvloop.metastore.port import DirectoryUnavailable

SCRAPE_S = 2.0
_MAX_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Places:
    """Where to ask. Workers are those named, besides those that the store knows."""

    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    metrics: Sequence[str] = ()


async def collect(places: Places, store: Store | None) -> Sample:
    """Return what is known now. Nothing that is away fails it."""
    endpoints = dict.fromkeys(places.prefill, ("prefill", False))
    endpoints |= dict.fromkeys(places.decode, ("decode", False))
    state = ""
    if store is not None:
        try:
            for worker in (await store.registry.workers()).values():
                endpoints[worker.endpoint] = (worker.role, worker.draining)
            state = "ok"
        except DirectoryUnavailable as error:
            state = f"away ({error.outage})"
    asked = asyncio.gather(*(network.ask(role, at) for at, (role, _) in endpoints.items()))
    scraped = asyncio.gather(*(scrape(at) for at in places.metrics))
    seen, texts = await asked, await scraped
    workers = [Seen(w.role, w.name, w.info, draining=endpoints[w.endpoint][1]) for w in seen]
    return Sample(
        at=time.monotonic(),
        workers=sorted(workers, key=lambda worker: (worker.role != "prefill", worker.name)),
        store=state,
        scraped=sum(text is not None for text in texts),
        silent=[at for at, text in zip(places.metrics, texts, strict=True) if text is None],
        series=summed(sample for text in texts if text is not None for sample in parse(text)),
    )


def parse(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return the samples of an exposition, kvloop's own alone."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        (sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        if family.name.startswith("kvloop_")
        for sample in family.samples
    ]


async def scrape(endpoint: str) -> str | None:
    """Return the text of http://endpoint/metrics; None when nobody answers well in time."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(SCRAPE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_MAX_BYTES)
            try:
                request = f"GET /metrics HTTP/1.0\r\nHost: {endpoint}\r\n\r\n"
                writer.write(request.encode())
                answer = await reader.read(_MAX_BYTES)
                while more := await reader.read(_MAX_BYTES):
                    answer += more
            finally:
                writer.close()
    except (OSError, ValueError, TimeoutError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return body.decode() if b" 200 " in head.split(b"\r\n")[0] else None
