"""One gateway process over a scripted router, shared by the tests that need vLLM's serving code."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from kvloop.engine.settings import smollm2_dir

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from gateway_kit import Gateway  # noqa: E402
from gateway_router import FakeRouter  # noqa: E402


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


@pytest.fixture(scope="session")
def gateway(
    _router: FakeRouter, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    started = Gateway(
        {
            "listen": "127.0.0.1:0",
            "chat_listen": "127.0.0.1:0",
            "router": f"127.0.0.1:{_router.port}",
            "model": str(model_dir),
            "served_model_name": "smollm2",
            "adapters": ["poet"],
            "max_model_len": 2048,
            "tool_call_parser": "hermes",
            "turn_timeout_s": 60,
            "max_body_bytes": 1_000_000,
            "render_check_every": 1,
        },
        tmp_path_factory.mktemp("gateway"),
    )
    yield started
    assert started.stop() == 0


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        yield client
