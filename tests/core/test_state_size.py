"""Bytes of state: the bound for every tree, and models of the sizes that people train, by their shapes alone."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import gradients

from gefen_jax import explain, gefen, learn_plan
from gefen_jax.lab import models
from gefen_jax.partition import ELEMENTS_PER_STATISTIC


def size_of(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def count(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def abstract(shapes):
    return {f"p{i}": jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16) for i, shape in enumerate(shapes)}


def bound(params):
    """Rule R5: never more than Adam's 8 bytes per element, but for 20 bytes a leaf and the codebook."""
    return 8 * count(params) + 20 * len(jax.tree.leaves(params)) + 1.1 * 1024


sizes = st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 64, 67, 128, 251, 256, 257, 509, 768, 1024, 5003]))
shapes = st.lists(st.lists(sizes, max_size=5).filter(lambda s: math.prod(s) < 10**9), max_size=12)


@settings(max_examples=400)
@given(
    shapes,
    st.sampled_from(["auto", "block", "factored", "full"]),
    st.sampled_from([8, 4]),
    st.sampled_from([None, 0, 64, 10**9]),
)
def test_no_tree_costs_more_than_adam(drawn, second_moment, bits, min_size):
    params = abstract(drawn)
    state = jax.eval_shape(gefen(1e-3, second_moment=second_moment, bits=bits, min_size=min_size).init, params)
    assert size_of(state) <= bound(params)
    assert all(x.size > 0 for x in jax.tree.leaves(state))  # checkpoints refuse arrays without elements
    for p, *statistics in zip(*map(jax.tree.leaves, (params, state.mu_scale, state.nu, state.nu_cross))):
        assert all(len(x.shape) == len(p.shape) and x.dtype == np.float32 for x in statistics)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 7, 16, 64, 67, 128]), max_size=4), min_size=1, max_size=4),
    st.sampled_from(["auto", "block", "full"]),
    st.sampled_from([8, 4]),
    st.integers(0, 99),
)
def test_no_learned_tree_costs_more_than_adam(drawn, second_moment, bits, seed):
    params = {f"p{i}": np.zeros(s, np.float32) for i, s in enumerate(drawn) if math.prod(s) <= 2**15} | {
        "one": np.zeros((64, 64), np.float32)
    }
    plan = learn_plan(gradients(params, seed), second_moment=second_moment, bits=bits, min_size=0)
    assert size_of(jax.eval_shape(gefen(1e-3, plan=plan).init, params)) <= bound(params)


def scanned(params):
    """The same model with its layers stacked along a first axis, as `flax.linen.scan` and MaxText keep them."""
    stacks = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        stacks.setdefault(re.sub(r"(?<=_)\d+(?=/)", "*", name), []).append(leaf)
    return {
        name: jax.ShapeDtypeStruct(((len(found),) if "*" in name else ()) + found[0].shape, found[0].dtype)
        for name, found in stacks.items()
    }


def statistics(state):
    """Elements of the quantised leaves, and numbers stored beside their codes."""
    coded = [leaf for leaf in state.leaves() if leaf.mu.dtype == np.uint8]
    return sum(leaf.mu.size for leaf in coded), sum(x.size for leaf in coded for x in leaf[1:])


MODELS = [
    ("gpt2-124m", False, 1.05),
    ("llama3-1.5b", False, 1.025),
    ("llama3-1.5b", True, 1.025),
    ("qwen3-1.7b", False, 1.025),
    ("qwen3-1.7b", True, 1.025),
]
SIZES = {"gpt2-124m": (1.2e8, 1.3e8), "llama3-1.5b": (1.4e9, 1.6e9), "qwen3-1.7b": (1.6e9, 1.8e9)}


@pytest.mark.parametrize(("name", "stacked", "limit"), MODELS)
def test_models_cost_about_a_byte(name, stacked, limit):
    """Uncalibrated, and at most that much under any plan that can be learned.

    A learned plan keeps the leaves that are exact, and spends on the others' scales and second moments at most one
    number for 170 elements, or as many as the shape rule where that is more (`partition.choose`, tested with it).
    """
    params = models.shapes(models.preset(name))
    whole = count(params)
    if stacked:
        leaves = len(jax.tree.leaves(params))
        params = scanned(params)
        assert len(params) < leaves / 10
    assert count(params) == whole
    assert SIZES[name][0] < whole < SIZES[name][1]
    state = jax.eval_shape(gefen(1e-3).init, params)
    assert size_of(state) <= limit * whole
    assert all(len(jax.tree.leaves(tree)) == len(jax.tree.leaves(params)) for tree in (state.mu, state.nu))

    elements, kept = statistics(state)
    most = max(kept, elements // ELEMENTS_PER_STATISTIC + len(jax.tree.leaves(params)))
    worst = size_of(state) + 4 * (most - kept)
    assert worst <= limit * whole
    assert size_of(jax.eval_shape(gefen(1e-3, bits=4).init, params)) <= (limit - 0.48) * whole


def test_a_calibrated_model_stays_within_the_budget():
    """A whole GPT of 3 million parameters, with gradients of every structure, learned and built."""
    params = models.init(models.preset("gpt"), jax.random.key(0))
    plan = learn_plan(gradients(params, 0))
    state = gefen(1e-3, plan=plan).init(params)
    elements, kept = statistics(state)
    _, default = statistics(gefen(1e-3).init(params))
    leaves = len(jax.tree.leaves(params))  # the budget does not count the 1 that stands for no column factor
    assert kept <= max(elements // ELEMENTS_PER_STATISTIC, default) + leaves
    found = explain(state)
    assert found.bytes == size_of(state)
    assert found.parameters == count(params)


@pytest.mark.slow
def test_gpt2_calibrated_costs_about_a_byte():
    """124 million parameters with gradients of every structure."""
    params = models.shapes(models.preset("gpt2-124m"))
    rng = np.random.default_rng(0)

    def grad(p):
        g = rng.standard_normal(p.shape, np.float32)
        for axis in range(max(len(p.shape) - 2, 0), len(p.shape)):
            along = [1] * len(p.shape)
            along[axis] = p.shape[axis]
            g *= np.exp(rng.standard_normal(along, np.float32))
        return g

    plan = learn_plan(jax.tree.map(grad, params))
    assert size_of(jax.eval_shape(gefen(1e-3, plan=plan).init, params)) <= 1.05 * count(params)
