"""URLs, values, hints, fitness and the breaker: everything that needs no server."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.metastore import codec, fitness, hints, keys, urls
from kvloop.metastore.breaker import LONGEST_PAUSE_S, Breaker
from kvloop.metastore.factory import open_directory, open_store
from kvloop.metastore.port import Level
from kvloop.runtime import digests
from kvloop.v1alpha1 import lease_pb2


@pytest.mark.parametrize(
    ("url", "kind", "tls", "hosts", "path", "db"),
    [
        ("memory://", "memory", False, (), "", 0),
        ("memory://shared", "memory", False, (), "shared", 0),
        ("redis://h", "single", False, (("h", 6379),), "", 0),
        ("valkey://h:1/2", "single", False, (("h", 1),), "", 2),
        ("rediss://h:1?db=3", "single", True, (("h", 1),), "", 3),
        ("redis://[::1]:7000/1", "single", False, (("::1", 7000),), "", 1),
        ("redis://[fe80::1]", "single", False, (("fe80::1", 6379),), "", 0),
        ("unix:///run/s.sock?db=1", "unix", False, (), "/run/s.sock", 1),
        (
            "redis+sentinel://a,b:1,[::1]:2/leases/4",
            "sentinel",
            False,
            (("a", 26379), ("b", 1), ("::1", 2)),
            "leases",
            4,
        ),
        ("rediss+sentinel://a/s", "sentinel", True, (("a", 26379),), "s", 0),
        ("redis+cluster://a:1,[::1]:2", "cluster", False, (("a", 1), ("::1", 2)), "", 0),
        ("valkeys+cluster://a", "cluster", True, (("a", 6379),), "", 0),
    ],
)
def test_urls_are_read(
    url: str, kind: str, tls: bool, hosts: tuple[tuple[str, int], ...], path: str, db: int
) -> None:
    found = urls.parse(url)
    assert (found.kind, found.tls, found.hosts, found.path, found.db) == (kind, tls, hosts, path, db)


def test_credentials_are_decoded_and_not_shown() -> None:
    found = urls.parse("redis+sentinel://us%3Aer:p%40ss%2F@a:1/s?sentinel_username=x&sentinel_password=y%26")
    assert (found.username, found.password) == ("us:er", "p@ss/")
    assert found.options == {"sentinel_username": "x", "sentinel_password": "y&"}
    assert "ss/" not in repr(found)
    assert "y&" not in repr(found)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "begins with"),
        ("redis:/h", "begins with"),
        ("http://h", "begins with"),
        ("redis://", "no host"),
        ("redis://::1:6379", "brackets"),
        ("redis://[::1:6379", "brackets"),
        ("redis://[h]:6379", "brackets"),
        ("redis://h:0", "port"),
        ("redis://h:65536", "port"),
        ("redis://h:x", "port"),
        ("redis://a,b", "several hosts"),
        ("redis://h/x", "not a number"),
        ("redis://h/1/2", "more path"),
        ("redis+sentinel://h", "name of the service"),
        ("redis+cluster://h/1", "database 0"),
        ("redis://h?ssl_ca_certs=x", "unknown option"),
        ("rediss://h?ssl_ca_certs=/nowhere/ca.pem", "can't be used"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("unix://", "path of a socket"),
    ],
)
def test_senseless_urls_say_what_to_change(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_store(url)


@given(st.text())
def test_any_text_is_a_url_or_a_value_error(text: str) -> None:
    for candidate in (text, f"redis://{text}", f"redis+sentinel://{text}", f"unix://{text}"):
        try:
            urls.parse(candidate)
        except ValueError:
            continue


def test_named_memory_is_shared_for_as_long_as_it_is_used() -> None:
    one = open_store("memory://tests-shared")
    assert open_store("memory://tests-shared") is one
    assert open_store("memory://") is not open_store("memory://")
    assert open_directory("memory://tests-shared") is one.directory


@pytest.mark.parametrize(("num_tokens", "limit"), [(24_000, 1024), (140_000, 2048)])
def test_entries_are_small(num_tokens: int, limit: int) -> None:
    entry = lease_pb2.DirectoryEntry(
        lease_id="l" * 36,
        conversation_id="c" * 128,
        decode_endpoint="[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535",
        dp_rank=255,
        epoch="e" * 36,
        num_tokens=num_tokens,
        block_size=16,
        turn_start_us=2**50,
        held=True,
    )
    for length in digests.coarse_lengths(num_tokens, 16):
        entry.digests.add(num_tokens=length, digest=b"\xff" * digests.COARSE_BYTES)
    value = codec.encode(entry)
    assert len(value) <= limit
    entry.version = codec.ENTRY_VERSION
    assert codec.decode(value) == entry


@given(st.binary(max_size=200))
def test_random_values_are_misses(value: bytes) -> None:
    assert codec.decode(value) is None
    assert codec.decode(b"KVL1" + value) is None


@given(st.integers(0, 199), st.integers(1, 255))
def test_every_changed_byte_is_noticed(position: int, flip: int) -> None:
    value = bytearray(
        codec.encode(lease_pb2.DirectoryEntry(lease_id="a", decode_endpoint="d", conversation_id="c" * 150))
    )
    value[position] ^= flip
    assert codec.decode(bytes(value)) is None


@given(st.binary(min_size=1, max_size=64))
def test_tags_can_be_undone_and_hold_nothing_that_means_something(raw: bytes) -> None:
    text = keys.tag(raw)
    assert keys.untag(text) == raw
    assert not set(text) & set(b"{}: \r\n*?[]")


def test_keys_of_a_scope_share_its_slot() -> None:
    assert keys.lease_key(b"abc") == b"kvloop:{YWJj}:lease"
    assert keys.alive_key(b"abc") == b"kvloop:{YWJj}:alive"
    assert keys.hint_key(b"abc", b"d") == b"kvloop:{YWJj}:hint:ZA"


@pytest.mark.parametrize(
    ("num_tokens", "lengths"),
    [
        (0, []),
        (63, []),
        (64, [64]),
        (80, [64, 80]),
        (127, [64, 80, 96, 112]),
        (128, [64, 80, 96, 112, 128]),
    ],
)
def test_hints_lie_on_a_grid(num_tokens: int, lengths: list[int]) -> None:
    assert hints.hint_lengths(num_tokens) == lengths


@pytest.mark.parametrize("num_tokens", [1_000, 24_000, 140_000, 1_000_000])
def test_both_sides_of_a_hint_meet(num_tokens: int) -> None:
    written = hints.written_lengths(num_tokens)
    asked = hints.hint_lengths(num_tokens + 500)
    assert len(written) <= hints.WRITTEN
    assert set(written) <= set(asked)
    assert written[-1] > 0.79 * num_tokens
    assert len(asked) < 64


def _info(**changed: str) -> dict[str, str]:
    base = {"redis_version": "7.2.0", "role": "master", "maxmemory": "1000", "used_memory": "10"}
    return base | {"maxmemory_policy": "volatile-ttl"} | changed


@pytest.mark.parametrize(
    ("info", "level"),
    [
        (_info(), None),
        (_info(redis_version="6.0.16"), None),
        (_info(redis_version="5.0.14"), Level.FAILURE),
        (_info(redis_version="unknown"), Level.FAILURE),
        (_info(valkey_version="9.1.2", redis_version="7.2.4"), None),
        (_info(role="slave"), Level.WARNING),
        (_info(maxmemory="0"), Level.NOTE),
        (_info(maxmemory_policy="allkeys-lru"), Level.WARNING),
        (_info(maxmemory_policy="allkeys-random"), Level.WARNING),
        (_info(maxmemory_policy="noeviction"), Level.WARNING),
        (_info(maxmemory_policy="volatile-lru"), None),
        (_info(used_memory="901"), Level.WARNING),
        (_info(used_memory="900"), None),
        (_info(used_memory="nonsense"), None),
    ],
)
def test_fitness(info: dict[str, str], level: Level | None) -> None:
    report = fitness.report([_info(), info])
    assert [finding.level for finding in report.findings] == ([level] if level else [])
    assert report.fit == (level is not Level.FAILURE)
    assert report.nodes == 2


def test_fitness_of_nothing() -> None:
    assert fitness.report([]).server == "unknown"


async def test_the_breaker_probes_alone_and_with_growing_pauses() -> None:
    pauses: list[float] = []
    outcomes = iter([OSError(), TimeoutError(), ValueError(), *([OSError()] * 8), None])

    async def probe() -> None:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    closed = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    breaker = Breaker(probe, sleep=sleep, rng=random.Random(1))
    assert not breaker.open
    breaker.trip()
    breaker.trip()
    assert breaker.open
    while breaker.open:  # noqa: ASYNC110
        await asyncio.sleep(0)
    closed.set()
    assert breaker.openings == 1
    assert breaker.probes == 12
    assert len(pauses) == 11
    assert all(pause <= LONGEST_PAUSE_S for pause in pauses)
    assert pauses[0] <= 0.05
    assert pauses[-1] > 0.2


async def test_a_closed_breaker_probes_no_more() -> None:
    calls = 0

    async def probe() -> None:
        nonlocal calls
        calls += 1
        raise OSError

    async def sleep(_: float) -> None:
        await asyncio.Event().wait()

    breaker = Breaker(probe, sleep=sleep)
    breaker.trip()
    while not calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await breaker.close()
    assert calls == 1
    assert not breaker.open


def test_every_script_says_what_it_takes_and_returns() -> None:
    folder = Path(codec.__file__).parent
    for name in ("scripts.py", "fields.py"):
        source = (folder / name).read_text()
        assert source.count("= Script(") == source.count("-- KEYS") == source.count("\n-- returns ")
