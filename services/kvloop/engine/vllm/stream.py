"""One request on AsyncLLM, with vLLM's errors turned into failures.

AsyncLLM.generate aborts by itself when its consumer is cancelled; here the consumer aborts, because the
connector must hear first that the abort is the client's wish.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from kvloop.engine.vllm import priming, sampling
from kvloop.engine.vllm.holds import gone
from kvloop.runtime.errors import Failure, Reason


class Stream:
    """A submitted request; yields vLLM's RequestOutputs up to the finished one."""

    def __init__(self, llm: Any, queue: Any) -> None:
        self._llm = llm
        self._queue = queue
        self.finished = False

    @classmethod
    async def submit(
        cls,
        llm: Any,
        *,
        prompt: Any,
        params: Any,
        request_id: str,
        priority: int,
        lora: Any,
        before_abort: Callable[[], Awaitable[None]],
        reasoning: Mapping[str, Any],
    ) -> Self:
        """Submit a request; reasoning: as grammar.reasoning tells it.

        Raises Failure INVALID_FIELD for what vLLM refuses before it reaches the core, WORKER_FAILED when
        the engine is dead. Cancelled, the request is aborted after before_abort.
        """
        adding = asyncio.ensure_future(
            llm.add_request(request_id, prompt, params, lora_request=lora, priority=priority, **reasoning)
        )
        try:
            return cls(llm, await asyncio.shield(adding))
        except asyncio.CancelledError:
            await asyncio.wait([adding])
            if not adding.cancelled() and adding.exception() is None:
                await cls(llm, adding.result()).abort(before_abort)
            raise
        except EngineDeadError:
            raise gone() from None
        except sampling.REFUSALS as error:
            raise sampling.blame(error) from None

    def prime(self, prompt: Sequence[int]) -> None:
        """Tell the answer's text from the prompt's end. For right after submit."""
        state = self._llm.output_processor.request_states.get(self._queue.request_id)
        if state is not None:
            priming.shorten(state.detokenizer, prompt)

    async def next(self) -> Any:
        """Return the next output. Raises Failure WORKER_FAILED when the engine has died."""
        try:
            output = self._queue.get_nowait() or await self._queue.get()
        except EngineDeadError:
            self.finished = True
            raise gone() from None
        except EngineGenerateError:
            self.finished = True
            raise Failure(Reason.ERROR_REASON_INTERNAL, "the engine failed on this request") from None
        self.finished = output.finished
        return output

    async def abort(self, before: Callable[[], Awaitable[None]]) -> None:
        """End the request in the engine, unless it has ended."""
        if self.finished:
            return
        self.finished = True
        await before()
        try:
            await self._llm.abort(self._queue.request_id, internal=True)
        except EngineDeadError:
            return
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the output queue."""
        close = getattr(self._queue, "close", None)
        if close is not None:
            close()
