"""Text made from a seed, and ids for it without a tokenizer.

Lengths are counted in words. Under WordEncoder a word is exactly one token; under a real tokenizer it is
about one, since the words are common ones.
"""

import random
import zlib

_LIST = """
action activity age air area arm art attention back bit body book boy building business car care case
center change child city class college community company control cost country couple court data day
death decision development difference director doctor door drug education effect effort end event
experience eye face fact family father field figure foot force form friend game girl government ground
group guy hand head health heart history home hour house idea image industry information interest issue
job kind land law leader level life light line lot love man market matter member mind minute moment
money month morning mother movie music name nation need news night north number office official oil
others paper parent part party patient people person phone picture piece place plan player point police
policy position power practice president price problem process product program project question rate
reason record relationship report research result right road role room school season sense service show
side site situation society son south space star state step story street student study system table tax
teacher team test thing time town use value view voice wall war water way week wife woman word work
worker world year
"""
WORDS = tuple(_LIST.split())

# Ids below are often special tokens.
_RESERVED = 1_000


class WordEncoder:
    """One id per word, by the word's checksum: exact lengths on engines that take ids."""

    def __init__(self, vocab_size: int) -> None:
        self._first = min(_RESERVED, vocab_size // 2)
        self._count = vocab_size - self._first

    def encode(self, text: str) -> list[int]:
        """Return the ids."""
        return [self._first + zlib.crc32(word.encode()) % self._count for word in text.split()]


def words(rng: random.Random, count: int) -> str:
    """Return so many words."""
    return " ".join(rng.choices(WORDS, k=count))


def rng_of(seed: int, *names: object) -> random.Random:
    """Return the generator of one thing, independent of how many others are drawn."""
    return random.Random("/".join(str(name) for name in (seed, *names)))
