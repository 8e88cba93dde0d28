"""The adapter's part of a reload, over an engine that loads nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_settings import vllm_settings

from kvloop.engine.port import EngineFacts
from kvloop.engine.vllm import facts
from kvloop.engine.vllm.adapter import VllmEngine
from kvloop.runtime.errors import Failure

pytestmark = pytest.mark.vllm

FACTS = EngineFacts(
    engine="vllm",
    version="1",
    epoch="old",
    model_name="m",
    model_revision="",
    adapters=(),
    max_model_len=4096,
    vocab_size=1000,
    block_size=16,
    compatibility="old",
    bidirectional_kv_xfer=True,
    kv_recompute_threshold=0,
)


class Core:
    """AsyncLLM and the control client, as far as a reload sees them; either may fail."""

    errored = False
    vllm_config = None

    def __init__(self) -> None:
        self.load_fails = self.telling_fails = False
        self.version: str | None = None

    async def collective_rpc(self, _method: str) -> None:
        if self.load_fails:
            raise OSError("half a checkpoint")

    async def reloaded(self, version: str) -> None:
        if self.telling_fails:
            raise OSError("no socket")
        self.version = version


@pytest.mark.parametrize("broken", ["load_fails", "telling_fails"])
async def test_an_engine_with_mixed_weights_is_not_well(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    core: Any = Core()
    monkeypatch.setattr(facts, "compatibility", lambda settings, *_: f"of {settings.weights_version}")
    engine = VllmEngine(vllm_settings(), "decode")
    monkeypatch.setattr(engine, "_core", SimpleNamespace(llm=core, processes=[]))
    monkeypatch.setattr(engine, "_control", core)
    monkeypatch.setattr(engine, "_facts", FACTS)
    setattr(core, broken, True)
    with pytest.raises(OSError, match=r"half|socket"):
        await engine.reload_weights("two")
    assert (engine.facts.epoch, engine.facts.compatibility) == ("old", "old")
    with pytest.raises(Failure) as raised:
        await engine.check_health()
    assert raised.value.reason_name == "NO_WORKER"
    setattr(core, broken, False)
    await engine.reload_weights("two")
    await engine.check_health()
    assert core.version == "two"
    assert engine.facts.epoch != "old"
    assert engine.facts.compatibility == "of two"
