"""The Pallas kernel in interpret mode against the plain step and float64."""

import jax.numpy as jnp
import kernel_twin as twin
import pytest
from kernel_twin import CASES

from gefen_jax import update
from gefen_pallas import leaf as pallas
from gefen_pallas import tree

SLOW = {"wide boxes", "parts of columns", "convolution", "tall boxes, columns", "long run, full", "one element"}


def run(leaf, decay, *, apply, bits=8):
    cut, mean, given = twin.cut(leaf), None, tree.Arrays(*map(jnp.asarray, leaf))
    if tree.is_factored(cut):
        h = update.hyper(twin.B1, twin.B2, twin.EPS, jnp.int32(twin.STEP))
        state = update.Leaf(*given[2:])
        nu, cross = update.second_moment(given.gradient.astype(jnp.float32), state, h)
        rows = tuple(i for i in range(nu.ndim) if cross.shape[i] == 1 and nu.shape[i] > 1)
        mean = jnp.mean(nu, rows).reshape(-1)
        given = given._replace(nu=nu, cross=cross)
    words, vector = jnp.asarray(twin.words_of(bits)), jnp.asarray(twin.hyper_vector())
    return pallas.step(given, cut, words, vector, decay, reads=True, apply=apply, mean=mean, interpret=True)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_classes(name):
    index = list(CASES).index(name)
    leaf, still = twin.arrays(CASES[name], index)
    apply = index % 2 == 0
    output, state = run(leaf, index // 2 % 2, apply=apply)
    twin.check(leaf, still, index // 2 % 2, apply, output, state)


@pytest.mark.parametrize(
    ("gradient", "parameter"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]
)
def test_dtypes(gradient, parameter):
    leaf, still = twin.arrays(CASES["row runs, own"], 1, gradient, parameter)
    output, state = run(leaf, 1, apply=True)
    twin.check(leaf, still, 1, True, output, state)


@pytest.mark.parametrize("name", ["row runs, factored", "whole columns", "runs within a mean"])
def test_four_bits(name):
    leaf, still = twin.arrays(CASES[name], 2, bits=4)
    output, state = run(leaf, 0, apply=False, bits=4)
    twin.check(leaf, still, 0, False, output, state, bits=4)
