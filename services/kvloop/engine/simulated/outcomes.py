"""Prefill outcomes: prompts' blocks kept for one decode engine, for a fixed time."""

from collections.abc import Sequence

from kvloop.engine.simulated.pool import Block, BlockPool


class Outcomes:
    """What a prefill engine has computed and nobody has read yet, oldest first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._table: dict[str, tuple[float, list[Block]]] = {}

    @property
    def blocks(self) -> list[list[Block]]:
        """Return the blocks of every outcome."""
        return [blocks for _, blocks in self._table.values()]

    @property
    def next_due(self) -> float | None:
        """When the oldest one lapses."""
        return next(iter(self._table.values()))[0] if self._table else None

    def keep(self, request_id: str, blocks: Sequence[Block], deadline: float) -> None:
        """Take over a request's references; deadlines ascend from call to call."""
        self.release(request_id)
        self._table[request_id] = (deadline, list(blocks))

    def names(self) -> list[str]:
        """Return the requests whose outcomes are kept."""
        return list(self._table)

    def release(self, request_id: str) -> bool:
        """Give the blocks back; False when nothing was kept."""
        entry = self._table.pop(request_id, None)
        if entry is None:
            return False
        self._pool.release(entry[1])
        return True

    def reap(self, now: float) -> None:
        """Give back what has lapsed."""
        while self._table:
            request_id = next(iter(self._table))
            if self._table[request_id][0] > now:
                return
            self.release(request_id)
