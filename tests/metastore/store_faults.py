"""A server that answers what it is told, and a sleep that is counted: faults on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pauses:
    """Counts the pauses between probes and keeps them short."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0.01)


class Canned:
    """A server that answers every command in the same way."""

    def __init__(self) -> None:
        self.port = 0
        self.answer: bytes | None = b"+PONG\r\n"
        """None: silence."""
        self.hang_up = False
        self.commands = 0
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def close(self) -> None:
        self.drop()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while head := await reader.readline():
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    await reader.readexactly(size + 2)
                self.commands += 1
                if self.answer is not None:
                    writer.write(self.answer)
                    await writer.drain()
                if self.hang_up:
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def drop(self) -> None:
        """Close every connection."""
        for writer in tuple(self._writers):
            writer.close()


@asynccontextmanager
async def canned() -> AsyncIterator[Canned]:
    server = Canned()
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await server.close()
        await listener.wait_closed()
