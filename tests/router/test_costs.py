"""Costs against what was measured on real machines, and how rates are learnt."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.router.costs import Costs, Rates, Terms, Work, compute_features, expected, transfer_features
from kvloop.router.learning import REFIT_EVERY, WINDOW, Estimator, fit

SUFFIX = 160
# Two H200s on NVLink, bf16; cross-layer blocks of 128 tokens for the large model, vLLM's own layout for the
# small one.
LARGE = Rates(
    prefill=Terms((20.0, 0.0877, 1.98e-6)),
    decode=Terms((23.0, 0.0877, 1.98e-6)),
    transfer=Terms((6.5, 1 / 285e6, 15e-3)),
    first_step_ms=25.0,
    bytes_per_token=262_144,
    descriptors_per_token=1 / 128,
)
SMALL = Rates(
    prefill=Terms((8.0, 0.003, 1e-7)),
    decode=Terms((8.0, 0.003, 1e-7)),
    transfer=Terms((3.0, 1 / 20e6, 0.0)),
    first_step_ms=17.0,
    bytes_per_token=114_688,
    descriptors_per_token=28 / 16,
)


@pytest.mark.parametrize(
    ("rates", "history", "measured"),
    [
        pytest.param(LARGE, 2_048, Costs(37, 67, 238), id="32b-2k"),
        pytest.param(LARGE, 8_192, Costs(40, 80, 908), id="32b-8k"),
        pytest.param(LARGE, 16_384, Costs(48, 96, 2_057), id="32b-16k"),
        pytest.param(LARGE, 24_576, Costs(56, 113, 3_404), id="32b-24k"),
    ],
)
def test_the_large_model_as_measured(rates: Rates, history: int, measured: Costs) -> None:
    got = expected(Work(history + SUFFIX, history, at_holder=True), rates)
    assert got.recompute == pytest.approx(measured.recompute, rel=0.08)
    assert got.readback == pytest.approx(measured.readback, rel=0.15)
    assert got.direct == pytest.approx(measured.direct, rel=0.25)
    assert got.direct < got.readback < got.recompute


def test_the_small_model_loses_by_readback() -> None:
    got = expected(Work(8_192 + SUFFIX, 8_192, at_holder=True), SMALL)
    assert got.recompute == pytest.approx(58.8, rel=0.1)
    assert got.readback == pytest.approx(87.3, rel=0.1)


def test_waiting_counts_where_the_work_is_done() -> None:
    work = Work(1000, 900, at_holder=True)
    idle = expected(work, LARGE)
    busy = expected(replace(work, prefill_wait_ms=500.0, decode_wait_ms=7.0), LARGE)
    assert busy.direct - idle.direct == pytest.approx(7)
    assert busy.readback - idle.readback == pytest.approx(500)
    assert busy.recompute - idle.recompute == pytest.approx(500)


def test_elsewhere_the_whole_prompt_is_handed_over() -> None:
    near = expected(Work(8_192, 8_000, at_holder=True), LARGE)
    far = expected(Work(8_192, 8_000, at_holder=False), LARGE)
    assert far.direct == near.direct
    assert far.readback - near.readback == pytest.approx(far.recompute - near.recompute)
    assert far.readback > near.readback


@given(prompt=st.integers(1, 100_000), reusable=st.integers(0, 100_000))
def test_costs_are_never_negative_and_reading_saves_computing(prompt: int, reusable: int) -> None:
    work = Work(prompt, min(reusable, prompt - 1), at_holder=True)
    free = replace(LARGE, transfer=Terms((0.0, 0.0, 0.0)))
    got = expected(work, free)
    assert got.direct >= 0
    assert got.readback <= got.recompute


def measured(truth: Terms, dice: random.Random, noise: float = 0.05) -> tuple[tuple[float, ...], float]:
    start = dice.choice((0, dice.randrange(20_000)))
    features = compute_features(start, start + dice.randrange(1, 20_000))
    return features, truth.ms(features) * dice.uniform(1 - noise, 1 + noise)


@pytest.mark.parametrize("seed", [LARGE.prefill, Terms((1.0, 1.0, 1e-9)), SMALL.prefill])
def test_rates_are_learnt_whatever_the_seed(seed: Terms) -> None:
    truth, dice = Terms((40.0, 2.0, 5e-5)), random.Random(3)
    estimator = Estimator(seed)
    for _ in range(2 * WINDOW):
        estimator.add(*measured(truth, dice))
    for start, end in ((0, 1_000), (0, 10_000), (15_000, 15_200), (0, 20_000)):
        features = compute_features(start, end)
        assert estimator.terms.ms(features) == pytest.approx(truth.ms(features), rel=0.3)


def test_outliers_do_not_move_rates() -> None:
    truth, dice = LARGE.prefill, random.Random(5)
    estimator = Estimator(truth)
    for number in range(2 * WINDOW):
        features, ms = measured(truth, dice)
        estimator.add(features, ms * 50 if number % 5 == 0 else ms)
    features = compute_features(0, 8_192)
    assert estimator.terms.ms(features) == pytest.approx(truth.ms(features), rel=0.15)


def test_one_kind_of_work_leaves_the_shape_to_the_seed() -> None:
    seed = LARGE.transfer
    features = transfer_features(1e9, 100)
    estimator = Estimator(seed)
    for _ in range(WINDOW):
        estimator.add(features, 3 * seed.ms(features))
    other = transfer_features(2e9, 50)
    assert estimator.terms.ms(features) == pytest.approx(3 * seed.ms(features), rel=0.01)
    assert estimator.terms.ms(other) == pytest.approx(3 * seed.ms(other), rel=0.05)


def test_rates_follow_a_change() -> None:
    estimator = Estimator(Terms((10.0,)))
    for ms in [10.0] * WINDOW + [30.0] * WINDOW:
        estimator.add((1.0,), ms)
    assert estimator.terms.values[0] == pytest.approx(30.0, rel=0.01)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_measurement_is_left_out(ms: float) -> None:
    estimator = Estimator(LARGE.prefill)
    estimator.add(compute_features(0, 10), ms)
    assert (estimator.count, estimator.terms) == (0, LARGE.prefill)


def test_others_rates_serve_until_there_are_own_ones() -> None:
    estimator = Estimator(Terms((10.0,)))
    estimator.reseed(Terms((20.0,)))
    assert estimator.terms.values == (20.0,)
    for _ in range(REFIT_EVERY):
        estimator.add((1.0,), 5.0)
    estimator.reseed(Terms((90.0,)))
    assert estimator.terms.values[0] == pytest.approx(5.0)
    estimator.reseed(Terms((1.0, 2.0)))
    assert len(estimator.terms.values) == 1


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e12), st.floats(1e-6, 1e9)), max_size=20),
)
def test_a_fit_is_always_usable(samples: list[tuple[float, float, float]]) -> None:
    terms = fit(LARGE.prefill, [((1.0, a, b), ms) for a, b, ms in samples])
    assert all(0 <= value < float("inf") for value in terms.values)
