"""One AsyncLLM engine with the plugin in one process, driven by JSON lines over a unix socket.

Run as a script: connector_engine.py '<json settings>' (see connector_harness.settings).
"""

import asyncio
import json
import os
import sys
from typing import Any

from kvloop.connector.process import die_with
from kvloop.engine.vllm.stats import Counters


async def main(settings: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = settings["transfer"] and KVTransferConfig(**settings["transfer"])
    counters = Counters()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(kv_transfer_config=transfer, **settings["engine"]),
        stat_loggers=[counters.factory()],
    )
    stop = asyncio.Event()

    async def answer(line: bytes, writer: asyncio.StreamWriter) -> None:
        message = json.loads(line)
        try:
            if message["op"] == "generate":
                result = await generate(engine, message)
            elif message["op"] == "reset":
                result = await engine.reset_prefix_cache()
            elif message["op"] == "abort":
                result = await engine.abort(message["request_id"])
            elif message["op"] == "preemptions":
                result = counters.snapshot().preemptions
            else:
                result = None
                stop.set()
        except Exception as error:  # noqa: BLE001 - passed on to the test
            result = {"raised": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps({"id": message["id"], "result": result}).encode() + b"\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks = set()
        while line := await reader.readline():
            tasks.add(asyncio.create_task(answer(line, writer)))

    server = await asyncio.start_unix_server(serve, settings["socket"], limit=1 << 26)
    await stop.wait()
    server.close()
    engine.shutdown()


async def generate(engine: Any, message: dict[str, Any]) -> dict[str, Any]:
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

    repetition = message.get("repetition")
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=message["max_tokens"],
        stop=message.get("stop"),
        stop_token_ids=message.get("stop_token_ids"),
        ignore_eos=message.get("ignore_eos", True),
        min_tokens=message.get("min_tokens", 0),
        logit_bias={int(k): v for k, v in message["logit_bias"].items()}
        if message.get("logit_bias")
        else None,
        repetition_detection=RepetitionDetectionParams(**repetition) if repetition else None,
        detokenize=bool(message.get("stop")),
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": message["params"]} if message.get("params") is not None else None,
    )
    prompt = TokensPrompt(prompt_token_ids=message["prompt"])
    if message.get("salt"):
        prompt["cache_salt"] = message["salt"]
    tokens: list[int] = []
    text, finish, params, cached = "", None, None, None
    outputs = engine.generate(prompt, sampling, message["request_id"])
    async for output in outputs:
        if output.outputs:
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
            finish = output.outputs[0].finish_reason or finish
        params = output.kv_transfer_params or params
        cached = output.num_cached_tokens if output.num_cached_tokens is not None else cached
        if message.get("cancel_after") and len(tokens) >= message["cancel_after"] and finish is None:
            await engine.abort(message["request_id"])
            finish = "cancelled"
            break
    await outputs.aclose()
    return {"tokens": tokens, "text": text, "finish": finish, "params": params, "cached": cached}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    die_with(given["parent"])
    os.environ["KVLOOP_ENGINE_PARENT_PID"] = str(os.getpid())
    asyncio.run(main(given))
