"""The default step against its equations in float64 NumPy: single steps of every structure, and whole runs."""

import float64
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import DTYPES, gradients, leaves, mixed

from gefen_jax import learn_plan, scale_by_gefen

SHAPES = [(64, 128), (7, 5), (3, 67, 64), (), (131,), (1, 5003), (4, 128, 128), (2, 3, 4, 5, 6), (512, 8)]
VARIANTS = [
    ({}, False),
    ({}, True),
    ({"bits": 4}, True),
    ({"second_moment": "block"}, True),
    ({"second_moment": "block", "bits": 4}, False),
    ({"second_moment": "factored"}, True),
    ({"second_moment": "full"}, False),
]


def label(variant):
    kw, calibrated = variant
    return f"{kw.get('second_moment', 'auto')}-{kw.get('bits', 8)}" + ("-calibrated" if calibrated else "")


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_steps_are_the_equations(variant):
    """From each state of the library, the next one is what float64 makes of it; all dtypes and shapes in one tree."""
    kw, calibrated = variant
    params = mixed(SHAPES)
    h = float64.Hyper(0.8, 0.95, 1e-6)
    plan = learn_plan([gradients(params, seed) for seed in (1, 2)], min_size=0, **kw) if calibrated else None
    tx = scale_by_gefen(*h, min_size=0, plan=plan, **kw)
    state = tx.init(params)
    words = np.asarray(state.codebook)
    update = jax.jit(tx.update)
    quantised = set()
    for t in range(1, 9):
        g = gradients(params, t)
        direction, new = update(g, state)
        for (path, leaf, before), after in zip(leaves(state), new.leaves()):
            float64.check_step(leaf, before, after, g[path], direction[path], t, words, h)
            if leaf.mu != ("full",):
                quantised.add(path)
        state = new
    assert quantised >= {"p0", "p1", "p2", "p4", "p5", "p6", "p7", "p8"}
    assert int(state.count) == 8


@pytest.mark.parametrize(("second_moment", "bits"), [("auto", 8), ("block", 4)])
def test_runs_follow_float64(second_moment, bits):
    """40 steps of the library and of float64 apart. Where rounding decides between two words the runs part a little:
    such codes are rare, and directions stay within the error that FORMAT.md allows for it, 0.02 per step."""
    shapes = {"kernel": (64, 128), "stack": (2, 128, 128), "vector": (300,), "bias": (9,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    h = float64.Hyper()
    tx = scale_by_gefen(second_moment=second_moment, bits=bits, min_size=64)
    state = tx.init(params)
    words = np.asarray(state.codebook)
    update = jax.jit(tx.update)
    decided = {path: leaf for path, leaf, _ in leaves(state)}
    mine = {path: float64.zeros(leaf) for path, leaf in decided.items()}
    drift = {path: np.zeros(leaf.shape) for path, leaf in decided.items()}
    for t in range(1, 41):
        g = gradients(params, t)
        direction, state = update(g, state)
        for path, leaf in decided.items():
            expected, moments = float64.step(leaf, mine[path], g[path], t, h)
            codes, stored = float64.quantise(leaf, moments.m, words)
            mine[path] = moments._replace(m=stored)
            drift[path] += np.asarray(direction[path], np.float64) - expected
            theirs = state.mu[path]
            if codes is not None:
                theirs = np.asarray(theirs) if bits == 8 else float64.unpack(np.asarray(theirs), leaf.shape)
                assert np.mean(theirs != codes) <= 1e-3, (path, t)
    for path, error in drift.items():
        assert np.abs(error).max() <= 40 * 0.02, path
        assert np.mean(np.abs(error)) <= 40 * 1e-5, path


sizes = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 11, 16, 31, 64, 67, 96, 128, 211])


@st.composite
def trees(draw):
    """Up to three leaves of rank 0 to 5, of at most 8192 elements each."""
    params = {}
    for i in range(draw(st.integers(0, 3))):
        shape: tuple[int, ...] = ()
        for _ in range(draw(st.integers(0, 5))):
            size = draw(sizes)
            if np.prod(shape, dtype=int) * size <= 8192:
                shape += (size,)
        params[f"p{i}"] = np.zeros(shape, np.dtype(draw(st.sampled_from(DTYPES))))
    return params


@settings(max_examples=30)
@given(trees(), st.sampled_from(["auto", "block", "factored", "full"]), st.sampled_from([8, 4]), st.booleans())
def test_any_shape(params, second_moment, bits, quantise_all):
    """Every shape, dtype and structure: two steps are the equations, state shapes are those of the plan."""
    h = float64.Hyper()
    tx = scale_by_gefen(second_moment=second_moment, bits=bits, min_size=0 if quantise_all else None)
    state = tx.init(params)
    words = np.asarray(state.codebook)
    update = jax.jit(tx.update)
    for t in (1, 2):
        g = gradients(params, t, scale=3.0)
        direction, new = update(g, state)
        assert jax.tree.structure(direction) == jax.tree.structure(params)
        for (path, leaf, before), after in zip(leaves(state), new.leaves()):
            p, d = params[path], direction[path]
            assert (d.shape, d.dtype) == (p.shape, p.dtype)
            if p.size:
                assert leaf.shape == p.shape
                float64.check_step(leaf, before, after, g[path], d, t, words, h)
        state = new
