"""Chats to token ids without tokenizing the same text twice, and with the generated ids put back.

A tokenizer cuts a text at its special tokens first and treats every piece between them by itself, so the
ids of a chat are the ids of its pieces in a row. Pieces that were seen before come from a cache: of a
conversation's next turn only the new messages are tokenized.

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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

Encode = Callable[[list[str]], Awaitable[list[list[int]]]]
"""Token ids of each text, without special tokens added."""

_ENTRY_BYTES = 200
"""What an entry costs beside its text and ids."""
_ID_BYTES = 4
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
    """Characters up to and including the last special token."""
    border_tokens: int
    """Ids up to there."""
    digest: "hashlib.blake2b"
    """State over the text up to the border."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Ids of the text from a border to the end of an answer."""

    border: int
    ids: "array[int]"


@dataclass(slots=True)
class _Tenant:
    pieces: "OrderedDict[str, array[int]]" = field(default_factory=OrderedDict)
    answers: OrderedDict[bytes, _Answer] = field(default_factory=OrderedDict)
    pieces_bytes: int = 0
    answers_bytes: int = 0

    @property
    def size(self) -> int:
        return self.pieces_bytes + self.answers_bytes


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
        pieces = self._cut.split(text) if self._cut is not None else [text]
        missing = {piece: None for piece in pieces[::2] if piece and piece not in cache.pieces}
        fresh: dict[str, list[int]] = {}
        if missing:
            texts = list(missing)
            fresh = dict(zip(texts, await encode(texts), strict=True))
        rendering = self._assemble(cache, text, pieces, fresh)
        for piece, ids in fresh.items():
            self._keep_piece(cache, piece, ids)
        self._shrink()
        return rendering

    def _assemble(
        self, cache: _Tenant, text: str, pieces: Sequence[str], fresh: Mapping[str, Sequence[int]]
    ) -> Rendering:
        ids: list[int] = []
        digest = hashlib.blake2b(digest_size=16)
        borders = {0: 0}
        position = cached = restored = last = 0
        state = digest.copy()
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._specials[piece])
            elif piece:
                known = fresh.get(piece)
                if known is None:
                    held = cache.pieces[piece]
                    cache.pieces.move_to_end(piece)
                    cached += len(held)
                    ids.extend(held)
                else:
                    ids.extend(known)
            digest.update(piece.encode("utf-8", "surrogatepass"))
            position += len(piece)
            if index % 2:
                borders[position] = len(ids)
                last, state = position, digest.copy()
            elif cache.answers:
                answer = cache.answers.get(digest.digest())
                if answer is not None and answer.border in borders:
                    cache.answers.move_to_end(digest.digest())
                    del ids[borders[answer.border] :]
                    ids.extend(answer.ids)
                    restored += len(answer.ids)
        return Rendering(text, ids, cached, restored, last, borders[last], state)

    def remember(self, tenant: str, rendering: Rendering, answer: str, answer_ids: Sequence[int]) -> None:
        """Keep the ids of an answer for when its text comes back.

        answer: exactly the text of answer_ids, special tokens included, the one that ended it left out.
        """
        if not answer_ids:
            return
        digest = rendering.digest.copy()
        digest.update((rendering.text[rendering.border :] + answer).encode("utf-8", "surrogatepass"))
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
        self._trim(cache)

    def _trim(self, cache: _Tenant) -> None:
        while cache.size > self._tenant_bytes:
            # The larger half gives way, so that neither starves the other.
            if cache.answers_bytes > cache.pieces_bytes:
                _, answer = cache.answers.popitem(last=False)
                cache.answers_bytes -= _ENTRY_BYTES + len(answer.ids) * _ID_BYTES
            else:
                piece, ids = cache.pieces.popitem(last=False)
                cache.pieces_bytes -= _piece_bytes(piece, len(ids))

    def _shrink(self) -> None:
        size = self.size_bytes
        while size > self._max_bytes and len(self._tenants) > 1:
            _, oldest = self._tenants.popitem(last=False)
            size -= oldest.size


def _piece_bytes(piece: str, num_ids: int) -> int:
    return _ENTRY_BYTES + len(piece) + num_ids * _ID_BYTES
