"""The block pool and its prefix cache."""

import pytest

from kvloop.engine.simulated.pool import BlockPool


def test_allocates_all_and_no_more() -> None:
    pool = BlockPool(3, caching=True)
    assert len(pool.allocate(2) or []) == 2
    assert pool.allocate(2) is None
    assert pool.free == 1
    assert len(pool.allocate(1) or []) == 1
    assert pool.free == 0


def test_a_shared_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(1, caching=True)
    blocks = pool.allocate(1) or []
    pool.touch(blocks)
    pool.release(blocks)
    assert pool.free == 0
    pool.release(blocks)
    assert pool.free == 1


def test_a_second_free_is_refused() -> None:
    pool = BlockPool(1, caching=True)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(RuntimeError):
        pool.release(blocks)


def test_freed_blocks_are_found_until_taken_last_of_a_request_first() -> None:
    pool = BlockPool(3, caching=True)
    blocks = pool.allocate(3) or []
    keys = [b"a", b"b", b"c"]
    for block, key in zip(blocks, keys, strict=True):
        pool.cache(block, key)
    pool.release(blocks)
    assert pool.hits(keys, 3) == blocks
    pool.allocate(1)
    assert pool.hits(keys, 3) == blocks[:2]
    pool.allocate(1)
    assert pool.hits(keys, 3) == blocks[:1]


def test_a_hit_in_use_is_not_given_away() -> None:
    pool = BlockPool(2, caching=True)
    blocks = pool.allocate(2) or []
    pool.cache(blocks[0], b"a")
    pool.release(blocks)
    pool.touch(pool.hits([b"a"], 1))
    assert pool.free == 1
    assert (pool.allocate(1) or [])[0] is blocks[1]


def test_a_taken_block_is_empty_and_forgotten() -> None:
    pool = BlockPool(1, caching=True)
    (block,) = pool.allocate(1) or []
    block.content = b"abcd"
    pool.cache(block, b"a")
    pool.release([block])
    (again,) = pool.allocate(1) or []
    assert again is block
    assert again.content == b""
    assert pool.hits([b"a"], 1) == []


def test_hits_stop_at_the_first_gap_and_at_the_limit() -> None:
    pool = BlockPool(3, caching=True)
    blocks = pool.allocate(3) or []
    for block, key in zip(blocks, (b"a", b"b", b"d"), strict=True):
        pool.cache(block, key)
    assert pool.hits([b"a", b"b", b"c", b"d"], 4) == blocks[:2]
    assert pool.hits([b"a", b"b"], 1) == blocks[:1]


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(1, caching=False)
    pool.cache((pool.allocate(1) or [])[0], b"a")
    assert pool.hits([b"a"], 1) == []


def test_the_cache_is_reset_only_when_nothing_is_in_use() -> None:
    pool = BlockPool(2, caching=True)
    blocks = pool.allocate(1) or []
    pool.cache(blocks[0], b"a")
    assert not pool.reset_cache()
    assert pool.hits([b"a"], 1)
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.hits([b"a"], 1) == []


def test_held_blocks_are_counted_once() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.allocate(3) or []
    pool.hold(blocks[:2])
    pool.hold(blocks[1:])
    assert pool.held == 3
    pool.unhold(blocks[:2])
    assert pool.held == 2


def test_blocks_outside_the_pool_do_not_exist() -> None:
    pool = BlockPool(2, caching=True)
    assert pool.at(1) is not None
    assert pool.at(2) is None
    assert pool.at(-1) is None
