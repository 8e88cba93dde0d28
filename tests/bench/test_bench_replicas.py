"""Replicas behind a balancer: who is due, what counts as reuse, what a run has to keep; and a small run."""

import itertools
import json
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvloop.bench import replicas
from kvloop.bench.replicas import Outage, Player, ReplicaPlan, ReplicaRecord, Rota, Talk, choose
from kvloop.bench.target import Outcome, Request, TargetFailed
from kvloop.bench.workload.distributions import Constant
from kvloop.bench.workload.model import History
from kvloop.bench.workload.multiturn import MultiTurn
from kvloop.bench.workload.words import WordEncoder

ROUTERS = ["a", "b", "c"]
WORDS = WordEncoder(32_000)


def sessions(conversations: int, turns: int) -> list[Any]:
    shape = MultiTurn(
        messages=Constant(2 * turns),
        common_opening_tokens=0,
        opening_tokens=Constant(80),
        input_tokens=Constant(10),
        output_tokens=Constant(4),
    )
    return shape.sessions(0, conversations)


def talk(name: str, router: str) -> Talk:
    return Talk(name, sessions(1, 2)[0], History(WORDS), router=router)


def record(**fields: Any) -> ReplicaRecord:
    standard: dict[str, Any] = {
        "conversation": "c",
        "turn": 2,
        "router": "b",
        "previous_router": "a",
        "reusable": True,
        "reused": True,
        "in_outage": False,
        "outcome": replicas.OK,
        "expected_digest": "d",
        "actual_digest": "d",
    }
    return ReplicaRecord(**(standard | fields))


COLD = record(reused=False)


def test_replicas_are_due_in_turn() -> None:
    rota = Rota(ROUTERS)
    assert rota.due(2) == []
    rota.served("b")
    assert rota.due() == ["c"]
    assert rota.due(2) == ["c", "a"]
    rota.served("c")
    assert rota.due() == ["a"]


@pytest.mark.parametrize(
    ("last", "lost", "due"),
    [("a", "b", "c"), ("a", "c", "b"), ("b", "b", "c"), ("a", "a", "b"), ("c", "c", "a")],
)
def test_a_lost_replica_is_not_due(last: str, lost: str, due: str) -> None:
    rota = Rota(ROUTERS)
    rota.served(last)
    rota.lost(lost)
    assert rota.due() == [due]


@pytest.mark.parametrize(
    ("due", "chosen"), [([], "1"), (["a"], "2"), (["b"], "1"), (["a", "b"], "3"), (["a", "c"], "2")]
)
def test_the_next_turn_is_of_a_conversation_that_another_replica_served(due: list[str], chosen: str) -> None:
    talks = [talk("1", "a"), talk("2", "b"), talk("3", "c")]
    assert choose(talks, due).name == chosen


def test_without_such_a_conversation_the_first_due_counts_most() -> None:
    assert choose([talk("1", "a"), talk("2", "b")], ["a", "b"]).name == "2"
    assert choose([talk("1", "a")], ["a"]).name == "1"


def test_an_outage_meets_what_lies_across_it() -> None:
    outage = Outage()
    assert not outage.meets(0, 100)
    outage.begin(10)
    assert not outage.meets(0, 9)
    assert outage.meets(0, 10)
    assert outage.meets(50, 60)
    outage.end(20)
    assert outage.meets(20, 30)
    assert outage.meets(0, 30)
    assert not outage.meets(21, 30)


def test_reuse_is_counted_outside_the_outage() -> None:
    played = [record(), COLD, record(reusable=False, reused=False), record(in_outage=True, reused=False)]
    assert replicas.reuse(played) == (2, 1)
    summary = replicas.summarise(played, [COLD], {"seed": 1})
    assert (summary["reusable"], summary["reused"], summary["reuse_rate"]) == (2, 1, 0.5)
    assert summary["in_outage"] == {"turns": 1, "reusable": 1, "reused": 0}
    assert summary["contrast_memory"]["reuse_rate"] == 0
    assert len(summary["records"]) == 4
    assert json.loads(json.dumps(summary)) == summary


def test_a_run_that_kept_everything_is_left_alone() -> None:
    assert replicas.missed([record()] * 99 + [COLD], [COLD]) == []


@pytest.mark.parametrize(
    ("played", "contrast", "text"),
    [
        ([record(), record(outcome=replicas.WRONG)], [COLD], "1 turns were wrong"),
        (
            [record(), record(outcome=replicas.FAILED, error="gone")],
            [COLD],
            "failed; the first: c, turn 2 gone",
        ),
        ([record()], [record(reused=False, outcome=replicas.WRONG)], "1 turns on memory:// were wrong"),
        ([record()] * 98 + [COLD] * 2, [COLD], "98 of 100 reusable turns"),
        ([], [COLD], "0 of 0 reusable turns"),
        ([record(router="a")], [COLD], "1 turns met the router of the turn before"),
        ([record()], [record()], "memory:// reused as much"),
    ],
)
def test_missed_promises_are_named(
    played: list[ReplicaRecord], contrast: list[ReplicaRecord], text: str
) -> None:
    [said] = replicas.missed(played, contrast)
    assert text in said


class Balanced:
    """Replicas in turn, one of which may be away; they answer as the reference does."""

    def __init__(self) -> None:
        self.alive = list(ROUTERS)
        self.next = itertools.count()
        self.held: dict[str, int] = {}
        self.wrong_at = self.refuse_at = -1
        self.sent = 0
        self.begun = False

    async def send(self, request: Request) -> Outcome:
        self.sent += 1
        router = self.alive[next(self.next) % len(self.alive)]
        if self.sent == self.refuse_at:
            raise TargetFailed("away", may_move=not self.begun)
        answer = await self.answer(request.prompt, request.max_tokens)
        if self.sent == self.wrong_at:
            answer[0] += 1
        before = self.held.get(request.conversation_id, 0)
        held = self.held[request.conversation_id] = len(request.prompt) + len(answer) - 1
        return Outcome(answer, 1.0, 1.0, len(request.prompt), len(answer), tokens={"readback": before},
                       router=router, held_tokens=held)  # fmt: skip

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return [3 + (sum(prompt) + number) % 1000 for number in range(max_tokens)]

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        raise AssertionError("nothing is let go here")

    async def close(self) -> None:
        raise AssertionError("the target is the caller's")


def player(target: Balanced, **fields: Any) -> Player:
    clock = itertools.count()
    return Player(
        plan=ReplicaPlan(at_a_time=4),
        target=target,
        reference=target,
        encoder=WORDS,
        clock=lambda: float(next(clock)),
        rota=Rota(ROUTERS),
        **fields,
    )


async def test_consecutive_turns_meet_different_replicas() -> None:
    records = await player(Balanced()).play(sessions(5, 6))
    assert len(records) == 30
    assert [r.turn for r in records if r.conversation == records[0].conversation] == [1, 2, 3, 4, 5, 6]
    for one in records:
        assert (one.previous_router == "") == (one.turn == 1)
        assert one.router != one.previous_router
        assert one.reusable == one.reused == (one.turn > 1)
        assert one.expected_digest == one.actual_digest
    assert replicas.missed(records, [COLD]) == []


async def test_a_refused_turn_is_sent_once_more_and_elsewhere() -> None:
    target = Balanced()

    async def kill(sending: Awaitable[Outcome]) -> Outcome:
        target.refuse_at = target.sent + 1
        try:
            return await sending
        finally:
            target.alive.remove("b")
            playing.rota.lost("b")
            target.next = itertools.count(1)

    playing = player(target, events={4: kill})
    records = await playing.play(sessions(4, 5))
    assert [one.asked_twice for one in records] == [number == 4 for number in range(20)]
    assert {one.router for one in records[4:]} == {"a", "c"}
    assert replicas.missed(records, [COLD]) == []


async def test_a_turn_that_had_begun_or_is_refused_twice_fails_and_ends_its_conversation() -> None:
    target = Balanced()
    target.begun, target.refuse_at = True, 6
    records = await player(target).play(sessions(4, 5))
    [failed] = [one for one in records if one.outcome == replicas.FAILED]
    assert (failed.router, failed.actual_digest, failed.reused, failed.asked_twice) == ("", "", False, False)
    assert len(records) == 20 - (5 - failed.turn)


async def test_an_answer_that_is_not_the_cold_one_is_wrong() -> None:
    target = Balanced()
    target.wrong_at = 3
    records = await player(target).play(sessions(4, 2))
    assert [one.outcome for one in records].count(replicas.WRONG) == 1
    assert records[2].expected_digest != records[2].actual_digest


@pytest.mark.slow
def test_a_small_run_keeps_its_promises(tmp_path: Path) -> None:
    out = tmp_path / "replicas.json"
    shape = ("--turns", "60", "--turns-per-conversation", "6", "--out", str(out))
    program = [sys.executable, "-m", "kvloop.cli.main", "bench", "replicas", *shape]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(out.read_text())
    assert summary["wrong"] == summary["failed"] == summary["same_router_twice"] == 0
    assert summary["reused"] >= 0.99 * summary["reusable"] > 0
    assert summary["contrast_memory"]["reuse_rate"] < 0.5
    assert len(summary["records"]) == summary["turns"] == 60
    assert set(summary["by_router"]) == {"router-0", "router-1", "router-2"}
    served_after = {one["router"] for one in summary["records"][31:]}
    assert len(served_after) == 2
    assert summary["in_outage"]["turns"] > 0
    # An entry that the store lost with its life is not found; nothing of that is wrong.
    assert all(one["expected_digest"] == one["actual_digest"] for one in summary["records"])
