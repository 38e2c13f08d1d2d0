"""Exact leaves against Adam in float64 and in Optax; a full second moment against Adam and the quantisation bound."""

import float64
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import gradient, gradients, leaves, mixed

from gefen_jax import blocks, gefen, scale_by_gefen

ULP = float64.ULP


def adam(grads, h):
    """(direction, m, root of the corrected v) of each step, float64."""
    m = v = 0.0
    found = []
    for t, g in enumerate(grads, 1):
        g = np.asarray(g).astype(np.float64)
        m, v = h.b1 * m + (1 - h.b1) * g, h.b2 * v + (1 - h.b2) * g * g
        root = np.sqrt(v / (1 - h.b2**t))
        found.append((m / (1 - h.b1**t) / (root + h.eps), m, root))
    return found


def terms(grads, h):
    """Sum of the magnitudes of the terms of m: rounding errors are relative to it where the terms cancel."""
    total, found = 0.0, []
    for g in grads:
        total = h.b1 * total + (1 - h.b1) * np.abs(np.asarray(g).astype(np.float64))
        found.append(total)
    return found


SHAPES = [(), (1,), (7,), (3, 5), (1021,), (2, 3, 4, 5, 6), (0, 3), (64, 63)]


@pytest.mark.parametrize("by", ["min_size", "full_precision"])
def test_exact_leaves_are_adam(by):
    """Small leaves, and any leaf on request, to a few roundings of float32 a step: for 30 steps, from any dtype."""
    params = mixed(SHAPES if by == "min_size" else [*SHAPES, (64, 128)])
    tx = scale_by_gefen(full_precision=None if by == "min_size" else ".*")
    state = tx.init(params)
    assert all(leaf.mu == ("full",) for leaf in blocks(state).values())
    h = float64.Hyper()
    steps = [gradients(params, seed, scale=10.0 ** (seed % 5 - 2)) for seed in range(30)]
    expected = {name: adam([g[name] for g in steps], h) for name in params}
    sizes = {name: terms([g[name] for g in steps], h) for name in params}
    update = jax.jit(tx.update)
    narrow = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10}
    for t, g in enumerate(steps, 1):
        direction, state = update(g, state)
        for name, p in params.items():
            if not p.size:
                continue
            d, m, root = expected[name][t - 1]
            found = np.asarray(direction[name]).astype(np.float64)
            assert direction[name].dtype == p.dtype
            slack = (4 + t) * ULP * sizes[name][t - 1]
            assert np.all(np.abs(np.asarray(state.mu[name]) - m) <= slack), name
            gain = 1 / (1 - h.b1**t) / (root + h.eps)
            rounding = narrow[p.dtype.name] * np.abs(d) + (2.0**-24 if p.dtype == np.float16 else 0)
            assert np.all(np.abs(found - d) <= slack * gain + (8 + t) * ULP * np.abs(d) + rounding), (name, t)


def test_exact_leaves_are_optax_adamw():
    """Parameters after 20 steps, and after each the update, within what float32 leaves open.

    Optax corrects the bias with 1 - b2^t in float32, whose cancellation costs up to 2^-24 t / (1 - b2^t) of v, half of
    that of its root: 3e-5 here, at any t. All else is a few ulps.
    """
    params = mixed(SHAPES, [jnp.float32])
    lr, decay = 1e-2, 0.1
    ours, theirs = gefen(lr, weight_decay=decay), optax.adamw(lr, weight_decay=decay)

    @jax.jit
    def step(a, b, state, other, g):
        u, state = ours.update(g, state, a)
        w, other = theirs.update(g, other, b)
        return optax.apply_updates(a, u), optax.apply_updates(b, w), state, other

    a, b, state, other = params, params, ours.init(params), theirs.init(params)
    for t in range(1, 21):
        a, b, state, other = step(a, b, state, other, gradients(params, t))
        for name in params:
            difference = np.abs(np.asarray(a[name], np.float64) - np.asarray(b[name]))
            assert np.all(difference <= t * (2 * lr * 3.2e-5 + 4 * ULP * (1 + np.abs(np.asarray(b[name]))))), (name, t)
    for name in params:
        if params[name].size:
            np.testing.assert_allclose(state.mu[name], other[0].mu[name], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(state.nu[name], other[0].nu[name], rtol=1e-5)


@st.composite
def quantised_trees(draw):
    shapes = draw(st.lists(st.lists(st.sampled_from([1, 2, 3, 8, 17, 64]), min_size=1, max_size=3), max_size=3))
    return {f"p{i}": tuple(shape) for i, shape in enumerate(shapes) if 2 <= np.prod(shape) <= 6000}


@settings(max_examples=15)
@given(quantised_trees(), st.sampled_from([8, 4]), st.sampled_from([0.5, 0.9]), st.integers(0, 99))
def test_full_second_moment_differs_from_adam_by_the_quantisation_bound(shapes, bits, b1, seed):
    """Where every element has its own second moment, only the stored momentum differs from Adam's.

    Let m_t be the momentum of step t before it is stored and S_t the largest magnitude in its block. Storing it adds
    an error q_t with |q_t| <= G S_t / 2, G the widest gap between words, as each element goes to the nearest of them
    and both ends are words. The next momentum is b1 (m_t + q_t) + (1 - b1) g, so the difference e_t from Adam's is
    e_t = b1 (e_{t-1} + q_{t-1}), hence

        |e_t| <= E_t := sum over k = 1 .. t-1 of b1^k G S_{t-k} / 2,

    and the update, lr m_t / ((1 - b1^t) (sqrt(v_t / (1 - b2^t)) + eps)), differs from Adam's by at most lr E_t over
    that denominator. S_t is the scale in the state. Float32 rounding adds some ulps of the terms of m and of the rest.
    """
    lr, h = 0.1, float64.Hyper(b1, 0.99, 1e-8)
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tx = gefen(lr, *h, weight_decay=0.0, second_moment="full", bits=bits, min_size=0)
    state = tx.init(params)
    gap = np.diff(np.asarray(state.codebook, np.float64)).max()
    rng = np.random.default_rng(seed)
    steps = [
        {name: gradient(shape, rng, np.float32, 10.0 ** rng.uniform(-3, 1)) for name, shape in shapes.items()}
        for _ in range(8)
    ]
    update = jax.jit(tx.update)
    bound = {name: np.zeros(shape) for name, shape in shapes.items()}
    for t, g in enumerate(steps, 1):
        u, state = update(g, state, params)
        for path, leaf, part in leaves(state):
            d, _, root = adam([g[path] for g in steps[:t]], h)[-1]
            size = terms([g[path] for g in steps[:t]], h)[-1]
            gain = lr / (1 - h.b1**t) / (root + h.eps)
            error = np.abs(np.asarray(u[path], np.float64) + lr * d)
            slack = 16 * ULP * (size + bound[path]) * gain + 16 * ULP * lr * np.abs(d)
            assert np.all(error <= bound[path] * gain + slack), (path, t, error.max())
            if leaf.mu != ("full",):
                largest = np.asarray(part.mu_scale, np.float64).ravel()[float64.block_numbers(leaf.shape, leaf.mu)]
                bound[path] = h.b1 * (bound[path] + gap / 2 * largest)


def test_the_quantisation_bound_is_not_idle():
    """The error is a fair share of the bound, and 8 bits are nearer to Adam than 4."""
    h = float64.Hyper()
    error = {}
    for bits in (8, 4):
        tx = scale_by_gefen(second_moment="full", bits=bits)
        g = {"w": np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)}
        _, state = tx.update(g, tx.init(g))
        direction, _ = tx.update(g, state)
        d = adam([g["w"]] * 2, h)[-1][0]
        error[bits] = np.mean(np.abs(np.asarray(direction["w"], np.float64) - d))
    assert 1e-3 < error[8] < error[4] / 4, error
