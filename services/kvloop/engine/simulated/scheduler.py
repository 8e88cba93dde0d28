"""Queues and steps: what one engine computes next, and for whom it makes room.

A step gives each running sequence its next token or its next chunk of prompt, then lets waiting ones in
while there are tokens, seats and blocks. A prompt gets all its blocks when it is let in; answers grow
block by block. When blocks run out, holds go first, then the sequence that came last is preempted.
"""

from collections import deque
from collections.abc import Callable

from kvloop.engine.port import Sources
from kvloop.engine.simulated.filling import Filler
from kvloop.engine.simulated.holds import HoldTable
from kvloop.engine.simulated.pool import Block, BlockPool
from kvloop.engine.simulated.request import Request
from kvloop.engine.simulated.settings import SimulatedSettings

Batch = list[tuple[Request, int]]
"""Requests and how many of their tokens one step computes."""


class Scheduler:
    """One engine's requests."""

    def __init__(
        self,
        settings: SimulatedSettings,
        pool: BlockPool,
        table: HoldTable,
        filler: Filler,
        *,
        start_read: Callable[[Request], None],
        read_saved: Callable[[Request], None],
        sample: Callable[[Request], None],
    ) -> None:
        self._settings = settings
        self._size = settings.block_size
        self._pool = pool
        self._table = table
        self._filler = filler
        self._start_read = start_read
        self._read_saved = read_saved
        """Told when a handle's blocks are not needed."""
        self._sample = sample
        """Told when all tokens of a request are computed."""
        self.preemptions = 0
        self.waiting: deque[Request] = deque()
        self.ready: deque[Request] = deque()
        """Read, and to run."""
        self.running: list[Request] = []

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def resume(self, request: Request, num_tokens: int) -> None:
        """Let a request run whose first num_tokens tokens have been read."""
        request.computed = num_tokens
        request.after_read = True
        self.ready.append(request)

    def leave(self, request: Request) -> None:
        """Take a request out, wherever it is, and give its blocks back."""
        for queue in (self.running, self.waiting, self.ready):
            if request in queue:
                queue.remove(request)
                break
        self._pool.release(request.blocks)
        request.blocks = []

    def schedule(self) -> Batch:
        """Return the next step; empty when nothing can run now."""
        budget = self._settings.max_num_batched_tokens
        batch: Batch = []
        running = self.running
        preempted = self.preemptions
        at = 0
        while at < len(running) and budget > 0:
            request = running[at]
            count = min(request.length - request.computed, budget)
            missing = -(-(request.computed + count) // self._size) - len(request.blocks)
            if missing > 0 and not self._grow(request, missing):
                continue
            batch.append((request, count))
            budget -= count
            at += 1
        while budget > 0 and preempted == self.preemptions and len(running) < self._settings.max_num_seqs:
            request_or_none = self._next()
            if request_or_none is None:
                break
            count = min(request_or_none.length - request_or_none.computed, budget)
            running.append(request_or_none)
            batch.append((request_or_none, count))
            budget -= count
        return batch

    def apply(self, batch: Batch) -> None:
        """Do a step: compute, and sample where everything is computed."""
        for request, count in batch:
            if request.over:
                continue
            self._filler.compute(request, request.computed, request.computed + count)
            request.computed += count
            request.after_read = False
            if request.computed == request.length:
                if request.sources is None:
                    request.sources = Sources(
                        local=request.local,
                        external=request.external,
                        computed=request.prompt_len - request.local - request.external,
                    )
                self._sample(request)

    def allocate(self, count: int) -> list[Block] | None:
        """Return blocks, at the cost of holds if need be."""
        while (blocks := self._pool.allocate(count)) is None:
            if not self._table.evict_one():
                return None
        return blocks

    def _next(self) -> Request | None:
        """Return the next request that can run now; reads that have to come first are started."""
        if self.ready:
            return self.ready.popleft()
        while self.waiting:
            request = self.waiting[0]
            if not self._admit(request):
                return None
            self.waiting.popleft()
            if request.external and not request.sources and not request.after_read:
                self._start_read(request)
            else:
                return request
        return None

    def _admit(self, request: Request) -> bool:
        """Give a request its blocks: cached ones first. False when there are not enough."""
        length, size = request.length, self._size
        hits: list[Block] = []
        if not request.skip_cache:
            hits = self._pool.hits(request.keys, (length - 1) // size)
        local = len(hits) * size
        first_time = request.sources is None and not request.after_read
        external = self._external(request, local) if first_time else 0
        self._pool.touch(hits)
        fresh = self.allocate(-(-length // size) - len(hits))
        if fresh is None:
            self._pool.release(hits)
            return False
        request.blocks = hits + fresh
        request.computed = local
        if first_time:
            request.local, request.external = local, external
            if request.handle is not None and not external and not request.prefill:
                self._read_saved(request)
        return True

    def _external(self, request: Request, local: int) -> int:
        """Return how many tokens are to be read; the last of a prompt is computed in any case."""
        if request.handle is None:
            return 0
        external = max(0, min(request.handle.num_tokens, request.length - 1) - local)
        if request.prefill and external < self._settings.kv_recompute_threshold:
            return 0
        return external

    def _grow(self, request: Request, count: int) -> bool:
        """Give a running request more blocks; False when it had to be preempted itself."""
        while True:
            blocks = self.allocate(count)
            if blocks is not None:
                request.blocks += blocks
                return True
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.fold = None
        if request.sources is None:
            request.external = 0
            request.handle = None
        self.waiting.appendleft(request)
