"""Start and end of one AsyncLLM with its engine core, its control socket and its temporary folder."""

import asyncio
import contextlib
import functools
import multiprocessing
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvloop.engine.settings import EngineSettings, Role
from kvloop.engine.vllm import env
from kvloop.engine.vllm.stats import Counters

GRACE_S = 10.0
"""Seconds an engine core has to end by itself before it is killed."""

_spawning = threading.Lock()
"""Engines of one process start one after another: their cores inherit the process's environment."""


class Core:
    """One engine core's life. `start` once, `stop` any number of times."""

    def __init__(self, settings: EngineSettings, role: Role, counters: Counters) -> None:
        self._settings = settings
        self._role = role
        self._counters = counters
        # The parent-death signal follows the thread that spawned the core, so this thread stays until the
        # core has ended.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvloop-engine")
        self._folder: Path | None = None
        self._children: list[BaseProcess] = []
        self._before: set[BaseProcess] | None = None
        self._abandoned = False
        self.llm: Any = None

    @property
    def control_path(self) -> Path:
        """Return the path of the control socket."""
        if self._settings.control_path is not None:
            return self._settings.control_path
        assert self._folder is not None
        return self._folder / "control"

    @property
    def processes(self) -> list[BaseProcess]:
        """Return the processes that this core consists of, workers of further ranks left out."""
        if self._before is not None and not self._children:  # still starting
            return list(set(multiprocessing.active_children()) - self._before)
        return list(self._children)

    async def start(self) -> None:
        """Spawn the engine core and load the model.

        Cancelled, or failed, it leaves nothing behind once `stop` has run.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="kvloop-"))
        building = asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        try:
            self.llm = await asyncio.shield(building)
        except asyncio.CancelledError:
            # The build waits for its core; without one it fails at once.
            self._abandoned = True
            while not building.done():
                _kill(set(self.processes))
                await asyncio.wait([building], timeout=0.05)
            if not building.cancelled() and building.exception() is None:
                self.llm = building.result()
            raise

    def _build(self) -> Any:
        with _spawning:
            if self._abandoned:
                raise RuntimeError("the start was cancelled")
            env.apply(self._settings, env.side_channel_port(self._settings))
            # Only now: vllm reads its environment when it is imported.
            from vllm.v1.engine.async_llm import AsyncLLM

            from kvloop.engine.vllm.arguments import engine_arguments

            arguments = engine_arguments(self._settings, self._role, self.control_path)
            self._before = set(multiprocessing.active_children())
            try:
                return AsyncLLM.from_engine_args(arguments, stat_loggers=[self._counters.factory()])
            finally:
                self._children = list(set(multiprocessing.active_children()) - self._before)
                self._before = None

    async def stop(self) -> None:
        """End the engine core, kill what does not end, and remove the folder."""
        loop = asyncio.get_running_loop()
        llm, self.llm = self.llm, None
        if llm is not None:
            await _fail_requests(llm)
            await loop.run_in_executor(self._thread, functools.partial(llm.shutdown, timeout=GRACE_S))
            _close_sockets(llm)
        children, self._children = self._children, []
        if children:
            await loop.run_in_executor(self._thread, _end, children)
        self._thread.shutdown(wait=False)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


async def _fail_requests(llm: Any) -> None:
    """End what is in flight before the core goes: its death would be logged as a fault."""
    from vllm.v1.engine.exceptions import EngineDeadError

    llm.output_processor.propagate_error(EngineDeadError())
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.gather(llm.output_handler, return_exceptions=True)


def _close_sockets(llm: Any) -> None:
    """Close vLLM's sockets and their context now; vLLM leaves the context to the garbage collector."""
    resources = llm.engine_core.resources
    for socket in (resources.input_socket, resources.output_socket):
        if socket is not None:
            socket.close(linger=0)
    resources.ctx.destroy(linger=0)


def _end(children: list[BaseProcess]) -> None:
    deadline = time.monotonic() + GRACE_S
    for child in children:
        with contextlib.suppress(ValueError):  # closed already
            child.join(max(0.0, deadline - time.monotonic()))
    _kill(set(children))
    for child in children:
        with contextlib.suppress(ValueError):
            child.join(GRACE_S)


def _kill(children: set[BaseProcess]) -> None:
    for child in children:
        with contextlib.suppress(ValueError):
            if child.is_alive():
                child.kill()
