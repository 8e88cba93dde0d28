"""LoRA adapters for tests."""

import json
from pathlib import Path


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
