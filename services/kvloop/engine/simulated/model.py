"""The made-up model: block hashes as vLLM chains them, and tokens as a digest of what the blocks hold.

The next token is a function of the weights, the adapter and every id in the blocks, however the ids came
there and whatever the block size: a history read back, hit in the cache or computed anew gives one
answer, provided that it is the same history. KV computed in one context and used in another, or by other
weights, changes the answer too.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from kvloop.engine.simulated.lexicon import lexicon_of
from kvloop.engine.simulated.pool import Block
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime.tokens import TOKEN_BYTES

HASH_BYTES = 16

Fold = hashlib.blake2b
"""What attention over all blocks yields, grown by one token at a time."""


class Model:
    """One set of weights."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self.lexicon = lexicon_of(settings.tokenizer, settings.vocab_size)
        self._block_bytes = settings.block_size * TOKEN_BYTES
        self._roots: dict[tuple[str, str], bytes] = {}
        self._none = _digest("none", settings.hash_seed)
        self.none_hash = ""
        """Tells whether two engines' block hashes can agree, and whether their weights are of one version."""
        self.weights = b""
        self.reload(settings.weights_version)

    def reload(self, version: str) -> None:
        """Take other weights under the same name."""
        s = self._settings
        self.weights = _digest("weights", s.model_name, s.revision, str(s.seed), version)
        self.none_hash = _digest("none", self._none.hex(), version).hex()

    def root(self, adapter: str, cache_salt: str) -> bytes:
        """Return what the first block's hash is chained to."""
        key = (adapter, cache_salt)
        found = self._roots.get(key)
        if found is None:
            if len(self._roots) > 4096:
                self._roots.clear()
            found = self._roots[key] = _digest("root", self._none.hex(), adapter, cache_salt)
        return found

    def chain(self, root: bytes, packed: bytes) -> list[bytes]:
        """Return the hashes of all full blocks of packed ids."""
        return list(_chain(root, packed, self._block_bytes))

    @staticmethod
    def link(parent: bytes, content: bytes) -> bytes:
        """Return the hash of one full block after its parent."""
        return hashlib.blake2b(parent + content, digest_size=HASH_BYTES).digest()

    def fold(self, blocks: Sequence[Block], num_tokens: int, root: bytes, adapter: str) -> "hashlib.blake2b":
        """Return the state after num_tokens tokens, as the blocks have them."""
        state = hashlib.blake2b(self.weights + adapter.encode(), digest_size=32)
        size = self._block_bytes
        used = blocks[: -(-num_tokens * TOKEN_BYTES // size)]
        weights = self.weights
        before = root
        strange = []
        for block in used:
            if block.parent != before or block.weights != weights:
                strange.append(block.parent + block.weights + block.own)
            before = block.own
        for mark in strange:
            state.update(b"out of context" + mark)
        contents = [block.content for block in used]
        contents[-1] = contents[-1][: num_tokens * TOKEN_BYTES - size * (len(used) - 1)]
        packed = b"".join(contents)
        if len(packed) < num_tokens * TOKEN_BYTES:
            state.update(b"never filled" + len(packed).to_bytes(8, "little"))
        state.update(packed)
        return state

    def token(self, digest: bytes) -> int:
        """Return the ordinary token that a state's digest means."""
        return self.lexicon.token(int.from_bytes(digest[:8], "little"))

    def ends(self, digest: bytes) -> bool:
        """Return whether the answer would end here."""
        return int.from_bytes(digest[8:12], "little") % self._settings.eos_every == 0


@lru_cache(maxsize=128)
def _chain(root: bytes, packed: bytes, size: int) -> tuple[bytes, ...]:
    """Remembered because both legs of a turn, often in one process, ask for the same."""
    blake = hashlib.blake2b
    hashes = []
    last = root
    for at in range(0, len(packed) - size + 1, size):
        last = blake(last + packed[at : at + size], digest_size=HASH_BYTES).digest()
        hashes.append(last)
    return tuple(hashes)


def _digest(*parts: str) -> bytes:
    state = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        encoded = part.encode()
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.digest()
