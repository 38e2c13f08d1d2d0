"""8-bit and 4-bit Adam against float64 written from their papers, over odd sizes, ranks 0 to 5 and narrow dtypes.

The reference reads our stored state before each step, so that a tie rounded the other way cannot add up: it checks
the update, that the new code is a nearest one, and that the scales are the maxima.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_jax.baselines import scale_by_adam4bit, scale_by_adam8bit
from gefen_jax.baselines.lowbit import dynamic_map, linear_map, nearest_code

B1, B2, EPS = 0.9, 0.99, 1e-8
SHAPES = [(), (1,), (1021,), (3, 5), (127, 3), (3, 3, 3, 8), (4, 8, 6), (2, 3, 4, 5, 6), (0, 3)]
MAPS = {"8": (dynamic_map(8, True), dynamic_map(8, False)), "4": (dynamic_map(4, True), linear_map(4))}


def decade_map(bits, signed):
    """The dynamic map once more, by bisecting decades instead of by formula."""
    words = [0.0, 1.0]
    for decade in range(bits - 1):
        top = 10.0 ** -(bits - 2 - decade)
        edges = np.linspace(top / 10, top, 2 ** (decade + (0 if signed else 1)) + 1)
        centres = (edges[1:] + edges[:-1]) / 2
        words += [*centres, *(-centres if signed else [])]
    return np.sort(words)


@pytest.mark.parametrize(("bits", "signed"), [(8, True), (8, False), (4, True), (4, False), (3, True)])
def test_dynamic_map(bits, signed):
    words = dynamic_map(bits, signed)
    assert words.shape == (2**bits,)
    assert words.dtype == np.float32
    assert (np.diff(words) > 0).all()
    assert 0 in words
    assert words[-1] == 1
    assert (words.min() < 0) == signed
    np.testing.assert_allclose(words, decade_map(bits, signed), rtol=1e-6)


def test_four_bit_dynamic_map_by_hand():
    half = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    np.testing.assert_allclose(dynamic_map(4, True), [-x for x in reversed(half)] + [0.0, *half, 1.0], rtol=1e-6)


@pytest.mark.parametrize("words", [*MAPS["8"], *MAPS["4"]], ids=["m8", "v8", "m4", "v4"])
def test_nearest_code_is_brute_force(words):
    draw = np.random.RandomState(0)
    y = np.concatenate([draw.uniform(-1.2, 1.2, 4000), 10 ** draw.uniform(-9, 0, 4000), words]).astype(np.float32)
    codes = np.asarray(nearest_code(jnp.asarray(y), words))
    distance = np.abs(y[:, None].astype(np.float64) - words)
    np.testing.assert_allclose(distance[np.arange(y.size), codes], distance.min(axis=1), rtol=0, atol=1e-7)


def blocks_of(x, size):
    flat = np.ravel(x)
    return [flat[i : i + size] for i in range(0, flat.size, size)]


def block_scale(shape, scale, size):
    return np.repeat(scale.astype(np.float64), size)[: math.prod(shape)].reshape(shape)


def slice_maxima(x):
    return [np.abs(x).max(axis=tuple(i for i in range(x.ndim) if i != axis)) for axis in range(x.ndim)]


def rank1(shape, maxima):
    out = np.empty(shape)
    for index in itertools.product(*map(range, shape)):
        out[index] = min(axis[i] for axis, i in zip(maxima, index))
    return out


def stored_codes(packed, shape, bits):
    packed = np.asarray(packed)
    if bits == "8":
        return packed
    pairs = [code for byte in packed for code in (byte % 16, byte // 16)]
    return np.array(pairs[: math.prod(shape)], int).reshape(shape)


def element_scale(name, scale, shape, bits):
    """The scale of each element, from the stored scales."""
    scale = np.asarray(scale)
    if name == "nu" and bits == "4" and len(shape) > 1:
        return rank1(shape, np.split(scale.astype(np.float64), np.cumsum(shape)[:-1]))
    return block_scale(shape, scale, 256 if bits == "8" else 128)


def expected_scale(name, moment, bits):
    if name == "nu" and bits == "4" and moment.ndim > 1:
        return np.concatenate(slice_maxima(moment))
    return np.array([np.abs(block).max() for block in blocks_of(moment, 256 if bits == "8" else 128)])


def check_steps(bits, shape, dtype, seed=0, steps=3):
    make = {"8": scale_by_adam8bit, "4": scale_by_adam4bit}[bits]
    tx = make(B1, B2, EPS, min_size=0)
    draw = np.random.RandomState(seed)
    state = tx.init({"x": jnp.zeros(shape, dtype)})
    update = jax.jit(tx.update)
    quantised = len(shape) > 0 and math.prod(shape) > 0
    for step in range(1, steps + 1):
        gradient = jnp.asarray(draw.standard_normal(shape) * 10.0 ** draw.uniform(-3, 0, shape), dtype)
        g = np.asarray(gradient).astype(np.float64)
        moments = {}
        for name, words in zip(("mu", "nu"), MAPS[bits]):
            stored, scale = getattr(state, name)["x"], getattr(state, f"{name}_scale")["x"]
            if quantised:
                codes = stored_codes(stored, shape, bits)
                moments[name] = words.astype(np.float64)[codes] * element_scale(name, scale, shape, bits)
            else:
                assert stored.dtype == jnp.float32
                moments[name] = np.asarray(stored, np.float64)
        mu = B1 * moments["mu"] + (1 - B1) * g
        nu = B2 * moments["nu"] + (1 - B2) * g**2
        expected = mu / (1 - B1**step) / (np.sqrt(nu / (1 - B2**step)) + EPS)

        updates, state = update({"x": gradient}, state)
        assert updates["x"].dtype == dtype
        tolerance = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}[jnp.dtype(dtype).name]
        np.testing.assert_allclose(np.asarray(updates["x"]).astype(np.float64), expected, rtol=tolerance, atol=1e-6)
        for name, moment, words in zip(("mu", "nu"), (mu, nu), MAPS[bits]):
            stored, scale = getattr(state, name)["x"], getattr(state, f"{name}_scale")["x"]
            if not quantised:
                np.testing.assert_allclose(stored, moment, rtol=1e-5)
                continue
            np.testing.assert_allclose(scale, expected_scale(name, moment, bits), rtol=1e-5)
            y = moment / np.maximum(element_scale(name, scale, shape, bits), 1e-300)
            distance = np.abs(y[..., None] - words)
            chosen = np.take_along_axis(distance, stored_codes(stored, shape, bits)[..., None].astype(int), -1)
            assert (chosen[..., 0] <= distance.min(axis=-1) + 1e-5).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", ["8", "4"])
def test_three_steps(bits, shape):
    check_steps(bits, shape, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", ["8", "4"])
def test_narrow_gradients_are_computed_in_float32(bits, dtype):
    assert ml_dtypes.finfo(dtype).bits == 16
    check_steps(bits, (37, 11), dtype)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    bits=st.sampled_from("84"),
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=5).map(tuple),
    seed=st.integers(0, 1000),
)
def test_any_shape(bits, shape, seed):
    check_steps(bits, shape, jnp.float32, seed, steps=2)
