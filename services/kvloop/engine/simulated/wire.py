"""Reads between processes: a tiny server per engine, on loopback.

A request is a JSON line {"op", "engine_id", ...}; the answer is a JSON line and, for blocks, as many
bytes as it says. A server that no longer is the engine asked for hangs up: the epoch fence.
"""

import asyncio
import contextlib
import json
import struct
from typing import Any

from kvloop.engine.simulated.fabric import Dead, Hello, KvSource
from kvloop.engine.simulated.handle import Address
from kvloop.engine.simulated.kv import Kv

LINE_LIMIT = 16 * 1024 * 1024
_LENGTHS = struct.Struct("<4H")


def _encode(kvs: list[Kv]) -> bytes:
    parts = []
    for kv in kvs:
        parts.append(_LENGTHS.pack(*(len(part) for part in kv)))
        parts.extend(kv)
    return b"".join(parts)


def _decode(payload: bytes) -> list[Kv]:
    kvs = []
    at = 0
    while at < len(payload):
        lengths = _LENGTHS.unpack_from(payload, at)
        at += _LENGTHS.size
        parts = []
        for length in lengths:
            parts.append(payload[at : at + length])
            at += length
        kvs.append(Kv(*parts))
    return kvs


class BlockServer:
    """Serves one engine's blocks to other processes."""

    def __init__(self, engine_id: str, source: KvSource) -> None:
        self._engine_id = engine_id
        self._source = source
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=LINE_LIMIT)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def abort(self) -> None:
        """Hang up on everybody at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                answer = await self._answer(json.loads(line))
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (OSError, ValueError, Dead):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, call: dict[str, Any]) -> bytes | None:
        if call.get("engine_id") != self._engine_id:
            return None
        header: dict[str, Any] = {}
        payload = b""
        if call["op"] == "hello":
            hello = await self._source.hello()
            header = {"now": hello.now, "compatibility": hello.compatibility}
        elif call["op"] == "fetch":
            kvs = await self._source.fetch([int(block_id) for block_id in call["block_ids"]])
            if kvs is None:
                header = {"missing": True}
            else:
                payload = _encode(kvs)
                header = {"bytes": len(payload)}
        elif call["op"] == "done":
            await self._source.done(str(call["request_id"]))
        return json.dumps(header).encode() + b"\n" + payload


class TcpSource:
    """An engine of another process, over one connection."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._engine_id = address.engine_id
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: Address) -> "TcpSource":
        """Connect. Raises Dead."""
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=LINE_LIMIT)
        except OSError:
            raise Dead from None
        return cls(address, reader, writer)

    async def hello(self) -> Hello:
        """Shake hands."""
        header, _ = await self._call("hello")
        return Hello(float(header["now"]), str(header["compatibility"]))

    async def fetch(self, block_ids: list[int]) -> list[Kv] | None:
        """Return what is in the blocks now; None when one of them does not exist."""
        header, payload = await self._call("fetch", block_ids=block_ids)
        return None if header.get("missing") else _decode(payload)

    async def done(self, request_id: str) -> None:
        """Tell that a read is over."""
        await self._call("done", request_id=request_id)

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _call(self, op: str, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        try:
            call = {"op": op, "engine_id": self._engine_id, **arguments}
            self._writer.write(json.dumps(call).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
            if not line:
                raise Dead
            header = json.loads(line)
            return header, await self._reader.readexactly(int(header.get("bytes", 0)))
        except (OSError, EOFError, ValueError):
            raise Dead from None
