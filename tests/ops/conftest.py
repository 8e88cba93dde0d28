"""Makes this folder's helper modules importable, and those of the rooms that are watched."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop.metastore.embedded import EmbeddedStore

_HERE = Path(__file__).parent
for folder in (_HERE, _HERE.parent / "router"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    """Return the URL of a real server of this module's own."""
    with EmbeddedStore() as store:
        yield store.url
