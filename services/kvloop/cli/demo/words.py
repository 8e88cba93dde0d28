"""A stand-in for a tokenizer, for simulated engines: one id per word, by its checksum."""

import re
import zlib
from collections.abc import Sequence

from kvloop.cli.chat.rendering import Message

_EOS = 2
_FIRST = 3
_PIECES = re.compile(r"\w+|\s+|[^\w\s]")


class WordRenderer:
    """Renders messages for engines that don't read them."""

    def __init__(self, vocab_size: int) -> None:
        self._words = vocab_size - _FIRST

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of all messages."""
        return [token for message in messages for token in self._encode(message)]

    def following(self, answer: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return end of turn and the new messages' ids."""
        end = [] if answer and answer[-1] == _EOS else [_EOS]
        return [*end, *self.first(messages)]

    def _encode(self, message: Message) -> list[int]:
        pieces = [message["role"], *_PIECES.findall(message["content"])]
        return [_FIRST + zlib.crc32(piece.encode()) % self._words for piece in pieces]
