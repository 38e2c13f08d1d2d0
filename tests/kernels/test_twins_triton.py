"""The Triton source, interpreted on the CPU, against the plain step and float64."""

import math
import sys

import kernel_twin as twin
import numpy as np
import pytest
from kernel_twin import CASES

from gefen_pallas import schedule, tree
from gefen_pallas.interpreter import Interpreter

pytest.importorskip("triton", reason="Triton is not installed: the kernels' source is NOT interpreted here")
if sys.modules.get("gefen_pallas.source") is not None:
    pytest.skip("Triton was imported to compile in this process", allow_module_level=True)

GUARD = 64
DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float16")]


class Guarded(Interpreter):
    """Arrays that kernels write lie between guards, which must be untouched afterwards."""

    def __init__(self):
        self.memory = []

    def mutable(self, array):
        raw = np.full(array.nbytes + 2 * GUARD, 0xA5, np.uint8)
        inside = raw[GUARD : GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        self.memory.append(raw)
        return inside

    def check(self):
        for raw in self.memory:
            assert (raw[:GUARD] == 0xA5).all(), "written before an array"
            assert (raw[-GUARD:] == 0xA5).all(), "written beyond an array"


def run(leaves, *, apply, bits=8, codec="table", limits=None, factor=1.0):
    launcher = Guarded()
    decays = [i % 2 for i in range(len(leaves))]
    outputs, states = tree.step(
        launcher,
        leaves,
        [twin.cut(leaf) for leaf in leaves],
        twin.words_of(bits),
        twin.hyper_vector(factor),
        decays,
        reads=True,
        apply=apply,
        companding=codec == "companding",
        limits=limits,
    )
    launcher.check()
    return outputs, states, decays


@pytest.mark.parametrize("apply", [True, False], ids=["apply", "update"])
def test_all_classes_in_one_tree(apply):
    """Every class of blocks at once, each with the others as neighbours."""
    leaves, dead = zip(*(twin.arrays(case, seed) for seed, case in enumerate(CASES.values())))
    outputs, states, decays = run(leaves, apply=apply)
    for leaf, still, decay, output, state in zip(leaves, dead, decays, outputs, states):
        twin.check(leaf, still, decay, apply, output, state)


@pytest.mark.parametrize(("gradient", "parameter"), DTYPES)
def test_dtypes(gradient, parameter):
    chosen = ["row runs, factored", "whole columns", "boxes, factored", "runs within a mean", "exact vector", "prime"]
    made = [twin.arrays(CASES[name], 1, gradient, parameter) for name in chosen]
    apply = parameter != "bfloat16" or gradient == "bfloat16"
    outputs, states, decays = run([leaf for leaf, _ in made], apply=apply)
    for (leaf, still), decay, output, state in zip(made, decays, outputs, states):
        twin.check(leaf, still, decay, apply, output, state)


def test_four_bits():
    chosen = [
        "row runs, factored",
        "row runs, own",
        "row runs, full",
        "runs within a mean",
        "means within a run",
        "whole columns",
        "boxes above",
        "boxes, factored",
        "tall boxes, columns",
        "batches",
        "long run, full",
    ]
    made = [twin.arrays(CASES[name], 2, bits=4) for name in chosen]
    outputs, states, decays = run([leaf for leaf, _ in made], apply=True, bits=4)
    for (leaf, still), decay, output, state in zip(made, decays, outputs, states):
        twin.check(leaf, still, decay, True, output, state, bits=4)


def test_companding_codes():
    from gefen_jax import codebook

    made = [twin.arrays(CASES[name], 3) for name in ("row runs, factored", "row runs, own")]
    words = np.asarray(codebook.companding_codebook(0.6), np.float32)
    original = twin.words_of
    twin.words_of = lambda bits: words
    try:
        outputs, states, decays = run([leaf for leaf, _ in made], apply=True, codec="companding")
        for (leaf, still), decay, output, state in zip(made, decays, outputs, states):
            twin.check(leaf, still, decay, True, output, state, codec="companding")
    finally:
        twin.words_of = original


def test_many_leaves_in_several_launches():
    """Splitting changes nothing."""
    names = ["row runs, factored", "exact vector", "one element", "row runs, own", "boxes, factored"]
    leaves = [twin.arrays(CASES[names[i % 5]], i)[0] for i in range(20)]
    whole, _, _ = run(leaves, apply=True)
    parts, _, _ = run(leaves, apply=True, limits={"max_leaves": 3, "max_classes": 2})
    for a, b in zip(whole, parts):
        np.testing.assert_array_equal(a, b)


def test_factor_multiplies_gradients():
    leaf, _ = twin.arrays(CASES["row runs, factored"], 5)
    half = leaf._replace(gradient=leaf.gradient * np.float32(0.5))
    (a,), (state,), _ = run([leaf], apply=True, factor=0.5)
    (b,), (expected,), _ = run([half], apply=True)
    np.testing.assert_array_equal(a, b)
    for x, y in zip(state, expected):
        np.testing.assert_array_equal(x, y)


def test_extreme_gradients():
    """Neither overflow of products of factors nor underflow of the scale's reciprocal."""
    for size in (1e10, 1e-10, 1e-37):
        leaf, _ = twin.arrays(CASES["row runs, factored"], 6)
        zero = leaf._replace(
            gradient=leaf.gradient * np.float32(size),
            mu=np.full_like(leaf.mu, 127),
            nu=leaf.nu * 0,
            cross=leaf.cross * 0,
            scale=leaf.scale * 0,
        )
        (output,), (state,), _ = run([zero], apply=False)
        expected, new = twin.oracle(zero, 0, False)
        assert np.isfinite(output).all()
        np.testing.assert_allclose(output, np.asarray(expected), rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(state[1], np.asarray(new.mu_scale), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_loses_a_factored_leaf_visibly(bad):
    """With a column share of 0 the rows that it is not in would be divided by eps alone, and leap."""
    leaf, _ = twin.arrays(CASES["row runs, factored"], 7)
    leaf.gradient[3, 5] = bad
    (output,), _, _ = run([leaf], apply=True)
    assert np.isnan(output).all()


def test_norm():
    gradients = [twin.arrays(case, i)[0].gradient for i, case in enumerate(CASES.values())]
    gradients.append(gradients[0].astype(twin.dtype("bfloat16")))
    gradients.append(np.full(40000, 0.5, np.float32))
    found = tree.norm(Interpreter(), gradients)
    exact = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients))
    assert abs(float(found) / exact - 1) < 1e-6


def test_a_broken_table_is_seen():
    """The comparison can fail: one hyper-parameter off by a thousandth is found."""
    leaf, still = twin.arrays(CASES["row runs, own"], 7)
    vector = twin.hyper_vector()
    vector[0] *= 1.001
    outputs, states = tree.step(
        Interpreter(), [leaf], [twin.cut(leaf)], twin.words_of(8), vector, [0], reads=True, apply=True
    )
    with pytest.raises(AssertionError):
        twin.check(leaf, still, 0, True, outputs[0], states[0])


def test_meta_width_agrees():
    from gefen_pallas import source

    assert source.META.value == schedule.META
