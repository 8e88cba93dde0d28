"""The text of an answer whose prompt ends in the middle of a character (checked on vLLM 0.29.0).

vLLM primes its detokenizer with the prompt. Where the prompt's last tokens are the first bytes of a
character, as when an answer is taken up from another engine, the primed stream gives the whole prompt's text
along with the completed character.
"""

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a character, so the tokens of one that may be at the end."""


class PromptText:
    """Takes the prompt's text off the answer's, where the detokenizer gives it."""

    def __init__(self, prompt: Sequence[int], decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """Take the prompt's tokens and the tokenizer's decode; without one nothing is taken off."""
        self._prompt = ""
        if decode is None or not decode(prompt[-_LONGEST_CHARACTER:]).endswith(_UNFINISHED):
            return
        # Whoever streamed the answer so far gave the text up to the last whole character, and no space that a
        # token has in front of the next one.
        for end in range(len(prompt), max(0, len(prompt) - _LONGEST_CHARACTER) - 1, -1):
            self._prompt = decode(prompt[:end])
            if not self._prompt.endswith(_UNFINISHED):
                break

    def less(self, text: str) -> str:
        """Return new text without the prompt's."""
        if not text or not self._prompt:
            return text
        prompt, self._prompt = self._prompt, ""
        return text.removeprefix(prompt)
