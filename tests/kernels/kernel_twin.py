"""What every kernel is held against: the library's own step in `jax.numpy`, and float64 from the equations alone."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from gefen_jax import codebook, update
from gefen_jax.quantization import thresholds
from gefen_pallas.geometry import LeafShape, plan_leaf
from gefen_pallas.tree import Arrays

NEAR = 4e-7
"""A code may differ where the number is this close to a decision threshold (3 ulp of 1: products may be fused)."""
RATE, DECAYS, STEP = 1e-2, (0.1, 0.0), 3
B1, B2, EPS = 0.9, 0.999, 1e-8


class Case(NamedTuple):
    """Shapes of one leaf: parameter, momentum scales, second moment, column factor."""

    shape: tuple
    scale: tuple
    nu: tuple
    cross: tuple = ()
    exact: bool = False

    @property
    def crossed(self):
        return self.cross or (1,) * len(self.shape)


CASES = {
    "row runs, factored": Case((48, 256), (48, 2), (48, 1), (1, 256)),
    "row runs, own": Case((64, 96), (64, 1), (64, 1)),
    "row runs, full": Case((30, 96), (30, 1), (30, 96)),
    "runs within a mean": Case((48, 512), (48, 2), (48, 1)),
    "means within a run": Case((48, 256), (48, 2), (48, 4)),
    "whole columns": Case((48, 256), (48, 1), (1, 256)),
    "parts of columns": Case((256, 96), (256, 1), (2, 96)),
    "boxes above": Case((256, 96), (256, 3), (2, 3)),
    "wide boxes": Case((64, 512), (64, 4), (2, 2)),
    "boxes, factored": Case((40, 64), (20, 1), (40, 1), (1, 64)),
    "boxes, columns": Case((256, 12), (4, 3), (4, 12)),
    "input axis": Case((64, 61), (1, 61), (64, 1), (1, 61)),
    "tall input axis": Case((5003, 5), (1, 5), (5003, 1), (1, 5)),
    "tall boxes": Case((2503, 3), (1, 3), (1, 3)),
    "tall boxes, columns": Case((2503, 4), (1, 2), (1, 4)),
    "batches": Case((2, 30, 8, 32), (2, 30, 4, 1), (2, 30, 1, 1), (2, 1, 8, 32)),
    "heads": Case((24, 4, 64), (24, 2, 1), (24, 1, 1), (1, 4, 64)),
    "convolution": Case((3, 3, 16, 64), (3, 3, 8, 1), (3, 3, 16, 1), (1, 1, 1, 64)),
    "flat runs": Case((6, 8), (16, 1), (16, 1)),
    "long run": Case((1, 9001), (1, 1), (1, 1)),
    "long run, factored": Case((3, 4801), (3, 1), (3, 1), (1, 4801)),
    "long run, full": Case((10000,), (1,), (10000,)),
    "blocks of one": Case((37,), (37,), (37,)),
    "prime": Case((1021,), (1,), (1,)),
    "scalar": Case((), (), ()),
    "one element": Case((1, 1), (1, 1), (1, 1)),
    "exact vector": Case((40,), (1,), (40,), exact=True),
    "exact odd matrix": Case((67, 31), (1, 1), (67, 31), exact=True),
}


def dtype(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def arrays(case, seed=0, gradient="float32", parameter="float32", bits=8):
    """A leaf in mid-training with every fourth coordinate dead, and the first tenth of the elements wholly so."""
    rng = np.random.default_rng(seed)
    size = math.prod(case.shape)
    dead = np.zeros(size, bool)
    dead[::4] = size > 1
    dead[: size // 10] = True
    dead = dead.reshape(case.shape)
    spread = np.exp(rng.standard_normal(case.shape[:1] + (1,) * (len(case.shape) - 1)))
    g = np.where(dead, 0, rng.standard_normal(case.shape) * spread).astype(np.float32)
    p = rng.standard_normal(case.shape).astype(np.float32)
    words = 2**bits
    if case.exact:
        mu = np.where(dead, 0, rng.standard_normal(case.shape)).astype(np.float32)
    else:
        codes = np.where(dead, words // 2 - 1, rng.integers(0, words, case.shape)).astype(np.uint8)
        codes = np.where(codes == 128, 127, codes) if bits == 8 else codes
        mu = codes if bits == 8 else (codes[..., ::2] | codes[..., 1::2] << 4)

    def positive(shape):
        return np.asarray(rng.random(shape) + 0.1, np.float32)

    cross = positive(case.crossed) if case.cross else np.ones(case.crossed, np.float32)
    g, p = g.astype(dtype(gradient)), p.astype(dtype(parameter))
    return Arrays(g, p, np.array(mu, order="C"), positive(case.scale), positive(case.nu), cross), dead


def cut(leaf):
    """How the geometry cuts the leaf."""
    shapes = (x.shape for x in (leaf.gradient, leaf.mu, leaf.scale, leaf.nu, leaf.cross))
    exact = leaf.mu.dtype != np.uint8
    return plan_leaf(LeafShape(*shapes, exact, leaf.gradient.dtype.name, leaf.parameter.dtype.name))


def words_of(bits):
    return np.asarray(codebook.prior_codebook(bits), np.float32)


def hyper_vector(factor=1.0):
    h = update.hyper(B1, B2, EPS, jnp.int32(STEP))
    return np.array([B1, 1 - B1, B2, 1 - B2, h.bc1, h.bc2, EPS, RATE, factor, *DECAYS], np.float32)


def oracle(leaf, decay, apply, bits=8, codec="table"):
    """Output and new state by the library's plain step."""
    book = update.codebook(jnp.asarray(words_of(bits)), codec)
    h = update.hyper(B1, B2, EPS, jnp.int32(STEP))
    g, p, *state = map(jnp.asarray, leaf)
    d, new = update.leaf_update(g, update.Leaf(*state), book, h)
    return update.finish(d, p, update.Tail(jnp.float32(RATE), DECAYS[decay], apply), g.dtype), new


def spread(statistic, shape):
    """A statistic repeated to the shape of its parameter."""
    statistic = np.asarray(statistic, np.float64)
    if shape and any(n % s for n, s in zip(shape, statistic.shape)):
        return np.repeat(statistic.ravel(), math.prod(shape) // statistic.size).reshape(shape)
    for axis, (n, s) in enumerate(zip(shape, statistic.shape)):
        statistic = np.repeat(statistic, n // s, axis=axis)
    return statistic.reshape(shape)


def means(x, like):
    """Block means (or maxima are made likewise) of ``x`` with the shape of a statistic."""
    return _reduce(x, like, np.mean)


def _reduce(x, stat, function):
    if x.shape and any(n % s for n, s in zip(x.shape, stat)):
        return function(x.reshape(stat[0], -1), axis=1).reshape(stat)
    split = [part for n, s in zip(x.shape, stat) for part in (s, n // s)]
    return function(x.reshape(split), axis=tuple(range(1, len(split), 2))).reshape(stat) if split else x


def float64(leaf, decay, bits=8):
    """The float64 update, momentum in units of its scale, and new statistics."""
    g, p = (np.asarray(x).astype(np.float64) for x in (leaf.gradient, leaf.parameter))
    shape = g.shape
    if leaf.mu.dtype == np.uint8:
        codes = leaf.mu
        if bits == 4:
            codes = np.stack([leaf.mu & 15, leaf.mu >> 4], -1).reshape(shape)
        old = words_of(bits)[codes].astype(np.float64) * spread(leaf.scale, shape)
    else:
        old = leaf.mu.astype(np.float64)
    m = B1 * old + (1 - B1) * g
    factored = any(s != 1 for s in leaf.cross.shape)
    nu = B2 * leaf.nu.astype(np.float64) + (1 - B2) * means(g * g, leaf.nu.shape)
    cross = leaf.cross.astype(np.float64)
    if factored:
        cross = B2 * cross + (1 - B2) * means(g * g, leaf.cross.shape)
        rows = tuple(i for i in range(nu.ndim) if cross.shape[i] == 1 and nu.shape[i] > 1)
        v = nu * cross / nu.mean(rows, keepdims=True)
    else:
        v = spread(nu, shape)
    d = m / (1 - B1**STEP) / (np.sqrt(v / (1 - B2**STEP)) + EPS)
    u = -RATE * (d + DECAYS[decay] * p)
    scale = _reduce(np.abs(m), leaf.scale.shape, np.max) if leaf.mu.dtype == np.uint8 else None
    return u, m, scale, nu, cross


def check(leaf, dead, decay, apply, output, state, *, bits=8, codec="table"):
    """Compare a kernel's results with both references; returns the number of codes that differ at a threshold."""
    expected, new = oracle(leaf, decay, apply, bits, codec)
    u, m, scale, nu, cross = float64(leaf, decay, bits)
    output, mu = np.asarray(output), np.asarray(state[0])
    assert output.dtype == (leaf.parameter if apply else leaf.gradient).dtype
    assert output.shape == leaf.gradient.shape
    coarse = max(float(jnp.finfo(leaf.gradient.dtype).eps) if not apply else 0, 4 * float(jnp.finfo(np.float32).eps))
    exactly = u if not apply else leaf.parameter.astype(np.float64) + u
    ulp = float(jnp.finfo(output.dtype).eps)
    slack = np.abs(u) * (2 * coarse + (float(jnp.finfo(leaf.gradient.dtype).eps) if apply else 0) + 2e-5)
    np.testing.assert_allclose(output.astype(np.float64), exactly, rtol=ulp, atol=slack.max() * 1.01 + 1e-12)
    np.testing.assert_allclose(
        output.astype(np.float64), np.asarray(expected).astype(np.float64), rtol=2 * ulp, atol=slack.max()
    )
    for got, want in ((state[2], nu), (state[3], cross)):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    differing = 0
    if scale is None:
        np.testing.assert_allclose(mu, m, rtol=1e-5, atol=1e-7)
    else:
        np.testing.assert_allclose(np.asarray(state[1]), scale, rtol=1e-6)
        differing = _compare_codes(mu, np.asarray(new.mu), m, spread(scale, m.shape), bits, codec)
    if DECAYS[decay] == 0:
        still = dead & (m == 0)
        assert (output[still] == (leaf.parameter[still] if apply else 0)).all(), "a dead coordinate moved"
    return differing


def _compare_codes(found, expected, m, scale, bits, codec):
    if bits == 4:
        found, expected = (np.stack([x & 15, x >> 4], -1).reshape(m.shape) for x in (found, expected))
    assert found.shape == expected.shape
    different = found != expected
    zero = 2**bits // 2 - 1
    assert (found[(m == 0)] == zero).all()
    assert (found != 128).all() or bits == 4, "the second zero was used"
    if not different.any():
        return 0
    y = m[different] / scale[different]
    if codec == "table":
        limits = np.asarray(thresholds(jnp.asarray(words_of(bits)))).astype(np.float64)
        assert np.abs(y[:, None] - limits).min(axis=1).max() < NEAR, "a code differs away from any threshold"
    assert np.abs(found[different].astype(int) - expected[different].astype(int)).max() <= 1 + (bits == 8)
    assert different.sum() <= 1 + 1e-3 * different.size
    return int(different.sum())
