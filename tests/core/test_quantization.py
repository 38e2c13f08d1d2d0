"""Codes: the fast search against the rule itself on every float32 that matters, packing, and blocks there and back."""

import float64
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_jax import quantization, update
from gefen_jax.codebook import companding_codebook, learn_codebook, prior_codebook

INFINITY = np.float32(np.inf)


def brute(values, words):
    """The rule of SPEC section 4 in NumPy, one value at a time in effect: the lower word wins ties in float32."""
    above = np.searchsorted(words, values, side="left")
    lower, upper = np.maximum(above - 1, 0), np.minimum(above, len(words) - 1)
    return np.where(np.abs(values - words[lower]) <= np.abs(values - words[upper]), lower, upper)


def first_of(words):
    """Code of the first word of the same value: there are two zeros among 256."""
    return np.searchsorted(words, words, side="left")


def neighbours(values, far=4):
    """The values and their next ``far`` float32 on either side."""
    found = [values]
    for direction in (-INFINITY, INFINITY):
        y = values
        for _ in range(far):
            y = np.nextafter(y, direction)
            found.append(y)
    return np.concatenate(found)


def telling(words, seed):
    """Words, midpoints and bin edges with their neighbours, values out of range and near 0, and random ones."""
    rng = np.random.default_rng(seed)
    middles = words[:-1] + (words[1:] - words[:-1]) * np.float32(0.5)
    edges = (np.arange(4097) / 2048 - 1).astype(np.float32)
    tiny = np.float32([0.0, -0.0, 1e-45, -1e-45, 1.2e-38, -1.2e-38, 1e-20, -1e-20, 5, -5, np.inf, -np.inf])
    random = np.concatenate([rng.uniform(-1.01, 1.01, 20000), rng.normal(size=4000) * 1e-3]).astype(np.float32)
    return np.concatenate([neighbours(words), neighbours(middles, 8), neighbours(edges), tiny, random])


@pytest.fixture(scope="module")
def search():
    """The rule, the table's search and the thresholds, compiled once for each number of words."""
    encode = jax.jit(lambda y, words: quantization.encode(y, quantization.search_table(words)))
    return encode, jax.jit(quantization.nearest), jax.jit(quantization.thresholds)


def assert_exact(words, search, seed=0):
    encode, nearest, thresholds = search
    values = telling(words, seed)
    rule = brute(values, words)
    same = first_of(words)
    np.testing.assert_array_equal(same[np.asarray(nearest(values, words))], same[rule])
    np.testing.assert_array_equal(np.asarray(encode(values, words)), same[rule])
    # A threshold is the last float32 that goes to a word or a lower one; the rule is monotone in between.
    limits = np.asarray(thresholds(words))
    assert np.all(np.diff(limits) >= 0)
    at, past = same[brute(limits, words)], same[brute(np.nextafter(limits, INFINITY), words)]
    index = np.arange(len(limits))
    assert np.all(at <= index)
    assert np.all(past > index)


@pytest.mark.parametrize("bits", [8, 4])
def test_search_is_the_rule_with_the_prior_codebook(search, bits):
    assert_exact(prior_codebook(bits), search)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["spikes", "smooth", "narrow", "edges"]), st.sampled_from([8, 4]))
def test_search_is_the_rule_with_learned_codebooks(search, seed, kind, bits):
    rng = np.random.default_rng(seed)
    counts = np.zeros(4096, np.int64)
    if kind == "spikes":
        counts[rng.integers(0, 4096, rng.integers(1, 300))] = rng.integers(1, 1000)
    elif kind == "smooth":
        counts += rng.poisson(1000 * np.exp(-np.abs(np.arange(4096) - 2048) / rng.uniform(10, 3000)))
    elif kind == "narrow":
        start = rng.integers(0, 4000)
        counts[start : start + 96] = rng.integers(1, 10**6, 96)
    else:
        counts[[0, 2047, 2048, 4095]] = rng.integers(0, 5, 4)
    counts[rng.integers(0, 4096)] += 1
    assert_exact(learn_codebook(counts, bits=bits), search, seed)


def test_nan_is_the_last_word_of_the_rule():
    assert quantization.nearest(jnp.float32(np.nan), jnp.asarray(prior_codebook(8))) == 255


@pytest.mark.parametrize("c", [0.0, 0.6, 3.0, 15.0])
def test_companding_is_its_closed_form(c):
    """Level round(127 s (1 + c) / (1 + c s)) of the magnitude s, in float64, except where that is next to a half."""
    words = companding_codebook(c)
    values = telling(words, 0)
    codes = np.asarray(jax.jit(lambda y, w: quantization.encode(y, quantization.companding(w)))(values, words))
    size = np.minimum(np.abs(values.astype(np.float64)), 1)
    level = size * (1 + c) / (1 + c * size) * 127
    expected = np.where(values > 0, 127 + np.rint(level) + (np.rint(level) > 0), 127 - np.rint(level))
    doubtful = np.abs(level - np.floor(level) - 0.5) < 1e-4
    assert np.mean(doubtful) < 0.3
    np.testing.assert_array_equal(codes[~doubtful], expected[~doubtful])
    at_words = jax.jit(lambda w: quantization.encode(w, quantization.companding(w)))(words)
    np.testing.assert_array_equal(np.asarray(at_words), first_of(words))
    assert np.all(np.sign(words[codes]) * np.sign(values) >= 0)
    inside = np.abs(values) <= 1
    error = np.abs(words[codes] - values)[inside]
    best = np.abs(words[brute(values, words)] - values)[inside]
    assert np.all(error <= best + np.diff(words).max() * 0.1)  # near the middle the other word may be taken


@pytest.mark.parametrize("shape", [(2,), (3, 4), (4, 3), (2, 3, 5), (1, 1, 6), (7, 8, 1, 9)])
def test_packing_is_low_then_high(shape):
    codes = np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)
    for axis in [i for i, size in enumerate(shape) if size % 2 == 0]:
        packed = quantization.pack(jnp.asarray(codes), axis)
        assert packed.shape == shape[:axis] + (shape[axis] // 2,) + shape[axis + 1 :]
        even, odd = np.take(codes, range(0, shape[axis], 2), axis), np.take(codes, range(1, shape[axis], 2), axis)
        np.testing.assert_array_equal(np.asarray(packed), even + 16 * odd)
        np.testing.assert_array_equal(float64.unpack(np.asarray(packed), shape), codes)
        np.testing.assert_array_equal(np.asarray(quantization.unpack(packed, axis)), codes)


@pytest.fixture(scope="module")
def requantize():
    def function(m, words):
        codes, scale = update.requantize(m, (1,), quantization.search_table(words), m)
        return codes, scale, quantization.decode(codes, words) * scale

    return jax.jit(function)


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_there_and_back(requantize, bits):
    """The largest element comes back exactly, with its sign; the others within half the gap of their words."""
    words = prior_codebook(bits)
    rng = np.random.default_rng(0)
    m = rng.normal(size=(300, 64)).astype(np.float32)
    m *= 10.0 ** rng.uniform(-33, 37, (300, 1)).astype(np.float32)  # no element is a denormal, nor 1 / scale
    codes, scale, back = (np.asarray(x) for x in requantize(m, words))
    np.testing.assert_array_equal(scale[:, 0], np.abs(m).max(axis=1))
    largest = np.argmax(np.abs(m), axis=1)[:, None]
    np.testing.assert_array_equal(np.take_along_axis(back, largest, 1), np.take_along_axis(m, largest, 1))
    assert set(np.take_along_axis(codes, largest, 1).ravel().tolist()) == {0, 2**bits - 1}
    y = m.astype(np.float64) / scale
    best = np.abs(y[:, :, None] - words.astype(np.float64)).min(axis=2)
    assert np.all(np.abs(back.astype(np.float64) / scale - y) <= best + 4 * float64.ULP)
    assert best.max() <= np.diff(words).max() / 2 + 1e-7


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-40, 1.17e-38])
def test_blocks_of_zeros_and_denormals_are_zero(requantize, bits, size):
    """Their reciprocal would overflow: scale 0, and the code of 0 everywhere."""
    m = np.full((2, 64), size, np.float32)
    m[0, ::2] = 0
    codes, scale, back = (np.asarray(x) for x in requantize(m, prior_codebook(bits)))
    assert np.all(scale == 0)
    assert np.all(codes == 2 ** (bits - 1) - 1)
    assert np.all(back == 0)


def test_small_elements_beside_a_large_one_are_exactly_zero(requantize):
    """Not the residue of a word next to 0, which the small second moment of a dead element would blow up."""
    m = np.zeros((1, 64), np.float32)
    m[0, :3] = 1.0, 1e-30, -1e-6
    codes, _, back = (np.asarray(x) for x in requantize(m, prior_codebook(8)))
    assert back[0].tolist() == [1.0, *[0.0] * 63]
    assert np.all(codes[0, 1:] == 127)
