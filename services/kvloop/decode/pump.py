"""From the engine to a reader, at two speeds.

The engine is drained as fast as it generates; what the reader has not taken yet is merged into one chunk.
A reader that stalls costs the memory of one answer and holds nothing up.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator

from kvloop.engine.port import DecodeDelta, Finish
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import turn_pb2


class Pump:
    """One answer in flight."""

    def __init__(self, deltas: AsyncIterator[DecodeDelta]) -> None:
        self._deltas = deltas
        self._answer = array("L")
        self._sent = 0
        self._text: list[str] = []
        self._logprobs: list[turn_pb2.PositionLogprobs] = []
        self._news = asyncio.Event()
        self._finish: Finish | None = None
        self._closed = False
        self._error: Exception | None = None

    @property
    def output_tokens(self) -> int:
        """Return how many tokens the answer has so far."""
        return len(self._answer)

    def answer(self) -> bytes:
        """Return the answer's tokens so far, packed."""
        return pack(self._answer)

    async def drain(self) -> Finish:
        """Take everything the engine gives; raises what the engine raises."""
        finish: Finish | None = None
        async for delta in self._deltas:
            self._answer.extend(delta.token_ids)
            if delta.text:
                self._text.append(delta.text)
            self._logprobs.extend(delta.logprobs)
            if delta.finish is not None:
                self._finish = finish = delta.finish
            self._news.set()
        if finish is None:
            raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the engine ended the answer without a reason")
        return finish

    async def abandon(self) -> None:
        """Cancel the answer if it still generates."""
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()

    def close(self, error: Exception | None = None) -> None:
        """Say that nothing follows, or what went wrong."""
        self._error = error
        self._closed = True
        self._news.set()

    async def chunks(self) -> AsyncIterator[turn_pb2.Chunk]:
        """Yield what is new, merged since the last time, until closed; then raise the error, if any."""
        while True:
            await self._news.wait()
            self._news.clear()
            chunk = self._take()
            if chunk is not None:
                yield chunk
            # News may have come while the reader was busy; they are taken before the end is told.
            elif self._closed:
                if self._error is not None:
                    raise self._error
                return
            if self._closed:
                self._news.set()

    def _take(self) -> turn_pb2.Chunk | None:
        if self._sent == len(self._answer) and not self._text and not self._logprobs:
            return None
        chunk = turn_pb2.Chunk(
            token_ids=pack(self._answer[self._sent :]), text="".join(self._text), logprobs=self._logprobs
        )
        if self._finish is not None:
            # Whoever has the last tokens knows that they are the last, also should the summary never come.
            chunk.finish_reason = self._finish.reason
            if self._finish.stop_reason is not None:
                chunk.stop_reason = self._finish.stop_reason
        self._sent = len(self._answer)
        self._text.clear()
        self._logprobs.clear()
        return chunk
