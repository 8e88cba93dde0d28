"""Workloads: what is drawn, that a seed names it, that JSON keeps it."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.bench.workload import sharegpt
from kvloop.bench.workload.agentic import REACT_STOP, Agentic
from kvloop.bench.workload.distributions import Constant, LogNormal, UniformInt, whole
from kvloop.bench.workload.lengths import LengthSweep
from kvloop.bench.workload.model import Conversation, History, Kind, Session, Step
from kvloop.bench.workload.multiturn import MultiTurn
from kvloop.bench.workload.words import WordEncoder, words
from kvloop.engine.simulated.lexicon import Syllables

ENCODER = WordEncoder(32_000)


@given(
    mean=st.floats(1, 1e5),
    ratio=st.floats(0.3, 1),
    low=st.floats(0, 100),
    span=st.floats(0, 1e5),
    seed=st.integers(),
)
def test_lognormal_stays_between_its_ends(
    mean: float, ratio: float, low: float, span: float, seed: int
) -> None:
    value = LogNormal(mean, ratio, low, low + span).draw(random.Random(seed))
    assert low <= value <= low + span


def test_lognormal_has_its_mean_and_its_median() -> None:
    rng = random.Random(1)
    drawn = [LogNormal(4_000, 0.85).draw(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(4_000, rel=0.03)
    assert statistics.median(drawn) == pytest.approx(0.85 * 4_000, rel=0.03)


def test_lognormal_by_median_has_that_median() -> None:
    rng = random.Random(1)
    drawn = [LogNormal.by_median(43, 0.6).draw(rng) for _ in range(20_000)]
    assert statistics.median(drawn) == pytest.approx(43, rel=0.03)


@given(low=st.integers(0, 50), span=st.integers(0, 50), least=st.integers(0, 60), seed=st.integers())
def test_whole_draws_are_whole_and_at_least_what_is_wanted(
    low: int, span: int, least: int, seed: int
) -> None:
    value = whole(UniformInt(low, low + span), random.Random(seed), least)
    assert isinstance(value, int)
    assert max(low, least) <= value <= max(low + span, least)


@given(count=st.integers(0, 500), seed=st.integers(), vocabulary=st.integers(2, 200_000))
def test_a_word_is_one_token_of_the_vocabulary(count: int, seed: int, vocabulary: int) -> None:
    ids = WordEncoder(vocabulary).encode(words(random.Random(seed), count))
    assert len(ids) == count
    assert all(0 <= token < vocabulary for token in ids)


@given(seed=st.integers(0, 2**32), number=st.integers(0, 50))
def test_multi_turn_keeps_to_its_parameters(seed: int, number: int) -> None:
    session = MultiTurn().session(seed, number)
    assert session == MultiTurn().session(seed, number)
    assert not session.forks
    assert 6 <= len(session.main.steps) <= 9
    assert 501 <= len(session.main.opening.split()) <= 10_500
    for step in session.main.steps:
        assert 120 <= len(step.text.split()) <= 160
        assert 800 <= step.output_tokens <= 1_200


@pytest.mark.parametrize(("messages", "turns"), [(1, 1), (2, 1), (12, 6), (13, 7), (14, 7), (17, 9), (18, 9)])
def test_messages_of_both_sides_make_turns_of_two(messages: int, turns: int) -> None:
    shape = MultiTurn(messages=Constant(messages), opening_tokens=Constant(1))
    assert len(shape.session(0, 0).main.steps) == turns


def test_multi_turn_shares_an_opening_and_nothing_else() -> None:
    first, second = MultiTurn().sessions(3, 2)
    first_words, second_words = first.main.opening.split(), second.main.opening.split()
    assert first_words[:500] == second_words[:500]
    assert first_words[500:540] != second_words[500:540]
    assert MultiTurn().session(4, 0) != first


@pytest.fixture(scope="module")
def traces() -> list[Session]:
    # What is counted below does not depend on the lengths of texts.
    return Agentic(scale=0.02).sessions(11, 600)


def test_agentic_has_the_published_figures(traces: list[Session]) -> None:
    turns = [len(session.main.steps) for session in traces]
    assert statistics.median(turns) == pytest.approx(43, rel=0.1)
    assert min(turns) >= 3
    assert max(turns) <= 200
    forked = [session for session in traces if session.forks]
    assert len(forked) / len(traces) == pytest.approx(0.44, abs=0.06)
    steps = [step for session in traces for step in session.main.steps]
    assert statistics.fmean(step.output_tokens for step in steps) / 0.02 == pytest.approx(444, rel=0.1)


def test_simulated_engines_say_the_stop_string_that_is_documented() -> None:
    lexicon, rng = Syllables(32_000), random.Random(0)
    said = "".join(lexicon.word(lexicon.token(rng.getrandbits(60))) for _ in range(60_000))
    assert 60_000 / said.count("zu bi") == pytest.approx(300, rel=0.2)
    assert REACT_STOP not in said
    made = [Agentic(stop="zu bi").session(0, number).main.steps[0].stop for number in range(20)]
    assert set(made) == {(), ("zu bi",)}


def test_agentic_gaps_kinds_and_stops_are_as_documented(traces: list[Session]) -> None:
    later = [step for session in traces for step in session.main.steps[1:]]
    tools = [step.gap_s for step in later if step.role == "tool"]
    assert statistics.median(tools) == pytest.approx(2, rel=0.15)
    assert min(tools) >= 0.05
    assert max(tools) <= 60
    turns = [step for step in later if step.kind is Kind.TURN]
    assert sum(step.role == "user" for step in turns) / len(turns) == pytest.approx(0.12, abs=0.02)
    regenerated = sum(step.kind is Kind.REGENERATE for step in later) / len(later)
    assert regenerated == pytest.approx(0.02, abs=0.006)
    assert any(step.kind is Kind.COMPACT for step in later)
    stopping = [session for session in traces if session.main.steps[0].stop]
    assert len(stopping) / len(traces) == pytest.approx(0.30, abs=0.06)
    for session in stopping:
        for conversation in (session.main, *session.forks):
            assert {step.stop for step in conversation.steps} == {(REACT_STOP,)}


@given(seed=st.integers(0, 2**32))
def test_agentic_sessions_can_be_played(seed: int) -> None:
    session = Agentic(scale=0.001).session(seed, 0)
    steps = session.main.steps
    assert steps[0].kind is Kind.TURN
    assert steps[0].gap_s == 0
    assert all(step.text or step.kind is Kind.REGENERATE for step in steps)
    for fork in session.forks:
        assert 1 <= fork.fork_after < len(steps)
        assert fork.steps[0].kind is not Kind.REGENERATE
        assert fork in session.forks_after(fork.fork_after)


def test_history_grows_regenerates_compacts_and_forks() -> None:
    history = History.open(ENCODER, "a b")
    first = list(history.ask(Step("c d", 4)))
    assert first == ENCODER.encode("a b c d")
    history.answered([1, 2])
    assert history.ask(Step("", 4, Kind.REGENERATE)) == first
    history.answered([3])
    forked = history.fork()
    assert history.ask(Step("e", 4)) == [*first, 3, *ENCODER.encode("e")]
    assert forked.ask(Step("f", 4)) == [*first, 3, *ENCODER.encode("f")]
    history.answered([9])
    assert history.ask(Step("g h", 4, Kind.COMPACT)) == ENCODER.encode("a b g h")


@given(length=st.integers(194, 3_000), repetition=st.integers(-3, 20), seed=st.integers(0, 99))
def test_a_length_sample_has_exactly_its_length(length: int, repetition: int, seed: int) -> None:
    shape = LengthSweep(suffix_tokens=160, answer_tokens=32)
    sample = shape.sample(seed, length, repetition)
    assert sample == shape.sample(seed, length, repetition)
    assert len(sample.opening.split()) + 32 + len(sample.suffix.split()) == length


def test_a_length_without_history_is_refused() -> None:
    assert LengthSweep(160, 32).sample(0, 193, 0).opening
    with pytest.raises(ValueError, match="leaves no history"):
        LengthSweep(160, 32).sample(0, 192, 0)


_TEXT = st.text(max_size=30)
_STEPS = st.builds(
    Step,
    text=_TEXT,
    output_tokens=st.integers(1, 5_000),
    kind=st.sampled_from(Kind),
    role=st.sampled_from(["user", "tool"]),
    gap_s=st.floats(0, 600),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=2).map(tuple),
    answer=st.none() | _TEXT,
)


@st.composite
def _sessions(draw: Any) -> list[Session]:
    sessions = []
    for number in range(draw(st.integers(1, 3))):
        steps = tuple(draw(st.lists(_STEPS, min_size=1, max_size=4)))
        forks = tuple(
            Conversation(
                f"{number}-{index}",
                tuple(draw(st.lists(_STEPS, min_size=1, max_size=2))),
                fork_after=draw(st.integers(1, len(steps))),
            )
            for index in range(draw(st.integers(0, 2)))
        )
        sessions.append(Session(Conversation(str(number), steps, opening=draw(_TEXT)), forks))
    return sessions


@given(sessions=_sessions())
def test_json_keeps_everything(sessions: list[Session]) -> None:
    assert sharegpt.from_json(sharegpt.to_json(sessions)) == sessions


def asserted(content: Any) -> None:
    """Assert what vLLM's benchmark_serving_multi_turn.py and its bench_dataset.py do of a file."""
    names = [entry["id"] for entry in content]
    assert all(isinstance(name, str) for name in names)
    assert len(set(names)) == len(names)
    for entry in content:
        messages = entry["messages"]
        assert isinstance(messages, list)
        assert messages
        for place in range(0, len(messages), 2):
            question, answer = messages[place : place + 2]
            assert set(question) == set(answer) == {"role", "content"}
            assert (question["role"], answer["role"]) == ("user", "assistant")
            assert isinstance(question["content"], str)


@given(sessions=_sessions())
def test_vllms_benchmark_would_take_a_file(sessions: list[Session]) -> None:
    asserted(json.loads(json.dumps(sharegpt.to_json(sessions))))


def test_vllms_benchmark_would_ask_for_the_same_of_generated_workloads() -> None:
    agents = Agentic(scale=0.02).sessions(5, 20)
    plain = MultiTurn().sessions(5, 2)
    for sessions in (agents, plain):
        content = sharegpt.to_json(sessions)
        asserted(content)
        played = [c for session in sessions for c in (session.main, *session.forks)]
        for entry, conversation in zip(content, played, strict=True):
            answers = [len(ENCODER.encode(message["content"])) for message in entry["messages"][1::2]]
            assert answers == [step.output_tokens for step in conversation.steps]
            first = ENCODER.encode(entry["messages"][0]["content"])
            assert first == ENCODER.encode(f"{conversation.opening} {conversation.steps[0].text}")
    assert any(step.role == "tool" for session in agents for step in session.main.steps)


def test_files_of_earlier_versions_are_read() -> None:
    asked = {"role": "tool", "content": "b", "kvloop": {"output_tokens": 7, "gap_s": 2.0, "stop": ["x"]}}
    messages = [{"role": "system", "content": "a"}, asked]
    messages.append({"role": "assistant", "content": "", "kvloop": {"generate": True}})
    (session,) = sharegpt.from_json([{"id": "a", "messages": messages}])
    step = Step("b", 7, role="tool", gap_s=2.0, stop=("x",))
    assert session.main == Conversation("a", (step,), opening="a")


def test_generated_workloads_survive_a_file(tmp_path: Path) -> None:
    sessions = Agentic(scale=0.005).sessions(5, 6)
    sharegpt.save(tmp_path / "deep" / "trace.json", sessions)
    assert sharegpt.load(tmp_path / "deep" / "trace.json") == sessions


def test_both_formats_of_others_are_read() -> None:
    said = [("system", "be brief"), ("user", "one"), ("assistant", "two words"), ("user", "three")]
    openai = [{"id": "x", "messages": [{"role": role, "content": text} for role, text in said]}]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"id": "x", "conversations": [{"from": names[role], "value": text} for role, text in said]}]
    (session,) = sharegpt.from_json(openai, output_tokens=50)
    assert [session] == sharegpt.from_json(shared, output_tokens=50)
    assert session.main.opening == "be brief"
    assert [step.text for step in session.main.steps] == ["one", "three"]
    assert [step.answer for step in session.main.steps] == ["two words", None]
    assert [step.output_tokens for step in session.main.steps] == [2, 50]


_PAIR = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        [3],
        [{"id": "a", "messages": []}],
        [{"id": "a", "messages": [{"role": "assistant", "content": "alone"}]}],
        [{"id": "a", "messages": ["text"]}],
        [{"id": "a", "messages": [{"role": "king", "content": "x"}]}],
        [{"id": "a", "messages": [{"role": "user", "content": ["parts"]}]}],
        [{"id": "a", "messages": [{"role": "user", "content": "x"}]}] * 2,
        [{"id": "a", "messages": [{"role": "user", "content": "x"}], "kvloop": {"parent": "b"}}],
        [{"id": "a", "messages": [{"role": "user", "content": "x", "kvloop": {"kind": "odd"}}]}],
        [{"id": "a", "messages": [{"role": "user", "content": "x"}], "kvloop": {"steps": [{}]}}],
        [{"id": "a", "messages": _PAIR, "kvloop": {"steps": 1}}],
        [{"id": "a", "messages": _PAIR, "kvloop": {"steps": [{}, {}]}}],
        [{"id": "a", "messages": _PAIR, "kvloop": {"steps": [{}], "opening_chars": "1"}}],
    ],
)
def test_what_is_no_workload_is_refused(content: object) -> None:
    with pytest.raises(sharegpt.BadWorkload):
        sharegpt.from_json(content)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with pytest.raises(sharegpt.BadWorkload, match=r"x\.json"):
        sharegpt.load(file)
    file.write_text("{")
    with pytest.raises(sharegpt.BadWorkload, match=r"x\.json"):
        sharegpt.load(file)
