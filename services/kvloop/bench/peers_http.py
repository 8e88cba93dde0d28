"""Turns over /v1/completions for measuring what is between client and engines: through a peer, and past it.

A client of its own, with the least between the wire and the clock: bodies are made beforehand, answers are
taken as bytes. Past peers, a client calls P and D itself and carries their handles as a proxy would.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvloop.bench.router_traffic import TIMEOUT_S, Played, Talk, TurnLost
from kvloop.runtime.tokens import unpack

COMPLETIONS = "/v1/completions"
FIRST_TURN: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What P is told when there is nothing to read."""
_EVENT = b"data: "
_END = b"\r\n\r\n"
_LIMIT_BYTES = 4 * 1024 * 1024


def reading(handle: dict[str, Any] | None) -> dict[str, Any]:
    """Return what P is told of D's handle of the turn before."""
    if handle is None:
        return FIRST_TURN
    return {**handle, "do_remote_decode": True, "do_remote_prefill": False}


@dataclass(slots=True)
class Answer:
    """An answer as it came in."""

    parts: list[bytes] = field(default_factory=list)
    first_event_s: float = 0.0
    """When its first event came, on perf_counter; 0 without events."""

    def take(self, part: bytes) -> None:
        """Take a part in."""
        if not self.first_event_s and _EVENT in part:
            self.first_event_s = time.perf_counter()
        self.parts.append(part)

    @property
    def content(self) -> bytes:
        """Return all of it."""
        return b"".join(self.parts)


class _NothingCame(TurnLost):
    """A connection was closed before the first byte of an answer."""


class Line:
    """Connections to one server, each with one request at a time, kept for the next one."""

    def __init__(self, endpoint: str, timeout_s: float = TIMEOUT_S) -> None:
        host, _, port = endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._timeout_s = timeout_s
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send a request and read its answer to the end. Raises TurnLost, OSError.

        A server may close a connection that it has not heard of for a while, at any time: the request then
        goes out once more, on a new one.
        """
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        while self._free:
            reader, writer = self._free.pop()
            if reader.at_eof():
                await _close(writer)
                continue
            try:
                return await self._exchange(reader, writer, request)
            except _NothingCame:
                break
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=_LIMIT_BYTES)
        return await self._exchange(reader, writer, request)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> Answer:
        answer = Answer()
        whole = False
        try:
            writer.write(request)
            async with asyncio.timeout(self._timeout_s):
                status, length = await self._head(reader)
                if length is not None:
                    answer.take(await reader.readexactly(length))
                else:
                    while size := int(await reader.readline(), 16):
                        answer.take((await reader.readexactly(size + 2))[:-2])
                    await reader.readline()
            whole = True
        except (ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise TurnLost(f"{self._host}:{self._port}: {type(error).__name__}") from None
        finally:
            if whole:
                self._free.append((reader, writer))
            else:
                await _close(writer)
        if status != 200:
            raise TurnLost(f"{self._host}:{self._port} answered {status}")
        return answer

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, int | None]:
        """Return the status, and the length of an answer that is not chunked."""
        try:
            head = await reader.readuntil(_END)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                raise
            raise _NothingCame(f"{self._host}:{self._port} closed the connection") from None
        lines = head.lower().split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
        for line in lines[1:]:
            if line.startswith(b"content-length:"):
                return status, int(line.partition(b":")[2])
        return status, None

    async def close(self) -> None:
        """Close the connections."""
        while self._free:
            await _close(self._free.pop()[1])


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def body_of(talk: Talk, model: str, **more: Any) -> bytes:
    """Return the body of a streamed turn of exactly so many tokens."""
    fields = {
        "model": model,
        "max_tokens": talk.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        **more,
        "prompt": unpack(talk.prompt),
    }
    return json.dumps(fields).encode()


class ThroughHttp:
    """Implements Way: one server that speaks OpenAI's API."""

    def __init__(self, endpoint: str, model: str = "m", *, named: bool = True) -> None:
        """Prepare. named: whether bodies tell the conversation's name."""
        self._line = Line(endpoint)
        self._model = model
        self._named = named
        self._bodies: dict[str, bytes] = {}
        self._begun: set[str] = set()
        self.verdicts: Counter[str] = Counter()
        """Of turns after a conversation's first one, as a gateway of ours tells them."""

    async def play(self, talk: Talk) -> Played:
        """See Way."""
        body = self._bodies.get(talk.conversation_id)
        if body is None:
            more = {"conversation_id": talk.conversation_id} if self._named else {}
            body = self._bodies[talk.conversation_id] = body_of(talk, self._model, **more)
        begun = time.perf_counter()
        first_ms, chunks, last = await _streamed(self._line, body, talk, begun)
        if talk.conversation_id in self._begun and b'"kvloop"' in last:
            self.verdicts[str(json.loads(last)["kvloop"].get("verdict", "")).upper()] += 1
        self._begun.add(talk.conversation_id)
        return Played(first_ms, chunks)

    async def ready(self, path: str) -> bool:
        """Tell whether it answers."""
        try:
            await self._line.ask("GET", path)
        except (OSError, TurnLost):
            return False
        return True

    async def close(self) -> None:
        """See Way."""
        await self._line.close()


class PastHttp:
    """Implements Way: P and D called directly."""

    def __init__(self, prefill: str, decode: str, model: str = "m") -> None:
        self._prefill, self._decode = Line(prefill), Line(decode)
        self._model = model
        self._bodies: dict[str, tuple[bytes, bytes]] = {}
        self._handles: dict[str, dict[str, Any]] = {}

    async def play(self, talk: Talk) -> Played:
        """See Way."""
        name = talk.conversation_id
        if name not in self._bodies:
            short = body_of(Talk(talk.prompt, 1), self._model).replace(
                b'"stream": true', b'"stream": false', 1
            )
            self._bodies[name] = short, body_of(talk, self._model)
        short, whole = self._bodies[name]
        begun = time.perf_counter()
        told = reading(self._handles.pop(name, None))
        prefilled = json.loads(
            (await self._prefill.ask("POST", COMPLETIONS, with_handle(short, told))).content
        )
        body = with_handle(whole, prefilled["kv_transfer_params"])
        first_ms, chunks, last = await _streamed(self._decode, body, talk, begun)
        self._handles[name] = json.loads(last)["kv_transfer_params"]
        return Played(first_ms, chunks)

    async def close(self) -> None:
        """See Way."""
        await self._prefill.close()
        await self._decode.close()


def with_handle(body: bytes, handle: dict[str, Any]) -> bytes:
    """Return a body with a handle added, without making it anew."""
    return body[:-1] + b', "kv_transfer_params": ' + json.dumps(handle).encode() + b"}"


async def _streamed(line: Line, body: bytes, talk: Talk, begun: float) -> tuple[float, int, bytes]:
    """Return milliseconds to the first event, how many there were, and the last one's data."""
    answer = await line.ask("POST", COMPLETIONS, body)
    first = answer.first_event_s - begun
    events = [event.lstrip() for event in answer.content.split(b"\n\n")]
    events = [event for event in events if event.startswith(_EVENT)]
    if len(events) < 2 or not events[-1].endswith(b"[DONE]"):
        raise TurnLost(f"a stream ended early, after {len(events)} events")
    answers = [event for event in events[:-1] if b'"text"' in event]
    if not answers:
        raise TurnLost("a stream had no answer in it")
    return first * 1000, len(answers), events[-2].removeprefix(_EVENT)
