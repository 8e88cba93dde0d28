"""Sessions under load, on a target in memory and on an OpenAI-compatible server in memory."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from bench_fakes import FakeTarget
from click.testing import CliRunner

from kvloop.bench.http_target import HttpTarget
from kvloop.bench.load import Load, LoadPlan, Outgrown
from kvloop.bench.load_report import caveats, retokenized, summarise_load
from kvloop.bench.records import Record
from kvloop.bench.target import Outcome, Request, TargetFailed
from kvloop.bench.workload.agentic import Agentic, fitting_scale
from kvloop.bench.workload.model import Conversation, History, Kind, Session, Step
from kvloop.bench.workload.words import WordEncoder
from kvloop.cli.bench.load import make_command
from kvloop.gateway.admission import reuse_of
from kvloop.gateway.identity import identify
from kvloop.v1alpha1 import router_service_pb2

ENCODER = WordEncoder(32_000)


def session(name: str, steps: int, forks: tuple[Conversation, ...] = ()) -> Session:
    made = tuple(Step(f"question {number}", 3) for number in range(steps))
    return Session(Conversation(name, made, opening="an opening"), forks)


class Meeting(FakeTarget):
    """Answers once so many requests are there at the same time."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(wanted)

    async def send(self, request: Request) -> Outcome:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self._barrier.wait()
        self.running -= 1
        return await super().send(request)


async def play(plan: LoadPlan, sessions: list[Session], target: FakeTarget) -> list[Record]:
    records: list[Record] = []
    await Load(plan, target, ENCODER, records.append).play(sessions)
    return records


async def test_a_conversation_is_played_turn_after_turn_on_its_own_answers() -> None:
    target = FakeTarget()
    records = await play(LoadPlan(), [session("a", 3)], target)
    assert [record.turn for record in records] == [1, 2, 3]
    first, second, _ = target.asked
    assert list(first.prompt) == ENCODER.encode("an opening question 0")
    assert len(second.prompt) == len(first.prompt) + 3 + 2
    assert {request.conversation_id for request in target.asked} == {target.ended[0][0]}


async def test_clients_of_a_closed_loop_work_at_once_and_no_more_of_them() -> None:
    target = Meeting(3)
    records = await play(LoadPlan(clients=3), [session(str(number), 2) for number in range(6)], target)
    assert len(records) == 12
    assert target.most_running == 3


async def test_sessions_of_an_open_loop_do_not_wait_for_each_other() -> None:
    target = Meeting(5)
    plan = LoadPlan(clients=None, rate=1e4)
    records = await play(plan, [session(str(number), 1) for number in range(5)], target)
    assert len(records) == 5


async def test_forks_start_from_their_parent_and_run_at_once() -> None:
    steps = (Step("side", 3), Step("more", 3))
    forks = tuple(Conversation(f"fork-{n}", steps, fork_after=2) for n in range(2))
    target = FakeTarget()
    records = await play(LoadPlan(), [session("main", 3, forks)], target)
    assert len(records) == 7
    main = [request for request in target.asked if request.conversation_id.startswith("main")]
    for number in range(2):
        first, second = [r for r in target.asked if r.conversation_id.startswith(f"fork-{number}")]
        assert first.parent_conversation_id == main[0].conversation_id
        assert second.parent_conversation_id == ""
        assert list(first.prompt[: len(main[1].prompt)]) == list(main[1].prompt)
    # The parent went on only after its forks.
    assert target.asked[-1] is main[-1]
    assert len(target.ended) == 3


async def test_a_failed_request_ends_its_conversation_alone() -> None:
    target = FakeTarget(fails_at=2)
    records = await play(LoadPlan(), [session("a", 3), session("b", 3)], target)
    assert [bool(record.error) for record in records] == [False, True, False, False, False]
    assert len(target.ended) == 2


async def test_warm_up_does_not_count_and_the_limit_ends_a_run() -> None:
    records = await play(
        LoadPlan(warm_up=2, max_requests=5), [session("a", 4), session("b", 4)], FakeTarget()
    )
    assert [record.measured for record in records] == [False, False, True, True, True]


async def test_conversations_that_outgrow_the_model_end() -> None:
    target = FakeTarget()
    await play(LoadPlan(max_model_len=16), [session("a", 9)], target)
    assert target.asked
    assert all(len(request.prompt) + request.max_tokens <= 16 for request in target.asked)


async def test_what_outgrown_conversations_leave_unplayed_is_counted_and_told() -> None:
    summary_of_all = Step("a summary", 3, Kind.COMPACT)
    steps = (Step("one", 3), Step("two", 3), Step("three", 3), summary_of_all, Step("five", 3))
    forks = (
        Conversation("f-0", (Step("w " * 9, 3), Step("more", 3)), fork_after=1),
        Conversation("f-1", (Step("side", 3), Step("w " * 9, 3)), fork_after=1),
        Conversation("f-2", (Step("late", 3), summary_of_all), fork_after=3),
    )
    records: list[Record] = []
    # The opening's two tokens, and four of each turn: the third would need 2 + 4 + 4 + 1 + 3.
    load = Load(LoadPlan(max_model_len=13), FakeTarget(), ENCODER, records.append)
    whole = Session(Conversation("main", steps, opening="an opening"), forks)
    await load.play([whole, session("b", 1)])
    assert [record.turn for record in records] == [1, 1, 2, 1]
    # Two forks had no room for the long step; the third was never come to.
    assert load.outgrown == Outgrown(conversations=3, turns=3 + 2 + 1 + 2, forks=2, compactions=2)
    settings = {"max_model_len": 13, "workload": "trace.json"}
    summary = summarise_load(records, settings, complete=True, planned=12, outgrown=load.outgrown)
    assert summary["outgrown"] == {"conversations": 3, "turns": 8, "forks": 2, "compactions": 2}
    assert len(records) + summary["outgrown"]["turns"] == whole.requests + 1
    assert caveats(summary) == [
        "3 conversations outgrew --max-model-len 13: 8 of 12 requests were not played, among them 2 whole"
        " forks and 2 compactions"
    ]
    agents = summary | {"settings": {"max_model_len": 32_768, "workload": "agentic"}}
    assert caveats(agents)[0].endswith("; at --scale 0.204 all fit")
    assert caveats(summarise_load(records, {}, complete=True)) == []


@pytest.mark.parametrize("limit", [8_192, 32_768, 40_960, 131_072])
async def test_at_the_scale_that_is_told_agents_outgrow_nothing(limit: int) -> None:
    sessions = Agentic(scale=fitting_scale(limit)).sessions(1, 12)
    for one in sessions:
        history = History.open(ENCODER, one.main.opening)
        for step in one.main.steps:
            assert len(history.ask(step)) + step.output_tokens <= limit
            history.answered([1] * step.output_tokens)
    assert fitting_scale(0) == 0


async def test_stop_strings_are_counted_as_they_were_asked_for_and_hit() -> None:
    class Stopping(FakeTarget):
        async def send(self, request: Request) -> Outcome:
            outcome = await super().send(request)
            told = [("stop", "x"), ("stop", "7"), ("length", ""), ("", ""), ("stop", "")]
            reason, by = told[len(self.asked) - 1]
            return replace(outcome, finish_reason=reason, stop_reason=by)

    steps = tuple(Step("on", 3, stop=("x",)) for _ in range(5))
    for exact, hit in ((True, [True, False, False, False, True]), (False, [True] + 4 * [False])):
        records = await play(LoadPlan(exact=exact), [Session(Conversation("a", steps))], Stopping())
        assert [record.stop_hit for record in records] == hit
        assert [record.finish_reason for record in records] == ["stop", "stop", "length", "", "stop"]
    summary = summarise_load(records, {}, complete=True)
    assert summary["stop_strings"] == {"asked": 5, "hit": 1, "not_told": 1}
    assert caveats(summary) == ["stop strings: asked 5, hit 1, not told 1"]
    plain = await play(LoadPlan(), [session("a", 2)], FakeTarget())
    assert "stop_strings" not in summarise_load(plain, {}, complete=True)


async def test_that_reuse_went_on_may_be_unknown() -> None:
    class Untold(FakeTarget):
        async def send(self, request: Request) -> Outcome:
            return replace(await super().send(request), verdict="", reason="")

    for target, told in ((Untold(), True), (FakeTarget(), False)):
        records = await play(LoadPlan(reuse=False), [session("a", 2)], target)
        said = caveats(summarise_load(records, {"reuse": False}, complete=True))
        assert bool(said) is told
    assert caveats(summarise_load(records, {"reuse": True}, complete=True)) == []


async def test_an_agentic_trace_is_played_whole() -> None:
    sessions = Agentic(scale=0.002, time_scale=0).sessions(3, 4)
    records = await play(LoadPlan(clients=4), sessions, FakeTarget())
    assert len(records) == sum(one.requests for one in sessions)


async def test_an_ended_run_keeps_its_records_and_lets_go() -> None:
    class Endless(FakeTarget):
        async def send(self, request: Request) -> Outcome:
            if len(self.asked) == 2:
                reached.set()
                await asyncio.Event().wait()
            return await super().send(request)

    reached = asyncio.Event()
    target, records = Endless(), list[Record]()
    work = asyncio.create_task(Load(LoadPlan(), target, ENCODER, records.append).play([session("a", 5)]))
    await reached.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert len(records) == 2
    assert len(target.ended) == 1


def test_a_run_keeps_all_of_its_settings_and_says_whose_machine_is_meant(tmp_path: Path) -> None:
    given = ["agentic", "--sessions", "1", "--scale", "0.01", "--stop", "zu bi", "--plain"]
    given += ["--max-model-len", "4096", "--max-requests", "2", "--vocabulary", "500", "--name", "mine"]
    # Nobody is there: what was asked for is kept all the same.
    given += ["--url", "http://127.0.0.1:1", "--model", "m", "--out", str(tmp_path)]
    result = CliRunner().invoke(make_command(), given)
    assert result.exit_code == 1, result.output
    settings = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["settings"]
    assert settings.pop("client").keys() == {"machine", "versions"}
    del settings["date"]
    assert settings == {
        "name": "mine",
        "workload": "agentic",
        "target": "http://127.0.0.1:1",
        "model": "m",
        "sessions": 1,
        "seed": 0,
        "clients": 1,
        "rate": None,
        "scale": 0.01,
        "time_scale": 1.0,
        "stop": "zu bi",
        "warm_up": 0,
        "max_requests": 2,
        "max_model_len": 4096,
        "reuse": True,
        "exact": False,
        "plain": True,
        "vocabulary": 500,
        "tokenizer": None,
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--plain",), "--plain is for servers of --url"),
        (("--url", "http://127.0.0.1:1", "--plain", "--no-reuse"), "drop one"),
    ],
)
def test_settings_that_contradict_are_refused(given: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(make_command(), list(given))
    assert result.exit_code == 1
    assert said in result.output


def test_one_loop_or_the_other() -> None:
    with pytest.raises(ValueError, match="either clients"):
        LoadPlan(clients=2, rate=1.0)
    with pytest.raises(ValueError, match="either clients"):
        LoadPlan(clients=None)


async def test_a_summary_of_a_load() -> None:
    records = await play(LoadPlan(warm_up=1), [session("a", 4)], FakeTarget())
    summary = summarise_load(records, {}, complete=True)
    assert (summary["requests"], summary["measured"]) == (4, 3)
    assert summary["verdicts"] == {"READBACK, PROVEN": 3}
    assert summary["distribution"]["ttft_ms"]["p99"] == 100.0
    assert summary["output_tokens_per_s"] * summary["span_s"] == pytest.approx(9)
    assert summarise_load([], {}, complete=False)["measured"] == 0


def http_target(
    *events: str, status: int = 200, seen: list[httpx.Request] | None = None, plain: bool = False
) -> HttpTarget:
    def answer(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        return httpx.Response(status, text="".join(f"data: {event}\n\n" for event in events))

    transport = httpx.MockTransport(answer)
    return HttpTarget("http://server/", "m", ENCODER, token="t", plain=plain, transport=transport)


REQUEST = Request(prompt=[5, 6, 7], max_tokens=3, conversation_id="c", stop=("x",))
USAGE = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


async def test_an_openai_server_is_a_target() -> None:
    seen: list[httpx.Request] = []
    first, second = (
        f'{{"choices": [{{"text": "{t}", "token_ids": [{n}]}}]}}' for t, n in (("a", 8), ("b", 9))
    )
    target = http_target(first, second, USAGE, "[DONE]", seen=seen)
    outcome = await target.send(REQUEST)
    await target.close()
    assert outcome.token_ids == [8, 9]
    assert (outcome.input_num_tokens, outcome.output_num_tokens) == (3, 2)
    assert 0 < outcome.ttft_ms <= outcome.latency_ms
    body = json.loads(seen[0].content)
    assert body["prompt"] == [5, 6, 7]
    assert (body["conversation_id"], body["stop"], body["max_tokens"]) == ("c", ["x"], 3)
    assert seen[0].headers["x-session-id"] == "c"
    assert seen[0].headers["authorization"] == "Bearer t"
    assert str(seen[0].url) == "http://server/v1/completions"


async def test_a_gateway_is_told_what_may_be_reused_and_what_a_conversation_came_from() -> None:
    seen: list[httpx.Request] = []
    report = {"verdict": "recompute", "reason": "disabled", "reused_tokens": 2, "held_tokens": 4}
    end = json.dumps(
        {"choices": [{"text": "a", "token_ids": [8], "finish_reason": "stop", "stop_reason": "x"}]}
        | {"kvloop": report}
    )
    target = http_target(end, USAGE, "[DONE]", seen=seen)
    outcome = await target.send(replace(REQUEST, reuse=False, parent_conversation_id="p"))
    await target.send(REQUEST)
    await target.close()
    # As the gateway itself reads them.
    assert reuse_of(seen[0].headers) == router_service_pb2.REUSE_POLICY_FORBID
    assert reuse_of(seen[1].headers) == router_service_pb2.REUSE_POLICY_UNSPECIFIED
    identity = identify(json.loads(seen[0].content), seen[0].headers)
    assert (identity.conversation_id, identity.parent_conversation_id) == ("c", "p")
    assert "parent_conversation_id" not in json.loads(seen[1].content)
    assert outcome.tokens == {"reused": 2, "computed": 1}
    assert (outcome.verdict, outcome.held_tokens) == ("RECOMPUTE", 4)
    assert (outcome.finish_reason, outcome.stop_reason) == ("stop", "x")


async def test_a_strict_server_gets_no_field_that_openai_does_not_have() -> None:
    seen: list[httpx.Request] = []
    target = http_target('{"choices": [{"text": "a"}]}', USAGE, "[DONE]", seen=seen, plain=True)
    outcome = await target.send(replace(REQUEST, parent_conversation_id="p", cache_salt="s"))
    await target.close()
    assert set(json.loads(seen[0].content)) == {
        *("model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "stop")
    }
    assert outcome.tokens == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            '{"error": {"message": "max_tokens is too large", "type": "x"}}',
            "answered 400: max_tokens is too large",
        ),
        ('{"object": "error", "message": "no such model"}', "answered 400: no such model"),
        (
            '{"detail": [{"loc": ["body"], "msg": "extra"}]}',
            'answered 400: [{"loc": ["body"], "msg": "extra"}]',
        ),
        ("<html>\n bad gateway</html>", "answered 400: <html> bad gateway</html>"),
        ("", "answered 400"),
        ("w" * 5000, f"answered 400: {'w' * 197}..."),
    ],
)
async def test_what_a_server_says_of_a_refused_request_is_told(body: str, said: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(400, text=body))
    target = HttpTarget("http://server", "m", ENCODER, transport=transport)
    with pytest.raises(TargetFailed) as failure:
        await target.send(REQUEST)
    assert str(failure.value) == f"http://server {said}"
    await target.close()


async def test_what_a_server_says_in_the_middle_of_a_stream_is_told() -> None:
    target = http_target('{"error": {"message": "out of blocks"}}', "[DONE]")
    with pytest.raises(TargetFailed, match="with an error: out of blocks"):
        await target.send(REQUEST)
    await target.close()


async def test_answers_without_ids_are_encoded_again() -> None:
    target = http_target('{"choices": [{"text": "two words"}]}', USAGE, "[DONE]")
    outcome = await target.send(REQUEST)
    assert outcome.token_ids == ENCODER.encode("two words")
    assert outcome.retokenized
    await target.close()
    told = http_target('{"choices": [{"text": "two words", "token_ids": [1]}]}', USAGE, "[DONE]")
    assert not (await told.send(REQUEST)).retokenized
    await told.close()


async def test_answers_without_ids_are_told_once_for_a_run() -> None:
    target = http_target('{"choices": [{"text": "two words"}]}', USAGE, "[DONE]")
    records: list[Record] = []
    await Load(LoadPlan(warm_up=1), target, ENCODER, records.append).play([session("a", 3)])
    await target.close()
    assert [record.retokenized for record in records] == [True] * 3
    summary = summarise_load(records, {}, complete=True)
    assert summary["retokenized"] == 2
    assert retokenized(summary).startswith("2 of 2 answers came without token ids")
    known = [replace(record, retokenized=False) for record in records]
    assert retokenized(summarise_load(known, {}, complete=True)) == ""


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (('{"choices": [{"text": "a"}]}',), 200),
        (("[DONE]",), 200),
        (('{"error": {"message": "m"}}', "[DONE]"), 200),
        (("no json",), 200),
        ((), 503),
    ],
)
async def test_what_is_no_answer_is_a_failure(events: tuple[str, ...], status: int) -> None:
    target = http_target(*events, status=status)
    with pytest.raises(TargetFailed):
        await target.send(REQUEST)
    await target.close()
