"""Adapters: loaded at once, told apart by what was loaded, and never read again."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from engine_adapters import write_adapter
from engine_pair import greedy, name, words
from engine_settings import vllm_settings

from kvloop.engine.port import DecodeJob
from kvloop.engine.settings import EngineSettings, resolve
from kvloop.engine.vllm.adapter import VllmEngine
from kvloop.engine.vllm.adapters import Adapters, content
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    with warnings.catch_warnings():
        # What vLLM imports warns of its own affairs.
        warnings.simplefilter("ignore")
        import vllm.lora.utils  # noqa: F401


class Loras:
    """AsyncLLM, as far as adapters go."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.added = True
        self.replaced: Path | None = None

    async def remove_lora(self, number: int) -> bool:
        self.told.append(("remove", number))
        return False

    async def add_lora(self, request: Any) -> bool:
        self.told.append(("add", request.lora_int_id))
        if self.replaced is not None:
            self.replaced.write_text("newer", encoding="utf-8")
        return self.added


def adapter(folder: Path, text: str = "weights") -> str:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_text(text, encoding="utf-8")
    return str(folder)


async def test_every_adapter_is_loaded_whatever_was_there_before(tmp_path: Path) -> None:
    paths = {name: adapter(tmp_path / name, name) for name in ("chef", "poet")}
    adapters, loras = Adapters(paths), Loras()
    await adapters.load(loras)
    assert loras.told == [("remove", 1), ("add", 1), ("remove", 2), ("add", 2)]
    assert adapters.contents == {name: content(path) for name, path in paths.items()}
    assert len(set(adapters.contents.values())) == 2
    assert adapters.request("poet").lora_int_id == 2
    assert adapters.request("") is None
    with pytest.raises(Failure) as unknown:
        adapters.request("smith")
    assert unknown.value.reason_name == "MODEL_NOT_FOUND"


async def test_files_that_change_while_they_are_loaded_are_refused(tmp_path: Path) -> None:
    adapters, loras = Adapters({"chef": adapter(tmp_path / "chef")}), Loras()
    loras.replaced = tmp_path / "chef" / "adapter_model.safetensors"
    with pytest.raises(Failure, match="chef was not loaded whole"):
        await adapters.load(loras)
    assert adapters.contents == {}
    loras.replaced = None
    await adapters.load(loras)
    loras.added = False
    with pytest.raises(Failure, match="chef was not loaded whole"):
        await adapters.load(loras)


def test_files_are_found_where_vllm_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter(tmp_path / "chef")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert content(path) == content("~/chef") == content("chef") != ""


@pytest.mark.parametrize(
    ("extra", "slots", "kept"), [({}, 2, 2), ({"max_loras": 1}, 1, 2), ({"max_loras": 4}, 4, 4)]
)
def test_memory_has_room_for_all(extra: dict[str, int], slots: int, kept: int, tmp_path: Path) -> None:
    from kvloop.engine.vllm.arguments import engine_arguments

    settings = vllm_settings(adapters={"a": "/a", "b": "/b"}, extra_engine_args=extra)
    made = engine_arguments(_on_cuda(settings), "decode", tmp_path / "control")
    assert (made.max_loras, made.max_cpu_loras) == (slots, kept)


def _on_cuda(settings: EngineSettings) -> EngineSettings:
    return resolve(settings, has_gpu=True)


async def say(engine: VllmEngine, adapter: str = "") -> list[int]:
    """Return what is said when nothing is reused."""
    job = DecodeJob(name("d"), tokens.pack(words(60)), greedy(), cache_salt=name("cold"), adapter=adapter)
    return [one async for delta in engine.decode(job) for one in delta.token_ids]


@pytest.mark.timeout(600)
async def test_replaced_files_serve_nobody_before_a_reload(tmp_path: Path) -> None:
    model = Path(vllm_settings().model_path)
    path = write_adapter(tmp_path / "smith", model, seed=0)
    same = write_adapter(tmp_path / "mason", model, seed=0)
    engine = VllmEngine(vllm_settings(adapters={"smith": path, "mason": same}), "decode")
    try:
        await engine.start()
        before = engine.facts.compatibility
        write_adapter(tmp_path / "smith", model, seed=1)
        old = await say(engine, "mason")
        assert await say(engine, "smith") == old != await say(engine)
        assert await engine.reset_prefix_cache()
        await engine.reload_weights("two")
        # Files that come after the reload are not read either.
        write_adapter(tmp_path / "smith", model, seed=0)
        assert await say(engine, "mason") == old
        assert await say(engine, "smith") != old
        assert await engine.reset_prefix_cache()
        after = engine.facts.compatibility
        await engine.reload_weights("two")
        assert await say(engine, "smith") == old
        assert len({before, after, engine.facts.compatibility}) == 3
    finally:
        await engine.stop()
