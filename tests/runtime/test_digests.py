"""Digests of prefixes: what is proven is shared, and all that is shared at a length asked about is proven."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.runtime.digests import (
    COARSE_POINTS,
    DIGEST_BYTES,
    Prefixes,
    coarse_lengths,
    common_prefix,
    prefix_digests,
    proof_lengths,
)
from kvloop.runtime.tokens import pack

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def shared(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(held=TOKENS, prompt=TOKENS, block=st.integers(1, 9))
def test_the_longest_shared_length_is_found(held: list[int], prompt: list[int], block: int) -> None:
    lengths = proof_lengths(len(prompt), block)
    claimed = prefix_digests(b"k", pack(prompt), lengths)
    proven = common_prefix(b"k", pack(held), lengths, claimed)
    assert proven == max((n for n in lengths if n <= shared(held, prompt)), default=0)


@given(prompt=TOKENS, asked=st.lists(st.integers(0, 60), max_size=12))
def test_prefixes_asked_about_in_any_order_have_their_own_digests(
    prompt: list[int], asked: list[int]
) -> None:
    prefixes = Prefixes(b"k", pack(prompt))
    for length in asked:
        if length > len(prompt):
            with pytest.raises(ValueError, match="within"):
                prefixes.digest(length)
        else:
            assert [prefixes.digest(length)] == prefix_digests(b"k", pack(prompt), [length])


@given(held=TOKENS, prompt=TOKENS, lies=st.lists(st.integers(0, 60), max_size=5))
def test_contradicting_claims_prove_nothing_that_is_not_shared(
    held: list[int], prompt: list[int], lies: list[int]
) -> None:
    lengths = proof_lengths(len(prompt), 1)
    claimed = prefix_digests(b"k", pack(prompt), lengths)
    for at in lies:
        if at < len(claimed):
            claimed[at] = bytes(DIGEST_BYTES)
    assert common_prefix(b"k", pack(held), lengths, claimed) <= shared(held, prompt)


def test_another_key_proves_nothing() -> None:
    packed = pack(range(40))
    lengths = proof_lengths(40, 16)
    assert lengths == [16, 32, 40]
    assert common_prefix(b"k", packed, lengths, prefix_digests(b"k", packed, lengths)) == 40
    assert common_prefix(b"k", packed, lengths, prefix_digests(b"other", packed, lengths)) == 0


def test_lengths_must_ascend_and_stay_within() -> None:
    for lengths in ([2, 1], [4]):
        with pytest.raises(ValueError, match="ascend"):
            prefix_digests(b"k", pack([1, 2, 3]), lengths)


@given(num_tokens=st.integers(0, 200_000), block=st.sampled_from([16, 32, 128]))
def test_coarse_lengths_are_few_and_end_at_the_end(num_tokens: int, block: int) -> None:
    lengths = coarse_lengths(num_tokens, block)
    assert len(lengths) <= COARSE_POINTS
    assert all(a < b for a, b in pairwise(lengths))
    assert (lengths[-1] if lengths else 0) == num_tokens
    assert all(length % block == 0 for length in lengths[:-1])
