"""A small file that is read again when it changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvloop.runtime import logs
from kvloop.runtime.clock import Clock
from kvloop.runtime.config import ConfigError

_RECHECK_S = 1.0

_log = logs.get("config")
V = TypeVar("V")


class WatchedFile(Generic[V]):
    """A parsed file. One that no longer parses leaves the former value in force, and the log tells."""

    def __init__(self, setting: str, file: Path, parse: Callable[[str], V], clock: Clock) -> None:
        """Read the file. Raises ConfigError, naming the setting, when it can't be read or parsed."""
        self._setting = setting
        self._file = file
        self._parse = parse
        self._clock = clock
        self._seen: tuple[int, int, int] | None = None
        self._checked = clock.monotonic()
        self._value = self._load()

    def value(self) -> V:
        """Return what the file says, at most a second ago."""
        now = self._clock.monotonic()
        if now - self._checked >= _RECHECK_S:
            self._checked = now
            try:
                if self._stamp() != self._seen:
                    self._value = self._load()
                    _log.info("file_reloaded", setting=self._setting)
            except ConfigError as error:
                _log.error("file_not_reloaded", setting=self._setting, error=str(error))
            except OSError as error:
                _log.error("file_not_reloaded", setting=self._setting, error=error.strerror)
        return self._value

    def _load(self) -> V:
        try:
            stamp = self._stamp()
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            kind = type(error).__name__
            raise ConfigError(f"{self._setting}: can't be read: {kind}: {self._file}") from None
        # Noted before parsing, so that a broken file is complained of once and not at every call.
        self._seen = stamp
        return self._parse(text)

    def _stamp(self) -> tuple[int, int, int]:
        status = self._file.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
