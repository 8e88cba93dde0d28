"""How engines reach each other's blocks: directly within a process, over loopback TCP between processes.

A source answers three things: what it is and what time it has, what is in some blocks now, and that a
read is over. It never says no to a read of blocks that have long become somebody else's; neither does
RDMA.
"""

from typing import NamedTuple, Protocol

from kvloop.engine.simulated.handle import Address
from kvloop.engine.simulated.kv import Kv


class Dead(Exception):
    """The other engine does not answer."""


class Hello(NamedTuple):
    """What the handshake tells."""

    now: float
    """The holder's monotonic clock."""
    compatibility: str


class KvSource(Protocol):
    """An engine whose blocks can be read. Every call may raise Dead."""

    async def hello(self) -> Hello:
        """Shake hands."""
        ...

    async def fetch(self, block_ids: list[int]) -> list[Kv] | None:
        """Return what is in the blocks now; None when one of them does not exist."""
        ...

    async def done(self, request_id: str) -> None:
        """Tell that a read is over."""
        ...

    async def close(self) -> None:
        """Let go of the way to the engine, not of the engine."""
        ...


class Fabric:
    """The engines of one process by engine id, and the way to those of others.

    tcp: whether engines of this fabric listen on loopback, and read from engines that do.
    """

    def __init__(self, *, tcp: bool = False) -> None:
        self.tcp = tcp
        self._sources: dict[str, KvSource] = {}

    def join(self, engine_id: str, source: KvSource) -> None:
        """Make an engine readable."""
        self._sources[engine_id] = source

    def leave(self, engine_id: str) -> None:
        """Forget an engine. Idempotent."""
        self._sources.pop(engine_id, None)

    async def open(self, address: Address) -> KvSource:
        """Return a way to an engine. Raises Dead."""
        source = self._sources.get(address.engine_id)
        if source is not None:
            return source
        if self.tcp and address.port:
            from kvloop.engine.simulated.wire import TcpSource

            return await TcpSource.connect(address)
        raise Dead


DEFAULT = Fabric(tcp=True)
"""The fabric of engines that are given none: all of this process, and others over loopback."""
