"""Chats to token ids without tokenizing the same text twice, and with the generated ids put back.

A tokenizer cuts a text at its special tokens first and treats every piece between them by itself, so the
ids of a chat are the ids of its pieces in a row. Pieces that were seen before come from a cache: of a
conversation's next turn only the new messages are tokenized.

A chat that begins with all of an earlier one is not even put together anew: the ids of the earlier one, known
by length and digest of its text up to its last special token, are where the walk starts. A conversation keeps
one such beginning, its newest; forks and rewritten histories fall back to pieces.

The same walk restores exact history. What a model generated need not be how the tokenizer would cut the
same text (merges at borders, digits, split UTF-8). A finished answer is remembered by a digest of the
whole text before and including it; where a later chat has exactly that text, the ids that the model
generated stand in for the tokenizer's, and the KV that a decode worker holds can be reused past them. A
text that differs in one character anywhere before is left to the tokenizer.

Caches are bounded and kept apart by tenant. Nothing here knows vLLM.
"""

import hashlib
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvloop.runtime import tokens

Encode = Callable[[list[str]], Awaitable[list[list[int]]]]
"""Token ids of each text, without special tokens added."""

_ENTRY_BYTES = 200
"""What an entry costs beside its text and ids."""
_ID_BYTES = 4
_DIGEST_BYTES = 16
_LARGEST_SHARE = 4
"""No entry may take more than a fourth of a tenant's space."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat as token ids, and what is needed to remember the answer to it."""

    text: str
    ids: list[int]
    cached_tokens: int
    """Ids that came from the cache."""
    restored_tokens: int
    """Ids that a model generated, where the tokenizer's would have differed or not."""
    border: int
    """Characters up to and including the last special token that is in no restored answer."""
    border_tokens: int
    """Ids up to there."""
    digest: "hashlib.blake2b"
    """State over the text up to the border."""
    head: "array[int]"
    """Ids that the walk started from."""

    def packed(self) -> bytes:
        """Return all ids as they travel."""
        # Answers are put back after the head, never inside it.
        return tokens.pack(self.head) + tokens.pack(self.ids[len(self.head) :])


@dataclass(frozen=True, slots=True)
class _Answer:
    """Ids of the text from a border to the end of an answer."""

    border: int
    ids: "array[int]"


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A chat up to its last special token."""

    ids: "array[int]"
    restored_tokens: int
    digest: "hashlib.blake2b"

    @property
    def size(self) -> int:
        return _ENTRY_BYTES + len(self.ids) * _ID_BYTES


_Place = tuple[int, bytes]
"""Where a beginning ends, in characters, and the digest of its text."""


@dataclass(slots=True)
class _Tenant:
    pieces: "OrderedDict[str, array[int]]" = field(default_factory=OrderedDict)
    answers: OrderedDict[bytes, _Answer] = field(default_factory=OrderedDict)
    beginnings: OrderedDict[_Place, _Beginning] = field(default_factory=OrderedDict)
    lengths: Counter[int] = field(default_factory=Counter)
    """How many beginnings have a length."""
    pieces_bytes: int = 0
    answers_bytes: int = 0
    beginnings_bytes: int = 0

    @property
    def size(self) -> int:
        return self.pieces_bytes + self.answers_bytes + self.beginnings_bytes

    def find(self, text: str, borders: Sequence[int]) -> tuple[int, _Beginning] | None:
        """Return where the longest known beginning of a text ends, and it; borders: where one may end."""
        for at in reversed(borders):
            if at in self.lengths:
                place = (at, hashlib.blake2b(_bytes(text[:at]), digest_size=_DIGEST_BYTES).digest())
                known = self.beginnings.get(place)
                if known is not None:
                    self.beginnings.move_to_end(place)
                    return at, known
        return None

    def keep(self, place: _Place, beginning: _Beginning) -> None:
        """Keep a beginning."""
        if place in self.beginnings:
            return
        self.beginnings[place] = beginning
        self.lengths[place[0]] += 1
        self.beginnings_bytes += beginning.size

    def drop(self, place: _Place) -> None:
        """Forget a beginning."""
        beginning = self.beginnings.pop(place, None)
        if beginning is None:
            return
        self.beginnings_bytes -= beginning.size
        self.lengths[place[0]] -= 1
        if not self.lengths[place[0]]:
            del self.lengths[place[0]]

    def drop_oldest(self) -> None:
        """Forget what has not been used for longest, of the kind that takes most: none starves another."""
        largest = max(self.pieces_bytes, self.answers_bytes, self.beginnings_bytes)
        if largest == self.beginnings_bytes:
            self.drop(next(iter(self.beginnings)))
        elif largest == self.answers_bytes:
            _, answer = self.answers.popitem(last=False)
            self.answers_bytes -= _ENTRY_BYTES + len(answer.ids) * _ID_BYTES
        else:
            piece, ids = self.pieces.popitem(last=False)
            self.pieces_bytes -= _piece_bytes(piece, len(ids))


class SegmentCache:
    """Pieces and answers of all tenants, least recently used first out."""

    def __init__(self, specials: Mapping[str, int], *, max_bytes: int, tenant_bytes: int) -> None:
        """Take the special tokens at which the tokenizer cuts, and the bounds in bytes."""
        # The longest first: where one special token begins another, the tokenizer takes the longer.
        ordered = sorted(specials, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
        self._specials = dict(specials)
        self._max_bytes = max_bytes
        self._tenant_bytes = min(tenant_bytes, max_bytes)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Return what the caches hold by their own account."""
        return sum(tenant.size for tenant in self._tenants.values())

    async def render(self, tenant: str, text: str, encode: Encode) -> Rendering:
        """Return the token ids of a text; encode is asked for the pieces not seen before."""
        cache = self._tenant(tenant)
        borders = [cut.end() for cut in self._cut.finditer(text)] if self._cut is not None else []
        start = cache.find(text, borders)
        rest = text[start[0] :] if start is not None else text
        pieces = self._cut.split(rest) if self._cut is not None else [rest]
        missing = {piece: None for piece in pieces[::2] if piece and piece not in cache.pieces}
        fresh: dict[str, list[int]] = {}
        if missing:
            texts = list(missing)
            fresh = dict(zip(texts, await encode(texts), strict=True))
        rendering = self._assemble(cache, text, pieces, fresh, start)
        for piece, ids in fresh.items():
            self._keep_piece(cache, piece, ids)
        self._keep_beginning(cache, rendering, start)
        self._trim(cache)
        self._shrink()
        return rendering

    def _assemble(
        self,
        cache: _Tenant,
        text: str,
        pieces: Sequence[str],
        fresh: Mapping[str, Sequence[int]],
        start: tuple[int, _Beginning] | None,
    ) -> Rendering:
        """Put together what comes after start, a position in the text and the ids up to there."""
        ids: list[int] = []
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        position = restored = 0
        if start is not None:
            position, known = start
            ids, digest, restored = known.ids.tolist(), known.digest.copy(), known.restored_tokens
        borders = {position: (len(ids), digest.copy())}
        cached = len(ids) - restored
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._specials[piece])
            elif piece:
                new = fresh.get(piece)
                if new is None:
                    held = cache.pieces[piece]
                    cache.pieces.move_to_end(piece)
                    cached += len(held)
                    ids.extend(held)
                else:
                    ids.extend(new)
            digest.update(_bytes(piece))
            position += len(piece)
            if index % 2:
                borders[position] = (len(ids), digest.copy())
            elif cache.answers:
                answer = cache.answers.get(digest.digest())
                if answer is not None and answer.border in borders:
                    cache.answers.move_to_end(digest.digest())
                    # Special tokens inside the answer are where its own ids have them, if at all.
                    while next(reversed(borders)) > answer.border:
                        borders.popitem()
                    del ids[borders[answer.border][0] :]
                    ids.extend(answer.ids)
                    restored += len(answer.ids)
        last, (count, state) = borders.popitem()
        head = start[1].ids if start is not None else array("I")
        return Rendering(text, ids, cached, restored, last, count, state, head)

    def remember(self, tenant: str, rendering: Rendering, answer: str, answer_ids: Sequence[int]) -> None:
        """Keep the ids of an answer for when its text comes back.

        answer: exactly the text of answer_ids, special tokens included, the one that ended it left out.
        """
        if not answer_ids:
            return
        digest = rendering.digest.copy()
        digest.update(_bytes(rendering.text[rendering.border :] + answer))
        cache = self._tenant(tenant)
        ids = array("I", rendering.ids[rendering.border_tokens :])
        ids.extend(answer_ids)
        size = _ENTRY_BYTES + len(ids) * _ID_BYTES
        if size > self._tenant_bytes // _LARGEST_SHARE:
            return
        key = digest.digest()
        old = cache.answers.pop(key, None)
        if old is not None:
            cache.answers_bytes -= _ENTRY_BYTES + len(old.ids) * _ID_BYTES
        cache.answers[key] = _Answer(rendering.border, ids)
        cache.answers_bytes += size
        self._trim(cache)
        self._shrink()

    def _tenant(self, name: str) -> _Tenant:
        cache = self._tenants.get(name)
        if cache is None:
            cache = self._tenants[name] = _Tenant()
        self._tenants.move_to_end(name)
        return cache

    def _keep_piece(self, cache: _Tenant, piece: str, ids: Sequence[int]) -> None:
        size = _piece_bytes(piece, len(ids))
        # Another turn may have brought the same piece while this one waited for the tokenizer.
        if piece in cache.pieces or size > self._tenant_bytes // _LARGEST_SHARE:
            return
        cache.pieces[piece] = array("I", ids)
        cache.pieces_bytes += size

    def _keep_beginning(
        self, cache: _Tenant, rendering: Rendering, start: tuple[int, _Beginning] | None
    ) -> None:
        """Keep the chat for its next turn, in place of the one that it has grown from."""
        if rendering.border_tokens * _ID_BYTES > self._tenant_bytes // _LARGEST_SHARE or not rendering.border:
            return
        ids = array("I")
        if start is not None:
            at, known = start
            if at == rendering.border:
                return
            ids.extend(known.ids)
            cache.drop((at, known.digest.digest()))
        ids.extend(rendering.ids[len(ids) : rendering.border_tokens])
        place = (rendering.border, rendering.digest.digest())
        cache.keep(place, _Beginning(ids, rendering.restored_tokens, rendering.digest))

    def _trim(self, cache: _Tenant) -> None:
        while cache.size > self._tenant_bytes:
            cache.drop_oldest()

    def _shrink(self) -> None:
        size = self.size_bytes
        while size > self._max_bytes and len(self._tenants) > 1:
            _, oldest = self._tenants.popitem(last=False)
            size -= oldest.size


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _piece_bytes(piece: str, num_ids: int) -> int:
    return _ENTRY_BYTES + len(piece) + num_ids * _ID_BYTES
