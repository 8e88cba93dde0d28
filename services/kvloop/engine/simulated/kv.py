"""What a read carries: the made-up KV of one block."""

from typing import NamedTuple


class Kv(NamedTuple):
    """The content of one block: what it was computed from, not what anybody believes it to be."""

    content: bytes
    """Packed ids, up to block_size of them."""
    parent: bytes
    """Hash of the context in which they were computed."""
    own: bytes
    """Hash of that context and the content; empty while not full."""
    weights: bytes
    """Which weights computed it."""
