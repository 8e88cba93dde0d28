"""Why recent turns went the way they went: a bounded memory, for the tenant that asked for them alone."""

from collections import OrderedDict
from dataclasses import dataclass

from kvloop.router.costs import Costs, Rates, Work
from kvloop.router.turn import Turn
from kvloop.router.verdict import Decision, Question
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import router_service_pb2, turn_pb2


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a verdict was reached from."""

    question: Question
    decision: Decision
    work: Work | None = None
    rates: Rates | None = None
    costs: Costs | None = None
    """Also when they did not decide."""


class Memory:
    """The last turns, oldest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[tuple[str, str], router_service_pb2.ExplainTurnResponse] = OrderedDict()

    def keep(self, turn: Turn, outcome: str) -> None:
        """Remember a turn that has ended."""
        if not self._limit:
            return
        key = (turn.tenant, turn.request_id)
        self._turns[key] = describe(turn, outcome)
        self._turns.move_to_end(key)
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def get(self, tenant: str, request_id: str) -> router_service_pb2.ExplainTurnResponse:
        """Return a tenant's turn. Failure TURN_NOT_FOUND."""
        found = self._turns.get((tenant, request_id))
        if found is None:
            raise Failure(
                Reason.ERROR_REASON_TURN_NOT_FOUND,
                "this router does not remember such a turn; ask the one that served it",
            )
        return found


def describe(turn: Turn, outcome: str) -> router_service_pb2.ExplainTurnResponse:
    """Return the numbers behind a turn."""
    out = router_service_pb2.ExplainTurnResponse(
        request_id=turn.request_id,
        outcome=outcome,
        prompt_tokens=turn.prompt_tokens,
        attempts=turn.attempt,
        direct_refused=turn.direct_refused,
        migrations=turn.migrations,
        timings_ms=turn.timings,
        found_by_prefix=turn.by_prefix,
    )
    if turn.pair is not None:
        out.prefill_worker = turn.pair.prefill.name if turn.pair.prefill is not None else ""
        out.decode_worker = turn.pair.decode.name
    if turn.origin is not None or turn.prefilled is not None or turn.decoded is not None:
        out.reuse.CopyFrom(reuse_of(turn))
    if turn.weighed is not None:
        _weighed(out, turn.weighed)
    return out


def reuse_of(turn: Turn) -> turn_pb2.Reuse:
    """Return where the prompt's KV came from, as the turn's summary says it."""
    out = turn_pb2.Reuse()
    decoded = turn.decoded
    if turn.origin is not None:
        out.CopyFrom(turn.origin)
    elif turn.prefilled is not None:
        out.CopyFrom(turn.prefilled.reuse)
    elif decoded is not None:
        out.verdict, out.reason = turn.decided.verdict, turn.decided.reason
        out.tokens.CopyFrom(decoded.tokens)
    out.retried = out.retried or (turn.origin is None and turn.attempt > 1)
    if decoded is not None and decoded.HasField("handoff"):
        out.handoff.CopyFrom(decoded.handoff)
    return out


def _weighed(out: router_service_pb2.ExplainTurnResponse, weighed: Weighed) -> None:
    question = weighed.question
    out.decided_verdict, out.decided_reason = weighed.decision.verdict, weighed.decision.reason
    out.by_cost = question.costs is not None
    out.threshold_tokens = question.threshold
    if question.lease is not None:
        out.lease_tokens = question.lease.num_tokens
        out.lease_held = question.lease.held
    if question.expected is not None:
        out.matched_tokens = question.expected.matched
        out.below_tokens = question.expected.upper
    if question.direct is not None:
        out.direct_max_suffix = question.direct.max_suffix
        out.direct_budget_tokens = question.direct.budget
    if question.holder is not None:
        out.direct_tokens_in_flight = question.holder.direct_tokens
    if weighed.costs is None or weighed.rates is None or weighed.work is None:
        return
    costs, rates, work = weighed.costs, weighed.rates, weighed.work
    out.costs.direct_ms, out.costs.readback_ms = costs.direct, costs.readback
    out.costs.recompute_ms = costs.recompute
    out.costs.prefill_wait_ms, out.costs.decode_wait_ms = work.prefill_wait_ms, work.decode_wait_ms
    out.costs.prefill_terms.extend(rates.prefill.values)
    out.costs.decode_terms.extend(rates.decode.values)
    out.costs.transfer_terms.extend(rates.transfer.values)
    out.costs.first_step_ms = rates.first_step_ms
    out.costs.bytes_per_token = rates.bytes_per_token
    out.costs.descriptors_per_token = rates.descriptors_per_token
