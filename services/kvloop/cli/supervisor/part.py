"""One child process: its log, its ready file, its end."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloop.cli import ready
from kvloop.cli.supervisor import launch

POLL_S = 0.02
STOP_GRACE_S = 6.0
_TAIL_BYTES = 64 * 1024


class PartFailed(Exception):
    """A part ended by itself, or did not become ready in time; the text says which and shows its log."""

    def __init__(self, name: str, what: str, log_lines: Sequence[str]) -> None:
        self.name = name
        self.what = what
        self.log_lines = tuple(log_lines)
        text = f"{name} {what}"
        if self.log_lines:
            text += "; its last log lines:\n" + "\n".join(f"  {line}" for line in self.log_lines)
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a part."""

    arguments: Sequence[str]
    """Program, as an absolute path, and its arguments."""
    environment: Mapping[str, str]


class Part:
    """A child process in a process group of its own, so that whatever it starts can be ended with it.

    It says that it is ready by writing {"endpoint": "host:port", ...} to its ready file. Start, stop and
    start again as often as needed; the log goes on in the same file.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self.ready_path = folder / f"{name}.ready"
        self.endpoint: str | None = None
        """host:port once ready; kept after the end, for a restart in the same place."""
        self.facts: dict[str, Any] = {}
        """What the ready file said."""
        self.expected_to_end = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the running part, or None."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Tell whether the process is there."""
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the last run (negative: the signal), or None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def spawn(self, command: Command) -> None:
        """Start the process; returns before it is ready."""
        if self.running:
            raise RuntimeError(f"{self.name} is running")
        self.ready_path.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            # -I -S: the launcher needs no packages, and starts three times as fast without them.
            launcher = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())]
            self._process = await asyncio.create_subprocess_exec(
                *launcher,
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(command.environment),
                start_new_session=True,
            )
        # Only now: a part that is being started has not ended by itself.
        self.expected_to_end = False

    async def wait_ready(self, timeout_s: float) -> str:
        """Return the endpoint once the part serves.

        Raises PartFailed when it ends or the time is over.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            if (facts := ready.read(self.ready_path)) is not None:
                self.facts = facts
                self.endpoint = str(facts["endpoint"])
                return self.endpoint
            if not self.running:
                raise self.failure()
            if asyncio.get_running_loop().time() > deadline:
                what = f"was not ready within {timeout_s:.0f} s"
                raise PartFailed(self.name, what, self.log_tail())
            await asyncio.sleep(POLL_S)

    async def wait_ended(self) -> int:
        """Return the exit code once the process has ended."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return await self._process.wait()

    def failure(self) -> PartFailed:
        """Return what to say about the part's end."""
        code = self.exit_code
        if code is not None and code < 0:
            what = f"was ended by {signal.Signals(-code).name}"
        else:
            what = f"ended with exit code {code}"
        return PartFailed(self.name, what, self.log_tail())

    def signal(self, number: int) -> None:
        """Send a signal to the part's own process."""
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the part: SIGTERM, again at half the grace to cut a drain short, then SIGKILL. Idempotent."""
        self.expected_to_end = True
        try:
            for _ in range(2):
                if not self.running:
                    break
                self.signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wait_ended(), grace_s / 2)
        finally:
            # Also when cancelled: nothing is left behind, and the group's other members go too.
            self._kill_group()
        if self._process is not None:
            await self.wait_ended()

    async def kill(self) -> None:
        """SIGKILL the part's own process alone, as the kernel would, and wait for its end."""
        self.expected_to_end = True
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self.wait_ended()

    def log_tail(self, lines: int = 15) -> list[str]:
        """Return the last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        return text.splitlines()[-lines:]

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
