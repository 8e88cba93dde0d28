"""One deployment for all clients; what they met with goes into out/surface.json."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The Go client's own tests know how to run Go.
for folder in (HERE, ROOT / "tests" / "client"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from surface_kit import SIMULATED, Told, Up  # noqa: E402

# "simulated" rehearses in seconds what `make test-surface` does on real engines.
ENGINE = os.environ.get("KVLOOP_SURFACE", "vllm")


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("up"), ENGINE)
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="session")
def clients() -> Iterator[dict[str, Told]]:
    """What each client met with, by name."""
    found: dict[str, Told] = {}
    yield found
    name = "surface.json" if ENGINE != SIMULATED else "surface-simulated.json"
    out = ROOT / "out" / name
    out.parent.mkdir(exist_ok=True)
    out.write_text(
        json.dumps(
            {"engine": ENGINE, "clients": {key: told.summary() for key, told in found.items()}}, indent=2
        )
        + "\n"
    )
