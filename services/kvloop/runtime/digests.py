"""Proof of the same tokens: keyed digests of prefixes.

A prefix digest covers every token up to a length, so one equal digest proves the whole prefix. The key
comes from the tenant, the model, the adapter and the salt: equal digests also mean an equal scope, and
digests tell nothing to whoever lacks the key.
"""

import bisect
import hashlib
import hmac
from collections.abc import Sequence

from kvloop.runtime.tokens import TOKEN_BYTES

DIGEST_BYTES = 16
COARSE_BYTES = 8
COARSE_POINTS = 16


def prefix_digests(key: bytes, packed: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Return the 16-byte digest of each prefix of packed token ids; lengths in tokens, ascending.

    Raises ValueError when lengths are not ascending or exceed the tokens.
    """
    state = hashlib.blake2b(key=key[:64], digest_size=DIGEST_BYTES)
    view = memoryview(packed)
    digests: list[bytes] = []
    done = 0
    for length in lengths:
        end = length * TOKEN_BYTES
        if end < done or end > len(view):
            raise ValueError("lengths must ascend and stay within the tokens")
        state.update(view[done:end])
        done = end
        digests.append(state.copy().digest())
    return digests


class Prefixes:
    """The prefixes of one prompt: what was hashed for one question is not hashed again for the next."""

    def __init__(self, key: bytes, packed: bytes) -> None:
        self._view = memoryview(packed)
        self._lengths = [0]
        """Ascending, in tokens; of each, the state of the hash is kept."""
        self._states = [hashlib.blake2b(key=key[:64], digest_size=DIGEST_BYTES)]

    def digest(self, length: int) -> bytes:
        """Return the 16-byte digest of a prefix. Raises ValueError when length exceeds the tokens."""
        end = length * TOKEN_BYTES
        if not 0 <= end <= len(self._view):
            raise ValueError("a length must stay within the tokens")
        at = bisect.bisect_right(self._lengths, length) - 1
        state = self._states[at]
        if self._lengths[at] != length:
            state = state.copy()
            state.update(self._view[self._lengths[at] * TOKEN_BYTES : end])
            self._lengths.insert(at + 1, length)
            self._states.insert(at + 1, state)
        return state.digest()


def hint_group(key: bytes) -> bytes:
    """Return the 16-byte name under which the holders of a digest key hint at each other's leases."""
    return hashlib.blake2b(b"kvloop hint group v1", key=key[:64], digest_size=DIGEST_BYTES).digest()


def proof_lengths(num_tokens: int, block_size: int) -> list[int]:
    """Return every block border up to num_tokens, and num_tokens itself."""
    borders = list(range(block_size, num_tokens + 1, block_size))
    if num_tokens > 0 and (not borders or borders[-1] != num_tokens):
        borders.append(num_tokens)
    return borders


def coarse_lengths(num_tokens: int, block_size: int) -> list[int]:
    """Return at most COARSE_POINTS block borders spread evenly below num_tokens, and num_tokens."""
    borders = proof_lengths(num_tokens, block_size)
    if len(borders) <= COARSE_POINTS:
        return borders
    step = len(borders) / COARSE_POINTS
    return [borders[int((i + 1) * step) - 1] for i in range(COARSE_POINTS - 1)] + [borders[-1]]


def common_prefix(key: bytes, packed: bytes, lengths: Sequence[int], claimed: Sequence[bytes]) -> int:
    """Return the longest of the ascending lengths whose claimed digest equals that of the held tokens, or 0.

    One equal digest proves all of its prefix, so the end is tried first and then the middle of what is left:
    a history that is shared whole costs one hash. Claims that contradict each other prove less, never more.
    """
    low, high = 0, min(bisect.bisect_right(lengths, len(packed) // TOKEN_BYTES), len(claimed))
    probe = high - 1
    while low < high:
        [own] = prefix_digests(key, packed, [lengths[probe]])
        if hmac.compare_digest(own, claimed[probe]):
            low = probe + 1
        else:
            high = probe
        probe = (low + high) // 2
    return lengths[low - 1] if low > 0 else 0
