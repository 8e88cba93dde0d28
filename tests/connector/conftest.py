"""Engines shared by the tests of this folder: two readers (with and without a prefix cache) and a decoder."""

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from connector_harness import Engine, EngineProcess, write_model

DECODER_BLOCKS = 96


@pytest.fixture(scope="session")
def engine_processes() -> Iterator[dict[str, EngineProcess]]:
    folder = Path(tempfile.mkdtemp(prefix="kvl"))  # short: unix socket paths are limited
    given = os.environ.get("KVLOOP_TEST_MODEL")
    model = Path(given) if given else write_model(folder / "model")
    engines = {
        "p": EngineProcess(folder, "p", model, "kv_both"),
        "plain": EngineProcess(folder, "plain", model, "kv_both", caching=False),
        "d": EngineProcess(folder, "d", model, "kv_consumer", blocks=DECODER_BLOCKS, kvloop_hold_share=0.9),
    }
    yield engines
    for engine in engines.values():
        engine.stop()
    shutil.rmtree(folder)


@pytest.fixture
async def p(engine_processes: dict[str, EngineProcess]) -> AsyncIterator[Engine]:
    engine = await engine_processes["p"].ready()
    yield engine
    await engine.close()


@pytest.fixture
async def plain(engine_processes: dict[str, EngineProcess]) -> AsyncIterator[Engine]:
    """Has no prefix cache, so what it answers without a handle is cold."""
    engine = await engine_processes["plain"].ready()
    yield engine
    await engine.close()


@pytest.fixture
async def d(engine_processes: dict[str, EngineProcess]) -> AsyncIterator[Engine]:
    engine = await engine_processes["d"].ready()
    yield engine
    await engine.close()
