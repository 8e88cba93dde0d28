"""What the scheduler side and the worker side tell each other with every engine step."""

from dataclasses import dataclass, field
from typing import Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvloop.connector.guard import Refusal


@dataclass(slots=True)
class Orders:
    """To the workers, on top of vLLM's own metadata."""

    refused: dict[str, list[int]] = field(default_factory=dict)
    """Requests to fail without reading: the blocks allocated to them, by request id."""
    notices: list[tuple[str, str]] = field(default_factory=list)
    """(engine, remote request id) of handles that nobody will read."""
    copies: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(from, to): blocks to copy before the step's forward pass, by request id."""
    guards_off: frozenset[str] = frozenset()
    stalled: bool = False
    """Whether a test wants reads not to be seen to end."""


@dataclass(slots=True)
class Read:
    """One completed read on some of the ranks."""

    ms: float = 0.0
    bytes: int = 0
    descriptors: int = 0
    ranks: int = 1


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers."""

    notices: list[str] = field(default_factory=list)
    """Remote request ids that readers of this engine's blocks have sent, once per rank."""
    reads: dict[str, Read] = field(default_factory=dict)
    """By request id."""
    failed: dict[str, Refusal] = field(default_factory=dict)
    """By request id."""
    copied: set[str] = field(default_factory=set)
    """Requests whose copies were in a step that is over."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Take in another rank's report."""
        assert isinstance(other, WorkerReport)
        self.notices += other.notices
        self.failed |= other.failed
        self.copied |= other.copied
        for request_id, read in other.reads.items():
            mine = self.reads.setdefault(request_id, Read(ranks=0))
            mine.ranks += read.ranks
            mine.ms = max(mine.ms, read.ms)
            mine.bytes += read.bytes
            mine.descriptors += read.descriptors
        return self

    def __bool__(self) -> bool:
        return bool(self.notices or self.reads or self.failed or self.copied)
