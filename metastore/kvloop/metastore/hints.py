"""At which lengths prefixes are hinted.

A client without a conversation id sends a prompt; nobody knows where its history ends. So both sides agree
on a grid of lengths: four per octave. A hint only has to lead to the lease, whose own digests, and the
holder's proof, then settle how far the prompts agree.
"""

GRID_PER_OCTAVE = 4
SHORTEST = 64
WRITTEN = 12


def hint_lengths(num_tokens: int) -> list[int]:
    """Return the grid's lengths up to num_tokens, ascending: what a search asks for."""
    lengths: list[int] = []
    octave = SHORTEST
    while octave <= num_tokens:
        step = octave // GRID_PER_OCTAVE
        lengths.extend(range(octave, min(2 * octave, num_tokens + 1), step))
        octave *= 2
    return lengths


def written_lengths(num_tokens: int) -> list[int]:
    """Return the lengths under which a lease of num_tokens is hinted: the longest few, three octaves.

    A prompt that shares less than an eighth of a lease gains little from reading it.
    """
    return hint_lengths(num_tokens)[-WRITTEN:]
