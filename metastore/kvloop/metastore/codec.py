"""The value under a lease key.

A header of fixed size comes before the protobuf message, so that Lua compares without decoding it:

    bytes 0-2    "KVL"
    byte  3      format; this module writes and reads "1"
    bytes 4-19   turn start in microseconds, decimal, zero-padded
    bytes 20-35  digest of the lease id
    bytes 36-39  CRC-32 of all the rest, little-endian
    bytes 40-    DirectoryEntry

Bytes 0-35 keep their meaning in every later format: an old worker still loses against a newer turn.
Whatever doesn't decode is no error but a miss: others may write under our keys.
"""

import hashlib
import zlib

from google.protobuf.message import DecodeError

from kvloop.v1alpha1 import lease_pb2

MAGIC = b"KVL"
FORMAT = b"1"
ENTRY_VERSION = 1
START_DIGITS = 16
HEADER_BYTES = 40
MAX_BYTES = 2048
_MAX_START = 10**START_DIGITS - 1


def lease_tag(lease_id: str) -> bytes:
    """Return the 16 bytes that stand for a lease in the header."""
    return hashlib.blake2b(lease_id.encode(), digest_size=16).digest()


def encode(entry: lease_pb2.DirectoryEntry) -> bytes:
    """Return the value of an entry; the version is set here.

    Raises ValueError for an entry without lease or endpoint, with a start out of range, or too large.
    """
    if not entry.lease_id or not entry.decode_endpoint:
        raise ValueError("an entry names its lease and its decode endpoint")
    if not 0 <= entry.turn_start_us <= _MAX_START:
        raise ValueError("turn_start_us is out of range")
    if entry.version != ENTRY_VERSION:
        copy = lease_pb2.DirectoryEntry()
        copy.CopyFrom(entry)
        copy.version = ENTRY_VERSION
        entry = copy
    message = entry.SerializeToString()
    if HEADER_BYTES + len(message) > MAX_BYTES:
        raise ValueError(f"an entry has at most {MAX_BYTES} bytes")
    head = b"KVL1%016d%b" % (entry.turn_start_us, lease_tag(entry.lease_id))
    return head + _checksum(head, message) + message


def _checksum(head: bytes, message: bytes) -> bytes:
    return zlib.crc32(message, zlib.crc32(head)).to_bytes(4, "little")


def decode(value: bytes | None) -> lease_pb2.DirectoryEntry | None:
    """Return the entry of a value; None for foreign, corrupt, huge and newer ones."""
    if value is None or not HEADER_BYTES < len(value) <= MAX_BYTES or value[:4] != MAGIC + FORMAT:
        return None
    message = value[HEADER_BYTES:]
    if _checksum(value[:36], message) != value[36:HEADER_BYTES]:
        return None
    try:
        entry = lease_pb2.DirectoryEntry.FromString(message)
    except DecodeError:
        return None
    if entry.version != ENTRY_VERSION or not entry.lease_id or not entry.decode_endpoint:
        return None
    return entry
