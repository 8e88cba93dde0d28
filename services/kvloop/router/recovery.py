"""What becomes of a turn whose attempt has failed: another attempt, the same answer elsewhere, or its end."""

from kvloop.router import verdict as verdicts
from kvloop.router.legs import LegFailed
from kvloop.router.migration import Replay, Sent, is_greedy, keeps_state, lost
from kvloop.router.turn import Tools, Turn
from kvloop.router.verdict import Verdict, Why
from kvloop.runtime import logs
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import turn_pb2

_log = logs.get("router")


def start_again(turn: Turn, tools: Tools, failed: LegFailed) -> bool:
    """Prepare the next attempt; False when what was passed on is the whole answer and nothing is left to do.

    Raises the Failure with which the turn ends.
    """
    failure = failed.failure
    if turn.out_of_time:
        raise Failure(Reason.ERROR_REASON_DEADLINE_EXCEEDED, "the turn ran out of time") from None
    if failed.callers_fault:
        raise failure from None
    if turn.streaming:
        if not _migrate(turn, tools):
            return False
    elif turn.attempt >= tools.settings.max_attempts:
        raise failure from None
    tools.watch.retried(failure, migrated=turn.streaming)
    event = "answer_migrates" if turn.streaming else "turn_started_again"
    _log.warning(event, request_id=turn.request_id, reason=failure.reason_name)
    # A worker that goes away says nothing against what is held elsewhere, or there.
    keeps = failed.going_away and not turn.streaming and turn.decided.verdict == Verdict.VERDICT_READBACK
    if turn.decided.verdict != Verdict.VERDICT_RECOMPUTE and not keeps:
        turn.decision = verdicts.cold(Why.REUSE_REASON_READ_FAILED)
    # A holder that failed is no longer preferred; one that is well still has most of the blocks.
    if turn.holder in turn.avoid:
        turn.holder = None
    return True


def _migrate(turn: Turn, tools: Tools) -> bool:
    """Have the next attempt go on with the answer; False when it has ended."""
    sent = Sent.of(turn.sent)
    _remember_origin(turn)
    if sent.ending is not None:
        # The answer is there to its last token. What D held of it is gone with D, or lapses.
        turn.carried, turn.decoded = b"", sent.summary()
        return False
    if turn.migrations >= tools.settings.max_migrations:
        raise lost("the answer was taken up too often")
    turn.migrations += 1
    if not keeps_state(turn.sampling):
        turn.carried, turn.replay = sent.token_ids, None
    elif is_greedy(turn.sampling) or turn.sampling.HasField("seed"):
        turn.carried, turn.replay = b"", Replay(sent)
    else:
        raise lost("its sampling can't be repeated")
    return True


def _remember_origin(turn: Turn) -> None:
    """Keep what the first attempt said of the prompt: later ones have other prompts, or other reasons."""
    if turn.origin is not None:
        return
    turn.origin = turn_pb2.Reuse()
    if turn.prefilled is not None:
        turn.origin.CopyFrom(turn.prefilled.reuse)
        turn.origin_logprobs = list(turn.prefilled.prompt_logprobs)
    else:
        # D goes on only from what it has proven to hold; how much more its cache had is not known.
        expected = min(turn.decided.expected_tokens, turn.prompt_tokens)
        turn.origin.verdict, turn.origin.reason = turn.decided.verdict, turn.decided.reason
        turn.origin.tokens.d_local, turn.origin.tokens.computed = expected, turn.prompt_tokens - expected
    turn.origin.retried = turn.origin.retried or turn.attempt > 1
