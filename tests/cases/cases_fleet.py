"""Starts the fleet that the cases run on."""

import hashlib
import json
import os
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cases_kit import Endpoint, Stack

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.engine.settings import smollm2_dir
from kvloop.engine.simulated.cost import PRESETS
from kvloop.runtime.ports import free_ports

THRESHOLD = 32
TENANTS = {"alpha": "token-of-alpha", "beta": "token-of-beta"}
SIMULATED_VOCABULARY = 32_000
PATIENT = {"directory_timeout_ms": 2000.0}
"""What is left to chance in production, a busy test machine must not decide."""
SMALL_BLOCKS = 96
"""Blocks of the second decode worker's pool."""
PIN_S = 12.0
PARTS = {"p1": "prefill-0", "p2": "prefill-1", "d1": "decode-0", "d2": "decode-1"}
ROUTERS = ("main", "bare", "twin", "direct", "pair", "small", "small-direct", "main-direct")
SIMULATED_PRESET = "qwen3-32b-h200"


def model_dir() -> Path:
    """Return the checkpoint that the vLLM cases run on."""
    return Path(os.environ.get("KVLOOP_TEST_MODEL") or smollm2_dir())


def _linked(model: Path, folder: Path) -> Path:
    """Return a folder of links to a checkpoint's files, so that other weights can come under its name."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    return folder


def _vllm(model: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    block_size = 32
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    settings = {
        "engine": "vllm",
        "model": str(model),
        "block_size": block_size,
        "max_model_len": 2048,
        "allow_untested": bool(os.environ.get("KVLOOP_ALLOW_UNTESTED")),
    }
    facts = {
        "block_size": block_size,
        "block_bytes": per_token * block_size,
        "eos": config["eos_token_id"],
        "tokenizer": lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        "model": model,
    }
    # One block of vLLM's pool is never given out.
    small = {"kv_cache_memory_bytes": (SMALL_BLOCKS + 1) * facts["block_bytes"]}
    return settings, facts, small


def _simulated() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    block_size = 32

    def tokenizer(text: str) -> list[int]:
        pieces = re.findall(r"\s*\w+|\s*\W", text)
        return [3 + zlib.crc32(piece.encode()) % (SIMULATED_VOCABULARY - 3) for piece in pieces]

    settings = {
        "engine": "simulated",
        "block_size": block_size,
        "max_model_len": 2048,
        "prefill_hold_s": 10.0,
        "extra_engine_args": {
            "preset": SIMULATED_PRESET,
            "time_scale": 0.2,
            "eos_every": 24,
            "vocab_size": SIMULATED_VOCABULARY,
            "num_blocks": 512,
        },
    }
    facts = {
        "block_size": block_size,
        "block_bytes": PRESETS[SIMULATED_PRESET].bytes_per_token * block_size,
        "eos": 2,
        "tokenizer": tokenizer,
    }
    return (
        settings,
        facts,
        {"extra_engine_args": settings["extra_engine_args"] | {"num_blocks": SMALL_BLOCKS}},
    )


def _tokens_file(folder: Path) -> Path:
    file = folder / "tokens"
    lines = [f"{hashlib.sha256(token.encode()).hexdigest()} {name}" for name, token in TENANTS.items()]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@asynccontextmanager
async def open_stack(engine: str, folder: Path) -> AsyncIterator[Stack]:
    """Start two P (with and without a prefix cache), two D (one small), eight routers and a store."""
    settings, facts, small = (
        _vllm(_linked(model_dir(), folder / "model")) if engine == "vllm" else _simulated()
    )
    p1, p2, d1, d2 = (f"127.0.0.1:{port}" for port in free_ports(4))
    controls = {name: folder / f"{name}.control" for name in PARTS}
    reader = {"begin_read_timeout_s": 5.0, "pin_s": PIN_S}
    holder = {"enable_prefix_caching": True, "soft_hints": True}
    link = {
        "first_chunk_timeout_s": 120.0,
        "chunk_timeout_s": 120.0,
        "tokens_file": str(_tokens_file(folder)),
        "info_interval_s": 0.2,
        # A case says which way its turns take.
        "direct": False,
        "by_cost": False,
        **PATIENT,
    }

    def router(prefill: str, decode: str, **more: Any) -> dict[str, Any]:
        return {**link, "prefill_endpoints": prefill, "decode_endpoints": decode, **more}

    def control(name: str) -> dict[str, Any]:
        return {"control_path": str(controls[name])}

    plan = FleetPlan(
        prefill=(
            {"listen": p1, "enable_prefix_caching": True, **reader, **control("p1")},
            {"listen": p2, "enable_prefix_caching": False, **reader, **control("p2")},
        ),
        decode=(
            {"listen": d1, **holder, **control("d1")},
            {"listen": d2, **holder, **control("d2"), **small, "hold_share": 0.98},
        ),
        routers=(
            router(p1, d1),
            router(p2, d1),
            router(p1, d1),
            router(p2, d1, direct=True),
            router(f"{p1},{p2}", f"{d1},{d2}"),
            router(p2, d2),
            # E3 stops its P, which must not count as gone for that.
            router(p1, d2, direct=True, info_timeout_s=60.0),
            router(p1, d1, direct=True),
        ),
        workers={
            **settings,
            "weights_version": "one",
            "kv_recompute_threshold": THRESHOLD,
            "test_hooks": True,
            **PATIENT,
        },
    )
    async with Fleet(plan, folder / "parts") as fleet:
        ends = {name: Endpoint(fleet.endpoint(name)) for name in fleet.parts if name != "store"}
        stack = Stack(
            routers={name: ends[f"router-{number}"] for number, name in enumerate(ROUTERS)},
            prefills={"p1": ends["prefill-0"], "p2": ends["prefill-1"]},
            decodes={"d1": ends["decode-0"], "d2": ends["decode-1"]},
            parts=PARTS,
            controls=controls,
            threshold=THRESHOLD,
            tenants=TENANTS,
            fleet=fleet,
            **facts,
        )
        try:
            yield stack
        finally:
            for end in ends.values():
                await end.channel.close()
