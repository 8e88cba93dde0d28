"""Whatever lies under our keys, lookups miss, and the next lease takes the place."""

import struct
import zlib
from collections.abc import Callable

import pytest
import redis
from store_servers import Store as Servers

from kvloop.metastore import codec, keys
from kvloop.metastore.factory import Store
from kvloop.v1alpha1 import lease_pb2

SCOPE = b"\x03" * 32
GROUP = b"\x04" * 32
KEY = keys.lease_key(SCOPE)
HINT = keys.hint_key(GROUP, b"d1")


def good(lease_id: str = "standing", start_us: int = 1) -> lease_pb2.DirectoryEntry:
    return lease_pb2.DirectoryEntry(
        version=codec.ENTRY_VERSION, lease_id=lease_id, decode_endpoint="d:1", turn_start_us=start_us
    )


def _with_message(message: bytes) -> bytes:
    head = codec.encode(good())[:36]
    return head + zlib.crc32(message, zlib.crc32(head)).to_bytes(4, "little") + message


def _versioned(version: int) -> bytes:
    entry = good()
    entry.version = version
    return _with_message(entry.SerializeToString())


VALUES = {
    "empty": b"",
    "text": b"hello",
    "json": b'{"lease": 1}',
    "header only": codec.encode(good())[: codec.HEADER_BYTES],
    "cut": codec.encode(good())[:-1],
    "bit flipped": codec.encode(good())[:-1] + b"\xff",
    "newer format": b"KVL2" + codec.encode(good())[4:],
    "newer version": _versioned(codec.ENTRY_VERSION + 1),
    "no version": _versioned(0),
    "not protobuf": _with_message(b"\xff\xff\xff\xff"),
    "no lease": _with_message(lease_pb2.DirectoryEntry(version=1, decode_endpoint="d").SerializeToString()),
    "huge": codec.encode(good()) + b"x" * (4 << 20),
    "start is no number": b"KVL1" + b"z" * 16 + codec.encode(good())[20:],
    "random": struct.pack("<60Q", *range(60)),
}


def _list(client: redis.Redis) -> None:
    client.rpush(KEY, "a", "b")
    client.pexpire(KEY, 60_000)


def _hash(client: redis.Redis) -> None:
    client.hset(KEY, "a", "b")
    client.pexpire(KEY, 60_000)


TYPES: dict[str, Callable[[redis.Redis], None]] = {"list": _list, "hash": _hash}


async def _misses_and_is_replaced(store: Store) -> None:
    found = await store.directory.lookup(SCOPE)
    assert found.entry is None
    assert found.remaining_s == 0
    assert found.turn_start_us > 0
    assert not await store.directory.remove(SCOPE, "other")
    answer = await store.directory.publish(SCOPE, good("new", found.turn_start_us), 60)
    assert answer.won
    assert answer.displaced is None
    assert (await store.directory.lookup(SCOPE)).entry == good("new", found.turn_start_us)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
async def test_values_that_are_no_entries(real: Servers, store: Store, value: bytes) -> None:
    real.owner(KEY).set(KEY, value, px=60_000)
    await _misses_and_is_replaced(store)


@pytest.mark.parametrize("write", TYPES.values(), ids=TYPES)
async def test_values_of_other_types(
    real: Servers, store: Store, write: Callable[[redis.Redis], None]
) -> None:
    write(real.owner(KEY))
    await _misses_and_is_replaced(store)


async def test_an_entry_without_ttl_is_not_ours(real: Servers, store: Store) -> None:
    real.owner(KEY).set(KEY, codec.encode(good(start_us=10**15)))
    assert (await store.directory.lookup(SCOPE)).entry is None
    assert (await store.directory.publish(SCOPE, good("new", 5), 60)).won


async def test_a_newer_format_still_wins_by_its_later_turn(real: Servers, store: Store) -> None:
    real.owner(KEY).set(KEY, b"KVL2" + codec.encode(good(start_us=1000))[4:], px=60_000)
    assert not (await store.directory.publish(SCOPE, good("older", 999), 60)).won
    answer = await store.directory.publish(SCOPE, good("newer", 1001), 60)
    assert answer.won
    assert answer.displaced is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"x",
        b"KVH1",
        b"KVH1\xff",
        b"KVH1\x03a:b",
        b"KVH1\x04YWFh",
        b"KVH2\x04YWFh",
        b"KVH1" + b"\x01a" * 9999,
    ],
)
async def test_hints_that_lead_nowhere(real: Servers, store: Store, value: bytes) -> None:
    real.owner(HINT).set(HINT, value, px=60_000)
    assert (await store.directory.find_by_prefix(GROUP, [b"d1"])).scope == b""
    await store.directory.publish(SCOPE, good(), 60)
    await store.directory.publish_hints(GROUP, [b"d1"], SCOPE, 60)
    assert (await store.directory.find_by_prefix(GROUP, [b"d1"])).scope == SCOPE


async def test_a_hint_to_a_corrupt_lease_leads_to_the_next(real: Servers, store: Store) -> None:
    other = b"\x05" * 32
    await store.directory.publish(SCOPE, good(), 60)
    await store.directory.publish_hints(GROUP, [b"d1"], SCOPE, 60)
    await store.directory.publish_hints(GROUP, [b"d1"], other, 60)
    real.owner(keys.lease_key(other)).set(keys.lease_key(other), b"KVL9" + b"x" * 99, px=60_000)
    assert (await store.directory.find_by_prefix(GROUP, [b"d1"])).scope == SCOPE


@pytest.mark.parametrize("key", [keys.WORKERS_KEY, keys.ESTIMATES_KEY])
async def test_tables_of_other_types_are_taken_over(real: Servers, store: Store, key: bytes) -> None:
    real.owner(key).set(key, b"foreign", px=60_000)
    assert await store.registry.workers() == {}
    assert await store.estimates.read() == {}
    await store.estimates.merge("a", [1.0])
    assert set(await store.estimates.read()) == {"a"}


async def test_fields_that_are_no_workers_or_estimates(real: Servers, store: Store) -> None:
    for key in (keys.WORKERS_KEY, keys.ESTIMATES_KEY):
        client = real.owner(key)
        client.hset(key, mapping={b"\xff": b"\xff", "a": "9999999999999nonsense", "b": "99"})
        client.pexpire(key, 60_000)
    assert await store.registry.workers() == {}
    assert await store.estimates.read() == {}
