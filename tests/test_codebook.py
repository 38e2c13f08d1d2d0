"""Histograms and codebooks against the reference's own, against brute force, and the promises of the default rule."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_jax import codebook, periods, prior, quantization

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "codebook.json").read_text())["cases"]
CENTRES = (np.arange(4096) + 0.5) / 2048 - 1


@pytest.fixture(scope="module")
def arrays():
    with np.load(DATA / "codebook.npz") as own, np.load(DATA / "period.npz") as shared:
        return {"codebook.npz": dict(own), "period.npz": dict(shared)}


def gradients(arrays, case):
    """(gradient, period) of every leaf of a golden case."""
    for leaf in case["tensors"]:
        prefix = "" if case["grads_in"] == "period.npz" else case["key"] + "/grad/"
        suffix = "/grad" if case["grads_in"] == "period.npz" else ""
        grad = arrays[case["grads_in"]][prefix + leaf["name"] + suffix]
        yield grad.view(ml_dtypes.bfloat16) if leaf["dtype"] == "bfloat16" else grad, leaf["period"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["key"])
def test_golden_codebook(arrays, case):
    stored = arrays["codebook.npz"]
    counts = stored[case["key"] + "/counts"]
    if case["kind"] == "gradients":
        total = np.zeros(4096, np.int64)
        for grad, period in gradients(arrays, case):
            assert periods.reference_period(grad) == period
            total += codebook.reference_histogram(grad, period)
        np.testing.assert_array_equal(total, counts)
    assert np.count_nonzero(counts) == case["active"]
    assert counts.sum() == pytest.approx(case["total"], rel=1e-7)  # added up in float32 there
    words = codebook.reference_codebook(counts, case.get("num_codes", 256), case.get("force_endpoints", True))
    assert words.dtype == np.float32
    assert codebook.mse(counts, words) == pytest.approx(case["mse"], rel=1e-9, abs=0)
    if "ties" not in case["key"]:  # where the optimum is unique
        np.testing.assert_allclose(words, stored[case["key"] + "/codebook"], rtol=0, atol=1e-6)


def test_all_golden_cases_are_there():
    assert len(CASES) == 37


# Histograms


def plain_histogram(values, tile):
    """Bins of the non-zero elements, by NumPy in the split view of the array."""
    split = [part for size, length in zip(values.shape, tile) for part in (size // length, length)]
    view = values.astype(np.float32).reshape(split)
    largest = np.abs(view).max(axis=tuple(range(1, 2 * len(tile), 2)), keepdims=True, initial=0)
    y = (view / np.where(largest > 0, largest, 1))[view != 0]
    bins = np.clip(np.floor((y + np.float32(1)) / np.float32(2.0**-11)), 0, 4095)
    return np.bincount(bins.astype(int), minlength=4096)


@st.composite
def tiled(draw):
    """A shape of rank 0 to 5 and a tile that divides it."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 12]), max_size=5)))
    return shape, tuple(draw(st.sampled_from(periods.divisors(s) if s else [1, 2])) for s in shape)


@settings(max_examples=80, deadline=None)
@given(tiled(), st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, np.float64]), st.integers(0, 2**32))
def test_histogram_equals_plain_counting(shape_and_tile, dtype, seed):
    shape, tile = shape_and_tile
    rng = np.random.default_rng(seed)
    values = np.asarray(rng.normal(size=shape) * (rng.random(shape) < 0.8)).astype(dtype)
    expected = plain_histogram(values, tile)
    np.testing.assert_array_equal(codebook.histogram(values, tile), expected)
    # The layout of the memory does not matter, nor do powers of two.
    np.testing.assert_array_equal(codebook.histogram(np.asarray(values, order="F"), tile), expected)
    np.testing.assert_array_equal(codebook.histogram(values.astype(np.float32) * np.float32(2.0**-20), tile), expected)


@pytest.mark.parametrize("tile", [(1, 499), (700, 1), (7, 499), (700, 499), (1, 1), (100, 1)])
def test_histogram_across_chunks(tile):
    # 349,300 elements: more than a chunk, whose end falls inside a row and inside blocks
    values = np.random.default_rng(0).normal(size=(700, 499)).astype(np.float32)
    np.testing.assert_array_equal(codebook.histogram(values, tile), plain_histogram(values, tile))


def test_zeros_count_for_the_reference_only():
    grad = np.zeros((4, 6), np.float32)
    grad[1] = [1, 2, 0, -2, 0, 1]
    reference = codebook.reference_histogram(grad, 6)
    assert reference[2048] == 20
    assert reference.sum() == 24
    reference[2048] = 0
    np.testing.assert_array_equal(codebook.histogram(grad, (1, 6)), reference)
    assert not codebook.histogram(np.zeros((3, 4), np.float32), (1, 2)).any()


def test_period_one_gives_signs():
    counts = codebook.reference_histogram(np.float32([3, -1, 0, 1e-20]), 1)
    assert counts[[0, 2048, 4095]].tolist() == [1, 1, 2]


def test_histogram_memory_is_a_chunk():
    values = np.random.default_rng(0).normal(size=(2048, 1024)).astype(ml_dtypes.bfloat16)
    codebook.histogram(values, (1, 256))
    tracemalloc.start()
    try:
        codebook.histogram(values, (1, 256))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6  # three chunks of 1 MiB, 2 bytes an element; the block maxima are 32 KiB


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_histogram_refuses_values_that_are_not_finite(value):
    grad = np.ones((4, 4), np.float32)
    grad[2, 1] = value
    for count in (lambda: codebook.histogram(grad, (1, 4)), lambda: codebook.reference_histogram(grad, 4)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            count()
    with pytest.raises(ValueError, match="NaN or infinite"):
        codebook.histogram(np.full((2, 2), 1e300), (1, 2))  # beyond float32


def test_histogram_refuses_bad_arguments():
    with pytest.raises(ValueError, match=r"tiles of shape \(3, 4\) do not divide an array of shape \(4, 4\)"):
        codebook.histogram(np.ones((4, 4), np.float32), (3, 4))
    with pytest.raises(ValueError, match="do not divide"):
        codebook.histogram(np.ones((4, 4), np.float32), (4,))
    with pytest.raises(ValueError, match="period 3 does not divide a leaf of 16 elements"):
        codebook.reference_histogram(np.ones((4, 4), np.float32), 3)
    with pytest.raises(TypeError, match="int64"):
        codebook.histogram(np.arange(4), (1,))


# Codebooks


def histogram_of(kind, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "normal":
        return codebook.histogram(rng.normal(size=(400, 256)).astype(np.float32), (1, 256))
    counts = np.zeros(4096, np.int64)
    if kind == "signs":
        counts[[0, 4095]] = 5000, 4000
    elif kind == "one bin":
        counts[2900] = 7
    elif kind == "three bins":
        counts[[1, 2047, 4000]] = 10, 10**12, 3
    elif kind == "uniform":
        counts[:] = 3
    elif kind == "one-sided":
        counts[2100:] = rng.integers(0, 5, 1996)
    elif kind == "sparse":
        counts[rng.choice(4096, 300, replace=False)] = 10 ** rng.integers(0, 9, 300)
    elif kind == "adjacent":  # far more mass than words next to each other
        counts[2048:2248] = 10**6
        counts[4095] = 1
    elif kind == "towards one":
        counts[4000:] = 10**7
    elif kind == "huge":
        counts[:] = rng.integers(1, 2**44, 4096)
    return counts


KINDS = ["normal", "signs", "one bin", "three bins", "uniform", "one-sided", "sparse", "adjacent"]
KINDS += ["towards one", "huge"]


def check_words(words, bits):
    """Everything that `learn_codebook` promises about a codebook, whatever it was learned from."""
    n = 2**bits
    assert words.shape == (n,)
    assert words.dtype == np.float32
    assert words[0] == -1
    assert words[-1] == 1
    zeros = [127, 128] if bits == 8 else [7]
    assert np.flatnonzero(words == 0).tolist() == zeros
    assert not np.signbit(words[zeros]).any()
    assert (np.diff(np.delete(words, 128 if bits == 8 else [])) > 0).all()
    if bits == 8:
        np.testing.assert_array_equal(words, 0 - words[::-1])
    # No bin holds two midpoints: exactly, in float32, and for the thresholds of the float32 nearest rule.
    exact = words.astype(np.float64)
    midpoints = (exact[1:] + exact[:-1]) / 2
    np.testing.assert_array_equal((words[1:] + words[:-1]) / 2, midpoints)
    assert np.bincount(np.floor((midpoints + 1) * 2048).astype(int)).max() == 1
    limits = np.unique(np.asarray(quantization.thresholds(jnp.asarray(words))))
    assert limits.size == n - 1 - (bits == 8)
    assert np.bincount(np.asarray(quantization.bin_of(jnp.asarray(limits)))).max() == 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_learned_words_keep_their_promises(kind, bits):
    for relative in (None, 1e-3, 0.1):
        check_words(codebook.learn_codebook(histogram_of(kind), bits=bits, relative=relative), bits)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 40)), min_size=1, max_size=400),
    st.sampled_from([4, 8]),
    st.sampled_from([None, 1e-4, 0.02]),
)
def test_any_histogram_gives_a_valid_codebook(spikes, bits, relative):
    counts = np.zeros(4096, np.int64)
    for position, power in spikes:
        counts[position] += 2**power
    check_words(codebook.learn_codebook(counts, bits=bits, relative=relative), bits)


def brute_force(weights, points, words, first, last, least=1):
    """Least squared error of a segmentation, by the textbook recursion over all starts in float64."""
    n = len(points)
    prefix = [np.concatenate([[0], np.cumsum(weights * points**k)]) for k in range(3)]

    def cost(start, end, centre):
        w, x, q = (p[end + 1] - p[start] for p in prefix)
        return (
            np.where(w > 0, q - x * x / np.maximum(w, 1e-300), 0)
            if centre is None
            else q - 2 * centre * x + centre**2 * w
        )

    ends = np.arange(n)
    error = np.where(ends >= least - 1, cost(0, ends, first), np.inf)
    for word in range(1, words):
        centre = last if word == words - 1 else None
        error = np.array(
            [np.inf] + [np.min(error[:end] + cost(np.arange(1, end + 1), end, centre)) for end in range(1, n)]
        )
    return error[-1]


@pytest.mark.parametrize("seed", range(4))
def test_reference_codebook_is_optimal(seed):
    rng = np.random.default_rng(seed)
    counts = np.zeros(4096, np.int64)
    active = np.sort(rng.choice(4096, 150, replace=False))
    counts[active] = rng.integers(1, 1000, 150)
    for words in (2, 7, 149, 150):
        ends = (-1.0, 1.0) if seed % 2 else (None, None)
        found = codebook.reference_codebook(counts, words, bool(seed % 2))
        least = brute_force(counts[active].astype(float), CENTRES[active], words, *ends) / counts.sum()
        # Nearest-word coding is never worse than coding by segments.
        assert codebook.mse(counts, found) <= least * (1 + 1e-6) + 1e-15
        if not seed % 2:  # and with free centres the optimum is also nearest-word coding
            assert codebook.mse(counts, found) == pytest.approx(least, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["normal", "uniform", "one-sided", "huge"])
def test_learned_codebook_is_optimal_on_the_half_line(kind, bits):
    # Bins merged by eights keep the brute force quick: the same mass, at the centre of one bin of each eight.
    counts = histogram_of(kind)
    half = counts[2048:] + counts[:2048][::-1]
    merged = np.zeros(4096, np.int64)
    merged[2048 + 4 :: 8] = half.reshape(-1, 8).sum(axis=1)
    points, weights = CENTRES[2048 + 4 :: 8], merged[2048 + 4 :: 8].astype(float)
    words = codebook.learn_codebook(merged, bits=bits)
    upper = words[words >= 0][-(128 if bits == 8 else 9) :]
    least = brute_force(weights, points, upper.size, 0.0, 1.0) / weights.sum()
    found = codebook.mse(merged, np.sort(np.concatenate([-upper, upper])))
    assert found == pytest.approx(least, rel=2e-4, abs=1e-11)


def test_sides_of_the_short_codebook_are_solved_separately():
    counts = histogram_of("normal")
    words = codebook.learn_codebook(counts, bits=4).astype(np.float64)
    half = (counts[2048:] + counts[:2048][::-1]).astype(float).reshape(-1, 8).sum(axis=1)
    points = (np.arange(256) + 0.5) / 256
    for side, number in ((words[7:], 9), (-words[7::-1], 8)):
        assert side.size == number
        error = np.min(np.square(points[:, None] - side), axis=1) @ half
        assert error == pytest.approx(brute_force(half, points, number, 0.0, 1.0), rel=2e-3)


def test_folding_makes_the_sign_irrelevant():
    counts = histogram_of("one-sided")
    np.testing.assert_array_equal(codebook.learn_codebook(counts), codebook.learn_codebook(counts[::-1]))
    np.testing.assert_array_equal(codebook.learn_codebook(counts), codebook.learn_codebook(3 * counts))


def test_mixing_in_the_prior_costs_nothing():
    counts = histogram_of("normal")
    exact = codebook.reference_codebook(counts + counts[::-1])
    learned = codebook.learn_codebook(counts)
    # 255 words instead of 256 and the forced zero cost 0.8 %; the rest would be the prior.
    assert codebook.mse(counts, learned) < 1.02 * codebook.mse(counts, exact)


def test_poor_histograms_are_served_exactly_and_the_rest_by_the_prior():
    learned = codebook.learn_codebook(histogram_of("signs"))
    known = prior.prior_counts()
    assert codebook.mse(known, learned) < 1.001 * codebook.mse(known, codebook.prior_codebook(8))
    spikes = np.zeros(4096, np.int64)
    spikes[[300, 2500, 3000, 3001, 4095]] = 1000
    learned = codebook.learn_codebook(spikes)
    for position in (300, 2500, 3000, 3001):
        assert np.abs(learned - CENTRES[position]).min() <= 2.0**-20


def test_relative_weight_moves_words_towards_zero():
    counts = histogram_of("normal")
    plain = codebook.learn_codebook(counts)
    weighted = codebook.learn_codebook(counts, relative=0.01)
    assert weighted[129] < plain[129]
    distance = np.abs(CENTRES[:, None] - plain).min(1), np.abs(CENTRES[:, None] - weighted).min(1)
    weight = counts / (CENTRES**2 + 1e-4)
    assert weight @ distance[1] ** 2 < weight @ distance[0] ** 2
    assert counts @ distance[1] ** 2 > counts @ distance[0] ** 2
    # A large offset is no weight at all.
    np.testing.assert_allclose(codebook.learn_codebook(counts, relative=1e4), plain, atol=2e-5)


@pytest.mark.parametrize("call", [codebook.reference_codebook, codebook.learn_codebook, lambda c: codebook.mse(c, [0])])
def test_bad_counts_are_refused(call):
    counts = np.ones(4096, np.int64)
    with pytest.raises(ValueError, match="empty"):
        call(counts * 0)
    with pytest.raises(ValueError, match="must not be negative, found -1 in bin 5"):
        call(np.where(np.arange(4096) == 5, -1, counts))
    with pytest.raises(ValueError, match=r"shape \(4096,\), found \(4095,\)"):
        call(counts[1:])
    for dtype in (np.float32, bool):
        with pytest.raises(TypeError, match="must be integers"):
            call(counts.astype(dtype))


def test_bad_arguments_are_refused():
    counts = np.ones(4096, np.int32)
    for bits in (2, 16, 8.5):
        with pytest.raises(ValueError, match="8 or 4"):
            codebook.learn_codebook(counts, bits=bits)
        with pytest.raises(ValueError, match="8 or 4"):
            codebook.prior_codebook(bits)
    for relative in (0, -1.0, np.nan):
        with pytest.raises(ValueError, match="positive"):
            codebook.learn_codebook(counts, relative=relative)
    with pytest.raises(ValueError, match="num_codes=1"):
        codebook.reference_codebook(counts, 1)
    with pytest.raises(ValueError, match="ascending"):
        codebook.mse(counts, [0.5, 0.0])


def test_mse_is_that_of_nearest_coding():
    counts = histogram_of("normal")
    words = codebook.prior_codebook(8).astype(np.float64)
    error = np.min(np.square(CENTRES[:, None] - words), axis=1)
    assert codebook.mse(counts, words) == pytest.approx(counts @ error / counts.sum(), rel=1e-12)


# The prior


@pytest.mark.parametrize("bits", [8, 4])
def test_stored_prior_is_what_the_command_prints(bits, capsys):
    prior.main()
    printed = np.float32(json.loads(capsys.readouterr().out)[str(bits)])
    np.testing.assert_allclose(codebook.prior_codebook(bits), printed, rtol=0, atol=1e-6)
    check_words(codebook.prior_codebook(bits), bits)


def test_prior_is_the_stated_density():
    # Blocks drawn from the model: Gaussians with inverse gamma variances, divided by their largest magnitude.
    rng = np.random.default_rng(0)
    shape = (8000, prior.BLOCK)
    entries = rng.normal(size=shape) / np.sqrt(rng.chisquare(prior.DEGREES, size=shape) / prior.DEGREES)
    drawn = codebook.histogram(entries.astype(np.float32), (1, prior.BLOCK))
    expected = prior.prior_counts() / prior.prior_counts().sum()
    distance = np.abs(np.cumsum(drawn) / drawn.sum() - np.cumsum(expected)).max()
    assert distance < 2e-3  # 1.6 standard deviations of the Kolmogorov statistic, if elements were independent: 1e-3


def test_using_the_prior_loads_no_compiler():
    code = "import sys, gefen_jax.codebook as c; c.prior_codebook(8); sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
