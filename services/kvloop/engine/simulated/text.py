"""A reversible text for token ids: one pronounceable word per token, each ended by a space.

Every id has its own word and no word is the beginning of another, so a stop string can be built from ids.
"""

from functools import lru_cache

SPECIAL_TOKENS = 3
"""Ids below this are special: they have no text."""

_SYLLABLES = [c + v for c in "bcdfghjklmnpqrstvwyz" for v in "aeiou"]
_VALUES = {syllable: value for value, syllable in enumerate(_SYLLABLES)}
_BASE = len(_SYLLABLES)


@lru_cache(maxsize=1 << 16)
def word(token_id: int) -> str:
    """Return the text of one token, its space included; "" for special tokens."""
    if token_id < SPECIAL_TOKENS:
        return ""
    syllables = []
    value = token_id
    while True:
        value, digit = divmod(value, _BASE)
        syllables.append(_SYLLABLES[digit])
        if value == 0:
            return "".join(reversed(syllables)) + " "


def decode(token_ids: "list[int]") -> str:
    """Return the text of tokens."""
    return "".join(map(word, token_ids))


def encode(text: str) -> list[int]:
    """Return the token ids of such a text. Raises ValueError for other texts."""
    ids = []
    for part in text.split():
        value = 0
        if len(part) % 2:
            raise ValueError("not a text of simulated tokens")
        for at in range(0, len(part), 2):
            digit = _VALUES.get(part[at : at + 2])
            if digit is None:
                raise ValueError("not a text of simulated tokens")
            value = value * _BASE + digit
        ids.append(value)
    return ids
