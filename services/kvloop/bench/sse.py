"""Streamed chats over bare HTTP/1.1, with the least of a client of its own between the wire and the clock."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

PATH = "/v1/chat/completions"
_DATA = b"data: "
_LIMIT_BYTES = 4 * 1024 * 1024


class StreamFailed(Exception):
    """A chat failed; the text says how."""


@dataclass(slots=True)
class Streamed:
    """One answer."""

    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    """When each event with new tokens came, in seconds since just before the request was sent.

    A token that ends inside a character, or says nothing, has an event without text.
    """
    told: dict[str, Any] = field(default_factory=dict)
    """What the gateway says about the turn's reuse."""


class Connection:
    """One connection to a gateway, one chat at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    @classmethod
    async def open(cls, endpoint: str) -> Self:
        """Connect to host:port."""
        host, _, port = endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_LIMIT_BYTES)
        return cls(reader, writer, endpoint)

    async def close(self) -> None:
        """Close it."""
        self._writer.close()
        await self._writer.wait_closed()

    async def chat(self, body: Mapping[str, Any]) -> Streamed:
        """Send one chat and read its stream to the end. Raises StreamFailed."""
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
        answer = Streamed()
        begun = time.perf_counter()
        try:
            self._writer.write(request)
            await self._writer.drain()
            status = await self._head()
            rest = b""
            while size := int(await self._reader.readline(), 16):
                part = (await self._reader.readexactly(size + 2))[:-2]
                now = time.perf_counter() - begun
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    _take(answer, event, now)
            await self._reader.readline()
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise StreamFailed(f"{type(error).__name__}: {error}") from None
        if status != 200 or not answer.arrivals_s:
            raise StreamFailed(f"HTTP {status}, {len(answer.arrivals_s)} events")
        return answer

    async def _head(self) -> int:
        """Return the status; only chunked answers are read. Raises StreamFailed."""
        status = int((await self._reader.readline()).split(b" ")[1])
        chunked = False
        while (line := await self._reader.readline()) not in {b"\r\n", b""}:
            chunked = chunked or line.lower().startswith(b"transfer-encoding: chunked")
        if not chunked:
            raise StreamFailed(f"HTTP {status} without a stream")
        return status


def _take(answer: Streamed, event: bytes, now: float) -> None:
    if not event.startswith(_DATA) or event.endswith(b"[DONE]"):
        return
    content = json.loads(event[len(_DATA) :])
    if "error" in content:
        raise StreamFailed("an error in the stream")
    for choice in content.get("choices") or ():
        delta = choice["delta"]
        answer.text += delta.get("content") or ""
        # The first event only says who speaks, the last one only why it ended.
        if "role" not in delta and not choice.get("finish_reason"):
            answer.arrivals_s.append(now)
    answer.told = content.get("kvloop") or answer.told
