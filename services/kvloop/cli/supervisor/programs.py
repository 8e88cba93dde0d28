"""The command lines of parts."""

import sys
from collections.abc import Sequence
from pathlib import Path

STORE_PASSWORD = "KVLOOP_STORE_PASSWORD"
"""Environment of the store's process: not on a command line, which everybody on the machine can read."""


def serve_program(role: str, settings: Path, ready_file: Path) -> Sequence[str]:
    """Return the command line of `kvloop serve`."""
    return [
        *(sys.executable, "-m", "kvloop.cli.main", "serve", role),
        *("--config", str(settings), "--ready-file", str(ready_file)),
    ]


def store_program(port: int, ready_file: Path) -> Sequence[str]:
    """Return the command line of the embedded store; port 0 takes any. Its password is in STORE_PASSWORD."""
    return [sys.executable, "-m", "kvloop.cli.supervisor.store", str(port), str(ready_file)]
