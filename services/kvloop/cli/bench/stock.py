"""A P and a D of stock vLLM, for as long as a measurement needs them: CPU engines of one host."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from kvloop.bench.stock import StockTarget
from kvloop.cli.supervisor.part import Command, Part, PartFailed
from kvloop.engine.settings import EngineSettings, Role, resolve
from kvloop.engine.vllm import env

TURN_TIMEOUT_S = 30.0
"""Of a leg. One that waits so long waits for blocks that stock vLLM holds for minutes."""
_START_S = 300.0
_POLL_S = 0.2
_MODEL = "stock"


def can_run(engine: Mapping[str, Any]) -> bool:
    """Tell whether engines of these settings have stock counterparts here: vLLM on CPUs."""
    settings = EngineSettings(**engine)
    return settings.engine == "vllm" and resolve(settings).device == "cpu"


@asynccontextmanager
async def open_stock(engine: Mapping[str, Any], blocks: int, folder: Path) -> AsyncIterator[StockTarget]:
    """Start P and D and yield them as a target; end them. Raises PartFailed.

    engine: settings as every worker has them. blocks: D's pool.
    """
    settings = resolve(EngineSettings(**engine))
    async with AsyncExitStack() as stack:
        urls = await asyncio.gather(
            stack.enter_async_context(_engine(settings, "prefill", None, folder)),
            stack.enter_async_context(_engine(settings, "decode", blocks, folder)),
        )
        target = StockTarget(*urls, _MODEL, timeout_s=TURN_TIMEOUT_S)
        stack.push_async_callback(target.close)
        yield target


@asynccontextmanager
async def _engine(
    settings: EngineSettings, role: Role, blocks: int | None, folder: Path
) -> AsyncIterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    part = Part(f"stock-{role}", folder)
    try:
        await part.spawn(
            Command([sys.executable, *arguments(settings, role, port, blocks)], _environment(settings))
        )
        url = f"http://127.0.0.1:{port}"
        await _wait_healthy(part, url)
        yield url
    finally:
        await part.stop()


def arguments(settings: EngineSettings, role: Role, port: int, blocks: int | None) -> list[str]:
    """Return what Python is given to become a stock engine with resolved settings."""
    values = {
        "host": "127.0.0.1",
        "port": port,
        "model": settings.model_path,
        "served-model-name": _MODEL,
        "dtype": settings.dtype,
        "seed": settings.seed or 0,
        "max-model-len": settings.max_model_len,
        "block-size": settings.block_size,
        "max-num-seqs": settings.max_num_seqs,
        "max-num-batched-tokens": settings.max_num_batched_tokens,
        "kv-cache-memory-bytes": settings.kv_cache_memory_bytes,
        "num-gpu-blocks-override": blocks,
        "kv-transfer-config": json.dumps(_transfer(settings, role)),
    }
    flags = [
        "--enforce-eager",
        "--disable-log-stats",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    if role == "prefill":
        flags.append("--no-enable-prefix-caching")
    given = [
        word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))
    ]
    return ["-m", "vllm.entrypoints.openai.api_server", *given, *flags]


def _transfer(settings: EngineSettings, role: Role) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": settings.kv_recompute_threshold,
            "decoder_kv_blocks_ttl": round(settings.decoder_kv_blocks_ttl),
            "backends": settings.backends,
            "num_threads": 1,
        },
    }


def _environment(settings: EngineSettings) -> dict[str, str]:
    own = env.environment(settings, env.side_channel_port(settings))
    made = {**env.defaults(settings), **os.environ, **own}
    # Whole GiB, and above the bytes asked for.
    made.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return made


async def _wait_healthy(part: Part, url: str) -> None:
    async with httpx.AsyncClient() as client:
        give_up = asyncio.get_running_loop().time() + _START_S
        while asyncio.get_running_loop().time() < give_up:
            if not part.running:
                raise part.failure()
            try:
                if (await client.get(f"{url}/health")).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(_POLL_S)
    raise PartFailed(part.name, f"was not ready within {_START_S:.0f} s", part.log_tail())
