"""Frames on their way out, and the sizes that both ends agree on."""

import asyncio
from typing import Generic, TypeVar

from kvloop.runtime.channels import MAX_MESSAGE_BYTES

WINDOW_BYTES = 256 * 1024
"""Of one call's messages that were sent and not taken; one message more may always be on its way."""
BATCH_BYTES = 1024 * 1024
"""A message is not filled beyond this, so that large requests don't hold up everybody's small frames."""
PAYLOAD_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""Of one frame at most: one that does not fit would break the stream, and everybody's calls."""
MAX_CALLS = 4096
"""On one stream at a time."""

F = TypeVar("F")


class Outbox(Generic[F]):
    """What is ready goes out together; one taker."""

    def __init__(self) -> None:
        self._frames: list[F] = []
        self._sizes: list[int] = []
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, frame: F, size: int = 0) -> None:
        """Add a frame; size: its payload's, in bytes."""
        if not self._closed:
            self._frames.append(frame)
            self._sizes.append(size)
            self._ready.set()

    def close(self) -> None:
        """Say that nothing follows; what is there still goes out."""
        self._closed = True
        self._ready.set()

    async def take(self) -> list[F]:
        """Return what is there, up to a batch, waiting for something to be; nothing once closed."""
        await self._ready.wait()
        frames = self._frames
        if sum(self._sizes) <= BATCH_BYTES:
            self._frames, self._sizes = [], []
        else:
            total = count = 0
            while count < len(frames) and (not count or total + self._sizes[count] <= BATCH_BYTES):
                total += self._sizes[count]
                count += 1
            frames, self._frames, self._sizes = frames[:count], frames[count:], self._sizes[count:]
        if not self._frames and not self._closed:
            self._ready.clear()
        return frames
