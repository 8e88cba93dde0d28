"""Room in the pool: holds give way before a request has to wait or to be preempted because of them."""

from collections.abc import Callable, Iterable
from typing import Any

from kvloop.connector.table import HoldTable


class CachedPrefix:
    """The blocks of the prefix cache that a request is about to take.

    Those that nobody else uses sit in the pool's free list, so they don't count as room for new blocks.
    """

    def __init__(self, pool: Any, request: Any, num_hashes: int) -> None:
        self._pool = pool
        self._request = request
        self.at_most = num_hashes
        """Of these blocks there are no more."""

    def blocks(self) -> dict[int, bool]:
        """Look them up: return them, with whether they are in the free list now."""
        hashes = self._request.block_hashes[: self.at_most]
        found = (self._pool.get_cached_block(block_hash, [0]) for block_hash in hashes)
        return {blocks[0].block_id: blocks[0].ref_cnt == 0 for blocks in found if blocks}


def whole_request(request: Any, num_computed_tokens: int, block_size: int, loading: int) -> int:
    """Return how many new blocks a request needs at most before it can run to its first token.

    loading: requests whose reads are in flight; vLLM reserves room for the rest of their prompts.
    """
    blocks: int = -(-(request.num_tokens + 1) // block_size) - num_computed_tokens // block_size
    return max(0, blocks) + 2 * loading


def next_step(requests: Iterable[tuple[Any, int]], block_size: int, most_tokens: int) -> int:
    """Return how many new blocks requests want in the next step.

    requests: (request, tokens of it that have been computed or read by then); most_tokens: of one request in
    one step.
    """
    blocks = 0
    for request, now in requests:
        then = now + min(max(1, request.num_tokens - now), most_tokens)
        blocks += -(-then // block_size) - -(-now // block_size)
    return blocks


def relieve_request(
    table: HoldTable, pool: Any, needed: int, give_back: Callable[[], None], cached: CachedPrefix
) -> None:
    """Evict holds so that a request that wants to start finds its blocks; none when it would not."""
    # This runs whenever vLLM tries to start a request, so it looks up nothing that can't matter.
    shortage = needed - pool.get_num_free_blocks()
    if shortage + cached.at_most <= 0 or shortage > table.held_blocks or not table.held_blocks:
        return
    if table.is_futile(shortage):
        return
    prefix = cached.blocks()
    shortage += sum(prefix.values())
    if shortage > 0:
        table.make_room(shortage, _references(pool), prefix)
        give_back()


def relieve_step(table: HoldTable, pool: Any, needed: int, give_back: Callable[[], None]) -> None:
    """Evict holds so that running requests find their blocks: each block spares one from being preempted."""
    shortage = needed - pool.get_num_free_blocks()
    if shortage > 0 and table.held_blocks:
        table.make_room(shortage, _references(pool), or_less=True)
        give_back()


def _references(pool: Any) -> Callable[[int], int]:
    return lambda block: int(pool.blocks[block].ref_cnt)
