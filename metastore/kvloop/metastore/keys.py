"""Names of keys.

The braces hold the hash tag, so that everything a script touches lies in one cluster slot. Tags are
base64url of keyed digests: they tell nothing, and hold no braces, colons or spaces.
"""

import base64
import binascii

PREFIX = b"kvloop:"
WORKERS_KEY = PREFIX + b"{workers}:all"
ESTIMATES_KEY = PREFIX + b"{estimates}:all"
CHECK_SCOPE = b"check"
MAX_TAG_BYTES = 64
_URLSAFE = bytes.maketrans(b"+/", b"-_")


def tag(raw: bytes) -> bytes:
    """Return the text of a scope, group or digest in keys.

    Raises ValueError when it is empty or longer than 64 bytes.
    """
    if not 0 < len(raw) <= MAX_TAG_BYTES:
        raise ValueError(f"a scope, group or digest has 1 to {MAX_TAG_BYTES} bytes")
    # base64's own function for this takes twice as long, and a lookup has some 40 tags to make.
    return binascii.b2a_base64(raw, newline=False).translate(_URLSAFE).rstrip(b"=")


def untag(text: bytes) -> bytes:
    """Return the raw bytes of a tag; raises ValueError for what tag() never returns."""
    return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)


def lease_key(scope: bytes) -> bytes:
    """Return the key of a scope's newest lease."""
    return b"kvloop:{%b}:lease" % tag(scope)


def alive_key(scope: bytes) -> bytes:
    """Return the key that stands while a session of the scope is open."""
    return b"kvloop:{%b}:alive" % tag(scope)


def hint_key(group: bytes, digest: bytes) -> bytes:
    """Return the key that leads from a prefix digest to scopes; a group's hints share one slot."""
    return hint_prefix(group) + tag(digest)


def hint_prefix(group: bytes) -> bytes:
    """Return how all hint keys of a group begin; the digest's tag follows."""
    return b"kvloop:{%b}:hint:" % tag(group)
