"""What of each tenant's chats is kept, and for how many tenants.

A tenant here is a digest of credentials. Whether they are anybody's is the router's to say: until a turn of
theirs has been answered they are a stranger's, and strangers have a small room of their own, so that made-up
credentials push out nobody.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_ENTRY_BYTES = 200
"""What an entry costs beside its text and ids."""
_TENANT_BYTES = 2048
"""What a tenant costs that holds nothing."""
_ID_BYTES = 4
_LARGEST_SHARE = 4
"""No entry may take more than a fourth of a tenant's space."""
_STRANGERS_SHARE = 16
"""Strangers have a sixteenth of the whole space."""
_MOST_STRANGERS = 64
_MOST_TENANTS = 16_384


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids of the text from a border to the end of an answer."""

    border: int
    ids: "array[int]"

    @property
    def size(self) -> int:
        """Return what it costs, in bytes."""
        return _ENTRY_BYTES + len(self.ids) * _ID_BYTES


@dataclass(frozen=True, slots=True)
class Beginning:
    """A chat up to its last special token."""

    ids: "array[int]"
    restored_tokens: int
    digest: "hashlib.blake2b"

    @property
    def size(self) -> int:
        """Return what it costs, in bytes."""
        return _ENTRY_BYTES + len(self.ids) * _ID_BYTES


Place = tuple[int, bytes]
"""Where a beginning ends, in characters, and the digest of its text."""


@dataclass(slots=True)
class Tenant:
    """One tenant's pieces, answers and beginnings, each least recently used first."""

    max_bytes: int
    pieces: "OrderedDict[str, array[int]]" = field(default_factory=OrderedDict)
    answers: OrderedDict[bytes, Answer] = field(default_factory=OrderedDict)
    beginnings: OrderedDict[Place, Beginning] = field(default_factory=OrderedDict)
    lengths: Counter[int] = field(default_factory=Counter)
    """How many beginnings have a length."""
    pieces_bytes: int = 0
    answers_bytes: int = 0
    beginnings_bytes: int = 0
    charged_bytes: int = 0
    """What the whole account knows of this one."""

    @property
    def size(self) -> int:
        """Return what is held, in bytes."""
        return _TENANT_BYTES + self.pieces_bytes + self.answers_bytes + self.beginnings_bytes

    def keep_piece(self, piece: str, ids: Sequence[int]) -> None:
        """Keep the ids of a piece."""
        size = _piece_bytes(piece, len(ids))
        # Another turn may have brought the same piece while this one waited for the tokenizer.
        if piece in self.pieces or self._too_large(size):
            return
        self.pieces[piece] = array("I", ids)
        self.pieces_bytes += size

    def keep_answer(self, key: bytes, answer: Answer) -> None:
        """Keep an answer, in place of another one to the same text."""
        if self._too_large(answer.size):
            return
        old = self.answers.pop(key, None)
        if old is not None:
            self.answers_bytes -= old.size
        self.answers[key] = answer
        self.answers_bytes += answer.size

    def keep_beginning(self, place: Place, beginning: Beginning, grown_from: Place | None) -> None:
        """Keep a beginning, in place of the one that it has grown from."""
        if self._too_large(beginning.size):
            return
        if grown_from is not None:
            self._drop_beginning(grown_from)
        if place in self.beginnings:
            return
        self.beginnings[place] = beginning
        self.lengths[place[0]] += 1
        self.beginnings_bytes += beginning.size

    def trim(self) -> None:
        """Forget what has not been used for longest until the rest is within the bound."""
        while self.size > self.max_bytes and self.size > _TENANT_BYTES:
            self._drop_oldest()

    def _too_large(self, size: int) -> bool:
        return size > self.max_bytes // _LARGEST_SHARE

    def _drop_beginning(self, place: Place) -> None:
        beginning = self.beginnings.pop(place, None)
        if beginning is None:
            return
        self.beginnings_bytes -= beginning.size
        self.lengths[place[0]] -= 1
        if not self.lengths[place[0]]:
            del self.lengths[place[0]]

    def _drop_oldest(self) -> None:
        """Forget the oldest of the kind that takes most: none starves another."""
        largest = max(self.pieces_bytes, self.answers_bytes, self.beginnings_bytes)
        if largest == self.beginnings_bytes:
            self._drop_beginning(next(iter(self.beginnings)))
        elif largest == self.answers_bytes:
            _, answer = self.answers.popitem(last=False)
            self.answers_bytes -= answer.size
        else:
            piece, ids = self.pieces.popitem(last=False)
            self.pieces_bytes -= _piece_bytes(piece, len(ids))


class _Room:
    """Tenants within a bound of bytes and of their number, least recently used first out."""

    def __init__(self, max_bytes: int, most: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._most = most
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()

    def find(self, name: str) -> Tenant | None:
        tenant = self._tenants.get(name)
        if tenant is not None:
            self._tenants.move_to_end(name)
        return tenant

    def take(self, name: str) -> Tenant | None:
        tenant = self._tenants.pop(name, None)
        if tenant is not None:
            self.size_bytes -= tenant.charged_bytes
        return tenant

    def put(self, name: str, tenant: Tenant) -> None:
        self._tenants[name] = tenant
        tenant.charged_bytes = 0
        self.settle(name, tenant)

    def settle(self, name: str, tenant: Tenant) -> None:
        """Charge what a tenant holds by now, and make room."""
        tenant.trim()
        # One that was pushed out while it waited for the tokenizer is nobody's any more.
        if self._tenants.get(name) is not tenant:
            return
        self.size_bytes += tenant.size - tenant.charged_bytes
        tenant.charged_bytes = tenant.size
        while self._tenants and (self.size_bytes > self.max_bytes or len(self._tenants) > self._most):
            self.take(next(iter(self._tenants)))


class Tenants:
    """All tenants, those apart whose credentials no router has accepted yet."""

    def __init__(self, *, max_bytes: int, tenant_bytes: int) -> None:
        """Take the bounds in bytes."""
        strangers_bytes = max_bytes // _STRANGERS_SHARE
        self._tenant_bytes = tenant_bytes
        self._strangers = _Room(strangers_bytes, _MOST_STRANGERS)
        self._known = _Room(max_bytes - strangers_bytes, _MOST_TENANTS)

    @property
    def size_bytes(self) -> int:
        """Return what all of them hold by their own account."""
        return self._known.size_bytes + self._strangers.size_bytes

    def find(self, name: str) -> Tenant:
        """Return a tenant; one that is not known is a stranger."""
        tenant = self._known.find(name) or self._strangers.find(name)
        if tenant is None:
            tenant = Tenant(min(self._tenant_bytes, self._strangers.max_bytes))
            self._strangers.put(name, tenant)
        return tenant

    def accept(self, name: str) -> None:
        """Count a tenant among those that a router has answered, with what is held of it."""
        if self._known.find(name) is not None:
            return
        tenant = self._strangers.take(name) or Tenant(0)
        tenant.max_bytes = min(self._tenant_bytes, self._known.max_bytes)
        self._known.put(name, tenant)

    def settle(self, name: str, tenant: Tenant) -> None:
        """Bring a tenant, and all together, back within their bounds after something was kept."""
        room = self._known if self._known.find(name) is tenant else self._strangers
        room.settle(name, tenant)


def _piece_bytes(piece: str, num_ids: int) -> int:
    return _ENTRY_BYTES + len(piece) + num_ids * _ID_BYTES
