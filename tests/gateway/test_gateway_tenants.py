"""What is kept of tenants stays within its bounds, and strangers push out nobody."""

import random
from array import array

import pytest

from kvloop.gateway import tenants
from kvloop.gateway.tenants import Answer, Tenant, Tenants

ROOM = 1_000_000
EMPTY = Tenant(0).size


@pytest.fixture
def kept() -> Tenants:
    return Tenants(max_bytes=ROOM, tenant_bytes=100_000)


def say(kept: Tenants, name: str, piece: str = "hello") -> None:
    tenant = kept.find(name)
    tenant.keep_piece(piece, [1, 2, 3])
    kept.settle(name, tenant)


def test_strangers_push_out_no_tenant_and_are_few(kept: Tenants) -> None:
    say(kept, "real")
    kept.accept("real")
    before = kept.size_bytes
    for number in range(10_000):
        say(kept, f"made up {number}")
    assert "hello" in kept.find("real").pieces
    assert kept.size_bytes - before <= ROOM // 16
    assert "hello" not in kept.find("made up 0").pieces
    assert "hello" in kept.find("made up 9999").pieces


def test_there_are_few_strangers_in_a_large_room() -> None:
    kept = Tenants(max_bytes=10**9, tenant_bytes=10**9)
    for number in range(65):
        say(kept, str(number))
    assert [len(kept.find(str(number)).pieces) for number in (1, 64)] == [1, 1]
    assert not kept.find("0").pieces


def test_what_a_stranger_held_is_its_own_once_accepted(kept: Tenants) -> None:
    say(kept, "new")
    before = kept.size_bytes
    kept.accept("new")
    assert kept.size_bytes == before
    for number in range(200):
        say(kept, f"made up {number}")
    tenant = kept.find("new")
    assert "hello" in tenant.pieces
    assert tenant.max_bytes == 100_000
    kept.accept("new")
    assert kept.find("new") is tenant


def test_empty_tenants_cost_too(kept: Tenants) -> None:
    for number in range(1000):
        kept.accept(str(number))
    assert kept.size_bytes <= ROOM
    assert kept.size_bytes % EMPTY == 0
    assert kept.size_bytes // EMPTY == ROOM * 15 // 16 // EMPTY


def test_the_number_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "_MOST_TENANTS", 3)
    kept = Tenants(max_bytes=ROOM, tenant_bytes=ROOM)
    for name in "abcd":
        kept.accept(name)
        say(kept, name)
    assert [bool(kept.find(name).pieces) for name in "bcda"] == [True, True, True, False]


def test_the_account_is_of_what_is_there(kept: Tenants) -> None:
    rng = random.Random(5)
    for _ in range(3000):
        name = str(rng.randrange(40))
        tenant = kept.find(name)
        if rng.random() < 0.1:
            kept.accept(name)
        elif rng.random() < 0.5:
            tenant.keep_piece("x" * rng.randrange(20_000), [1])
        else:
            tenant.keep_answer(rng.randbytes(1), Answer(0, array("I", [1] * rng.randrange(5000))))
        kept.settle(name, tenant)
        rooms = (kept._known, kept._strangers)
        assert kept.size_bytes == sum(one.size for room in rooms for one in room._tenants.values())
        for room in rooms:
            assert room.size_bytes <= room.max_bytes


def test_one_pushed_out_while_it_waited_is_not_charged(kept: Tenants) -> None:
    tenant = kept.find("slow")
    for number in range(100):
        say(kept, str(number))
    before = kept.size_bytes
    tenant.keep_piece("late", [1])
    kept.settle("slow", tenant)
    assert kept.size_bytes == before
    assert not kept.find("slow").pieces
