"""Turns that go on in the middle of a block: its KV is copied rather than computed again.

vLLM's prefix cache has full blocks only, so a turn that goes on here would compute up to a block of its
history anew. A hold has that last, partly filled block, too. It can't be shared, since both turns would write
behind the history; a copy of it, made before the step's forward pass, is the new turn's own.

What is copied is proven as full blocks are, by the chained hash of the last full block, and in it token by
token; salt and adapter are in the hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvloop.connector.guard import Text
from kvloop.connector.hold import Hold

_MOST = 32
"""Holds compared, newest first: many may have the same full blocks, such as those of a system prompt."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What a prompt and a hold share behind their last common full block."""

    block: int
    count: int
    """Tokens of it that are shared."""


class Tails:
    """The partly filled last blocks of decode holds. For the engine's thread, which gives blocks back."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._heads: dict[int, bytes] = {}
        self._tails: dict[bytes, dict[int, tuple[Hold, list[int]]]] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._heads)

    def add(self, hold: Hold, text: Text) -> None:
        """Note a hold's last block if it is partly filled, behind at least one that is full."""
        full, rest = divmod(hold.num_tokens, self._block_size)
        if not full or not rest:
            return
        head, block = bytes(text.hashes[full - 1]), hold.blocks[-1]
        self._heads[block] = head
        self._tails.setdefault(head, {})[block] = (hold, list(text.tokens[full * self._block_size :]))

    def forget(self, block: int) -> None:
        """Forget a block that is given back; unknown ones are none of ours."""
        head = self._heads.pop(block, None)
        if head is None:
            return
        del self._tails[head][block]
        if not self._tails[head]:
            del self._tails[head]

    def find(self, prompt: Text, num_computed_tokens: int) -> Tail | None:
        """Return the longest that goes on from a prompt's full blocks; one token is left to compute.

        num_computed_tokens: of the prompt, in the prefix cache; full blocks.
        """
        full = num_computed_tokens // self._block_size
        if not full or full > len(prompt.hashes):
            return None
        found = self._tails.get(bytes(prompt.hashes[full - 1]))
        if not found:
            return None
        end = min(num_computed_tokens + self._block_size, len(prompt.tokens)) - 1
        rest = prompt.tokens[num_computed_tokens:end]
        best = Tail(0, 0)
        for block, (hold, tokens) in islice(reversed(found.items()), _MOST):
            count = _common(tokens, rest)
            if count > best.count and not hold.doomed and not hold.gone:
                best = Tail(block, count)
        return best if best.count else None


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
