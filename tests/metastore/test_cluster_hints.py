"""A search on a cluster whose nodes fail one by one: names, hints and hinted leases lie on different ones."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvloop.metastore import codec, keys, scripts
from kvloop.metastore.guard import GuardedLink
from kvloop.metastore.port import DirectoryUnavailable
from kvloop.metastore.redis_directory import RedisDirectory
from kvloop.v1alpha1 import lease_pb2

NAMED, FORK, GONE, GROUP = b"n" * 32, b"f" * 32, b"x" * 32, b"g" * 16


class Nodes:
    """A link that keeps nothing but what it is given, and counts how often it is waited for."""

    clustered = True

    def __init__(self, leases: dict[bytes, str], hinted: Sequence[bytes], away: set[bytes]) -> None:
        self.leases = {keys.lease_key(scope): lease for scope, lease in leases.items()}
        self.hinted = hinted
        self.away = away

    async def run(self, script: scripts.Script, names: Sequence[bytes], *args: bytes | int) -> Any:
        key = names[0]
        if key.startswith(keys.hint_prefix(GROUP)):
            if GROUP in self.away:
                raise DirectoryUnavailable
            pairs = [
                part for number, scope in enumerate(self.hinted, 1) for part in (number, keys.tag(scope))
            ]
            return [b"7", b"5", *pairs]
        if any(key == keys.lease_key(scope) for scope in self.away):
            raise DirectoryUnavailable
        lease = self.leases.get(key)
        if lease is None:
            return [None, 0, 7_000_001]
        entry = lease_pb2.DirectoryEntry(lease_id=lease, decode_endpoint="d:1")
        return [codec.encode(entry), 1000, 7_000_001]


def directory(leases: dict[bytes, str], hinted: Sequence[bytes], away: set[bytes]) -> RedisDirectory:
    link: GuardedLink = Nodes(leases, hinted, away)  # type: ignore[assignment]
    return RedisDirectory(link)


@pytest.mark.parametrize(
    ("leases", "away", "scope"),
    [
        ({NAMED: "n", FORK: "f"}, set(), NAMED),
        ({FORK: "f"}, set(), FORK),
        ({NAMED: "n", FORK: "f"}, {GROUP}, NAMED),
        ({FORK: "f"}, {GROUP}, b""),
        ({FORK: "f", GONE: "x"}, {GONE}, FORK),
        ({GONE: "x"}, {GONE}, b""),
    ],
    ids=["all well", "not named", "no hints needed", "hints away", "a hinted lease away", "all hinted away"],
)
async def test_what_can_be_found_is_found(leases: dict[bytes, str], away: set[bytes], scope: bytes) -> None:
    found = await directory(leases, [GONE, FORK], away).find_by_prefix(GROUP, [b"d1", b"d2"], [NAMED])
    assert found.scope == scope
    assert (found.found.entry is not None) == bool(scope)
    assert found.position == (0 if scope == FORK else -1)
    assert found.found.turn_start_us in {7_000_001, 7_000_005}


@pytest.mark.parametrize(("names", "away"), [([NAMED], {NAMED}), ([], {GROUP})])
async def test_without_an_answer_to_the_first_question_it_is_unavailable(
    names: list[bytes], away: set[bytes]
) -> None:
    with pytest.raises(DirectoryUnavailable):
        await directory({NAMED: "n"}, [], away).find_by_prefix(GROUP, [b"d1"], names)
