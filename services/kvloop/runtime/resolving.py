"""Names that stand for several processes: who is behind a name is looked up again and again."""

import asyncio
import socket

from kvloop.runtime import endpoints, logs

RESOLVE_EVERY_S = 5.0

_log = logs.get("resolving")


async def behind(endpoint: str) -> tuple[str, ...]:
    """Return host:port of every address behind an endpoint; none when its name can't be resolved now."""
    at = endpoints.parse(endpoint)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        _log.warning("name_not_resolved", endpoint=endpoint, error=type(error).__name__)
        return ()
    # A host with two stacks is behind its name twice.
    hosts = {str(address[0]): None for family, *_, address in found if family == found[0][0]}
    return tuple(str(at._replace(host=host)) for host in sorted(hosts))


async def addresses(endpoint: str) -> tuple[str, ...]:
    """Return host:port of everybody behind an endpoint; nobody when its name can't be resolved now.

    One address is as good as the name, which is returned then: gRPC looks it up by itself.
    """
    found = await behind(endpoint)
    return (endpoint,) if len(found) == 1 else found
