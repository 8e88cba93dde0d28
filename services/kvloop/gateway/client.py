"""The EngineClient that is no engine: every generate() is a turn of RouterService."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from kvloop.gateway import compat, exchange, problems
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.history import History
from kvloop.gateway.metrics import Metrics
from kvloop.gateway.outputs import Answer
from kvloop.gateway.router import Metadata
from kvloop.gateway.routers import Routers
from kvloop.gateway.sampling import check_prompt_logprobs, tell_reasoning, to_proto
from kvloop.gateway.segments import Rendering
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime import tokens, tracing
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2

_FORK_QUEUE = 16


class RouterEngineClient:
    """The methods of vLLM's EngineClient that matter; compat.make_client_class adds the others."""

    def __init__(
        self,
        base: compat.Base,
        routers: Routers,
        settings: GatewaySettings,
        history: History,
        metrics: Metrics,
    ) -> None:
        """Take the loaded model and the routers; neither is this object's to close."""
        self.vllm_config = base.vllm_config
        self.model_config = base.vllm_config.model_config
        self.renderer = base.renderer
        self.input_processor = base.input_processor
        self._routers = routers
        self._settings = settings
        self._history = history
        self._metrics = metrics
        self._draining = False

    # What the serving code asks about the engine.

    @property
    def is_running(self) -> bool:
        """Return True: there is nothing here that could stop running."""
        return True

    @property
    def is_stopped(self) -> bool:
        """Return False."""
        return False

    @property
    def errored(self) -> bool:
        """Return False: a router that is away fails turns, not the gateway."""
        return False

    @property
    def dead_error(self) -> BaseException:
        """Return the exception that stands for "can't serve"."""
        return compat.dead_error()

    def start_draining(self) -> None:
        """Fail health checks from now on."""
        self._draining = True

    async def check_health(self) -> None:
        """Return when turns can be served; raise vLLM's EngineDeadError otherwise."""
        if self._draining or not await self._routers.ready():
            raise compat.dead_error()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what vLLM's app should serve."""
        return compat.TASKS

    async def is_tracing_enabled(self) -> bool:
        """Return False."""
        return False

    async def do_log_stats(self) -> None:
        """Do nothing: there is no engine to tell about."""

    async def notify_kv_transfer_request_rejected(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: no client's transfer parameters get this far."""

    async def abort(self, request_id: Any) -> None:
        """Do nothing: a turn ends with its generator."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the app closes what it opened."""

    def encode(self, *_args: Any, **_kwargs: Any) -> AsyncGenerator[Any, None]:
        """Refuse: no pooling model is served."""
        raise NotImplementedError("pooling models are not served")

    # Turns.

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        **_unused: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's RequestOutputs of one prompt; n > 1 forks it into n turns.

        What vLLM knows of session, trace and rank is not asked: the door has taken them, or refused them.
        Failures are raised as vLLM's own exceptions, with the status that HTTP should have.
        """
        here = exchange.current() or Exchange()
        try:
            ids = compat.prompt_ids(prompt)
            rendered = here.rendering is not None and here.rendering.ids is ids
            compat.check_inputs(self, request_id, prompt, sampling_params, rendered=rendered)
            check_prompt_logprobs(sampling_params, len(ids), self.model_config)
            sampling = to_proto(sampling_params, room=self.model_config.max_model_len - len(ids))
            tell_reasoning(sampling, reasoning_ended, reasoning_parser_kwargs)
            turns = self._turns(
                here,
                prompt,
                sampling_params,
                sampling,
                request_id=request_id,
                adapter=lora_request.lora_name if lora_request is not None else "",
                priority=priority,
            )
            whole = not compat.wants_deltas(sampling_params)
            outputs = turns[0] if len(turns) == 1 else _merge(turns, whole=whole)
            async with aclosing(outputs):
                async for output in outputs:
                    here.answered = True
                    yield output
        except Failure as failure:
            problem = problems.from_failure(failure)
            here.problem = here.problem or problem
            here.failure = here.failure or failure
            self._metrics.failed(problem.reason)
            raise compat.http_error(problem) from None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            here.problem = here.problem or compat.problem_of(error)
            self._metrics.failed(None)
            raise

    def _turns(
        self,
        here: Exchange,
        prompt: Any,
        params: Any,
        sampling: sampling_pb2.SamplingParams,
        *,
        request_id: str,
        adapter: str,
        priority: int,
    ) -> list[AsyncGenerator[Any, None]]:
        ids = compat.prompt_ids(prompt)
        rendering = here.rendering
        if rendering is not None and rendering.ids is not ids:
            # Of another prompt, or tokenized in another way.
            rendering = None
        packed = rendering.packed() if rendering is not None else tokens.pack(ids)
        turns: list[AsyncGenerator[Any, None]] = []
        for index in range(params.n):
            message = router_service_pb2.GenerateRequest(
                request_id=here.request_id if here.turns == 0 else exchange.mint_request_id(),
                model=self._settings.model_name,
                adapter=adapter,
                prompt_token_ids=packed,
                sampling=sampling,
                cache_salt=prompt.get("cache_salt") or "",
                reuse_policy=here.reuse_policy,
            )
            if params.n > 1 and params.seed is not None:
                # As vLLM does for parallel samples.
                message.sampling.seed = params.seed + index
            if self._settings.client_priority:
                message.priority = priority if here.priority is None else here.priority
            self._name(message, here)
            here.turns += 1
            here.running += 1
            answer = Answer(request_id, ids, params, index)
            turns.append(self._turn(here, message, answer, rendering if params.n == 1 else None))
        return turns

    def _name(self, message: router_service_pb2.GenerateRequest, here: Exchange) -> None:
        """Give the turn its conversation.

        Only one turn at a time can continue a conversation. Others that run beside it (n > 1, several
        prompts) read what it holds and leave nothing behind.
        """
        own = here.identity
        # A client that names no conversation comes back all the same, and is known by its prompt's beginning.
        compared = message.reuse_policy == router_service_pb2.REUSE_POLICY_FORBID
        unnamed = self._settings.hold_unnamed and here.running == 0 and not compared
        held = bool(own.conversation_id) or unnamed
        if held:
            message.retention.hold = True
        message.retention.hold_on_cancel = held and self._settings.hold_on_cancel
        if here.retention is not None and held:
            message.retention.MergeFrom(here.retention)
        if not own.conversation_id:
            return
        if here.running == 0:
            message.conversation_id = own.conversation_id
            message.parent_conversation_id = own.parent_conversation_id
            return
        message.conversation_id = f"fork-{uuid.uuid4().hex}"
        message.parent_conversation_id = own.conversation_id
        message.retention.hold = message.retention.hold_on_cancel = False

    async def _turn(
        self,
        here: Exchange,
        message: router_service_pb2.GenerateRequest,
        answer: Answer,
        rendering: Rendering | None,
    ) -> AsyncGenerator[Any, None]:
        metadata: Metadata = tracing.outgoing() or here.trace
        if here.authorization:
            metadata = (*metadata, ("authorization", here.authorization))
        stream = self._routers.generate(message, timeout_s=here.time_left_s(), metadata=metadata)
        try:
            async for response in stream:
                if response.HasField("chunk"):
                    output = answer.add(response.chunk)
                    if output is not None:
                        yield output
                elif response.HasField("summary"):
                    self._ended(here, response.summary, answer, rendering)
                    yield answer.end(response.summary)
        finally:
            here.running -= 1
            await stream.aclose()

    def _ended(
        self, here: Exchange, summary: turn_pb2.Summary, answer: Answer, rendering: Rendering | None
    ) -> None:
        here.summaries.append(summary)
        self._metrics.ended(here, summary)
        self._history.accept(here.tenant)
        if rendering is not None:
            self._history.remember(
                here.tenant, rendering, answer.ids, answer.text, summary, hides=answer.hides
            )


async def _merge(turns: list[AsyncGenerator[Any, None]], *, whole: bool) -> AsyncGenerator[Any, None]:
    """Yield outputs of several turns as they come, or one output of all of them at the end.

    One that fails ends all.
    """
    queue: asyncio.Queue[tuple[Any, Exception | None]] = asyncio.Queue(_FORK_QUEUE)

    async def drain(turn: AsyncGenerator[Any, None]) -> None:
        try:
            async for output in turn:
                await queue.put((output, None))
            await queue.put((None, None))
        except Exception as error:  # noqa: BLE001 - handed to whoever reads the queue
            await queue.put((None, error))
        finally:
            await turn.aclose()

    tasks = [asyncio.create_task(drain(turn)) for turn in turns]
    left = len(tasks)
    kept: list[Any] = []
    try:
        while left:
            output, error = await queue.get()
            if error is not None:
                raise error
            if output is None:
                left -= 1
            elif whole:
                kept.append(output)
            else:
                yield output
        if kept:
            kept[0].outputs = sorted((one.outputs[0] for one in kept), key=lambda one: one.index)
            yield kept[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
