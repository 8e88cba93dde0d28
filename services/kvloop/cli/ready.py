"""Ready files: how a part tells its supervisor where it serves."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvloop.cli.errors import CommandFailed


def announce(file: Path, facts: Mapping[str, Any]) -> None:
    """Write a ready file that readers see whole or not at all; only its owner may read it."""
    part = file.with_name(file.name + ".part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.replace(file)


def read(file: Path) -> dict[str, Any] | None:
    """Return what a ready file says; None before there is one."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def say_line(facts: Mapping[str, Any]) -> None:
    """Write the facts as one line to stdout, for machines."""
    # Whoever ran the command with its output closed does not need the line.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(facts).encode() + b"\n")


@contextlib.contextmanager
def no_longer_than_served(file: Path | None) -> Iterator[None]:
    """Keep a ready file from outliving what it speaks of. Raises CommandFailed where it can't be written."""
    if file is None:
        yield
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    except OSError as error:
        raise CommandFailed(f"can't use {file} as ready file: {error.strerror}") from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
