"""The block pool: reference counts, and the prefix cache among the free blocks.

As in vLLM, a freed block keeps its content and its place in the cache until it is taken for something
else; the least recently freed goes first, and of one request the last blocks go before the first.
"""

from collections.abc import Iterable, Sequence

from kvloop.engine.simulated.kv import Kv


class Block:
    """One block, and what its KV was computed from."""

    __slots__ = ("content", "holds", "id", "key", "own", "parent", "refs", "weights")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.holds = 0
        """How many holds keep it."""
        self.key: bytes | None = None
        """Hash under which the prefix cache has it."""
        self.content = b""
        """Packed ids that were really put in."""
        self.parent = b""
        """Hash of the context in which they were computed."""
        self.own = b""
        """Hash of that context and the content, once full."""
        self.weights = b""

    def kv(self) -> Kv:
        """Return a copy of what is in it now."""
        return Kv(self.content, self.parent, self.own, self.weights)


class BlockPool:
    """All blocks of one engine. Blocks come to be when first taken: an idle pool costs nothing."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self.total = num_blocks
        self.held = 0
        """Unique blocks kept by holds."""
        self._caching = caching
        self._blocks: list[Block] = []
        self._free: dict[int, Block] = {}
        self._cached: dict[bytes, Block] = {}

    @property
    def free(self) -> int:
        """Blocks that a new request may take, cached ones included."""
        return self.total - len(self._blocks) + len(self._free)

    def allocate(self, count: int) -> list[Block] | None:
        """Return empty blocks with one reference each, or None when there are not enough."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            if len(self._blocks) < self.total:
                block = Block(len(self._blocks))
                self._blocks.append(block)
            else:
                block = self._free.pop(next(iter(self._free)))
                self._forget(block)
                block.content = block.parent = block.own = block.weights = b""
            block.refs = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Take one more reference on each."""
        for block in blocks:
            if block.refs == 0:
                del self._free[block.id]
            block.refs += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Give one reference of each back."""
        for block in reversed(blocks):
            if block.refs <= 0:
                raise RuntimeError("a block was freed twice")
            block.refs -= 1
            if block.refs == 0:
                self._free[block.id] = block

    def hold(self, blocks: Iterable[Block]) -> None:
        """Count blocks as held; their references are the holder's own."""
        for block in blocks:
            if block.holds == 0:
                self.held += 1
            block.holds += 1

    def unhold(self, blocks: Iterable[Block]) -> None:
        """Undo hold."""
        for block in blocks:
            block.holds -= 1
            if block.holds == 0:
                self.held -= 1

    def cache(self, block: Block, key: bytes) -> None:
        """Let later requests find a full block; of equal blocks the first is kept."""
        if self._caching and block.key is None and key not in self._cached:
            block.key = key
            self._cached[key] = block

    def hits(self, keys: Sequence[bytes], limit: int) -> list[Block]:
        """Return the cached blocks of the longest run from the start, at most limit of them."""
        found: list[Block] = []
        cached = self._cached
        for key in keys[:limit]:
            block = cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def reset_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use."""
        if self.free != self.total:
            return False
        for block in self._blocks:
            block.key = None
        self._cached.clear()
        return True

    def at(self, block_id: int) -> Kv | None:
        """Return what is in a block now, whoever has it; None when there is no such block."""
        if not 0 <= block_id < self.total:
            return None
        return self._blocks[block_id].kv() if block_id < len(self._blocks) else Kv(b"", b"", b"", b"")

    def audit(self) -> dict[int, int]:
        """Return the references of every block in use, by id. Raises RuntimeError on a broken account."""
        for block in self._blocks:
            if (block.refs == 0) != (block.id in self._free):
                raise RuntimeError("a block is both free and in use, or neither")
            if block.key is not None and self._cached.get(block.key) is not block:
                raise RuntimeError("the cache does not know its own block")
        if self.held != sum(block.holds > 0 for block in self._blocks):
            raise RuntimeError("the count of held blocks is off")
        return {block.id: block.refs for block in self._blocks if block.refs}

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            del self._cached[block.key]
            block.key = None
