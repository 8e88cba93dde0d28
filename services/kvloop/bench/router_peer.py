"""vllm-router, measured beside ours: its way of a turn, and what stands for vLLM behind it.

    python -m kvloop.bench.router_peer READY_FILE

serves /v1/completions on two ports, as a prefill server and as a decode server that streams an answer at the
pace of the paced simulated engines. Both are as cheap as they can be: only the router between is measured.
"""

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from pathlib import Path

import h11
import httpx
import uvloop

from kvloop.bench.router_traffic import TIMEOUT_S, Played, Talk, TurnLost
from kvloop.engine.simulated.cost import PRESETS
from kvloop.runtime.tokens import unpack

STEP_S = PRESETS["paced"].decode_base_s
_JSON = [("content-type", "application/json")]
_EVENTS = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
_CHUNK = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":"word ","logprobs":null,"finish_reason":null}]}\n\n'
)
_PREFILLED = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "e",
            "remote_block_ids": [1],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        },
    }
).encode()
_DONE = b"data: [DONE]\n\n"
_READ_BYTES = 1 << 20


class ThroughVllmRouter:
    """Implements Way over /v1/completions with token ids."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
        self._bodies: dict[str, bytes] = {}

    async def play(self, talk: Talk) -> Played:
        """See Way."""
        body = self._bodies.get(talk.conversation_id)
        if body is None:
            fields = {"model": "m", "max_tokens": talk.output_tokens, "stream": True}
            whole = json.dumps({**fields, "prompt": unpack(talk.prompt)})
            body = self._bodies[talk.conversation_id] = whole.encode()
        begun = time.perf_counter()
        first, events = 0.0, 0
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/v1/completions", content=body, headers=headers) as answer:
            if answer.status_code != httpx.codes.OK:
                raise TurnLost(f"vllm-router answered {answer.status_code}")
            async for piece in answer.aiter_raw():
                first = first or time.perf_counter() - begun
                events += piece.count(b"data: ")
        if events != talk.output_tokens + 1:
            raise TurnLost(f"vllm-router gave {events} events instead of {talk.output_tokens + 1}")
        return Played(first * 1000, events - 1)

    async def ready(self) -> bool:
        """Tell whether it answers."""
        try:
            return (await self._client.get("/health")).is_success
        except httpx.TransportError:
            return False

    async def close(self) -> None:
        """See Way."""
        await self._client.aclose()


class _Worker:
    """One HTTP server; every connection is served until it closes."""

    def __init__(self) -> None:
        self._ticks = asyncio.Event()

    async def keep_pace(self) -> None:
        """Let all streams go on at once, a step at a time, as an engine does."""
        while True:
            await asyncio.sleep(STEP_S)
            ticks, self._ticks = self._ticks, asyncio.Event()
            ticks.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        if (connection := writer.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError):
            while await self._one(http, reader, writer):
                http.start_next_cycle()
        writer.close()

    async def _one(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        body = bytearray()
        method = b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Request):
                method = event.method
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return False

        def send(*events: h11.Event) -> None:
            writer.write(b"".join(http.send(event) or b"" for event in events))

        fields = json.loads(body) if method == b"POST" else {}
        if not fields.get("stream"):
            headers = [*_JSON, ("content-length", str(len(_PREFILLED)))]
            send(h11.Response(status_code=200, headers=headers), h11.Data(_PREFILLED), h11.EndOfMessage())
        else:
            send(h11.Response(status_code=200, headers=_EVENTS))
            for _ in range(fields["max_tokens"]):
                await self._ticks.wait()
                send(h11.Data(_CHUNK))
            send(h11.Data(_DONE), h11.EndOfMessage())
        await writer.drain()
        return http.our_state is h11.DONE and http.their_state is h11.DONE


async def serve(ready: Path) -> None:
    """Serve a P and a D until SIGTERM."""
    worker = _Worker()
    pacing = asyncio.create_task(worker.keep_pace())
    servers = [await asyncio.start_server(worker.serve, "127.0.0.1", 0, limit=_READ_BYTES) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    aside = ready.with_suffix(".new")
    aside.write_text(json.dumps({"endpoint": f"127.0.0.1:{ports[1]}", "prefill": f"127.0.0.1:{ports[0]}"}))
    aside.replace(ready)
    await stop.wait()
    pacing.cancel()
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
