"""A leg whose engine ends the turn later than it says: what it then holds is let go of."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from keeper_kit import Bench, scope

from kvloop.decode.leg import Leg
from kvloop.engine.port import DecodeDelta, DecodeJob, Finish, Sources
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.runtime.metrics import Metrics
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import decode_service_pb2, turn_pb2


class Engine:
    """Gives a token, then fails, or finishes without knowing of a hold."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure
        self.lease_id = ""

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeDelta]:
        assert job.hold is not None
        self.lease_id = job.hold.lease_id
        yield DecodeDelta([7])
        if self.failure is not None:
            raise self.failure
        reason = turn_pb2.FINISH_REASON_STOP
        yield DecodeDelta((), finish=Finish(reason, "stop", Sources(0, 0, 3), hold=None))


def leg_of(bench: Bench, engine: Any) -> Leg:
    request = decode_service_pb2.DecodeRequest(
        request_id="r",
        prompt_token_ids=pack([1, 2, 3]),
        scope=scope(),
        retention=turn_pb2.Retention(hold=True, hold_on_cancel=True),
    )
    nothing: Any = None
    return Leg(
        request, engine, bench.keeper, nothing, clock=bench.clock, worker_id="d", metrics=Metrics("decode")
    )


@pytest.mark.parametrize(
    "failure", [None, ValueError("a bug"), Failure(Reason.ERROR_REASON_INTERNAL, "the engine failed")]
)
async def test_what_the_engine_holds_late_is_let_go_of(failure: Exception | None) -> None:
    bench = Bench()
    engine = Engine(failure)
    await leg_of(bench, engine).start()
    await bench.engine.settling.wait()
    bench.engine.hold(engine.lease_id, 3, 60.0)
    await bench.keeper.settled()
    assert bench.engine.held == {}


async def test_a_turn_that_the_engine_refused_is_not_waited_for() -> None:
    bench = Bench()
    await leg_of(bench, Engine(invalid("sampling.n", "must be 1"))).start()
    await bench.keeper.settled()
    assert bench.engine.patience == []
