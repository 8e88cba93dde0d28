"""From vLLM's outputs and the connector's reports to the port's types."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvloop.connector.control import ControlError, HoldInfo, TransferInfo
from kvloop.engine.port import FirstToken, Hold, Sources, TransferFacts
from kvloop.engine.vllm.continuing import PromptText
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import turn_pb2

REPORT = "kvloop_report"

_FINISH = {
    "stop": turn_pb2.FINISH_REASON_STOP,
    "length": turn_pb2.FINISH_REASON_LENGTH,
    "repetition": turn_pb2.FINISH_REASON_REPETITION,
}
_CONTROL_REASONS = {
    "not_found": (Reason.ERROR_REASON_LEASE_NOT_FOUND, "nothing is held under this lease"),
    "expired": (Reason.ERROR_REASON_LEASE_EXPIRED, "the lease's time is over"),
    "bad_request": (Reason.ERROR_REASON_INVALID_FIELD, "the engine refuses these arguments"),
    "closed": (Reason.ERROR_REASON_WORKER_FAILED, "the engine is gone"),
}


def finish_reason(reason: str) -> "turn_pb2.FinishReason.ValueType":
    """Return the proto's reason of an answer that ended by itself."""
    return _FINISH.get(reason, turn_pb2.FINISH_REASON_UNSPECIFIED)


def take_report(params: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, Mapping[str, Any] | None]:
    """Return (kv_transfer_params without the report, the report)."""
    if params is None:
        return None, None
    handle = dict(params)
    report = handle.pop(REPORT, None)
    return handle, report


def handle_json(handle: Mapping[str, Any]) -> str:
    """Return a handle as it travels."""
    return json.dumps(handle, separators=(",", ":"))


def sources(report: Mapping[str, Any] | None, prompt_tokens: int) -> Sources:
    """Return the scheduler's split of the prompt; all computed when the connector said nothing."""
    if report is None:
        return Sources(local=0, external=0, computed=prompt_tokens)
    return Sources(local=report["local"], external=report["external"], computed=report["computed"])


def transfer(info: TransferInfo | None) -> TransferFacts | None:
    """Return a read's facts."""
    if info is None:
        return None
    return TransferFacts(duration_ms=info["ms"], bytes=info["bytes"], descriptors=info["descriptors"])


def hold(info: HoldInfo, *, at_most: int | None = None) -> Hold:
    """Return the port's form of a hold. at_most: tokens that the caller knows.

    With async scheduling the engine may have computed a token past a stop string; nobody has seen it.
    """
    known = info["num_tokens"] if at_most is None else min(info["num_tokens"], at_most)
    return Hold(
        lease_id=info["lease_id"],
        num_tokens=known,
        num_blocks=info["num_blocks"],
        remaining_s=info["remaining_s"],
        pins=info["pins"],
        doomed=info["doomed"],
    )


def first_token(completion: Any, prompt_text: PromptText) -> FirstToken:
    """Return the only token of a prefill that samples as the answer does."""
    (token,) = completion.token_ids
    return FirstToken(
        token_id=token,
        text=prompt_text.less(completion.text),
        logprobs=positions(completion.logprobs, [token]),
        ends=completion.finish_reason == "stop",
    )


def control_failure(error: ControlError) -> Failure:
    """Return the failure of a refused control call."""
    reason, text = _CONTROL_REASONS.get(
        error.code, (Reason.ERROR_REASON_INTERNAL, "the engine's table of holds failed")
    )
    return Failure(reason, text)


def positions(
    logprobs: Sequence[Mapping[int, Any] | None] | None, chosen: Sequence[int]
) -> list[turn_pb2.PositionLogprobs]:
    """Return alternatives per position, the chosen token first. A prompt's first position has none."""
    if not logprobs:
        return []
    return [
        turn_pb2.PositionLogprobs(candidates=_candidates(entry, token))
        for entry, token in zip(logprobs, chosen, strict=False)
    ]


def _candidates(entry: Mapping[int, Any] | None, chosen: int) -> list[turn_pb2.TokenLogprob]:
    if not entry:
        return []
    tokens = sorted(entry, key=lambda token: token != chosen)
    return [_logprob(token, entry[token]) for token in tokens]


def _logprob(token: int, logprob: Any) -> turn_pb2.TokenLogprob:
    message = turn_pb2.TokenLogprob(token_id=token, logprob=logprob.logprob, rank=logprob.rank or 0)
    if logprob.decoded_token is not None:
        message.decoded_token = logprob.decoded_token
    return message
