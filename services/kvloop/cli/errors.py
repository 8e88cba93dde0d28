"""Expected failures end a command with a sentence and an exit code, not with a traceback."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

import typer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

P = ParamSpec("P")
T = TypeVar("T")


class CommandFailed(Exception):
    """A command can't do what it was asked to; the text says what to do about it."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def write_line(stream: IO[str], text: str) -> None:
    """Write a line; a reader that went away (kvloop up | tee, both ended by one Ctrl-C) changes nothing."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except OSError:
        # What is still buffered must not fail once more at the interpreter's end.
        with Path(os.devnull).open("w") as nowhere, contextlib.suppress(OSError):
            os.dup2(nowhere.fileno(), stream.fileno())


def say(message: str) -> None:
    """Write a line for people on stderr."""
    write_line(sys.stderr, message)


def sentences(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command: ConfigError and CommandFailed end it with their text and code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        from kvloop.runtime.config import ConfigError

        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            say(str(error))
            raise typer.Exit(EXIT_USAGE) from None
        except CommandFailed as error:
            say(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return wrapped
