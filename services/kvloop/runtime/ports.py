"""Ports for what listens later than it is told where."""

import contextlib
import random
import socket

QUIET = range(20_000, 32_000)
"""Below what Linux gives to outgoing connections: one of those would be taken before somebody listens."""
_TRIES = 64

# Processes that were seeded alike must not choose alike.
_rng = random.SystemRandom()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of a host that is free now, and that no outgoing connection takes. Raises OSError."""
    for port in _rng.sample(QUIET, _TRIES):
        with contextlib.suppress(OSError):
            try_listening(host, port)
            return port
    raise OSError(f"none of the ports tried is free at {host}")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return so many different ones."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port(host))
    return list(found)


def try_listening(host: str, port: int) -> None:
    """Raise the OSError that whoever listens there would get."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: connections of a former life that are still closing are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
