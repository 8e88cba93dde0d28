"""Stores for the contract: real servers, one of each a session. Every test ends with a look at their keys."""

import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvloop.metastore.factory import Store as OpenStore
from kvloop.metastore.factory import StoreOptions, open_store

sys.path.insert(0, str(Path(__file__).parent))

import store_servers as servers

# A user who may run scripts on kvloop's keys and nothing else.
ACL = (
    "user default on nopass ~* &* +@all",
    "user leases on >pass%40word ~kvloop:* +@read +@write +eval +evalsha +time +ping +info",
)
_OPENERS = {
    "valkey": servers.valkey,
    "redis": servers.debian_redis,
    "acl": lambda folder: servers.debian_redis(folder, *ACL, credentials="leases:pass%2540word@"),
    "tls": servers.tls_redis,
    "sentinel": servers.sentinel,
    "cluster": servers.cluster,
}
KINDS = ["memory", *_OPENERS]
# Generous: these tests are about meaning, on a machine that may be busy.
PATIENT = StoreOptions(deadline_s=10.0, connect_s=10.0)


class Stores:
    """The session's servers, each started when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._running: dict[str, servers.Store] = {}

    def get(self, kind: str) -> servers.Store:
        if kind not in self._running:
            folder = self._folder / kind
            folder.mkdir()
            self._running[kind] = self._stack.enter_context(_OPENERS[kind](folder))
        return self._running[kind]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    found = Stores(tmp_path_factory.mktemp("stores"))
    yield found
    found.close()


def assert_no_key_without_ttl(store: servers.Store) -> None:
    forever = store.keys_without_ttl()
    assert not forever, f"keys without TTL in {store.kind}: {forever}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Tests that write past the directory have no meaning in memory.
    if "backing" in metafunc.fixturenames:
        kinds = KINDS[1:] if "real" in metafunc.fixturenames else KINDS
        metafunc.parametrize("backing", kinds, indirect=True)


@pytest.fixture
def backing(request: pytest.FixtureRequest, stores: Stores) -> Iterator[servers.Store | None]:
    """Return the real store behind a test, or None for memory; no key without TTL may stay in it."""
    if request.param == "memory":
        yield None
        return
    store = stores.get(request.param)
    store.clear()
    yield store
    assert_no_key_without_ttl(store)


@pytest.fixture
def url(backing: servers.Store | None) -> str:
    return "memory://" if backing is None else backing.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[OpenStore]:
    opened = open_store(url, options=PATIENT)
    yield opened
    await opened.close()


@pytest.fixture
def real(backing: servers.Store | None) -> servers.Store:
    """Return the servers behind a test that writes past the directory: not for memory."""
    assert backing is not None
    return backing
