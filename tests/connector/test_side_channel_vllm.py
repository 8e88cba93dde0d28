"""An engine whose side channel can't listen says so and ends; vLLM alone would wait for ever."""

import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from connector_harness import EngineProcess, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_a_taken_port_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvl"))  # short: unix socket paths are limited
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("connector_harness.free_port", lambda: server.getsockname()[1])
        process = EngineProcess(folder, "d", write_model(folder / "model"), "kv_consumer")
        try:
            assert process.process.wait(240) != 0
            text = process.log.read_text()
            assert f"the NIXL side channel can't listen at 127.0.0.1, port {server.getsockname()[1]}" in text
        finally:
            process.stop()
            shutil.rmtree(folder)
