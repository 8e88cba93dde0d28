"""What a check found."""

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Status(enum.StrEnum):
    """Weight of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result, as sentences for a person."""

    name: str
    status: Status
    text: str
    remedy: str = ""
    """What to do; "" when all is well."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "status": str(self.status)}


def ok(name: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(name, Status.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    """Return a finding that costs time."""
    return Finding(name, Status.WARN, text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps KV from being reused, or turns from being served."""
    return Finding(name, Status.FAIL, text, remedy)
