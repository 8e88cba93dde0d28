"""C2, C3: other weights, and other adapters on the same weights, never share a conversation's KV.

P with a prefix cache and the small D come back with another revision and four adapters. The rest of the fleet
stays as it is, so both revisions are served at once.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cases_kit import Case, Stack, same

PARTS = ("prefill-0", "decode-1")
ADAPTERS = {"chef": 0, "poet": 1, "smith": 2, "mason": 2}
"""Name -> seed of its weights."""


def write_adapter(folder: Path, model: Path | None, seed: int) -> str:
    """Write a LoRA adapter with random weights, large enough to change answers; returns its path."""
    if model is None:
        return str(folder)
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, rank = config["hidden_size"], 8
    width = config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.05
        weights[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.05
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return str(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def adapters(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = {name: write_adapter(folder / name, stack.model, seed) for name, seed in ADAPTERS.items()}
    await stack.restart(PARTS, revision="two", adapters=paths)
    await stack.ready("small-direct", "bare")
    yield folder
    await stack.restart(PARTS, revision=None, adapters={})
    await stack.ready()


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("C2", "RECOMPUTE (not found), 0 bytes")
async def test_other_revision(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    two = await case.turn(prompt, router="small-direct")
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    assert two.sources.computed == len(prompt)
    # The first revision's lease is untouched.
    three = await case.turn(prompt)
    case.expect(three, "READBACK", "PROVEN", len(history) + len(one.ids) - 1)
    case.tell(two)
    await case.stack.end(case.name(), router="small-direct")


@pytest.mark.parametrize("router", ["small-direct"])
@pytest.mark.case("C3", "RECOMPUTE (not found), 0 bytes")
async def test_other_adapter(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history, adapter="chef")
    plain = await stack.cold(history, router="small-direct")
    assert not same(plain, one), "the adapter changes nothing"
    prompt = [*history, *one.ids, *suffix]
    for other in ("poet", ""):
        two = await case.turn(prompt, adapter=other)
        case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
        assert two.sources.computed == len(prompt)
    three = await case.turn(prompt, adapter="chef")
    case.expect(three, "DIRECT", "PROVEN", 0)
    held = one.summary.lease.num_tokens
    assert three.sources.d_local in (held, held // stack.block_size * stack.block_size)
    case.tell(two)
    for adapter in ("chef", "poet"):
        await stack.end(case.name(), adapter=adapter, router="small-direct")


@pytest.mark.parametrize("router", ["small-direct"])
@pytest.mark.case("C3", "RECOMPUTE (not found), 0 bytes")
async def test_files_replaced_before_their_first_use(
    case: Case, history: list[int], suffix: list[int], adapters: Path
) -> None:
    stack = case.stack
    write_adapter(adapters / "smith", stack.model, seed=3)
    one = await case.turn(history, adapter="smith")
    if stack.model is not None:
        # What smith's files were when the workers started, mason's still are.
        assert same(one, await stack.cold(history, adapter="mason", router="small-direct"))
    prompt = [*history, *one.ids, *suffix]
    two = await case.turn(prompt, adapter="mason")
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    three = await case.turn(prompt, adapter="smith")
    case.expect(three, "DIRECT", "PROVEN", 0)
    case.tell(two)
    for adapter in ("smith", "mason"):
        await stack.end(case.name(), adapter=adapter, router="small-direct")
