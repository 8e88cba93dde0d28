"""Intervals, tests, and telling a change from noise."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloop.bench import conversations, statistics
from kvloop.bench.compare import Finding, compare, dropped, loads
from kvloop.bench.records import Record

_TIMES = st.lists(st.floats(0.1, 1e5), min_size=2, max_size=12)


@settings(max_examples=25)
@given(samples=_TIMES)
@example(samples=[1.0, 8623.382796905056])
def test_a_median_lies_in_its_interval_and_that_between_the_samples(samples: list[float]) -> None:
    found = statistics.median(samples)
    assert found.low is not None
    assert found.high is not None
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)
    assert found == statistics.median(samples)


def test_a_single_sample_has_no_interval() -> None:
    assert statistics.median([3.0]) == statistics.Estimate(3.0, None, None, 1)
    assert statistics.ratio([3.0, 4.0], [2.0]) == statistics.Estimate(1.75, None, None, 1)


def test_few_samples_have_a_range_and_no_interval() -> None:
    five, six = statistics.median([5, 1, 4, 2, 3]), statistics.median([5, 1, 4, 2, 3, 6])
    assert five.as_dict() == {"value": 3.0, "range_low": 1.0, "range_high": 5.0, "n": 5}
    assert set(six.as_dict()) == {"value", "ci_low", "ci_high", "n"}
    few = statistics.ratio([2, 4, 8, 6, 5, 3], [1, 2, 1, 1, 2])
    assert few.as_dict() == {"value": 4.5, "range_low": 1.0, "range_high": 8.0, "n": 5}
    assert not statistics.ratio([2, 4, 8, 6, 5, 3], [1, 2, 1, 1, 2, 2]).is_range
    assert statistics.median([3.0]).as_dict() == {"value": 3.0, "range_low": None, "range_high": None, "n": 1}
    assert statistics.bounds(five.as_dict()) == (1.0, 5.0)
    assert statistics.bounds(six.as_dict()) == (six.low, six.high)
    assert statistics.bounds(statistics.median([3.0]).as_dict()) is None


def _of(cells: dict[int, list[float]]) -> list[Record]:
    return [
        Record("readback", length, "c", 2, measured=True, ttft_ms=value)
        for length, values in cells.items()
        for value in values
    ]


def test_few_samples_tell_a_change_only_where_their_ranges_are_apart() -> None:
    lengths = (512, 1024, 2048)
    before = _of({length: [10, 11, 12, 13, 14] for length in lengths})
    (apart,) = compare(before, _of({length: [15, 16, 17, 18, 19] for length in lengths}))
    assert (apart.finding, [cell.apart for cell in apart.cells]) == (Finding.SLOWER, [True] * 3)
    touching = {length: [15.0, 16, 17, 18, 19] for length in lengths} | {2048: [14.0, 16, 17, 18, 19]}
    (overlapping,) = compare(before, _of(touching))
    assert overlapping.finding is Finding.TOO_FEW
    # Lengths with more samples decide then.
    more = _of({512: [10, 11, 12, 13, 14, 15], 2048: [10, 11]})
    (decided,) = compare(more, _of({512: [20, 21, 22, 23, 24, 25], 2048: [9, 12]}))
    assert decided.finding is Finding.SLOWER
    assert decided.p == pytest.approx(statistics.smallest_p(6, 6), abs=2e-3)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(4)
    covered = 0
    for _ in range(60):
        found = statistics.median([rng.lognormvariate(0, 1) for _ in range(25)])
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.0 <= found.high
    assert 50 <= covered <= 60


def test_a_ratio_is_of_medians_with_an_interval_around_it() -> None:
    rng = random.Random(2)
    above = [rng.uniform(90, 110) for _ in range(20)]
    below = [value / 4 for value in above]
    found = statistics.ratio(above, below)
    assert found.value == pytest.approx(4)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 4 < found.high
    assert found.high - found.low < 1


def test_holm_adjusts_upwards_in_order() -> None:
    assert statistics.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {
        "a": pytest.approx(0.03),
        "c": pytest.approx(0.06),
        "b": pytest.approx(0.06),
    }
    assert statistics.holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_the_smallest_p_is_reached_by_samples_that_do_not_overlap() -> None:
    assert statistics.rank_test([1, 2, 3], [4, 5, 6]) == pytest.approx(statistics.smallest_p(3, 3))
    assert statistics.smallest_p(4, 4) == pytest.approx(2 / 70)


def test_strata_add_up_where_each_alone_says_little() -> None:
    strata: list[tuple[Sequence[float], Sequence[float]]] = [([10, 11, 12], [13, 14, 15])] * 4
    assert statistics.stratified_test(strata[:1]) > 0.05
    assert statistics.stratified_test(strata) < 0.001
    # A difference between strata is none between runs.
    assert statistics.stratified_test([([1, 2, 3], [1, 2, 3]), ([90, 91, 92], [90, 91, 92])]) > 0.5


def _run(seed: int, factors: dict[str, float], samples: int = 8, noise: float = 0.05) -> list[Record]:
    rng = random.Random(seed)
    return [
        Record(
            leg=leg,
            nominal_tokens=length,
            conversation_id="c",
            turn=2,
            measured=True,
            ttft_ms=length * factor * rng.lognormvariate(0, noise),
        )
        for leg, factor in factors.items()
        for length in (512, 1024, 2048)
        for _ in range(samples)
    ]


def test_a_change_is_told_from_noise() -> None:
    before = _run(1, {"off-cold": 1.0, "readback": 0.1, "direct": 0.05})
    after = _run(2, {"off-cold": 1.0, "readback": 0.12, "direct": 0.04})
    found = {one.leg: one for one in compare(before, after)}
    assert {leg: one.finding for leg, one in found.items()} == {
        "off-cold": Finding.NOISE,
        "readback": Finding.SLOWER,
        "direct": Finding.FASTER,
    }
    assert found["readback"].ratio == pytest.approx(1.2, rel=0.05)
    assert [cell.nominal_tokens for cell in found["readback"].cells] == [512, 1024, 2048]


def test_equal_runs_seldom_seem_to_differ() -> None:
    findings = [
        compare(_run(2 * seed, {"readback": 1.0}), _run(2 * seed + 1, {"readback": 1.0}))[0].finding
        for seed in range(20)
    ]
    assert findings.count(Finding.NOISE) >= 18


def test_a_change_too_small_to_matter_is_noise() -> None:
    before, after = _run(1, {"readback": 1.0}, noise=1e-4), _run(2, {"readback": 1.01}, noise=1e-4)
    assert compare(before, after)[0].finding is Finding.NOISE
    assert compare(before, after, min_change=0.005)[0].finding is Finding.SLOWER


def test_too_few_samples_are_said_to_be_too_few() -> None:
    before, after = _run(1, {"readback": 1.0}, samples=1), _run(2, {"readback": 9.0}, samples=1)
    assert compare(before, after)[0].finding is Finding.TOO_FEW
    three = compare(_run(1, {"readback": 1.0}, samples=3), _run(2, {"readback": 9.0}, samples=3))
    assert three[0].finding is Finding.SLOWER


def test_only_what_both_runs_measured_is_compared() -> None:
    before = _run(1, {"off-cold": 1.0, "readback": 1.0})
    after = [*_run(2, {"readback": 1.0, "direct": 1.0})]
    after += [replace(record, measured=False, ttft_ms=1e9) for record in after]
    after += [replace(record, error="broken", ttft_ms=0.0) for record in after]
    found = compare(before, after)
    assert [(one.leg, one.finding) for one in found] == [("readback", Finding.NOISE)]
    # Nothing was read back in these records: there is no transfer to compare.
    assert compare(before, after, metric="transfer_ms") == []


def test_what_is_not_compared_is_told() -> None:
    before, after = _run(1, {"off-cold": 1.0, "readback": 1.0}), _run(2, {"readback": 1.0, "direct": 1.0})
    place = next(place for place, record in enumerate(after) if record.nominal_tokens == 1024)
    after[place] = replace(after[place], ttft_ms=0.0)
    (found,) = compare(before, after)
    assert [cell.nominal_tokens for cell in found.cells] == [512, 2048]
    told = dropped(before, after)
    assert len(told) == 7
    assert "readback at 1,024 tokens: 1 of 8 samples of B are 0" in told
    assert "off-cold at 512 tokens: only A has it" in told
    assert "direct at 2,048 tokens: only B has it" in told
    assert dropped(before, before) == []
    assert (
        dropped(before, before, metric="transfer_ms")[0]
        == "off-cold at 512 tokens: 8 of 8 samples of A are 0"
    )


def _load_of(rng: random.Random, names: Sequence[str], run: str, factor: float = 1.0) -> list[Record]:
    """Return a load whose conversations differ, and whose turns are like the turn before."""
    records: list[Record] = []
    for name in names:
        level, drift = rng.lognormvariate(0, 0.6), 0.0
        for turn in range(1, rng.randint(2, 20)):
            drift = 0.9 * drift + rng.gauss(0, 0.2)
            ttft_ms = 100 * factor * level * math.exp(drift) * (1 + 0.05 * turn)
            records.append(
                Record("load", 0, f"{name}-{run}", turn, measured=True, ttft_ms=ttft_ms, tpot_ms=ttft_ms / 5)
            )
    return records


RUN_A, RUN_B = "0a1b2c3d", "4e5f6a7b"


def _split(records: Sequence[Record], rng: random.Random) -> tuple[list[Record], list[Record]]:
    names = sorted({record.conversation_id for record in records})
    chosen = set(rng.sample(names, len(names) // 2))
    return [r for r in records if r.conversation_id in chosen], [
        r for r in records if r.conversation_id not in chosen
    ]


def test_a_load_split_by_conversation_seldom_seems_to_differ() -> None:
    rng = random.Random(5)
    findings = []
    for _ in range(60):
        halves = _split(_load_of(rng, [f"c-{number}" for number in range(20)], RUN_A), rng)
        findings += [one.finding for one in compare(*halves)]
    # 5% of 60 are 3; more than 8 come to pass once in 500.
    assert findings.count(Finding.NOISE) >= 52


def test_equal_loads_of_the_same_conversations_seldom_seem_to_differ() -> None:
    rng = random.Random(6)
    names = [f"c-{number}" for number in range(12)]
    findings = [
        compare(_load_of(rng, names, RUN_A), _load_of(rng, names, RUN_B))[0].finding for _ in range(60)
    ]
    assert findings.count(Finding.NOISE) >= 52


def test_a_load_that_changed_is_told_by_the_turns_that_both_runs_have() -> None:
    names = [f"c-{number}" for number in range(8)]
    before = _load_of(random.Random(7), names, RUN_A)
    rng = random.Random(8)
    after = [
        replace(
            record,
            conversation_id=record.conversation_id.replace(RUN_A, RUN_B),
            ttft_ms=record.ttft_ms * 1.1 * rng.lognormvariate(0, 0.02),
        )
        for record in before[:-3]
    ]
    (found,) = compare(before, after)
    assert found.finding is Finding.SLOWER
    (cell,) = found.cells
    assert found.ratio == cell.ratio.value == pytest.approx(1.1, rel=0.02)
    assert cell.ratio.low is not None
    assert cell.ratio.high is not None
    assert 1.05 < cell.ratio.low < 1.1 < cell.ratio.high < 1.15
    assert cell.ratio.samples == 8
    ((leg, line),) = loads(before, after)
    assert leg == "load"
    assert line == (
        f"{len(after)} turns of 8 conversations that both runs have, turn by turn;"
        " 3 of A and 0 of B are in one alone"
    )
    (same,) = compare(before, before)
    assert (same.finding, same.ratio, same.p) == (Finding.NOISE, 1.0, 1.0)


def test_a_load_of_other_conversations_that_is_far_slower_is_told() -> None:
    rng = random.Random(9)
    before = _load_of(rng, [f"c-{number}" for number in range(12)], RUN_A)
    after = _load_of(rng, [f"d-{number}" for number in range(14)], RUN_B, factor=5)
    (found,) = compare(before, after)
    assert found.finding is Finding.SLOWER
    assert loads(before, after) == [
        ("load", "12 conversations of A and 14 of B as wholes; the runs have none in common")
    ]


def test_few_conversations_tell_no_change_however_many_turns_they_have() -> None:
    names = [f"c-{number}" for number in range(5)]
    rng = random.Random(10)
    before, after = _load_of(rng, names, RUN_A), _load_of(rng, names, RUN_B, factor=100)
    assert compare(before, after)[0].finding is Finding.TOO_FEW
    others = [replace(record, conversation_id=f"other-{record.conversation_id}") for record in after]
    (found,) = compare(before, others)
    assert found.finding is Finding.TOO_FEW
    assert found.cells[0].ratio.is_range


def test_bootstrapped_medians_are_those_of_the_arrays_that_were_drawn() -> None:
    arrays = [np.array([3.0, 1.0]), np.array([7.0]), np.array([2.0, 9.0, 4.0])]
    made = np.concatenate(list(conversations._medians(arrays, np.random.default_rng(1))))
    drawn = np.random.default_rng(1).multinomial(3, np.full(3, 1 / 3), size=len(made))
    for median, counts in zip(made[:50], drawn, strict=False):
        taken = [array for array, count in zip(arrays, counts, strict=True) for _ in range(count)]
        assert median == np.median(np.concatenate(taken))
