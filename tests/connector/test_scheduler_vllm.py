"""The scheduler side without an engine: whom it makes room for, and reads by several ranks."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 32


@pytest.fixture
def turn() -> Callable[..., Any]:
    from kvloop.connector.terms import parse_terms
    from kvloop.connector.turns import Turn

    def make(**changes: Any) -> Any:
        made = Turn(parse_terms({}, "r"))
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    return make


@pytest.fixture
def scheduler() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kvloop.connector.scheduler import KvloopScheduler
    made = KvloopScheduler.__new__(KvloopScheduler)
    made._turns, made._requests, made._ranks = {}, {}, 2
    return made


def needed(scheduler: Any, scheduled: dict[str, int]) -> int:
    from kvloop.connector import pressure

    return pressure.next_step(scheduler._wanting(scheduled), BLOCK, 512)


def test_a_read_that_is_over_gets_room_for_what_it_lacks(scheduler: Any, turn: Callable[..., Any]) -> None:
    scheduler._turns["r"] = turn(admitted=True, loading=True, unscheduled=True, external=50 * BLOCK)
    scheduler._requests["r"] = SimpleNamespace(num_computed_tokens=0, num_tokens=50 * BLOCK + 1)
    # vLLM asks for no room any more once something was read: without this nobody would make any.
    assert needed(scheduler, {}) == 1
    scheduler._turns["r"].loading = False
    assert needed(scheduler, {}) == 1
    scheduler._requests["r"].num_computed_tokens = 50 * BLOCK
    assert needed(scheduler, {"r": 1}) == 0
    # From its first step on it is one of those that run.
    assert needed(scheduler, {}) == 0


def test_a_read_is_over_when_every_rank_has_read(scheduler: Any, turn: Callable[..., Any]) -> None:
    from kvloop.connector.metadata import Read, WorkerReport

    one = turn(admitted=True, loading=True)
    scheduler._note_read(one, Read(5.0, 100, 3))
    assert one.loading
    scheduler._note_read(one, Read(9.0, 100, 3))
    assert not one.loading
    assert one.transfer == {"ms": 9.0, "bytes": 200, "descriptors": 6}
    other = turn(admitted=True, loading=True)
    both, second = (WorkerReport(reads={"r": Read(ms, 100, 3)}) for ms in (5.0, 2.0))
    both.aggregate(second)
    scheduler._note_read(other, both.reads["r"])
    assert not other.loading
    assert other.transfer == {"ms": 5.0, "bytes": 200, "descriptors": 6}


@pytest.mark.parametrize(
    ("status", "held"),
    [
        ("FINISHED_STOPPED", True),
        ("FINISHED_LENGTH_CAPPED", True),
        ("FINISHED_REPETITION", True),
        ("FINISHED_ABORTED", False),
        ("FINISHED_IGNORED", False),
        ("FINISHED_ERROR", False),
    ],
)
def test_a_turn_that_came_to_its_own_end_is_held(scheduler: Any, status: str, held: bool) -> None:
    from vllm.v1.request import RequestStatus

    from kvloop.connector.terms import parse_terms
    from kvloop.connector.turns import Turn, TurnLog

    hold = {"ttl_s": 60.0, "on_cancel": False, "tenant": "t"}
    turn = Turn(parse_terms({"kvloop_turn": {"id": "t", "kind": "decode", "hold": hold}}, "r"))
    scheduler._log = TurnLog()
    request = SimpleNamespace(
        status=RequestStatus[status],
        num_output_tokens=4,
        sampling_params=SimpleNamespace(stop=None),
        mm_features=(),
        prompt_embeds=None,
        prompt_token_ids=[1, 2, 3],
    )
    assert scheduler._wants_hold(request, turn) == held
