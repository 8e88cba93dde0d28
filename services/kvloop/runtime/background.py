"""Work that nobody awaits: kept from the garbage collector, and heard of when it fails."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvloop.runtime import logs

T = TypeVar("T")

_log = logs.get("background")


def spawn(tasks: "set[asyncio.Task[T]]", work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start work as a task that is in `tasks` until it ends; an exception that ends it is logged."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(_tell)
    return task


async def end(tasks: "set[asyncio.Task[Any]]", patience_s: float) -> None:
    """Give what still runs patience_s seconds, then cancel it; returns once all has ended."""
    if tasks:
        await asyncio.wait(set(tasks), timeout=patience_s)
    # What ended meanwhile may have begun something else.
    rest = list(tasks)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _tell(task: "asyncio.Task[Any]") -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        name = getattr(task.get_coro(), "__qualname__", task.get_name())
        _log.error("task_failed", task=name, error=type(error).__name__, exc_info=error)
