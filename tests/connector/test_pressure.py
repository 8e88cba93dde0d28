"""How much room a step and a request want."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.connector import pressure
from kvloop.connector.table import HoldTable


class Pool:
    """Counts what a table's holds leave free."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.cached: dict[bytes, Any] = {}

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_cached_block(self, block_hash: bytes, _groups: list[int]) -> Any:
        return [self.cached[block_hash]]


@pytest.mark.parametrize(
    ("computed", "scheduled", "total", "blocks"),
    [
        (0, 15, 15, 0),
        (0, 16, 16, 1),
        (16, 1, 17, 0),
        (31, 1, 32, 1),
        (0, 64, 200, 4),
        (64, 64, 130, 1),
        (128, 2, 130, 0),
    ],
)
def test_the_next_step(computed: int, scheduled: int, total: int, blocks: int) -> None:
    request = SimpleNamespace(num_computed_tokens=computed, num_tokens=total)
    assert pressure.next_step([(request, scheduled)], 16, 64) == blocks
    assert pressure.next_step([(request, scheduled)] * 3, 16, 64) == 3 * blocks


@pytest.mark.parametrize(
    ("tokens", "computed", "blocks"), [(15, 0, 1), (16, 0, 2), (100, 48, 4), (100, 96, 1)]
)
def test_a_whole_request(tokens: int, computed: int, blocks: int) -> None:
    request = SimpleNamespace(num_tokens=tokens)
    assert pressure.whole_request(request, computed, 16, 0) == blocks
    assert pressure.whole_request(request, computed, 16, 2) == blocks + 4


def relieved(pool: Pool, table: HoldTable, needed: int, cached: Any = None) -> int:
    def give_back() -> None:
        pool.free += sum(len(blocks) for blocks in table.take_freeable())

    pressure.relieve(table, pool, needed, give_back, cached)
    return table.leases


def full_table() -> HoldTable:
    table = HoldTable()
    for n in range(3):
        table.hold(f"l{n}", kind="decode", blocks=[3 * n, 3 * n + 1, 3 * n + 2], num_tokens=48, ttl_s=60.0)
    return table


@pytest.mark.parametrize(("needed", "left"), [(0, 3), (2, 3), (3, 2), (5, 2), (6, 1), (100, 0)])
def test_no_more_is_evicted_than_needed(needed: int, left: int) -> None:
    assert relieved(Pool(2), full_table(), needed) == left


def test_pinned_holds_stay() -> None:
    table = full_table()
    table.pin("l0", 5.0)
    assert relieved(Pool(2), table, 100) == 1


def test_cached_blocks_in_the_free_list_are_no_room() -> None:
    pool = Pool(4)
    pool.cached = {b"a": SimpleNamespace(ref_cnt=0), b"b": SimpleNamespace(ref_cnt=1)}
    cached = pressure.CachedPrefix(pool, SimpleNamespace(block_hashes=[b"a", b"b", b"c"]), 2)
    assert cached.in_free_list() == 1
    assert relieved(pool, full_table(), 3, cached) == 3
    assert relieved(pool, full_table(), 4, cached) == 2
