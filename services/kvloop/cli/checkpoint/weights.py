"""From a GGUF of a Llama model to a Hugging Face checkpoint's weights and configuration."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloop.cli.checkpoint.steps import CheckpointError, Progress

DTYPE = "float16"
"""4-bit weights times 16-bit scales: float16 keeps more of their digits than bfloat16."""

Array = npt.NDArray[np.float32]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def fields(gguf: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(str(gguf)).fields.items()}


def hugging_face_name(name: str) -> str:
    """Return a GGUF tensor's name in a Llama checkpoint. Raises CheckpointError for unknown ones."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise CheckpointError(f"unexpected tensor {name} in the GGUF file")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def unpermute(rows: Array, heads: int) -> Array:
    """Return q or k rows in Hugging Face's order.

    llama.cpp keeps each head's rotary pairs next to each other (heads, dim / 2, 2); Hugging Face keeps the
    halves apart (heads, 2, dim / 2). rows: (heads * dim, width).
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def config(meta: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return config.json. tied: the output head shares the embedding."""
    heads, width = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    theta = meta["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # GGUF keeps it as float32; the shortest decimal that reads back as the same float32 is meant.
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": DTYPE,
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def convert(gguf: Path, meta: Mapping[str, Any], target: Path, progress: Progress) -> bool:
    """Write all weights, dequantized, as safetensors; return whether the output head is tied."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = GGUFReader(str(gguf)).tensors
    state: dict[str, npt.NDArray[np.float16]] = {}
    for done, tensor in enumerate(tensors):
        progress("convert", done, len(tensors))
        # GGUF names the fastest dimension first.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        weights: Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        match = _LAYER_NAME.fullmatch(tensor.name)
        if match is not None and match[2] in heads:
            weights = unpermute(weights, heads[match[2]])
        state[hugging_face_name(tensor.name)] = np.ascontiguousarray(weights, dtype=np.float16)
    save_file(state, str(target), metadata={"format": "pt"})
    progress("convert", len(tensors), len(tensors))
    return "lm_head.weight" not in state
