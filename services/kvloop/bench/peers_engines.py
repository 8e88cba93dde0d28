"""What stands for vLLM behind peers: a prefill and a decode server that speak as `vllm serve` with NIXL does.

    python -m kvloop.bench.peers_engines READY_FILE STEP_MS

P answers a prompt with a handle (`kv_transfer_params`); D wants one, streams an answer, a chunk each STEP_MS
or all at once for 0, and gives its own handle with the last chunk, as vLLM from 0.33 on does. A handle of D's
that comes back to P counts as a read. Both are as cheap as they can be: what is between is measured.
"""

import asyncio
import contextlib
import json
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h11
import uvloop

_JSON = [("content-type", "application/json")]
_EVENTS = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
_DONE = b"data: [DONE]\n\n"
_READ_BYTES = 1 << 20
_BLOCK_SIZE = 32
_ENGINES = {role: f"{role}-{secrets.token_hex(8)}" for role in ("prefill", "decode")}
COUNTS = "/counts"


class Refused(Exception):
    """A request that no vLLM would take; the text says why."""


def handle(role: str, num_tokens: int) -> dict[str, Any]:
    """Return a handle as NIXL's connector gives it: what the other side needs to read the blocks."""
    return {
        "do_remote_prefill": role == "prefill",
        "do_remote_decode": role == "decode",
        "remote_block_ids": [list(range(-(-num_tokens // _BLOCK_SIZE)))],
        "remote_engine_id": _ENGINES[role],
        "remote_request_id": f"cmpl-{secrets.token_hex(8)}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": num_tokens,
    }


def read_of(role: str, body: Mapping[str, Any]) -> bool:
    """Tell whether a request has P or D read from the other. Raises Refused for what can't be meant.

    A first turn at P names nothing to read; D always reads what P has computed.
    """
    given = body.get("kv_transfer_params") or {}
    reads = given.get("remote_engine_id") is not None
    if role == "decode" and not (reads and given.get("do_remote_prefill")):
        raise Refused("D was given no handle of P's")
    if role == "prefill" and not given.get("do_remote_decode"):
        raise Refused("P was not told that D goes on")
    source = "prefill" if role == "decode" else "decode"
    if reads and given["remote_engine_id"] != _ENGINES[source]:
        raise Refused("a handle of nobody's")
    return reads


def answer_of(prompt_tokens: int) -> bytes:
    """Return P's answer to a prompt."""
    choice = {"index": 0, "text": "a", "finish_reason": "length", "token_ids": [7]}
    return json.dumps(
        {**_head(), "choices": [choice], "kv_transfer_params": handle("prefill", prompt_tokens)}
    ).encode()


def chunk(text: str, last: int | None = None) -> bytes:
    """Return one event of a streamed answer; the last one tells the length that D holds."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length" if last else None}
    event: dict[str, Any] = {**_head(), "choices": [choice]}
    if last:
        event["kv_transfer_params"] = handle("decode", last)
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _head() -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}


_CHUNK = chunk("word ")


class Server:
    """P's or D's door; every connection is served until it closes."""

    def __init__(self, role: str, pace: "Pace") -> None:
        self._role = role
        self._pace = pace
        self.counts: Counter[str] = Counter(turns=0, reads=0, refused=0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        if (connection := writer.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError):
            while await self._one(http, reader, writer):
                http.start_next_cycle()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _one(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; False when there is no further one."""
        asked = await _request(http, reader)
        if asked is None:
            return False
        method, body = asked

        def send(*events: h11.Event) -> None:
            writer.write(b"".join(http.send(event) or b"" for event in events))

        def whole(status: int, content: bytes) -> None:
            headers = [*_JSON, ("content-length", str(len(content)))]
            send(h11.Response(status_code=status, headers=headers), h11.Data(content), h11.EndOfMessage())

        if method != b"POST":
            # Health checks, and what was counted.
            whole(200, json.dumps(self.counts).encode())
        else:
            fields = json.loads(body)
            try:
                self.counts["reads"] += read_of(self._role, fields)
                self.counts["turns"] += 1
            except Refused as refused:
                self.counts["refused"] += 1
                whole(400, json.dumps({"error": {"message": str(refused), "code": 400}}).encode())
            else:
                await self._answer(fields, send, whole)
        await writer.drain()
        return http.our_state is h11.DONE and http.their_state is h11.DONE

    async def _answer(
        self, fields: Mapping[str, Any], send: Callable[..., None], whole: Callable[[int, bytes], None]
    ) -> None:
        prompt_tokens = len(fields["prompt"])
        if not fields.get("stream"):
            whole(200, answer_of(prompt_tokens))
            return
        send(h11.Response(status_code=200, headers=_EVENTS))
        # Each chunk is a write of its own, as vLLM's are.
        for _ in range(fields["max_tokens"] - 1):
            await self._pace.step()
            send(h11.Data(_CHUNK))
        await self._pace.step()
        send(h11.Data(chunk("word ", prompt_tokens + fields["max_tokens"] - 1)))
        send(h11.Data(_DONE), h11.EndOfMessage())


async def _request(http: h11.Connection, reader: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """Return a request's method and body; None when the connection ended."""
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
            return method, bytes(body)
        else:
            return None


class Pace:
    """Lets all streams go on at once, a step at a time, as an engine does."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ticks = asyncio.Event()

    async def keep(self) -> None:
        """Take steps for ever, if they take time."""
        while self._step_s:
            await asyncio.sleep(self._step_s)
            ticks, self._ticks = self._ticks, asyncio.Event()
            ticks.set()

    async def step(self) -> None:
        """Wait for the next step."""
        if self._step_s:
            await self._ticks.wait()


async def start(step_s: float) -> tuple[list[asyncio.Server], "asyncio.Task[None]"]:
    """Serve a P and a D on free ports; the task keeps their pace."""
    pace = Pace(step_s)
    servers = [
        await asyncio.start_server(Server(role, pace).serve, "127.0.0.1", 0, limit=_READ_BYTES)
        for role in ("prefill", "decode")
    ]
    return servers, asyncio.create_task(pace.keep())


async def serve(ready: Path, step_s: float) -> None:
    """Serve a P and a D until SIGTERM."""
    servers, pacing = await start(step_s)
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
    uvloop.run(serve(Path(sys.argv[1]), float(sys.argv[2]) / 1000))
