"""A front end that dies. It has an engine of its own: nothing serves afterwards."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest
from connector_harness import EngineProcess, write_model
from connector_steps import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


async def test_an_engine_core_dies_with_its_front_end() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvl"))  # short: unix socket paths are limited
    process = EngineProcess(folder, "d", write_model(folder / "model"), "kv_consumer")
    try:
        engine = await process.ready()
        family = psutil.Process(process.process.pid).children(recursive=True)
        assert process.core_pid in {child.pid for child in family}
        process.process.kill()
        await until(lambda: all_gone(family))
        # The connection broke with its server.
        await asyncio.gather(engine.close(), return_exceptions=True)
    finally:
        process.stop()
        shutil.rmtree(folder)


async def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
