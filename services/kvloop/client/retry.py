"""When a call is worth another try, and when that is."""

import random
from dataclasses import dataclass

import grpc

from kvloop.client.errors import CallFailed

# Reasons that another try, or another router, may do away with. SUPERSEDED is none: a later attempt has it.
_PASSING = frozenset(
    {
        "DIRECTORY_UNAVAILABLE",
        "DRAINING",
        "KV_READ_FAILED",
        "NO_WORKER",
        "OVERLOADED",
        "WORKER_FAILED",
    }
)
# Codes of calls that will fail the same way anywhere.
_FINAL = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon. Seconds."""

    attempts: int = 4
    """Tries in all."""
    first_pause_s: float = 0.1
    """Doubles with every try; the pause is drawn at random below that, on top of RetryInfo's."""
    longest_pause_s: float = 2.0

    def pause_s(self, failure: CallFailed, tries: int) -> float:
        """Return how long to wait after so many tries."""
        backoff = min(self.first_pause_s * 2 ** (tries - 1), self.longest_pause_s)
        return (failure.retry_after_s or 0.0) + random.uniform(0.0, backoff)


PATIENT = RetryPolicy()
"""For agents."""
ONCE = RetryPolicy(attempts=1)
"""For measurements."""


def is_passing(failure: CallFailed) -> bool:
    """Tell whether another try may succeed."""
    if failure.reason:
        return failure.reason in _PASSING
    return failure.code is grpc.StatusCode.UNAVAILABLE


def is_final(failure: CallFailed) -> bool:
    """Tell whether no router will ever take the call."""
    return failure.code in _FINAL


def is_away(failure: CallFailed) -> bool:
    """Tell whether it is the router that is away or going, so that another one is worth asking at once."""
    return failure.reason == "DRAINING" or (
        not failure.reason and failure.code is grpc.StatusCode.UNAVAILABLE
    )
