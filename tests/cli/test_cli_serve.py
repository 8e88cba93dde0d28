"""`kvloop serve` as a process ends: with an error when what it serves with is lost."""

import asyncio
from pathlib import Path

import pytest

from kvloop.cli import serve
from kvloop.cli.errors import CommandFailed
from kvloop.decode.settings import DecodeSettings
from kvloop.engine import worker
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime import logs


class Doomed(SimulatedEngine):
    """An engine that dies once it is up."""

    async def start(self) -> None:
        await super().start()
        asyncio.get_running_loop().call_soon(self.faults.kill)


def test_a_worker_whose_engine_is_dead_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, no_settings_around: None, tmp_path: Path
) -> None:
    # The process is the tests' own: its collector and its logs are left as they are.
    monkeypatch.setattr(serve, "_spare_collections", lambda: None)
    monkeypatch.setattr(logs, "configure", lambda level: None)
    monkeypatch.setattr(worker, "create_engine", lambda settings, role: Doomed(SimulatedSettings(), role))
    monkeypatch.setattr(worker, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(worker, "DEAD_S", 0.05)
    settings = DecodeSettings.load(flags={"engine": "simulated", "listen": "127.0.0.1:0", "stop_grace_s": 0})
    with pytest.raises(CommandFailed, match="decode: the engine is dead"):
        serve.serve("decode", settings, tmp_path / "ready", "info")
    assert not (tmp_path / "ready").exists(), "nobody serves there"
