"""host:port endpoints: read, written and judged the same everywhere; IPv6 addresses stand in brackets."""

import ipaddress
import re
from typing import NamedTuple

# Letters, digits, dots, hyphens and underscores: nothing that a gRPC resolver could take for a scheme.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
_MAX_PORT = 65535


class Endpoint(NamedTuple):
    """Where a service listens."""

    host: str
    """A name or an address, without brackets."""
    port: int

    def __str__(self) -> str:
        """Return host:port, bracketed for IPv6."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Tell whether the endpoint is on this host by its very form; names are not resolved."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(text: str) -> Endpoint:
    """Return the endpoint of host:port, 127.0.0.1:50051, or [::1]:50051.

    Raises ValueError, with a text that does not repeat the input.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()) or int(port) > _MAX_PORT:
        raise ValueError("expected host:port")
    if host.startswith("[") and host.endswith("]"):
        try:
            return Endpoint(str(ipaddress.IPv6Address(host[1:-1])), int(port))
        except ValueError:
            raise ValueError("expected an IPv6 address in the brackets") from None
    if ":" in host:
        raise ValueError("an IPv6 address needs brackets: [::1]:50051")
    if not _NAME.fullmatch(host):
        raise ValueError("expected a host name or an address before the port")
    return Endpoint(host, int(port))
