"""The least that a router in grpc.aio can do: two calls per turn, bytes handed on, nothing looked at.

    python -m kvloop.bench.router_passthrough PREFILL DECODE READY_FILE

What a router of ours costs is compared with this. It decides nothing and checks nothing; the client tells it
what belongs to which leg.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from kvloop.bench.router_traffic import DECODE, PASS, PREFILL, TIMEOUT_S, as_handle
from kvloop.runtime.channels import SERVER_OPTIONS, open_channel


async def serve(prefill_endpoint: str, decode_endpoint: str, ready: Path) -> None:
    """Serve until SIGTERM."""
    prefill: Any = open_channel(prefill_endpoint).unary_unary(PREFILL)
    decode: Any = open_channel(decode_endpoint).unary_stream(DECODE)

    async def generate(request: bytes, _: Any) -> AsyncIterator[bytes]:
        size = 4 + int.from_bytes(request[:4], "little")
        tail, shared = request[4:size], request[size:]
        prefilled = await prefill(shared + tail, timeout=TIMEOUT_S, wait_for_ready=True)
        async for raw in decode(shared + as_handle(prefilled), timeout=TIMEOUT_S, wait_for_ready=True):
            yield raw

    service, _, method = PASS.removeprefix("/").partition("/")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: dict[str, Any] = {method: grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # Written aside and moved: whoever sees the file sees all of it.
    aside = ready.with_suffix(".new")
    aside.write_text(json.dumps({"endpoint": f"127.0.0.1:{port}"}))
    aside.replace(ready)
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
