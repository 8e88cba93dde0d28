"""Token ids as they travel: packed little-endian uint32, forwarded untouched."""

import sys
from array import array
from collections.abc import Iterable

import numpy as np

TOKEN_BYTES = 4

_TYPECODE = next(code for code in ("I", "L") if array(code).itemsize == TOKEN_BYTES)


def pack(token_ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian uint32, 4 bytes each.

    Raises OverflowError when an id does not fit.
    """
    packed = array(_TYPECODE, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> list[int]:
    """Return the token ids of a packed run.

    Raises ValueError when the length is not a multiple of 4.
    """
    ids = array(_TYPECODE)
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def largest(packed: bytes) -> int:
    """Return the largest token id of a packed run that is not empty, without making an int of each."""
    return int(np.frombuffer(packed, dtype="<u4").max())


def count(packed: bytes) -> int:
    """Return how many token ids a packed run has."""
    return len(packed) // TOKEN_BYTES
