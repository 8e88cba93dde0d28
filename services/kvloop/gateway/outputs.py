"""Chunks of a turn to the outputs that vLLM's serving code consumes (checked on 0.29.0)."""

from collections.abc import Sequence
from typing import Any

from kvloop.gateway import compat
from kvloop.gateway.exchange import reused_tokens
from kvloop.runtime import tokens
from kvloop.v1alpha1 import turn_pb2

_FINISH = {
    turn_pb2.FINISH_REASON_STOP: "stop",
    turn_pb2.FINISH_REASON_LENGTH: "length",
    turn_pb2.FINISH_REASON_REPETITION: "repetition",
}


class Answer:
    """One turn's answer, handed on as deltas or as a whole, as the serving code asked.

    A whole answer is one output at the end. Prompt logprobs come with the summary, where vLLM has them on
    its first output: a turn that asks for them is handed on as a whole.
    """

    def __init__(self, request_id: str, prompt_ids: list[int], params: Any, index: int = 0) -> None:
        """Take vLLM's parameters of the turn; index: which of n."""
        self._request_id = request_id
        self._prompt_ids = prompt_ids
        self._params = params
        self._index = index
        self._whole = not compat.wants_deltas(params) or params.prompt_logprobs is not None
        self._wanted = params.logprobs is not None or bool(params.logprob_token_ids)
        self._text: list[str] = []
        self._logprobs: list[dict[int, Any]] = []
        self._cumulative = 0.0
        self.ids: list[int] = []
        """All ids so far."""

    @property
    def text(self) -> str:
        """Return all text so far."""
        return "".join(self._text)

    @property
    def hides(self) -> bool:
        """Return whether the text leaves special tokens out."""
        return bool(self._params.skip_special_tokens)

    def add(self, chunk: turn_pb2.Chunk) -> Any | None:
        """Return the output to hand on, or None when it is kept for the whole."""
        ids, text = tokens.unpack(chunk.token_ids), chunk.text
        self.ids.extend(ids)
        self._text.append(text)
        logprobs: list[dict[int, Any]] = []
        if self._wanted:
            logprobs = [compat.logprobs_of(position) for position in chunk.logprobs]
            for token, entry in zip(ids, logprobs, strict=False):
                if token in entry:
                    self._cumulative += entry[token].logprob
        if self._whole:
            self._logprobs.extend(logprobs)
            return None
        return self._output(text, ids, logprobs, None)

    def end(self, summary: turn_pb2.Summary) -> Any:
        """Return the last output."""
        if self._whole:
            return self._output(self.text, self.ids, self._logprobs, summary)
        return self._output("", [], [], summary)

    def _output(
        self, text: str, ids: list[int], logprobs: list[dict[int, Any]], summary: turn_pb2.Summary | None
    ) -> Any:
        wanted = self._wanted
        completion = compat.completion_output(
            index=self._index,
            text=text,
            token_ids=ids,
            cumulative_logprob=self._cumulative if wanted else None,
            logprobs=logprobs if wanted else None,
            finish_reason=None if summary is None else _FINISH.get(summary.finish_reason, "stop"),
            stop_reason=None if summary is None else self._stop_reason(summary),
        )
        return compat.request_output(
            request_id=self._request_id,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=None if summary is None else self._prompt_logprobs(summary.prompt_logprobs),
            outputs=[completion],
            finished=summary is not None,
            num_cached_tokens=None if summary is None else reused_tokens(summary),
        )

    def _stop_reason(self, summary: turn_pb2.Summary) -> int | str | None:
        if not summary.HasField("stop_reason"):
            return None
        reason = summary.stop_reason
        # Token ids travel in decimal; a stop string may look the same, and then it was asked for.
        if reason.isdecimal() and reason not in (self._params.stop or ()):
            return int(reason)
        return reason

    def _prompt_logprobs(
        self, positions: Sequence[turn_pb2.PositionLogprobs]
    ) -> list[dict[int, Any] | None] | None:
        if self._params.prompt_logprobs is None:
            return None
        return [compat.logprobs_of(position) if position.candidates else None for position in positions]
