"""Running a command's coroutine so that signals end it in order."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import typer

from kvloop.cli.errors import EXIT_FAILED

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(work: Coroutine[Any, Any, int], *, ending_is_success: bool = False) -> None:
    """Run a coroutine to its exit code and leave with it.

    The first SIGINT, SIGTERM or SIGHUP cancels the coroutine, which then cleans up; further ones change
    nothing, since cleaning up is bounded. A command ended by a signal leaves with 128 + its
    number, or with 0 where that is how it is meant to end.
    """
    code = asyncio.run(_run(work))
    raise typer.Exit(0 if ending_is_success and code > 128 else code)


async def _run(work: Coroutine[Any, Any, int]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()

    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + received[0] if received else EXIT_FAILED
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)
