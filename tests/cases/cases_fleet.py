"""Starts the fleet that the cases run on."""

import hashlib
import json
import os
import re
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from cases_kit import Endpoint, Stack

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.engine.settings import smollm2_dir
from kvloop.engine.simulated.cost import PRESETS

THRESHOLD = 32
TENANTS = {"alpha": "token-of-alpha", "beta": "token-of-beta"}
SIMULATED_VOCABULARY = 32_000
PATIENT = {"directory_timeout_ms": 2000.0}
"""What is left to chance in production, a busy test machine must not decide."""
SIMULATED_PRESET = "qwen3-32b-h200"


def free_ports(count: int) -> list[int]:
    """Return free loopback ports."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def model_dir() -> Path:
    """Return the checkpoint that the vLLM cases run on."""
    return Path(os.environ.get("KVLOOP_TEST_MODEL") or smollm2_dir())


def _vllm(model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    block_size = 32
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    settings = {"engine": "vllm", "model": str(model), "block_size": block_size, "max_model_len": 2048}
    facts = {
        "block_size": block_size,
        "block_bytes": per_token * block_size,
        "eos": config["eos_token_id"],
        "tokenizer": lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    }
    return settings, facts


def _simulated() -> tuple[dict[str, Any], dict[str, Any]]:
    block_size = 32

    def tokenizer(text: str) -> list[int]:
        pieces = re.findall(r"\s*\w+|\s*\W", text)
        return [3 + zlib.crc32(piece.encode()) % (SIMULATED_VOCABULARY - 3) for piece in pieces]

    settings = {
        "engine": "simulated",
        "block_size": block_size,
        "max_model_len": 2048,
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
    return settings, facts


def _tokens_file(folder: Path) -> Path:
    file = folder / "tokens"
    lines = [f"{hashlib.sha256(token.encode()).hexdigest()} {name}" for name, token in TENANTS.items()]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@asynccontextmanager
async def open_stack(engine: str, folder: Path) -> AsyncIterator[Stack]:
    """Start two P (with and without a prefix cache), one D, four routers and a store."""
    settings, facts = _vllm(model_dir()) if engine == "vllm" else _simulated()
    main, bare, decode = (f"127.0.0.1:{port}" for port in free_ports(3))
    tokens = str(_tokens_file(folder))
    link = {"decode_endpoints": decode, "tokens_file": tokens, "info_interval_s": 0.2, **PATIENT}
    plan = FleetPlan(
        prefill=(
            {"listen": main, "enable_prefix_caching": True, "begin_read_timeout_s": 5.0},
            {"listen": bare, "enable_prefix_caching": False, "begin_read_timeout_s": 5.0},
        ),
        decode=({"listen": decode, "enable_prefix_caching": True, "soft_hints": True},),
        routers=(
            {**link, "prefill_endpoints": main},
            {**link, "prefill_endpoints": bare},
            {**link, "prefill_endpoints": main},
            {**link, "prefill_endpoints": bare, "direct": True},
        ),
        workers={**settings, "kv_recompute_threshold": THRESHOLD, "test_hooks": True, **PATIENT},
    )
    async with Fleet(plan, folder / "parts") as fleet:
        ends = {name: Endpoint(fleet.endpoint(name)) for name in fleet.parts if name != "store"}
        stack = Stack(
            routers={
                name: ends[f"router-{number}"]
                for number, name in enumerate(("main", "bare", "twin", "direct"))
            },
            prefills={"p1": ends["prefill-0"], "p2": ends["prefill-1"]},
            decodes={"d1": ends["decode-0"]},
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
