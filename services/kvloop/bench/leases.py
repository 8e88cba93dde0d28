"""What leases cost, and what they are worth when there is less memory than conversations.

Three measurements, on services that run: BeginRead + EndRead on a decode worker, idle and while it streams;
the CPU time of a decode worker that holds leases and does nothing else; and conversations that need twice the
decode worker's KV, with leases, without, and on stock vLLM, in turns.
"""

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloop.bench.target import Outcome, Request, Target, TargetFailed
from kvloop.metastore.port import DirectoryUnavailable, LeaseDirectory
from kvloop.runtime import channels, digests, tokens
from kvloop.v1alpha1 import decode_service_pb2, decode_service_pb2_grpc, sampling_pb2, turn_pb2, worker_pb2

CALL_S = 10.0
STREAM_TOKENS = 1500
RECENT = 3
"""A conversation comes back after so many others have been there."""
SESSION_LEASE_S = 20
"""TTL of leases whose sessions are open: short, so that they are prolonged while it is measured."""
ALIVE_S = 30.0
"""A session's alive key lasts so long, and is written three times as often, as routers do."""

_ids = itertools.count()


class Holder:
    """A decode worker, spoken to as prefill workers and routers do."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._channel = channels.open_channel(endpoint)
        self._stub = decode_service_pb2_grpc.DecodeServiceStub(self._channel)
        self._words = random.Random(seed)
        self._key = secrets.token_bytes(32)
        self.info = worker_pb2.WorkerInfo()

    async def __aenter__(self) -> "Holder":
        """Learn the worker's facts."""
        self.info = await self.facts()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection; what is held stays."""
        await self._channel.close()

    async def facts(self) -> worker_pb2.WorkerInfo:
        """Return what the worker says of itself now."""
        answer = await self._stub.GetInfo(decode_service_pb2.DecodeServiceGetInfoRequest(), timeout=CALL_S)
        return answer.info

    def prompt(self, length: int) -> list[int]:
        """Return random token ids."""
        return [self._words.randrange(5, self.info.vocab_size) for _ in range(length)]

    def _request(
        self, prompt: list[int], max_tokens: int, *, hold: bool, name: str = "", ttl_s: int = 0
    ) -> decode_service_pb2.DecodeRequest:
        name = name or f"bench-{next(_ids)}"
        retention = turn_pb2.Retention(hold=hold)
        if ttl_s:
            retention.ttl.FromSeconds(ttl_s)
        return decode_service_pb2.DecodeRequest(
            request_id=name,
            scope=turn_pb2.TurnScope(
                scope=scope_of(name), digest_key=self._key, conversation_id=name, tenant="bench"
            ),
            prompt_token_ids=tokens.pack(prompt),
            sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            retention=retention,
        )

    async def lease(self, prompt: list[int], name: str = "", ttl_s: int = 0) -> turn_pb2.LeaseInfo:
        """Have the worker compute a prompt and hold it, for its own time or ttl_s."""
        summary = None
        request = self._request(prompt, 1, hold=True, name=name, ttl_s=ttl_s)
        async for response in self._stub.Decode(request, timeout=60):
            if response.HasField("summary"):
                summary = response.summary
        if summary is None or not summary.HasField("lease"):
            raise TargetFailed("the decode worker holds nothing")
        return summary.lease

    async def release(self, lease: turn_pb2.LeaseInfo) -> None:
        """Let a lease go."""
        await self._stub.ReleaseLease(
            decode_service_pb2.ReleaseLeaseRequest(lease_id=lease.lease_id), timeout=CALL_S
        )

    @asynccontextmanager
    async def streaming(self, count: int) -> AsyncIterator[None]:
        """Have so many answers stream; yields once all have begun."""
        calls = [
            self._stub.Decode(self._request(self.prompt(8), STREAM_TOKENS, hold=False), timeout=600)
            for _ in range(count)
        ]
        readers = [asyncio.create_task(_drain(call)) for call in calls]
        try:
            await asyncio.gather(*(call.initial_metadata() for call in calls))
            yield
            if any(reader.done() for reader in readers):
                raise TargetFailed("a stream ended before the measurement did")
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def begin_end(self, lease: turn_pb2.LeaseInfo, held: list[int], rounds: int) -> list[float]:
        """Return milliseconds of BeginRead and EndRead together, round by round."""
        lengths = digests.proof_lengths(lease.num_tokens, self.info.block_size)
        proof = b"".join(digests.prefix_digests(self._key, tokens.pack(held), lengths))
        begin = decode_service_pb2.BeginReadRequest(
            lease_id=lease.lease_id,
            epoch=self.info.epoch,
            scope=turn_pb2.TurnScope(digest_key=self._key),
            prefix_lengths=lengths,
            prefix_digests=proof,
            compatibility=self.info.compatibility,
        )
        took: list[float] = []
        for _ in range(rounds):
            begun = time.perf_counter()
            grant = await self._stub.BeginRead(begin, timeout=CALL_S)
            end = decode_service_pb2.EndReadRequest(lease_id=lease.lease_id, read_id=grant.read_id)
            await self._stub.EndRead(end, timeout=CALL_S)
            took.append((time.perf_counter() - begun) * 1e3)
        return took


def scope_of(name: str) -> bytes:
    """Return the directory's key of a conversation of these measurements, 32 bytes."""
    return name.encode().ljust(32)


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


def percentiles(samples: Iterable[float]) -> dict[str, float]:
    """Return p50 and p99 (nearest rank), and how many samples there are."""
    ordered = sorted(samples)
    at = {"p50": 0.5, "p99": 0.99}
    found = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    return {**{name: round(value, 3) for name, value in found.items()}, "samples": len(ordered)}


async def begin_end_read(holder: Holder, length: int, rounds: int, streams: int) -> dict[str, Any]:
    """Measure BeginRead + EndRead of a lease of so many tokens, idle and under streams."""
    prompt = holder.prompt(length)
    lease = await holder.lease(prompt)
    await holder.begin_end(lease, prompt, rounds // 10 + 1)
    idle = await holder.begin_end(lease, prompt, rounds)
    async with holder.streaming(streams):
        busy = await holder.begin_end(lease, prompt, rounds)
    await holder.release(lease)
    return {
        "tokens": lease.num_tokens,
        "load_average": round(os.getloadavg()[0], 1),
        "idle": percentiles(idle),
        "streaming": {"streams": streams, **percentiles(busy)},
    }


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes so far, in seconds (Linux)."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
        ticks += sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> dict[str, list[int]]:
    """Return a worker's own process and what it has started: {"front": [...], "core": [...]}."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
                parents.setdefault(int(stat.split()[1]), []).append(int(entry.name))
    below = list(parents.get(pid, ()))
    for child in below:
        below += parents.get(child, ())
    return {"front": [pid], "core": below}


async def idle_cpu(
    holder: Holder, pid: int, leases: int, seconds: float, directory: LeaseDirectory
) -> dict[str, Any]:
    """Measure the share of a core that a decode worker takes that holds leases and does nothing else.

    Three times: without leases, with some of as many conversations, and with as many short ones whose
    sessions are open, which the worker prolongs again and again. directory: the worker's, for alive keys.
    Raises TargetFailed when the worker has let a lease go.
    """
    processes = family(pid)
    found: dict[str, Any] = {"leases": leases, "seconds": seconds}

    async def watch(what: str, count: int) -> None:
        before = {part: cpu_seconds(pids) for part, pids in processes.items()}
        begun = time.perf_counter()
        await asyncio.sleep(seconds)
        took = time.perf_counter() - begun
        shares = {part: (cpu_seconds(pids) - before[part]) / took for part, pids in processes.items()}
        found[what] = {part: round(share, 4) for part, share in shares.items()}
        found[what]["all"] = round(sum(shares.values()), 4)
        if (await holder.facts()).pool.leases < count:
            raise TargetFailed("the decode worker has let leases go")

    def prompt() -> list[int]:
        return holder.prompt(holder.info.block_size - 4)

    await watch("without_leases", 0)
    held = [await holder.lease(prompt()) for _ in range(leases)]
    await watch("with_leases", leases)
    for lease in held:
        await holder.release(lease)
    names = [f"session-{next(_ids)}" for _ in range(leases)]
    async with _sessions(directory, names):
        held = [await holder.lease(prompt(), name, SESSION_LEASE_S) for name in names]
        await watch("with_sessions", leases)
    for lease in held:
        await holder.release(lease)
    return found


@asynccontextmanager
async def _sessions(directory: LeaseDirectory, names: list[str]) -> AsyncIterator[None]:
    """Keep conversations alive, as routers do while sessions are open."""

    async def beat() -> None:
        while True:
            for name in names:
                with contextlib.suppress(DirectoryUnavailable):
                    await directory.set_alive(scope_of(name), ALIVE_S)
            await asyncio.sleep(ALIVE_S / 3)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating


@dataclass(slots=True)
class Pressure:
    """What one way of serving came to."""

    second_turns: int = 0
    """That were to be served."""
    served: int = 0
    reused: int = 0
    tokens: int = 0
    """Prompt tokens of second turns."""
    tokens_reused: int = 0
    preemptions: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    """Of requests without a lease."""
    second_ttft_ms: list[float] = field(default_factory=list)

    def take(self, outcome: Outcome) -> None:
        """Take note of a second turn."""
        self.served += 1
        self.reused += outcome.verdict in {"READBACK", "DIRECT"}
        self.tokens += outcome.input_num_tokens
        self.tokens_reused += outcome.tokens["readback"] + outcome.tokens["d_local"]
        self.second_ttft_ms.append(outcome.ttft_ms)

    def summary(self) -> dict[str, Any]:
        """Return the figures. A second turn that was not served has reused nothing."""
        return {
            "second_turns": self.second_turns,
            "served": self.served,
            "reuse_rate": round(self.reused / self.second_turns, 4),
        }

    def timed_summary(self) -> dict[str, Any]:
        """Return the figures, with what only our own services tell."""
        return {
            **self.summary(),
            "reused_tokens": round(self.tokens_reused / self.tokens, 4),
            "preemptions": self.preemptions,
            "ttft_without_lease_ms": percentiles(self.ttft_ms),
            "ttft_second_turn_ms": percentiles(self.second_ttft_ms),
        }


Stock = Callable[[], AbstractAsyncContextManager[Target]]
"""Starts a fresh P and D of stock vLLM, D with as many blocks as the holder, and ends them."""


@dataclass(frozen=True, slots=True)
class Oversubscription:
    """Conversations that need `factor` times the decode worker's KV.

    With leases and with retention off, requests without a conversation follow one another meanwhile. Stock
    vLLM is spared them, as D would hold those too. It holds every turn for minutes and evicts none, so that
    it comes to a stand when its pool is full: there a round of it ends, and it starts anew with the next.
    """

    factor: float = 2.0
    blocks: int = 12
    """Blocks of a conversation's first turn."""
    rounds: int = 3
    """Each serves every conversation once in each way."""
    single_tokens: int = 64
    """Prompt of a request without a lease."""

    async def measure(self, target: Target, holder: Holder, stock: Stock | None = None) -> dict[str, Any]:
        """Play; the target's only decode worker is the holder. stock: None leaves it out."""
        ways = {"leases": Pressure(), "retention_off": Pressure()}
        if stock is not None:
            ways["stock"] = Pressure()
        order = list(ways)
        for _ in range(self.rounds):
            for way in order:
                ways[way].second_turns += self._count(holder)
                if way == "stock" and stock is not None:
                    await self._stock_round(stock, holder, ways[way])
                    continue
                before = (await holder.facts()).counters.preemptions
                await self._round(target, holder, way, ways[way])
                ways[way].preemptions += (await holder.facts()).counters.preemptions - before
            order.reverse()
        on, off = (ways[way].timed_summary() for way in ("leases", "retention_off"))
        return {
            "pool_blocks": holder.info.pool.total_blocks,
            "conversations": self._count(holder),
            "blocks_of_a_conversation": self.blocks,
            "rounds": self.rounds,
            "leases": on,
            "retention_off": off,
            "stock": ways["stock"].summary() if stock is not None else None,
            "preemptions_due_to_leases": on["preemptions"] - off["preemptions"],
            "p99_ratio_without_lease": round(
                on["ttft_without_lease_ms"]["p99"] / off["ttft_without_lease_ms"]["p99"], 4
            ),
        }

    def _count(self, holder: Holder) -> int:
        return int(self.factor * holder.info.pool.total_blocks / self.blocks)

    async def _round(self, target: Target, holder: Holder, way: str, pressure: Pressure) -> None:
        singles = asyncio.create_task(self._singles(target, holder, pressure))
        try:
            await self._conversations(target, holder, pressure, reuse=way == "leases")
        finally:
            singles.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await singles

    async def _stock_round(self, stock: Stock, holder: Holder, pressure: Pressure) -> None:
        async with stock() as target:
            with contextlib.suppress(TargetFailed):
                await self._conversations(target, holder, pressure, reuse=True)

    async def _singles(self, target: Target, holder: Holder, pressure: Pressure) -> None:
        while True:
            request = Request(holder.prompt(self.single_tokens), 4, "", reuse=False)
            pressure.ttft_ms.append((await target.send(request)).ttft_ms)

    async def _conversations(
        self, target: Target, holder: Holder, pressure: Pressure, *, reuse: bool
    ) -> None:
        waiting: list[tuple[str, list[int]]] = []
        names: list[str] = []

        async def come_back() -> None:
            name, prompt = waiting.pop(0)
            pressure.take(await target.send(Request(prompt, 8, name, reuse=reuse)))

        for _ in range(self._count(holder)):
            name = f"leases-{next(_ids)}"
            names.append(name)
            prompt = holder.prompt(self.blocks * holder.info.block_size - 40)
            outcome = await target.send(Request(prompt, 8, name, reuse=reuse))
            waiting.append((name, [*prompt, *outcome.token_ids, *holder.prompt(24)]))
            if len(waiting) > RECENT:
                await come_back()
        while waiting:
            await come_back()
        for name in names:
            await target.end(name)
