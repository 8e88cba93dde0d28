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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kvloop.gateway.tenants import Answer, Beginning, Tenant, Tenants
from kvloop.runtime import tokens

Encode = Callable[[list[str]], Awaitable[list[list[int]]]]
"""Token ids of each text, without special tokens added."""

_DIGEST_BYTES = 16


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


class SegmentCache:
    """Pieces and answers of all tenants, least recently used first out."""

    def __init__(self, specials: Mapping[str, int], *, max_bytes: int, tenant_bytes: int) -> None:
        """Take the special tokens at which the tokenizer cuts, and the bounds in bytes."""
        # The longest first: where one special token begins another, the tokenizer takes the longer.
        ordered = sorted(specials, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
        self._specials = dict(specials)
        self._tenants = Tenants(max_bytes=max_bytes, tenant_bytes=tenant_bytes)

    @property
    def size_bytes(self) -> int:
        """Return what the caches hold by their own account."""
        return self._tenants.size_bytes

    async def render(self, tenant: str, text: str, encode: Encode) -> Rendering:
        """Return the token ids of a text; encode is asked for the pieces not seen before."""
        cache = self._tenants.find(tenant)
        borders = [cut.end() for cut in self._cut.finditer(text)] if self._cut is not None else []
        start = _find(cache, text, borders)
        rest = text[start[0] :] if start is not None else text
        pieces = self._cut.split(rest) if self._cut is not None else [rest]
        # Held here, too: other turns of the tenant may push them out while this one waits for the tokenizer.
        held: dict[str, Sequence[int]] = {}
        missing: list[str] = []
        for piece in dict.fromkeys(pieces[::2]):
            known = cache.pieces.get(piece)
            if known is not None:
                cache.pieces.move_to_end(piece)
                held[piece] = known
            elif piece:
                missing.append(piece)
        fresh = dict(zip(missing, await encode(missing), strict=True)) if missing else {}
        rendering = self._assemble(cache, text, pieces, held=held, fresh=fresh, start=start)
        for piece, ids in fresh.items():
            cache.keep_piece(piece, ids)
        self._keep_beginning(cache, rendering, start)
        self._tenants.settle(tenant, cache)
        return rendering

    def accept(self, tenant: str) -> None:
        """Give a tenant its share of the cache: a router has answered a turn of it."""
        self._tenants.accept(tenant)

    def _assemble(
        self,
        cache: Tenant,
        text: str,
        pieces: Sequence[str],
        *,
        held: Mapping[str, Sequence[int]],
        fresh: Mapping[str, Sequence[int]],
        start: tuple[int, Beginning] | None,
    ) -> Rendering:
        """Put together what comes after start, a position in the text and the ids up to there."""
        ids: list[int] = []
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        position = restored = 0
        if start is not None:
            position, begun = start
            ids, digest, restored = begun.ids.tolist(), begun.digest.copy(), begun.restored_tokens
        borders = {position: (len(ids), digest.copy())}
        cached = len(ids) - restored
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._specials[piece])
            elif piece:
                known = held.get(piece)
                if known is not None:
                    cached += len(known)
                ids.extend(fresh[piece] if known is None else known)
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
        ids = array("I", rendering.ids[rendering.border_tokens :])
        ids.extend(answer_ids)
        cache = self._tenants.find(tenant)
        cache.keep_answer(digest.digest(), Answer(rendering.border, ids))
        self._tenants.settle(tenant, cache)

    def _keep_beginning(
        self, cache: Tenant, rendering: Rendering, start: tuple[int, Beginning] | None
    ) -> None:
        """Keep the chat for its next turn, in place of the one that it has grown from."""
        ids, grown_from = array("I"), None
        if not rendering.border:
            return
        if start is not None:
            at, known = start
            if at == rendering.border:
                return
            ids.extend(known.ids)
            grown_from = (at, known.digest.digest())
        ids.extend(rendering.ids[len(ids) : rendering.border_tokens])
        beginning = Beginning(ids, rendering.restored_tokens, rendering.digest)
        cache.keep_beginning((rendering.border, rendering.digest.digest()), beginning, grown_from)


def _find(cache: Tenant, text: str, borders: Sequence[int]) -> tuple[int, Beginning] | None:
    """Return where the longest known beginning of a text ends, and it; borders: where one may end."""
    for at in reversed(borders):
        if at in cache.lengths:
            place = (at, hashlib.blake2b(_bytes(text[:at]), digest_size=_DIGEST_BYTES).digest())
            known = cache.beginnings.get(place)
            if known is not None:
                cache.beginnings.move_to_end(place)
                return at, known
    return None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
