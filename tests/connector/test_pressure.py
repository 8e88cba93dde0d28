"""How much room a step and a request want."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.connector import pressure
from kvloop.connector.table import HoldTable


class Pool:
    """Counts how often blocks are in use, as a table's holds and other requests do."""

    def __init__(self, table: HoldTable, free: int) -> None:
        self.free = free
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(100)]
        self.cached: dict[bytes, Any] = {}
        self.looked_up = 0
        for held in table.snapshots():
            read_id, _, hold = table.pin(held.lease_id, 5.0)
            table.unpin(held.lease_id, read_id)
            self.use(*hold.blocks)

    def use(self, *blocks: int) -> None:
        for block in blocks:
            self.blocks[block].ref_cnt += 1

    def take_back(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.blocks[block].ref_cnt -= 1
            self.free += self.blocks[block].ref_cnt == 0

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_cached_block(self, block_hash: bytes, _groups: list[int]) -> Any:
        self.looked_up += 1
        return [self.cached[block_hash]] if block_hash in self.cached else None


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
    request = SimpleNamespace(num_tokens=total)
    assert pressure.next_step([(request, computed + scheduled)], 16, 64) == blocks
    assert pressure.next_step([(request, computed + scheduled)] * 3, 16, 64) == 3 * blocks


@pytest.mark.parametrize(
    ("tokens", "computed", "blocks"), [(15, 0, 1), (16, 0, 2), (100, 48, 4), (100, 96, 1)]
)
def test_a_whole_request(tokens: int, computed: int, blocks: int) -> None:
    request = SimpleNamespace(num_tokens=tokens)
    assert pressure.whole_request(request, computed, 16, 0) == blocks
    assert pressure.whole_request(request, computed, 16, 2) == blocks + 4


def table_of(**holds: list[int]) -> HoldTable:
    """A table of holds with these blocks, of the tenants that the first letters name."""
    table = HoldTable()
    for name, blocks in holds.items():
        table.hold(name, kind="decode", blocks=blocks, num_tokens=48, ttl_s=60.0, tenant=name[0])
    return table


def relieved(
    pool: Pool, table: HoldTable, needed: int, cached: Any = None, *, step: bool = False
) -> list[str]:
    """Relieve a request or a step, and return whose holds are gone."""

    def give_back() -> None:
        for blocks in table.take_freeable():
            pool.take_back(blocks)

    if step:
        pressure.relieve_step(table, pool, needed, give_back)
    else:
        cached = cached or pressure.CachedPrefix(pool, SimpleNamespace(block_hashes=[]), 0)
        pressure.relieve_request(table, pool, needed, give_back, cached)
    return [lease_id for lease_id, _ in table.take_events()]


def three() -> HoldTable:
    return table_of(a0=[0, 1, 2], a1=[3, 4, 5], a2=[6, 7, 8])


@pytest.mark.parametrize(
    ("needed", "gone"), [(0, 0), (2, 0), (3, 1), (5, 1), (6, 2), (11, 3), (12, 0), (100, 0)]
)
def test_no_more_is_evicted_than_needed_and_nothing_in_vain(needed: int, gone: int) -> None:
    table = three()
    pool = Pool(table, 2)
    assert relieved(pool, table, needed) == ["a0", "a1", "a2"][:gone]
    assert pool.free == 2 + 3 * gone


@pytest.mark.parametrize(("needed", "gone"), [(0, 0), (2, 0), (3, 1), (6, 2), (11, 3), (12, 3), (100, 3)])
def test_for_running_requests_less_is_of_use_too(needed: int, gone: int) -> None:
    table = three()
    pool = Pool(table, 2)
    assert relieved(pool, table, needed, step=True) == ["a0", "a1", "a2"][:gone]


def test_running_requests_cost_no_hold_whose_blocks_stay_in_use() -> None:
    table = three()
    pool = Pool(table, 0)
    pool.use(0, 1, 2)
    assert relieved(pool, table, 100, step=True) == ["a1", "a2"]


def test_pinned_holds_stay() -> None:
    table = three()
    pool = Pool(table, 2)
    table.pin("a0", 5.0)
    assert relieved(pool, table, 9) == []
    assert relieved(pool, table, 8) == ["a1", "a2"]


def test_a_hold_whose_blocks_a_request_uses_is_no_room() -> None:
    table = three()
    pool = Pool(table, 2)
    pool.use(0, 1, 2)
    assert relieved(pool, table, 9) == []
    assert relieved(pool, table, 5) == ["a1"]


def test_holds_that_share_blocks_go_together_or_not_at_all() -> None:
    table = table_of(a0=[0, 1, 2], a1=[0, 1, 2, 3], a2=[6, 7, 8])
    pool = Pool(table, 0)
    table.pin("a2", 5.0)
    assert relieved(pool, table, 5) == []
    assert relieved(pool, table, 1) == ["a1"]
    assert pool.free == 1
    assert relieved(pool, table, 4) == ["a0"]
    assert pool.free == 4


def test_what_went_first_comes_back_when_the_next_is_enough() -> None:
    table = table_of(a0=[0], a1=[3, 4, 5])
    assert relieved(Pool(table, 0), table, 3) == ["a1"]


def test_the_tenant_that_holds_most_gives_way() -> None:
    table = table_of(a0=[0, 1], b0=[3, 4], b1=[6, 7])
    assert relieved(Pool(table, 0), table, 2) == ["b0"]


def test_cached_blocks_in_the_free_list_are_no_room() -> None:
    table = three()
    pool = Pool(table, 4)
    pool.cached = {b"a": pool.blocks[50], b"b": pool.blocks[3]}
    cached = pressure.CachedPrefix(pool, SimpleNamespace(block_hashes=[b"a", b"b", b"c"]), 2)
    assert cached.blocks() == {50: True, 3: False}
    assert relieved(pool, table, 3, cached) == []
    assert relieved(pool, table, 4, cached) == ["a0"]


def test_a_held_block_that_the_request_itself_takes_is_no_room() -> None:
    table = table_of(a0=[0, 1, 2])
    pool = Pool(table, 0)
    pool.cached = {b"a": pool.blocks[0]}
    cached = pressure.CachedPrefix(pool, SimpleNamespace(block_hashes=[b"a"]), 1)
    assert relieved(pool, table, 3, cached) == []
    assert relieved(pool, table, 2, cached) == ["a0"]


@pytest.mark.parametrize(
    ("free", "needed", "looked_up"),
    [(100, 10, 0), (16, 10, 0), (15, 10, 6), (10, 10, 6), (3, 10, 6), (1, 10, 6), (0, 10, 0)],
)
def test_a_prefix_is_looked_up_only_where_it_may_be_what_is_lacking(
    free: int, needed: int, looked_up: int
) -> None:
    table = three()
    pool = Pool(table, free)
    pool.cached = {bytes([n]): pool.blocks[50 + n] for n in range(6)}
    request = SimpleNamespace(block_hashes=[bytes([n]) for n in range(9)])
    relieved(pool, table, needed, pressure.CachedPrefix(pool, request, 6))
    assert pool.looked_up == looked_up


def test_without_holds_nothing_is_looked_up() -> None:
    table = HoldTable()
    pool = Pool(table, 0)
    relieved(pool, table, 0, pressure.CachedPrefix(pool, SimpleNamespace(block_hashes=[b"a"]), 1))
    assert pool.looked_up == 0


def test_what_was_looked_for_in_vain_a_moment_ago_is_not_looked_up_again() -> None:
    table = three()
    pool = Pool(table, 0)
    for lease_id in ("a0", "a1", "a2"):
        table.pin(lease_id, 5.0)
    request = SimpleNamespace(block_hashes=[b"a", b"b"])
    for _ in range(3):
        assert relieved(pool, table, 4, pressure.CachedPrefix(pool, request, 2)) == []
    assert pool.looked_up == 2
