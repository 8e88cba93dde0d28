"""What an answer that is taken up elsewhere goes on with, piece by piece."""

import pytest

from kvloop.router.migration import Replay, Sent, continued, keeps_state, repeatable
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2


def chunk(ids: list[int], text: str = "", **fields: object) -> bytes:
    made = turn_pb2.Chunk(token_ids=tokens.pack(ids), text=text, **fields)  # type: ignore[arg-type]
    return router_service_pb2.GenerateResponse(chunk=made).SerializeToString()


def rest(replay: Replay, raw: bytes) -> tuple[list[int], str] | None:
    left = replay.rest(raw)
    if left is None:
        return None
    parsed = router_service_pb2.GenerateResponse.FromString(left).chunk
    return tokens.unpack(parsed.token_ids), parsed.text


def test_what_was_sent_comes_again_and_is_left_out() -> None:
    replay = Replay(Sent.of([chunk([1, 2], "ab"), chunk([3], "")]))
    assert rest(replay, chunk([1], "a")) is None
    assert not replay.over
    assert rest(replay, chunk([2, 3, 4], "bcd")) == ([4], "cd")
    assert replay.over


def test_text_that_was_held_back_comes_with_the_first_new_chunk() -> None:
    replay = Replay(Sent.of([chunk([1, 2, 3], "a")]))
    assert rest(replay, chunk([1, 2, 3], "a")) is None
    assert replay.over
    late = Replay(Sent.of([chunk([1, 2, 3], "abc")]))
    assert rest(late, chunk([1, 2, 3, 4], "a")) == ([4], "")
    assert not late.over
    assert rest(late, chunk([5], "bcde")) == ([5], "de")


@pytest.mark.parametrize("other", [chunk([1, 9], "ab"), chunk([1, 2], "ax")], ids=["token", "text"])
def test_another_answer_is_refused(other: bytes) -> None:
    with pytest.raises(Failure, match="can't be repeated"):
        Replay(Sent.of([chunk([1, 2], "ab")])).rest(other)


def test_log_probabilities_of_what_was_sent_are_left_out() -> None:
    entries = [
        turn_pb2.PositionLogprobs(candidates=[turn_pb2.TokenLogprob(token_id=n, logprob=-n)])
        for n in (1, 2, 3)
    ]
    left = Replay(Sent.of([chunk([1, 2])])).rest(chunk([1, 2, 3], logprobs=entries))
    assert left is not None
    assert [
        e.candidates[0].token_id for e in router_service_pb2.GenerateResponse.FromString(left).chunk.logprobs
    ] == [3]


def test_an_answer_that_has_ended_needs_its_summary_alone() -> None:
    open_ended = Sent.of([chunk([1, 2])])
    assert open_ended.ending is None
    ended = Sent.of([chunk([1]), chunk([2, 5], finish_reason=turn_pb2.FINISH_REASON_STOP, stop_reason="5")])
    summary = ended.summary()
    assert (summary.finish_reason, summary.stop_reason) == (turn_pb2.FINISH_REASON_STOP, "5")
    assert summary.output_tokens == 3


def sampling(**fields: object) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**{"max_tokens": 10, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 0},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"stop": ["x"]},
        {"bad_words": ["x"]},
        {"max_tokens": None},
        {"structured_outputs": sampling_pb2.StructuredOutputs(json_object=True)},
        {"repetition_detection": sampling_pb2.RepetitionDetection(max_pattern_size=3)},
        {"thinking_token_budget": 5},
        {"extra_args_json": '{"a": 1}'},
        {"spaces_between_special_tokens": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_these_keep_state(fields: dict[str, object]) -> None:
    assert keeps_state(sampling(**fields))
    assert repeatable(sampling(**fields, temperature=0.7)).HasField("seed")
    assert repeatable(sampling(**fields)).HasField("seed"), "the model's own temperature is not known"
    greedy = sampling(**fields, temperature=0.0)
    assert repeatable(greedy) is greedy


def test_these_do_not() -> None:
    plain = sampling(
        temperature=0.7,
        repetition_penalty=1.2,
        presence_penalty=0.0,
        min_tokens=3,
        logprobs=2,
        stop_token_ids=[4],
        logit_bias={3: 1.0},
        allowed_token_ids=[1, 2],
        spaces_between_special_tokens=True,
        extra_args_json="{}",
    )
    assert not keeps_state(plain)
    assert repeatable(plain) is plain


@pytest.mark.parametrize(("count", "most", "least"), [(1, 9, 3), (4, 6, 0), (9, 1, 0)])
def test_limits_count_what_is_there_already(count: int, most: int, least: int) -> None:
    left = continued(sampling(min_tokens=4, prompt_logprobs=1, top_k=5), count)
    assert (left.max_tokens, left.min_tokens, left.top_k) == (most, least, 5)
    assert not left.HasField("prompt_logprobs")
