"""What the tests ask over HTTP, and Prometheus' text as numbers."""

import asyncio
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


async def get(endpoint: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Return status and body."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


Sample = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Sample:
    """Return values by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(endpoint: str) -> Sample:
    status, body = await get(endpoint, "/metrics")
    assert status == 200
    return samples(body)


def value(found: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """Return one sample's value, 0 when there is none."""
    return found.get((name, frozenset(labels.items())), 0.0)


def total(found: Sample, name: str) -> float:
    """Return the sum over all labels."""
    return sum(amount for (sample, _), amount in found.items() if sample == name)
