# ruff: noqa: N802 - methods are named as the RPCs
"""What the services of prefill and decode workers have in common: opening, draining, and how turns travel."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from kvloop.engine.port import Engine
from kvloop.engine.reloading import Reloading
from kvloop.engine.settings import Role
from kvloop.engine.worker import worker_info
from kvloop.runtime import checks
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.servicing import Context, stream, time_left_s
from kvloop.v1alpha1 import worker_pb2

RETRY_AFTER_S = 1.0


class WorkerParts(Protocol):
    """What every worker's methods work with, once its engine is up."""

    @property
    def engine(self) -> Engine:
        """Return the engine."""
        ...

    @property
    def reloading(self) -> Reloading:
        """Return what loads weights anew."""
        ...

    @property
    def worker_id(self) -> str:
        """Return the worker's name."""
        ...


P = TypeVar("P", bound=WorkerParts)


class WorkerServicing(Generic[P]):
    """Closed until `open`, and to new turns again after `drain`. Goes ahead of the stub's own class."""

    def __init__(self, carrier: Carrier) -> None:
        """Take what carries the calls of turns."""
        self._carrier = carrier
        self._open: P | None = None
        self._draining = False

    def guard(self, admits: Callable[[Any], bool] | None) -> None:
        """Have calls on attached streams let in like calls of their own."""
        self._carrier.admits = admits

    def open(self, parts: P) -> None:
        """Begin to serve."""
        self._open = parts

    def drain(self) -> None:
        """Refuse new turns; what is held is served on."""
        self._draining = True
        self._carrier.drain()

    @property
    def _parts(self) -> P:
        if self._open is None:
            raise Failure(
                Reason.ERROR_REASON_NO_WORKER, "the engine is starting", retry_after_s=RETRY_AFTER_S
            )
        return self._open

    def _admit(self) -> P:
        """Return the parts for a new turn. Failures: NO_WORKER, DRAINING."""
        parts = self._parts
        if self._draining:
            raise Failure(Reason.ERROR_REASON_DRAINING, "the worker is going away")
        parts.reloading.admit()
        return parts

    async def _reload(self, weights_version: str, context: Context) -> str:
        """Load other weights under the same name; return the new epoch."""
        left = checks.check_deadline(time_left_s(context))
        return await self._parts.reloading.run(weights_version, left)

    async def _info(self, role: Role) -> worker_pb2.WorkerInfo:
        """Return the worker's facts, with its pool and counters."""
        parts = self._parts
        info = worker_info(parts.engine.facts, role, parts.worker_id)
        info.pool.CopyFrom(await parts.engine.pool())
        info.counters.CopyFrom(await parts.engine.counters())
        info.draining = self._draining
        return info

    @stream
    async def Attach(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        """Carry many calls of the method that serves turns."""
        async with aclosing(self._carrier.serve(request_iterator, context)) as batches:
            async for batch in batches:
                yield batch
