"""The Engine port over vLLM's AsyncLLM, in this process; the engine core is vLLM's own child.

Requests go through AsyncLLM. Holds are the connector plugin's, reached through its control socket, which
never waits for an engine step.
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvloop.connector.control import ControlClient
from kvloop.engine import legs
from kvloop.engine.port import (
    DecodeDelta,
    DecodeJob,
    EngineFacts,
    EngineLoad,
    Finish,
    FirstToken,
    PrefillJob,
    PrefillOutcome,
)
from kvloop.engine.settings import SMOLLM2, EngineSettings, Role, resolve
from kvloop.engine.vllm import outputs, transfer
from kvloop.engine.vllm.adapters import Adapters
from kvloop.engine.vllm.continuing import PromptText
from kvloop.engine.vllm.holds import SETTLE_S, HoldTable, gone
from kvloop.engine.vllm.lifecycle import Core
from kvloop.engine.vllm.stats import Counters
from kvloop.runtime import checks, tokens
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import sampling_pb2, turn_pb2, worker_pb2


class VllmEngine(HoldTable):
    """One vLLM engine. See kvloop.engine.port.Engine for what its methods promise."""

    def __init__(self, settings: EngineSettings, role: Role) -> None:
        super().__init__()
        self._settings = resolve(settings)
        if settings.model == SMOLLM2 and not Path(self._settings.model_path).is_dir():
            raise ValueError("the checkpoint smollm2 is not here; run `kvloop model fetch smollm2`")
        self._counters = Counters()
        self._core = Core(self._settings, role, self._counters)
        self._adapters = Adapters(self._settings.adapters)
        self._facts: EngineFacts | None = None
        self._defaults: dict[str, Any] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Lock()
        self._mixed = False
        """Whether a reload has failed on its way: the weights may be partly old ones."""

    @property
    def facts(self) -> EngineFacts:
        """Return the facts; valid once started."""
        if self._facts is None:
            raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the engine has not started")
        return self._facts

    @property
    def settings(self) -> EngineSettings:
        """Return the settings with every open value filled."""
        return self._settings

    @property
    def core_pids(self) -> list[int]:
        """Return the engine core's process ids."""
        return [process.pid for process in self._core.processes if process.pid is not None]

    @property
    def control_path(self) -> Path:
        """Return the path of the engine core's control socket; valid once started."""
        return self._core.control_path

    @property
    def load(self) -> EngineLoad:
        """Return what the engine had to do at its last step."""
        return self._counters.load

    async def start(self) -> None:
        """Spawn the engine core and load the model."""
        try:
            await self._core.start()
            await self._adapters.load(self._core.llm)
            self._control = await ControlClient.connect(self._core.control_path)
        except BaseException as error:
            await self.stop()
            if isinstance(error, Exception):
                text = f"the engine did not start: {type(error).__name__}: {error}"
                raise Failure(Reason.ERROR_REASON_WORKER_FAILED, text) from error
            raise
        from vllm import __version__

        from kvloop.engine.vllm.facts import engine_facts

        config = self._core.llm.vllm_config
        self._defaults = dict(config.model_config.get_diff_sampling_param())
        self._facts = engine_facts(self._settings, config, __version__, self._adapters.contents)

    async def stop(self) -> None:
        """End the engine core and remove its socket. Idempotent."""
        async with self._stopping:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            control, self._control = self._control, None
            if control is not None:
                await control.close()
            await self._core.stop()

    async def check_health(self) -> None:
        """Raise WORKER_FAILED unless the engine core lives, NO_WORKER unless its weights are whole."""
        if self._llm().errored or not all(process.is_alive() for process in self._core.processes):
            raise gone()
        if self._mixed:
            raise Failure(Reason.ERROR_REASON_NO_WORKER, "the weights were not loaded whole")

    async def counters(self) -> worker_pb2.EngineCounters:
        """Return the engine's own counters since its start."""
        return self._counters.snapshot()

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while blocks are in use."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return bool(await self._llm().reset_prefix_cache())
        except EngineDeadError:
            raise gone() from None

    async def reload_weights(self, version: str) -> None:
        """Load the weights from where they lie, under the same name, in a new epoch."""
        from vllm import __version__
        from vllm.v1.engine.exceptions import EngineDeadError

        from kvloop.engine.vllm.facts import compatibility

        facts, llm = self.facts, self._llm()
        try:
            await llm.collective_rpc("reload_weights")
            # vLLM has dropped them, and would read them again at their next use.
            await self._adapters.load(llm)
            await self._call(self._client().reloaded(version))
            settings = self._settings.model_copy(update={"weights_version": version})
            digest = compatibility(settings, llm.vllm_config, __version__, self._adapters.contents)
        except EngineDeadError:
            raise gone() from None
        except BaseException:
            self._mixed = True
            raise
        self._settings, self._mixed = settings, False
        self._facts = dataclasses.replace(facts, epoch=secrets.token_hex(8), compatibility=digest)

    async def prefill(self, job: PrefillJob) -> PrefillOutcome:
        """Compute, or read, the prompt's KV and hold it for one decode engine."""
        from kvloop.engine.vllm import sampling

        if job.read is not None and not self._settings.bidirectional_kv_xfer:
            # vLLM would wait for this read for ever.
            raise Failure(
                Reason.ERROR_REASON_INCOMPATIBLE_ENGINES,
                "this engine does not read back; set bidirectional_kv_xfer",
            )
        ids = self._checked(job.prompt, job.sampling)
        asked = transfer.prefill(job, self._settings.prefill_hold_s)
        tells = job.first_token and self._tells_text(job.sampling)
        params = sampling.to_vllm(
            legs.prefill_leg(job.sampling, first_token=tells),
            # What nobody sees is greedy, whatever the model's own configuration says.
            defaults=self._defaults if tells else {},
            transfer=asked,
        )
        prompt_text = self._prompt_text(ids, params)
        stream = await self._submit(job, ids, params, job.request_id)
        stream.prime(ids)
        logprobs: list[turn_pb2.PositionLogprobs] = []
        outcome: PrefillOutcome | None = None
        try:
            output = await stream.next()
            while not output.finished:
                logprobs += outputs.positions(output.prompt_logprobs, ids)
                output = await stream.next()
            logprobs += outputs.positions(output.prompt_logprobs, ids)
            handle, report = outputs.take_report(output.kv_transfer_params)
            reason = output.outputs[0].finish_reason
            if reason == "abort":
                raise gone()
            if reason != "length" and not (reason == "stop" and tells):
                raise await self._failure(report, job.request_id, read=job.read is not None)
            if not handle:
                raise Failure(Reason.ERROR_REASON_INTERNAL, "the engine held nothing of a prefill")
            outcome = PrefillOutcome(
                handle_json=outputs.handle_json(handle),
                held_s=report["held_s"] if report else self._settings.prefill_hold_s,
                sources=outputs.sources(report, len(ids)),
                readback=outputs.transfer(report["transfer"]) if report else None,
                prompt_logprobs=tuple(logprobs),
                first=self._first_token(output.outputs[0], prompt_text, params) if tells else None,
            )
            return outcome
        finally:
            await stream.abort(self._announce(job.request_id))
            if outcome is None:
                # The engine may have finished in the moment of the abort.
                self._spawn(self._forget_prefill(job.request_id))

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeDelta]:
        """Generate. Closing the iterator before the finish cancels the turn."""
        from kvloop.engine.vllm import sampling

        ids = self._checked(job.prompt, job.sampling)
        params = sampling.to_vllm(
            legs.decode_leg(job.sampling), defaults=self._defaults, transfer=transfer.decode(job)
        )
        turn_id = transfer.decode_turn_id(job)
        prompt_text = self._prompt_text(ids, params)
        stream = await self._submit(job, ids, params, turn_id)
        stream.prime(ids)
        known = len(ids)
        told = False
        try:
            while not stream.finished:
                output = await stream.next()
                completion = output.outputs[0]
                _, report = outputs.take_report(output.kv_transfer_params)
                reason = completion.finish_reason
                if reason == "abort":  # only the engine's end aborts a turn that is not ours to abort
                    raise gone()
                if reason == "error":
                    read = job.handle_json is not None
                    raise await self._failure(report, turn_id, read=read, constrained=job.sampling)
                new = list(completion.token_ids)
                known += len(new)
                delta = DecodeDelta(
                    token_ids=new,
                    text=prompt_text.less(completion.text),
                    logprobs=outputs.positions(completion.logprobs, new),
                )
                if reason is None:
                    yield delta
                elif report is not None:
                    finish = await self._finish(job, completion, report, known)
                    told = True
                    yield DecodeDelta(delta.token_ids, delta.text, delta.logprobs, finish)
                else:
                    # The front end found a stop string and aborted: the engine core settles at its next
                    # step, for which the answer need not wait.
                    yield delta
                    report = await self._call(self._client().report(turn_id, SETTLE_S))
                    finish = await self._finish(job, completion, report, known)
                    told = True
                    yield DecodeDelta((), finish=finish)
        finally:
            if not told and job.hold is not None:
                self._remember(job.hold.lease_id, known)
            await stream.abort(self._announce(turn_id))

    async def _finish(
        self, job: DecodeJob, completion: Any, report: Mapping[str, Any] | None, known: int
    ) -> Finish:
        stop = completion.stop_reason
        hold = None
        if job.hold is not None:
            info = await self._call(self._client().hold(job.hold.lease_id, SETTLE_S))
            hold = None if info is None else outputs.hold(info, at_most=known)
        return Finish(
            reason=outputs.finish_reason(completion.finish_reason),
            stop_reason=None if stop is None else str(stop),
            sources=outputs.sources(report, tokens.count(job.prompt)),
            hold=hold,
            handoff=outputs.transfer(report["transfer"]) if report else None,
        )

    async def _failure(
        self,
        report: Mapping[str, Any] | None,
        turn_id: str,
        *,
        read: bool,
        constrained: sampling_pb2.SamplingParams | None = None,
    ) -> Failure:
        """Return why the engine ended a request with "error"."""
        if self._llm().errored:
            return gone()
        if report is None:
            report = await self._call(self._client().report(turn_id, SETTLE_S))
        refused = report["refused"] if report else None
        if refused is not None:
            return Failure(
                Reason.ERROR_REASON_KV_READ_FAILED,
                "the read of remote KV failed or was refused",
                metadata={"guard": str(refused)},
            )
        if constrained is not None and constrained.HasField("structured_outputs"):
            # Of what a request can bring along, only its grammar fails inside the engine core.
            return invalid(
                "sampling.structured_outputs", "the engine can't compile or satisfy this constraint"
            )
        if read:
            return Failure(Reason.ERROR_REASON_KV_READ_FAILED, "the read of remote KV failed")
        return Failure(Reason.ERROR_REASON_INTERNAL, "the engine failed on this request")

    async def _submit(self, job: PrefillJob | DecodeJob, ids: list[int], params: Any, turn_id: str) -> Any:
        from kvloop.engine.vllm.stream import Stream

        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if job.cache_salt:
            prompt["cache_salt"] = job.cache_salt
        if params.structured_outputs is None:
            # Marked as rendered, so that it is not sent through a thread; parsing a grammar is worth one.
            prompt["type"] = "token"
        return await Stream.submit(
            self._llm(),
            prompt=prompt,
            params=params,
            request_id=job.request_id,
            priority=job.priority,
            lora=self._adapters.request(job.adapter),
            before_abort=self._announce(turn_id),
            reasoning=self._reasoning(job.sampling) if params.structured_outputs is not None else {},
        )

    def _checked(self, prompt: bytes, sampling: sampling_pb2.SamplingParams) -> list[int]:
        """Return the prompt's ids. The services check too; the engine core must not depend on it."""
        facts = self.facts
        checks.check_prompt(prompt, max_model_len=facts.max_model_len, vocab_size=facts.vocab_size)
        checks.check_sampling(sampling, vocab_size=facts.vocab_size)
        return tokens.unpack(prompt)

    def _prompt_text(self, ids: list[int], params: Any) -> PromptText:
        tokenizer = self._llm().tokenizer
        if tokenizer is None or not params.detokenize:
            return PromptText(())

        def decode(part: Sequence[int]) -> str:
            return str(tokenizer.decode(list(part), skip_special_tokens=params.skip_special_tokens))

        return PromptText(ids, decode)

    def _tells_text(self, asked: sampling_pb2.SamplingParams) -> bool:
        """Tell whether an answer's text can be told by two engines, one after the other."""
        from kvloop.engine.vllm import priming

        tokenizer = self._llm().tokenizer
        silent = asked.HasField("detokenize") and not asked.detokenize
        return tokenizer is None or silent or priming.is_exact(tokenizer)

    def _first_token(self, completion: Any, prompt_text: PromptText, params: Any) -> FirstToken | None:
        first = outputs.first_token(completion, prompt_text)
        has_text = params.detokenize and self._llm().tokenizer is not None
        # Half a character: greedy, the decode leg begins with it again and tells both halves.
        half = has_text and not first.text and not first.ends
        return None if half and params.temperature == 0 else first

    def _reasoning(self, sampling: sampling_pb2.SamplingParams) -> dict[str, Any]:
        from kvloop.engine.vllm import grammar

        return grammar.reasoning(sampling, self._llm().vllm_config, self._llm().tokenizer)

    def _announce(self, turn_id: str) -> Any:
        async def announce() -> None:
            with contextlib.suppress(Failure):
                await self._call(self._client().cancel(turn_id))

        return announce

    async def _forget_prefill(self, request_id: str) -> None:
        with contextlib.suppress(Failure):
            await self._call(self._client().report(request_id, SETTLE_S))
            await self.release(request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _llm(self) -> Any:
        if self._core.llm is None:
            raise gone()
        return self._core.llm
