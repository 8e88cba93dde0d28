"""One gateway process over a scripted router, shared by the tests that need vLLM's serving code."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from kvloop.engine.settings import smollm2_dir

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from gateway_router import FakeRouter  # noqa: E402

_MAIN = """
import asyncio, json, sys
from kvloop.gateway.app import GatewayApp
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime.server import run_until_signal

class Announced(GatewayApp):
    async def start(self):
        await super().start()
        print(json.dumps({"endpoint": self.endpoint}), flush=True)

asyncio.run(run_until_signal(Announced(GatewaySettings(**json.loads(sys.argv[1])))))
"""
_START_S = 110


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The SmolLM2 checkpoint; only its configuration and tokenizer are read."""
    given = os.environ.get("KVLOOP_TEST_MODEL")
    return Path(given) if given else smollm2_dir()


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def _router(tokenizer: Tokenizer) -> Iterator[FakeRouter]:
    router = FakeRouter(tokenizer)
    yield router
    router.stop()


@pytest.fixture
def router(_router: FakeRouter) -> FakeRouter:
    _router.reset()
    return _router


class Gateway:
    """A gateway process."""

    def __init__(self, settings: dict[str, object]) -> None:
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps(settings)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith('{"endpoint"'):
            line = self.process.stdout.readline()
        assert line, "the gateway ended while it started"
        self.url = f"http://{json.loads(line)['endpoint']}"

    def stop(self) -> int:
        """End the process; return its exit status."""
        self.process.terminate()
        status = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture(scope="session")
def gateway(_router: FakeRouter, model_dir: Path) -> Iterator[Gateway]:
    started = Gateway(
        {
            "listen": "127.0.0.1:0",
            "router": f"127.0.0.1:{_router.port}",
            "model": str(model_dir),
            "served_model_name": "smollm2",
            "adapters": ["poet"],
            "max_model_len": 2048,
            "tool_call_parser": "hermes",
            "turn_timeout_s": 60,
            "max_body_bytes": 1_000_000,
            "render_check_every": 1,
        }
    )
    yield started
    assert started.stop() == 0


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        yield client


def wait_until(condition: object, seconds: float = 10.0) -> None:
    """Poll until a condition holds."""
    assert callable(condition)
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition never held"
        time.sleep(0.01)
