"""Starts engines with the plugin and drives them. Engines run a tiny random model, so that any wrong KV
changes tokens; KVLOOP_TEST_MODEL names another checkpoint."""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvloop.connector.control import ControlClient
from kvloop.runtime.ports import free_port

BLOCK = 32
VOCAB = 512
_numbers = itertools.count()


def write_model(folder: Path) -> Path:
    """Write a seeded Llama of four small layers whose weights are large enough for chaotic answers."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    hidden, inner, layers, heads, kv_heads, size = 128, 256, 4, 4, 2, 32
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden) * 8,
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    weights["model.norm.weight"] = torch.ones(hidden)
    for n in range(layers):
        name = f"model.layers.{n}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": matrix(heads * size, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads * size, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads * size, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, heads * size),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(folder)
    return folder


def fresh_prompt(length: int, seed: int | None = None) -> list[int]:
    """Return token ids that no other prompt begins with."""
    source = random.Random(seed if seed is not None else next(_numbers) + 1000)
    return [source.randrange(3, VOCAB) for _ in range(length)]


def new_id(kind: str = "turn") -> str:
    return f"{kind}-{next(_numbers)}"


class EngineProcess:
    """An engine in its own process; its control socket is `control`, after `ready`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        model: Path,
        role: str,
        *,
        blocks: int = 512,
        caching: bool = True,
        **extra: object,
    ) -> None:
        self.name = name
        self.socket = folder / f"{name}.sock"
        self.control_path = folder / f"{name}.control"
        self.log = folder / f"{name}.log"
        settings = {
            "socket": str(self.socket),
            "parent": os.getpid(),
            "engine": {
                "model": str(model),
                "dtype": "float32",
                "enforce_eager": True,
                "block_size": BLOCK,
                "max_model_len": 2048,
                "max_num_batched_tokens": 2048,
                "max_num_seqs": 8,
                "num_gpu_blocks_override": blocks + 1,
                "kv_cache_memory_bytes": 256 << 20,
                "seed": 0,
                "enable_prefix_caching": caching,
                "disable_log_stats": True,
            },
            "transfer": {
                "kv_connector": "KvloopConnector",
                "kv_connector_module_path": "kvloop.connector.connector",
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {
                    "bidirectional_kv_xfer": True,
                    "num_threads": 1,
                    "kvloop_control_path": str(self.control_path),
                    "kvloop_test_hooks": True,
                    "kvloop_allow_untested": bool(os.environ.get("KVLOOP_ALLOW_UNTESTED")),
                    "kvloop_start_margin_s": 0.5,
                    **extra,
                },
            },
        }
        env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine core
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        script = Path(__file__).with_name("connector_engine.py")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(settings)],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def ready(self) -> "Engine":
        """Connect once the engine serves; one connection per test, since each has its own event loop."""
        give_up = time.monotonic() + 300
        while not self.socket.exists():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < give_up, self.log.read_text()[-4000:]
            await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_unix_connection(str(self.socket), limit=1 << 26)
        return Engine(self, reader, writer, await ControlClient.connect(self.control_path))

    @property
    def core_pid(self) -> int:
        """The engine core: the child that runs vLLM's loop."""
        import psutil

        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(
            c.pid for c in children if "EngineCore" in " ".join(c.cmdline()) or "EngineCore" in c.name()
        )

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Engine:
    """One test's connection to an engine."""

    def __init__(
        self,
        process: EngineProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        control: ControlClient,
    ) -> None:
        self.process = process
        self.control = control
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.create_task(self._receive())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        await self._writer.wait_closed()
        await self.control.close()

    async def _receive(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            self._waiting.pop(message["id"]).set_result(message["result"])

    async def call(self, op: str, **arguments: object) -> Any:
        number = next(_numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n")
        return await future

    async def generate(
        self, prompt: list[int], max_tokens: int, params: object = None, **more: object
    ) -> Any:
        request_id = more.pop("request_id", None) or new_id("request")
        return await self.call(
            "generate", prompt=prompt, max_tokens=max_tokens, params=params, request_id=request_id, **more
        )

    async def prefill(
        self, prompt: list[int], read: dict[str, Any] | None = None, ttl_s: float = 30.0, **more: object
    ) -> Any:
        """Run a prefill leg; its handle is result["params"]."""
        turn_id = str(more.pop("turn_id", None) or new_id("prefill"))
        turn = {"id": turn_id, "kind": "prefill", "hold": {"ttl_s": ttl_s, "on_cancel": False, "tenant": "t"}}
        params = {"do_remote_decode": True, "do_remote_prefill": False, **(read or {}), "kvloop_turn": turn}
        return await self.generate(prompt, 1, params, **more)

    async def decode(
        self,
        prompt: list[int],
        max_tokens: int,
        handle: dict[str, Any] | None = None,
        *,
        lease: str | None = None,
        ttl_s: float = 60.0,
        on_cancel: bool = False,
        tenant: str = "t",
        **more: object,
    ) -> Any:
        """Run a decode leg, DIRECT without a handle; with a lease it is held."""
        hold = {"ttl_s": ttl_s, "on_cancel": on_cancel, "tenant": tenant} if lease else None
        given = {k: v for k, v in (handle or {}).items() if k != "kvloop_report"}
        params = {"do_remote_decode": False, "do_remote_prefill": False, **given}
        params["kvloop_turn"] = {"id": lease or new_id("attempt"), "kind": "decode", "hold": hold}
        return await self.generate(prompt, max_tokens, params, **more)

    async def free(self) -> int:
        return (await self.control.pool())["free"]
