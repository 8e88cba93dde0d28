"""Which held block a prompt goes on from in its middle."""

from kvloop.connector.guard import Text
from kvloop.connector.hold import Hold
from kvloop.connector.tails import Tail, Tails

BLOCK = 4
PROMPT = list(range(100, 110))


def hashes(tokens: list[int]) -> list[bytes]:
    return [repr(tokens[: end + BLOCK]).encode() for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def text(tokens: list[int]) -> Text:
    return Text(tokens, hashes(tokens), "scope")


def held(tails: Tails, tokens: list[int], last_block: int, lease_id: str = "a") -> Hold:
    blocks = [*range(-(-len(tokens) // BLOCK) - 1), last_block]
    hold = Hold(lease_id, "decode", "t", tuple(blocks), len(tokens), 100.0)
    tails.add(hold, text(tokens))
    return hold


def test_the_shared_head_of_the_last_block() -> None:
    tails = Tails(BLOCK)
    held(tails, PROMPT[:7], last_block=50)
    assert tails.find(text(PROMPT), 4) == Tail(50, 3)
    diverged = [*PROMPT[:6], 1, 2, 3]
    assert tails.find(text(diverged), 4) == Tail(50, 2)
    assert tails.find(text([*PROMPT[:4], 1, 2, 3]), 4) is None


def test_one_token_is_left_to_compute() -> None:
    tails = Tails(BLOCK)
    held(tails, PROMPT[:7], last_block=50)
    assert tails.find(text(PROMPT[:7]), 4) == Tail(50, 2)
    assert tails.find(text(PROMPT[:6]), 4) == Tail(50, 1)
    assert tails.find(text(PROMPT[:5]), 4) is None


def test_only_behind_the_same_full_blocks() -> None:
    tails = Tails(BLOCK)
    held(tails, PROMPT[:7], last_block=50)
    assert tails.find(text(PROMPT), 0) is None
    assert tails.find(text(PROMPT), 8) is None
    assert tails.find(text([1, *PROMPT[1:]]), 4) is None


def test_full_blocks_are_the_prefix_caches_affair() -> None:
    tails = Tails(BLOCK)
    held(tails, PROMPT[:8], last_block=50)
    held(tails, PROMPT[:3], last_block=51)
    assert len(tails) == 0


def test_the_longest_of_several_forks() -> None:
    tails = Tails(BLOCK)
    held(tails, PROMPT[:7], last_block=50)
    held(tails, [*PROMPT[:5], 1], last_block=51, lease_id="b")
    assert tails.find(text(PROMPT), 4) == Tail(50, 3)
    assert tails.find(text([*PROMPT[:5], 1, 2]), 4) == Tail(51, 2)


def test_what_is_given_back_or_leaving_is_not_copied() -> None:
    tails = Tails(BLOCK)
    hold = held(tails, PROMPT[:7], last_block=50)
    hold.doomed = True
    assert tails.find(text(PROMPT), 4) is None
    hold.doomed = False
    assert tails.find(text(PROMPT), 4) == Tail(50, 3)
    tails.forget(50)
    tails.forget(50)
    assert tails.find(text(PROMPT), 4) is None
    assert len(tails) == 0
