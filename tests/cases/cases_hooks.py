"""What cases do to single engines: freeze them, fill them, and what their test hooks can break."""

import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import psutil
from cases_kit import Stack, until

from kvloop.connector.control import ControlClient, ControlError
from kvloop.v1alpha1 import turn_pb2

GUARDS = ("deadline", "hash", "counts")
NOTHING_HELD = turn_pb2.Retention(hold=False)
LONG = 1500
"""Tokens of a prompt that takes most of the small decode worker's pool."""

_serial = itertools.count(1)


@asynccontextmanager
async def hooks(stack: Stack, engine: str) -> AsyncIterator[ControlClient]:
    """Open an engine's control socket; every hook is off again afterwards."""
    client = await ControlClient.connect(stack.controls[engine])
    try:
        yield client
    finally:
        with contextlib.suppress(ControlError):  # the engine is gone, and its hooks with it
            await client.stall(None)
            await client.spoil(None)
            for guard in GUARDS:
                await client.guard(guard, True)
        await client.close()


@contextmanager
def frozen(stack: Stack, engine: str) -> Iterator[None]:
    """Stop an engine's processes, as a suspended host would; a front end of its own runs on.

    The simulated engine is its front end.
    """
    front = psutil.Process(stack.fleet.parts[stack.parts[engine]].pid)
    stopped = front.children(recursive=True) or [front]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)


async def pinned(stack: Stack, decode: str, lease_id: str) -> None:
    """Return once somebody has leave to read a lease."""

    async def has_pins() -> bool:
        return any(lease.pins for lease in await stack.leases(decode) if lease.lease_id == lease_id)

    assert await until(has_pins), "nobody reads the lease"


async def let_go(stack: Stack, decode: str, lease_id: str, timeout_s: float = 40.0) -> None:
    """Return once a decode worker holds nothing of a lease any more, pins included."""

    async def gone() -> bool:
        return lease_id not in {lease.lease_id for lease in await stack.leases(decode)}

    assert await until(gone, timeout_s), "the lease is still held"


def unheard(length: int) -> list[int]:
    """Return a prompt that no cache knows."""
    return [2000 + next(_serial)] * length


async def overwrite(stack: Stack, router: str, decode: str) -> None:
    """Have other turns take every free block of a decode worker once."""
    left = (await stack.info(decode)).pool.free_blocks
    while left > 0:
        length = min(LONG, left * stack.block_size)
        await stack.turn(unheard(length), router=router, max_tokens=1, retention=NOTHING_HELD)
        left -= -(-length // stack.block_size)
