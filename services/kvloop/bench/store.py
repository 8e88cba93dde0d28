"""The directory against raw redis-py GET and SET of the same bytes, on one server, in one run.

Raw is redis-py's own client over one connection that is made as the directory's: the same class, parser and
settings. 64 at once are also measured with redis-py's usual way, a connection each, and the better of the two
counts. Every sample is kept. What is compared is measured in turns, so that whatever else the machine does
hits both alike. Growth is measured on two servers at the same time, one with a thousand leases and one with a
million.
"""

import asyncio
import json
import os
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from kvloop.metastore import codec, keys
from kvloop.metastore.embedded import EmbeddedStore
from kvloop.metastore.factory import Store, StoreOptions, open_raw, open_store
from kvloop.metastore.hints import WRITTEN, hint_lengths, written_lengths
from kvloop.runtime import digests
from kvloop.v1alpha1 import lease_pb2

TOKENS = 24_000
BLOCK = 16
TTL_S = 3600.0
FEW = 1_000
CONCURRENT = 64
WARM_UP = 200
# Both sides get all the time they want: this measures speed, not the deadline.
OPTIONS = StoreOptions(deadline_s=10.0, connect_s=10.0)
# Highest, or lowest, acceptable value of each ratio.
AT_MOST = {"lookup_p50_ratio": 1.3, "publish_p50_ratio": 1.6, "p99_growth": 1.5}
AT_LEAST = {"concurrent_ratio": 0.7}

Operation = Callable[[], Awaitable[Any]]


def sample_entry() -> lease_pb2.DirectoryEntry:
    """Return an entry as a decode worker publishes it at 24k tokens."""
    entry = lease_pb2.DirectoryEntry(
        version=codec.ENTRY_VERSION,
        lease_id="0123456789abcdef" * 2,
        conversation_id="0123456789abcdef" * 2,
        decode_endpoint="10.0.0.1:50052",
        epoch="0123456789abcdef" * 2,
        num_tokens=TOKENS,
        block_size=BLOCK,
        turn_start_us=1,
        held=True,
    )
    for length in digests.coarse_lengths(TOKENS, BLOCK):
        entry.digests.add(num_tokens=length, digest=os.urandom(digests.COARSE_BYTES))
    return entry


def scope(number: int) -> bytes:
    """Return the scope of the n-th lease: 32 bytes, as an HMAC."""
    return b"%032d" % number


def fill(store: EmbeddedStore, count: int, value: bytes) -> None:
    """Write leases past the directory, in the protocol's own words: a million take seconds."""
    ttl = b"%d" % int(TTL_S * 1000)
    tail = b"\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(value), value, len(ttl), ttl)
    password = store.url.split(":", 2)[2].split("@")[0].encode()
    with socket.create_connection(("127.0.0.1", store.port)) as peer, peer.makefile("rb") as answers:
        peer.sendall(b"AUTH %b\r\n" % password)
        answers.readline()
        for start in range(0, count, 500):
            numbers = range(start, min(start + 500, count))
            names = [keys.lease_key(scope(number)) for number in numbers]
            peer.sendall(
                b"".join(b"*5\r\n$3\r\nSET\r\n$%d\r\n%b%b" % (len(name), name, tail) for name in names)
            )
            if answers.read(5 * len(names)) != b"+OK\r\n" * len(names):
                raise RuntimeError("the store refused leases")


async def in_turns(operations: dict[str, Operation], rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each operation, run one after the other in every round."""
    samples: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + WARM_UP):
        for name, operation in operations.items():
            begun = time.perf_counter_ns()
            await operation()
            if number >= WARM_UP:
                samples[name].append((time.perf_counter_ns() - begun) / 1000)
    return samples


async def at_once(operations: dict[str, Operation], rounds: int) -> dict[str, list[float]]:
    """Return operations per second of each, 64 at a time, by round."""
    rates: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + 2):
        for name, operation in operations.items():
            begun = time.perf_counter_ns()
            await asyncio.gather(*(operation() for _ in range(CONCURRENT)))
            # The first rounds connect.
            if number >= 2:
                rates[name].append(CONCURRENT * 1e9 / (time.perf_counter_ns() - begun))
    return rates


def percentile(samples: list[float], share: float) -> float:
    """Return a percentile of samples."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


async def used_memory(raw: "Redis") -> int:
    """Return the server's memory in use, in bytes."""
    return int((await raw.info("memory"))["used_memory"])


async def bytes_of_hints(store: Store, raw: "Redis") -> int:
    """Return what the hints of one lease take."""
    names = [length.to_bytes(16, "big") for length in written_lengths(TOKENS)]
    await store.directory.publish_hints(b"g" * 32, names, scope(0), TTL_S)
    sizes = [await raw.memory_usage(keys.hint_key(b"g" * 32, name)) for name in names]
    for name in names:
        await raw.delete(keys.hint_key(b"g" * 32, name))
    return sum(size or 0 for size in sizes)


async def measure(small: EmbeddedStore, large: EmbeddedStore, rounds: int, many: int) -> dict[str, Any]:
    """Run everything and return the record."""
    entry = sample_entry()
    value = codec.encode(entry)
    rng = random.Random(1)
    few, lots = open_store(small.url, options=OPTIONS), open_store(large.url, options=OPTIONS)
    raw = open_raw(small.url, options=OPTIONS)
    pool = Redis.from_url(small.url, max_connections=CONCURRENT)
    raw_large = Redis.from_url(large.url)
    try:
        report = await few.directory.check()
        await lots.directory.check()
        await few.directory.publish(scope(0), entry, TTL_S)
        asked = [length.to_bytes(16, "big") for length in hint_lengths(TOKENS)]
        await few.directory.publish_hints(b"g" * 16, asked[-WRITTEN:-1], scope(0), TTL_S)
        await raw.set(b"raw", value, px=int(TTL_S * 1000))
        single = await in_turns(
            {
                "get": lambda: raw.get(b"raw"),
                "lookup": lambda: few.directory.lookup(scope(0)),
                "set": lambda: raw.set(b"raw", value, px=int(TTL_S * 1000)),
                "publish": lambda: few.directory.publish(scope(0), entry, TTL_S),
                "find": lambda: few.directory.find_by_prefix(b"g" * 16, asked, [scope(0)]),
                "find_hinted": lambda: few.directory.find_by_prefix(b"g" * 16, asked, [scope(FEW)]),
            },
            rounds,
        )
        rates = await at_once(
            {
                "get": lambda: raw.get(b"raw"),
                "get_pooled": lambda: pool.get(b"raw"),
                "lookup": lambda: few.directory.lookup(scope(0)),
            },
            max(rounds // 20, 10),
        )
        hint_bytes = await bytes_of_hints(few, raw)
        fill(small, FEW, value)
        before = await used_memory(raw_large)
        await asyncio.to_thread(fill, large, many, value)
        bytes_per_lease = (await used_memory(raw_large) - before) / many
        growth = await in_turns(
            {
                "few": lambda: few.directory.lookup(scope(rng.randrange(FEW))),
                "many": lambda: lots.directory.lookup(scope(rng.randrange(many))),
            },
            rounds * 5,
        )
        found = await lots.directory.lookup(scope(many - 1))
        if found.entry is None:
            raise RuntimeError("leases were lost while they were measured")
    finally:
        await asyncio.gather(few.close(), lots.close(), raw.aclose(), pool.aclose(), raw_large.aclose())
    return {
        "lookup_p50_ratio": statistics.median(single["lookup"]) / statistics.median(single["get"]),
        "publish_p50_ratio": statistics.median(single["publish"]) / statistics.median(single["set"]),
        "concurrent_ratio": statistics.median(rates["lookup"])
        / max(statistics.median(rates["get"]), statistics.median(rates["get_pooled"])),
        "p99_growth": percentile(growth["many"], 0.99) / percentile(growth["few"], 0.99),
        "bytes_per_lease": round(bytes_per_lease),
        "bytes_of_hints_per_lease": hint_bytes,
        "value_bytes": len(value),
        "p50_us": {name: round(statistics.median(values), 1) for name, values in single.items()},
        "p99_us": {name: round(percentile(values, 0.99), 1) for name, values in (single | growth).items()},
        "settings": {"rounds": rounds, "leases": [FEW, many], "concurrent": CONCURRENT, "tokens": TOKENS},
        "versions": {
            "store": report.server,
            "redis-py": version("redis"),
            "hiredis": version("hiredis"),
            "python": platform.python_version(),
        },
        "samples": {
            "single_us": {name: [round(value, 1) for value in values] for name, values in single.items()},
            "concurrent_per_s": {name: [round(rate) for rate in values] for name, values in rates.items()},
            "growth_us": {name: [round(value, 1) for value in values] for name, values in growth.items()},
        },
    }


def missed(record: dict[str, Any]) -> list[str]:
    """Return a sentence for every target that the record misses."""
    over = [
        f"{name} is {record[name]:.2f}, at most {limit} wanted"
        for name, limit in AT_MOST.items()
        if record[name] > limit
    ]
    under = [
        f"{name} is {record[name]:.2f}, at least {limit} wanted"
        for name, limit in AT_LEAST.items()
        if record[name] < limit
    ]
    return over + under


def main(
    out: Annotated[Path, typer.Option(help="Where the record goes.")] = Path("out/store.json"),
    rounds: Annotated[int, typer.Option(min=10, help="Samples per operation.")] = 3000,
    leases: Annotated[int, typer.Option(min=FEW, help="Leases of the full store.")] = 1_000_000,
) -> None:
    """Measure the directory on embedded Valkey servers."""
    console = Console()
    memory = 512 * 1024 * 1024 + leases * 2048
    with EmbeddedStore() as small, EmbeddedStore(maxmemory_bytes=memory) as large:
        record = uvloop.run(measure(small, large, rounds, leases))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record) + "\n")
    table = Table("measure", "value", "target")
    for name in ("lookup_p50_ratio", "publish_p50_ratio", "concurrent_ratio", "p99_growth"):
        target = f"<= {AT_MOST[name]}" if name in AT_MOST else f">= {AT_LEAST[name]}"
        table.add_row(name, f"{record[name]:.2f}", target)
    table.add_row("bytes_per_lease", str(record["bytes_per_lease"]), "")
    console.print(table)
    console.print(f"p50 in microseconds: {record['p50_us']}; written to {out}")
    problems = missed(record)
    for problem in problems:
        console.print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
