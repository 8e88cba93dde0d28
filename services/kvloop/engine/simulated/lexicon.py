"""Which tokens a simulated model speaks, and their text: made-up words, or those of a real tokenizer.

With a real tokenizer chat templates, gateways and clients work as they do over a real model, nonsense as the
answers are.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from kvloop.engine.simulated import text


class Lexicon(Protocol):
    """The ordinary tokens of a model."""

    def token(self, number: int) -> int:
        """Return the ordinary token that any number means."""
        ...

    def word(self, token_id: int) -> str:
        """Return a token's text; "" for special tokens."""
        ...


class Syllables:
    """Every id but the special ones, as a pronounceable word."""

    def __init__(self, vocab_size: int) -> None:
        self._span = vocab_size - text.SPECIAL_TOKENS

    def token(self, number: int) -> int:
        """Return the ordinary token that any number means."""
        return text.SPECIAL_TOKENS + number % self._span

    def word(self, token_id: int) -> str:
        """Return a token's text."""
        return text.word(token_id)


class Tokenized:
    """Those ids of a tokenizer whose text stands alone: no special tokens, no parts of a character."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        """Read folder/tokenizer.json. Raises ValueError."""
        self._tokenizer = _load(folder)
        self._special = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._ordinary = _ordinary(folder, vocab_size)

    def token(self, number: int) -> int:
        """Return the ordinary token that any number means."""
        return self._ordinary[number % len(self._ordinary)]

    def word(self, token_id: int) -> str:
        """Return a token's text."""
        if token_id in self._special:
            return ""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def lexicon_of(tokenizer: str, vocab_size: int) -> Lexicon:
    """Return the lexicon of a tokenizer's folder, or without one of syllables. Raises ValueError."""
    return Tokenized(tokenizer, vocab_size) if tokenizer else Syllables(vocab_size)


def vocab_size_of(folder: str) -> int:
    """Return how many ids a tokenizer has. Raises ValueError."""
    return int(_load(folder).get_vocab_size(with_added_tokens=True))


@lru_cache(maxsize=8)
def _load(folder: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("tokenizer needs the package tokenizers; install kvloop[chat]") from None
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"tokenizer: there is no {file}; name the folder of a fetched model")
    return Tokenizer.from_file(str(file))


@lru_cache(maxsize=8)
def _ordinary(folder: str, vocab_size: int) -> tuple[int, ...]:
    tokenizer = _load(folder)
    special = tokenizer.get_added_tokens_decoder()
    count = min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[token] for token in range(count)], skip_special_tokens=False)
    found = tuple(
        token for token, said in enumerate(texts) if said and "\ufffd" not in said and token not in special
    )
    if not found:
        raise ValueError(f"tokenizer: {folder} has no token whose text stands alone below {vocab_size}")
    return found
