"""Names that stand for several routers: who is behind a name is looked up again and again."""

import asyncio
import socket

from kvloop.runtime import endpoints, logs

_log = logs.get("gateway")


async def addresses(endpoint: str) -> tuple[str, ...]:
    """Return host:port of everybody behind an endpoint; nobody when its name can't be resolved now.

    One address is as good as the name, which is returned then: gRPC looks it up by itself.
    """
    at = endpoints.parse(endpoint)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except OSError as error:
        _log.warning("routers_not_resolved", error=type(error).__name__)
        return ()
    # A host with two stacks is behind its name twice.
    hosts = {str(address[0]): None for family, *_, address in found if family == found[0][0]}
    return tuple(str(at._replace(host=host)) for host in sorted(hosts)) if len(hosts) > 1 else (endpoint,)
