"""The way of an answer from the decode leg to the client.

The decode leg is drained as fast as it comes, whatever the client does: D publishes the lease at the end of
its stream, so a client that reads slowly must not hold it up. What piles up meanwhile is merged into one
chunk, and is never more than the answer itself.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvloop.v1alpha1 import router_service_pb2

MERGED_BYTES = 1024 * 1024
"""A merged chunk's most: gRPC clients receive 4 MiB unless told otherwise."""

Offer = Callable[[bytes], bool]
"""Sends a serialized message and returns True, or returns False and has not sent it."""


class Relay:
    """One answer under way. One writer, one reader."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._last: bytes | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Of the reader, while it has nothing to do."""
        self._offer: Offer | None = None

    @property
    def ended(self) -> bool:
        """Tell whether the answer is complete or has failed."""
        return self._last is not None or self._error is not None

    def put(self, chunk: bytes) -> None:
        """Add a serialized GenerateResponse with a chunk."""
        if self._offer is None or self._chunks or not self._offer(chunk):
            self._chunks.append(chunk)
            self._stir()

    def finish(self, summary: bytes) -> None:
        """End the answer with a serialized GenerateResponse that holds the summary."""
        if not self.ended:
            self._last = summary
            self._stir()

    def fail(self, error: Exception) -> None:
        """End the answer with a failure; chunks that came before it still go out."""
        if not self.ended:
            self._error = error
            self._stir()

    async def pour(self, write: Callable[[bytes], Awaitable[None]], offer: Offer | None = None) -> None:
        """Write serialized GenerateResponses up to the summary; raise what the answer failed of.

        offer: takes a chunk at once where there is room for it, which spares a step of the reader.
        """
        self._offer = offer
        try:
            while True:
                if self._chunks:
                    waiting = self._take()
                    await write(waiting[0] if len(waiting) == 1 else merge(waiting))
                elif self._error is not None:
                    raise self._error
                elif self._last is not None:
                    return await write(self._last)
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self._offer = None

    def _take(self) -> list[bytes]:
        """Return what goes out as one chunk, no larger than clients receive."""
        count = size = 0
        while count < len(self._chunks) and (not count or size + len(self._chunks[count]) <= MERGED_BYTES):
            size += len(self._chunks[count])
            count += 1
        taken, self._chunks = self._chunks[:count], self._chunks[count:]
        return taken

    def _stir(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def merge(chunks: list[bytes]) -> bytes:
    """Return one serialized chunk with the tokens, texts and logprobs of several, in order."""
    parsed = [router_service_pb2.GenerateResponse.FromString(raw).chunk for raw in chunks]
    merged = router_service_pb2.GenerateResponse()
    merged.chunk.token_ids = b"".join(chunk.token_ids for chunk in parsed)
    merged.chunk.text = "".join(chunk.text for chunk in parsed)
    for chunk in parsed:
        merged.chunk.logprobs.extend(chunk.logprobs)
    # How an answer ended is told by its last chunk.
    if parsed[-1].finish_reason:
        merged.chunk.finish_reason = parsed[-1].finish_reason
    if parsed[-1].HasField("stop_reason"):
        merged.chunk.stop_reason = parsed[-1].stop_reason
    return merged.SerializeToString()
