"""Writing blocks: by computing, and by copying from another engine.

What is written is the truth about the KV (Kv); what the cache is told is what the scheduler believes
(the request's own hashes). The two differ exactly when something went wrong.
"""

from kvloop.engine.simulated.kv import Kv
from kvloop.engine.simulated.model import Model
from kvloop.engine.simulated.pool import BlockPool
from kvloop.engine.simulated.request import Request
from kvloop.runtime.tokens import TOKEN_BYTES


class Filler:
    """Fills the blocks of one pool."""

    def __init__(self, model: Model, pool: BlockPool, block_size: int) -> None:
        self._model = model
        self._pool = pool
        self._size = block_size

    def compute(self, request: Request, start: int, end: int) -> None:
        """Compute the KV of the positions from start to end, in the context of what the blocks hold."""
        size, blocks, ids = self._size, request.blocks, request.ids
        weights = self._model.weights
        at = start
        while at < end:
            index = at // size
            low = index * size
            high = min(end, low + size)
            block = blocks[index]
            if at == low:
                block.content = bytes(ids[low * TOKEN_BYTES : high * TOKEN_BYTES])
                block.parent = blocks[index - 1].own if index else request.root
                block.weights = weights
            else:
                filled = block.content[: (at - low) * TOKEN_BYTES].ljust((at - low) * TOKEN_BYTES, b"\0")
                block.content = filled + ids[at * TOKEN_BYTES : high * TOKEN_BYTES]
            if high == low + size:
                self._seal(request, index)
            at = high

    def copy(self, request: Request, first: int, kvs: list[Kv], num_tokens: int) -> None:
        """Put what was read into the request's blocks, from block first on, up to num_tokens tokens."""
        size = self._size
        for index, kv in enumerate(kvs, first):
            block = request.blocks[index]
            wanted = min(size, num_tokens - index * size) * TOKEN_BYTES
            block.content = kv.content[:wanted]
            block.parent, block.weights = kv.parent, kv.weights
            whole = wanted == size * TOKEN_BYTES
            block.own = kv.own if whole else b""
            if whole:
                self._pool.cache(block, request.keys[index])

    def _seal(self, request: Request, index: int) -> None:
        size = self._size * TOKEN_BYTES
        block, keys = request.blocks[index], request.keys
        believed_parent = keys[index - 1] if index else request.root
        believed = bytes(request.ids[index * size : (index + 1) * size])
        if index == len(keys):
            keys.append(self._model.link(believed_parent, believed))
        if block.parent == believed_parent and block.content == believed:
            block.own = keys[index]
        else:
            block.own = self._model.link(block.parent, block.content)
        self._pool.cache(block, keys[index])
