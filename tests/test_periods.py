"""The reference's period rule against its own choices and scores, and against a plain float64 transcription."""

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_jax import periods, tiling

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "period.json").read_text())["cases"]


@pytest.fixture(scope="module")
def arrays():
    with np.load(DATA / "period.npz") as stored:
        return dict(stored)


def gradient(arrays, case):
    grad = arrays[case["key"] + "/grad"]
    return grad.view(ml_dtypes.bfloat16) if case["dtype"] == "bfloat16" else grad


def plain_scores(grad):
    """Section by section as the paper's implementation has it: the means of every candidate from all elements."""
    logs = np.log(np.square(np.asarray(grad, np.float32)).astype(np.float64) + 1e-12).reshape(-1)
    cand = [p for p in range(1, logs.size + 1) if logs.size % p == 0 and logs.size // p >= 4]
    return cand, [np.abs(np.diff(logs.reshape(-1, p).mean(axis=1))).mean() for p in cand]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["key"])
def test_golden_period_and_scores(arrays, case):
    grad = gradient(arrays, case)
    if case["error"]:
        with pytest.raises(ValueError, match="not finite"):
            periods.reference_period(grad)
    else:
        assert periods.reference_period(grad) == case["period"]
    cand, score = periods.scores(grad)
    if grad.size > 1:  # the reference scores nothing for a single element
        np.testing.assert_array_equal(cand, arrays[case["key"] + "/cand"])
        # Relative 1e-12 or absolute 1e-13, whichever is more; NaN and infinity where the reference has them.
        expected = arrays[case["key"] + "/score"]
        np.testing.assert_array_equal(np.isfinite(score), np.isfinite(expected))
        np.testing.assert_array_equal(np.isnan(score), np.isnan(expected))
        finite = np.isfinite(expected)
        error = np.abs(score[finite] - expected[finite])
        assert (error <= np.maximum(1e-12 * expected[finite], 1e-13)).all()


def test_all_golden_cases_are_there():
    assert len(CASES) == 130
    assert sum(case["error"] is not None for case in CASES) == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, np.float64]), st.integers())
def test_scores_equal_the_plain_transcription(n, dtype, seed):
    rng = np.random.default_rng(abs(seed))
    grad = (np.exp(2 * rng.normal(size=n)) * rng.normal(size=n)).astype(dtype)
    cand, score = periods.scores(grad)
    expected_cand, expected = plain_scores(grad)
    assert cand.tolist() == expected_cand
    np.testing.assert_allclose(score, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", [4 * 10007, 2 * 3 * 5 * 7 * 11 * 13, 2**15, 211 * 223])
def test_long_blocks_lose_no_digits(n):
    grad = np.random.default_rng(n).normal(size=n).astype(np.float32)
    cand, score = periods.scores(grad)
    expected_cand, expected = plain_scores(grad)
    assert cand.tolist() == expected_cand
    np.testing.assert_allclose(score, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-20])
def test_equal_magnitudes_score_exactly_zero(value):
    _, score = periods.scores(np.full(5040, value, np.float32))
    assert not score.any()
    assert periods.reference_period(np.full(5040, value, np.float32)) == 1


def test_layout_does_not_matter():
    grad = np.random.default_rng(0).normal(size=(30, 48)).astype(np.float32)
    np.testing.assert_array_equal(periods.scores(np.asfortranarray(grad))[1], periods.scores(grad)[1])
    np.testing.assert_array_equal(periods.scores(grad.reshape(6, 5, 48))[1], periods.scores(grad)[1])


@pytest.mark.parametrize(
    ("cand", "score", "n", "expected"),
    [
        ([1, 2, 4, 8, 16, 32], [1, 0, 0, 5, 3, 0], 128, 1),  # 8 is too short to be chosen
        ([1, 2, 4, 8, 16, 32, 64], [0, 0, 0, 9, 3, 4, 0], 256, 32),  # nor does it compete with longer peaks
        ([1, 2, 4, 8, 16, 32], [1, 0, 0, 2, 3, 0], 128, 16),
        ([1, 2, 4, 8, 16, 32], [1, 0, 0, 2, 2, 0], 128, 1),  # level with a neighbour is no peak
        ([1, 2, 4, 8, 16, 32], [0, 0, 0, 0, 1, 9], 128, 1),  # the ends are no peaks
        ([1, 12, 16, 24, 48, 96], [0, 2, 1, 2, 0, 0], 384, 24),  # equal peaks: the longer
        ([], [], 3, 1),
        ([1], [0.5], 5, 1),
        ([1, 1024, 2048, 4096], [0, 1, 3, 1], 16384, 2048),  # 2048 has no smaller divisor above 1024
        ([1, 1024, 3072, 6144], [0, 1, 3, 1], 24576, 1536),
        ([1, 1000, 3000, 6000], [0, 1, 3, 1], 24000, 1500),
    ],
)
def test_choice(cand, score, n, expected):
    assert periods.choose_period(cand, score, n) == expected


def test_nan_counts_as_a_peak_and_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        periods.choose_period([1, 2, 16, 32], [1, 1, np.nan, 1], 128)
    assert periods.choose_period([1, 2, 16, 32], [1, 1, np.inf, np.inf], 128) == 1
    assert periods.choose_period([1, 2, 4, 8], [np.nan] * 4, 32) == 1  # none is longer than 8


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="real floating point, found int64"):
        periods.reference_period(np.arange(100))
    with pytest.raises(TypeError, match="complex64"):
        periods.scores(np.zeros(100, np.complex64))
    with pytest.raises(ValueError, match="one length"):
        periods.choose_period([1, 2], [0.0], 8)
    with pytest.raises(ValueError, match="negative"):
        periods.candidates(-1)


def test_divisors_and_momentum_blocks():
    for n in range(1, 400):
        expected = [d for d in range(1, n + 1) if n % d == 0]
        assert periods.divisors(n) == expected
        assert periods.candidates(n).tolist() == [d for d in expected if n // d >= 4]
        assert tiling.largest_divisor(n, 256) == max(d for d in expected if d <= 256)
    assert periods.candidates(0).size == 0
    assert periods.reference_period(np.zeros((3, 0), np.float32)) == 1
    assert periods.reference_period(np.float32(2.0)) == 1


@pytest.mark.parametrize("shape", [(1024, 768), (719, 1013), (3**6, 2**10)])
def test_peak_memory(shape):
    grad = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tracemalloc.start()
    try:
        periods.scores(grad)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 24 * grad.size
