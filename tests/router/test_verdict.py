"""The verdict, rule by rule and at its borders."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.router.costs import Costs
from kvloop.router.verdict import (
    Decision,
    DirectLimits,
    Expected,
    Holder,
    Lease,
    Question,
    Verdict,
    Why,
    decide,
    expect,
)
from kvloop.runtime import tokens
from kvloop.runtime.digests import COARSE_BYTES, coarse_lengths, prefix_digests
from kvloop.v1alpha1 import lease_pb2

KEY = b"k" * 32
THRESHOLD = 64
WELL = Holder(ready=True, same_epoch=True, can_serve_reads=True)
GOOD = Question(
    prompt_tokens=1000,
    threshold=THRESHOLD,
    lease=Lease(900, 10.0, held=True),
    holder=WELL,
    expected=Expected(900, 901, diverged=False),
)
LIMITS = DirectLimits(max_suffix=100, budget=150)
DIRECT = replace(GOOD, holder=replace(WELL, can_go_on=True), direct=LIMITS)
GOES_ON = Decision(Verdict.VERDICT_DIRECT, Why.REUSE_REASON_PROVEN, 900)
READS = Decision(Verdict.VERDICT_READBACK, Why.REUSE_REASON_PROVEN, 900)


def entry_of(history: list[int], block: int = 16) -> lease_pb2.DirectoryEntry:
    entry = lease_pb2.DirectoryEntry(num_tokens=len(history), block_size=block, held=True)
    lengths = coarse_lengths(len(history), block)
    for at, digest in zip(lengths, prefix_digests(KEY, tokens.pack(history), lengths), strict=True):
        entry.digests.add(num_tokens=at, digest=digest[:COARSE_BYTES])
    return entry


def test_everything_well_reads_back() -> None:
    assert decide(GOOD) == Decision(Verdict.VERDICT_READBACK, Why.REUSE_REASON_PROVEN, 900)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (replace(GOOD, ruled_out=Why.REUSE_REASON_DISABLED), Why.REUSE_REASON_DISABLED),
        (
            replace(GOOD, ruled_out=Why.REUSE_REASON_DIRECTORY_UNAVAILABLE, lease=None),
            Why.REUSE_REASON_DIRECTORY_UNAVAILABLE,
        ),
        (replace(GOOD, lease=None), Why.REUSE_REASON_NOT_FOUND),
        (replace(GOOD, lease=Lease(900, 0.0, held=True)), Why.REUSE_REASON_EXPIRED),
        (replace(GOOD, lease=Lease(900, 10.0, held=False)), Why.REUSE_REASON_EXPIRED),
        (replace(GOOD, holder=None), Why.REUSE_REASON_DECODE_UNAVAILABLE),
        (replace(GOOD, holder=replace(WELL, ready=False)), Why.REUSE_REASON_DECODE_UNAVAILABLE),
        (replace(GOOD, holder=replace(WELL, same_epoch=False)), Why.REUSE_REASON_EPOCH),
        (replace(GOOD, holder=replace(WELL, same_epoch=False, ready=False)), Why.REUSE_REASON_EPOCH),
        (replace(GOOD, holder=replace(WELL, can_serve_reads=False)), Why.REUSE_REASON_INCOMPATIBLE),
        (replace(GOOD, expected=None), Why.REUSE_REASON_BELOW_THRESHOLD),
        (replace(GOOD, expected=Expected(0, 16, diverged=True)), Why.REUSE_REASON_DIVERGED),
    ],
)
def test_each_rule_has_its_reason(question: Question, reason: "Why.ValueType") -> None:
    assert decide(question) == Decision(Verdict.VERDICT_RECOMPUTE, reason)


@pytest.mark.parametrize("diverged", [False, True])
@pytest.mark.parametrize(
    ("readable", "reads"),
    [(0, False), (1, False), (THRESHOLD - 1, False), (THRESHOLD, True), (THRESHOLD + 1, True)],
)
def test_the_threshold(readable: int, reads: bool, diverged: bool) -> None:
    decision = decide(replace(GOOD, expected=Expected(0, readable + 1, diverged)))
    if reads:
        assert decision == Decision(Verdict.VERDICT_READBACK, Why.REUSE_REASON_PROVEN, readable)
    else:
        reason = Why.REUSE_REASON_DIVERGED if diverged else Why.REUSE_REASON_BELOW_THRESHOLD
        assert decision == Decision(Verdict.VERDICT_RECOMPUTE, reason)


@pytest.mark.parametrize(("readable", "reads"), [(0, False), (1, True)])
def test_a_threshold_of_zero_still_wants_something_to_read(readable: int, reads: bool) -> None:
    decision = decide(replace(GOOD, threshold=0, expected=Expected(0, readable + 1, diverged=False)))
    assert (decision.verdict == Verdict.VERDICT_READBACK) == reads


def test_the_last_token_is_always_computed() -> None:
    question = replace(GOOD, prompt_tokens=THRESHOLD + 1, expected=Expected(900, 901, diverged=False))
    assert decide(question).expected_tokens == THRESHOLD
    question = replace(question, prompt_tokens=THRESHOLD)
    assert decide(question).reason == Why.REUSE_REASON_BELOW_THRESHOLD


def test_bounds_of_a_grown_history() -> None:
    history = list(range(100))
    assert expect(KEY, tokens.pack([*history, 1, 2]), entry_of(history)) == Expected(100, 101, False)


def test_bounds_of_the_same_prompt_again() -> None:
    history = list(range(100))
    assert expect(KEY, tokens.pack(history), entry_of(history)) == Expected(99, 100, False)


def test_bounds_of_a_regenerated_prompt_end_with_it() -> None:
    history = list(range(100))
    # Block borders up to 64 agree; the one at 80 is beyond the prompt.
    assert expect(KEY, tokens.pack(history[:70]), entry_of(history)) == Expected(64, 70, False)


@pytest.mark.parametrize(
    ("changed", "bounds"),
    [
        (0, Expected(0, 16, True)),
        (15, Expected(0, 16, True)),
        (16, Expected(16, 32, True)),
        (50, Expected(48, 64, True)),
        (99, Expected(96, 100, True)),
    ],
)
def test_bounds_around_a_changed_token(changed: int, bounds: Expected) -> None:
    history = list(range(100))
    prompt = list(history)
    prompt[changed] += 500
    assert expect(KEY, tokens.pack([*prompt, 1]), entry_of(history)) == bounds


def test_another_key_shares_nothing() -> None:
    history = list(range(100))
    assert expect(b"x" * 32, tokens.pack(history), entry_of(history)) == Expected(0, 16, True)


def test_forged_digests_do_no_harm() -> None:
    entry = lease_pb2.DirectoryEntry(num_tokens=2**31, held=True)
    entry.digests.add(num_tokens=50, digest=b"x" * COARSE_BYTES)
    entry.digests.add(num_tokens=10, digest=b"")
    entry.digests.add(num_tokens=0, digest=b"")
    bounds = expect(KEY, tokens.pack(range(60)), entry)
    assert 0 <= bounds.matched < bounds.upper <= 60


@given(
    history=st.lists(st.integers(0, 3), min_size=1, max_size=300),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=300),
    shared=st.integers(0, 300),
)
def test_the_truth_is_within_the_bounds(history: list[int], prompt: list[int], shared: int) -> None:
    prompt = history[:shared] + prompt
    common = next(
        (i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b),
        min(len(history), len(prompt)),
    )
    bounds = expect(KEY, tokens.pack(prompt), entry_of(history))
    readable = min(common, len(prompt) - 1)
    assert min(bounds.matched, len(prompt) - 1) <= readable < bounds.upper


def test_a_short_suffix_goes_on_where_the_history_is() -> None:
    assert decide(DIRECT) == GOES_ON


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(replace(DIRECT, direct=None), id="switched off"),
        pytest.param(replace(DIRECT, holder=WELL), id="no prefix cache"),
        pytest.param(replace(DIRECT, holder=replace(WELL, can_go_on=True, overloaded=True)), id="much to do"),
        pytest.param(replace(DIRECT, expected=Expected(899, 901, False)), id="not wholly proven"),
        pytest.param(replace(DIRECT, expected=Expected(900, 950, True)), id="diverged"),
    ],
)
def test_otherwise_the_history_is_read(question: Question) -> None:
    assert decide(question).verdict == Verdict.VERDICT_READBACK


@pytest.mark.parametrize(("suffix", "direct"), [(0, False), (1, True), (99, True), (100, True), (101, False)])
def test_the_longest_suffix(suffix: int, direct: bool) -> None:
    question = replace(DIRECT, prompt_tokens=900 + suffix)
    assert (decide(question) == GOES_ON) == direct


@pytest.mark.parametrize(
    ("in_flight", "direct"), [(0, True), (49, True), (50, True), (51, False), (150, False)]
)
def test_the_budget_of_suffix_tokens(in_flight: int, direct: bool) -> None:
    holder = replace(WELL, can_go_on=True, direct_tokens=in_flight)
    assert decide(replace(DIRECT, holder=holder)) == (GOES_ON if direct else READS)


def test_a_suffix_beyond_the_budget_is_taken_alone() -> None:
    assert decide(replace(DIRECT, direct=DirectLimits(max_suffix=100, budget=10))) == GOES_ON


def test_what_is_not_held_any_more_only_its_worker_may_have() -> None:
    soft = replace(DIRECT, lease=Lease(900, 10.0, held=False))
    assert decide(soft) == GOES_ON
    expired = Decision(Verdict.VERDICT_RECOMPUTE, Why.REUSE_REASON_EXPIRED)
    assert decide(replace(soft, prompt_tokens=1001)) == expired


@pytest.mark.parametrize(
    ("costs", "verdict"),
    [
        (Costs(56, 113, 3404), Verdict.VERDICT_DIRECT),
        (Costs(113, 113, 3404), Verdict.VERDICT_DIRECT),
        (Costs(114, 113, 3404), Verdict.VERDICT_READBACK),
        (Costs(60, 87, 59), Verdict.VERDICT_RECOMPUTE),
        (Costs(59, 87, 59), Verdict.VERDICT_DIRECT),
        (Costs(90, 59, 59), Verdict.VERDICT_READBACK),
        (Costs(90, 59.1, 59), Verdict.VERDICT_RECOMPUTE),
    ],
)
def test_the_cheapest_way_and_the_least_work_among_equals(costs: Costs, verdict: "Verdict.ValueType") -> None:
    decision = decide(replace(DIRECT, costs=costs))
    assert decision.verdict == verdict
    costlier = verdict == Verdict.VERDICT_RECOMPUTE
    assert decision.reason == (Why.REUSE_REASON_COSTLIER if costlier else Why.REUSE_REASON_PROVEN)


def test_a_read_that_is_not_open_is_no_rival() -> None:
    soft = replace(DIRECT, lease=Lease(900, 10.0, held=False), costs=Costs(100, 50, 101))
    assert decide(soft) == GOES_ON


def test_limits_hold_whatever_the_costs() -> None:
    cheap = Costs(1, 2, 3000)
    assert decide(replace(DIRECT, prompt_tokens=1001, costs=cheap)).verdict == Verdict.VERDICT_READBACK
    short = replace(GOOD, expected=Expected(0, THRESHOLD, False), costs=cheap)
    assert decide(short).reason == Why.REUSE_REASON_BELOW_THRESHOLD
