"""Makes this folder's helper modules importable, and a store for those who ask."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop.metastore.embedded import EmbeddedStore

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    """Return the URL of a real server of this module's own."""
    with EmbeddedStore() as store:
        yield store.url


@pytest.fixture(params=["memory", "valkey"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of each kind of store in turn."""
    return "memory://" if request.param == "memory" else str(request.getfixturevalue("valkey_url"))
