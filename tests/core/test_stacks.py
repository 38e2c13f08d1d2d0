"""A stack of slices is trained as the slices are, one by one: layers under scan, experts, heads."""

import float64
import jax
import numpy as np
import pytest
from trees import gradient, gradients, mixed

from gefen_jax import blocks, scale_by_gefen

DECLARED = [(4, 64, 32), (5, 7, 3), (3, 40, 50), (2, 128, 128), (6, 1, 131), (3, 96, 1)]
"""Stacks of one batch axis; some slices are worth factoring and some are not."""
UNDECLARED = [(2, 128, 128), (3, 150, 130), (2, 2, 128, 160), (4, 4096, 4), (5, 7, 3), (3, 1, 131)]
"""Slices of at least 128 x 128, and slices too thin to factor."""
APART = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-9}


def codes(mu, shape):
    """One code per element, whichever axis packs two into a byte."""
    mu = np.asarray(mu)
    return mu if mu.shape == shape else float64.unpack(mu, shape)


def assert_stacks_are_slices(shapes, axes, options):
    """Three steps of the stacks and of their slices; what they keep and return agrees to rounding.

    All stacks are one tree, and so are the first slices of all, the second ones (shorter stacks begin anew), and so on.
    """
    params = mixed(shapes)
    whole = scale_by_gefen(min_size=0, axes=dict.fromkeys(params, (1, 1)) if axes else None, **options)
    single = scale_by_gefen(min_size=0, **options)
    depth = max(shape[0] for shape in shapes)

    def slices(tree, i):
        return {name: x[i % x.shape[0]] for name, x in tree.items()}

    state, parts = whole.init(params), [single.init(slices(params, 0))] * depth
    for (name, leaf), one in zip(blocks(state).items(), blocks(parts[0]).values()):
        assert leaf.mu == ("tile", (1, *one.mu[1])), name
    update, update_part = jax.jit(whole.update), jax.jit(single.update)
    for seed in range(3):
        g = gradients(params, seed)
        d, state = update(g, state)
        e, parts = zip(*[update_part(slices(g, i), part) for i, part in enumerate(parts)])
        for name, p in params.items():
            count = p.shape[0]
            for field in ("mu_scale", "nu", "nu_cross"):
                one, many = getattr(state, field)[name], [getattr(part, field)[name] for part in parts[:count]]
                one = np.broadcast_to(one, (count, *many[0].shape))  # no column factors: a single 1
                np.testing.assert_allclose(one, np.stack(many), rtol=1e-5, err_msg=f"{field} of {name}")
            many = np.stack([codes(part.mu[name], p.shape[1:]) for part in parts[:count]])
            assert np.mean(codes(state.mu[name], p.shape) != many) <= 1e-3
            one = np.asarray(d[name]).astype(np.float64)
            many = np.stack([x[name] for x in e[:count]]).astype(np.float64)
            assert np.all(np.abs(one - many) <= APART[p.dtype.name] * (1 + np.abs(one))), name


@pytest.mark.parametrize("options", [{}, {"second_moment": "block", "bits": 4}], ids=str)
@pytest.mark.parametrize(("shapes", "axes"), [(DECLARED, True), (UNDECLARED, False)], ids=["declared", "undeclared"])
def test_stacks_are_their_slices(shapes, axes, options):
    assert_stacks_are_slices(shapes, axes, options)


def test_statistics_stay_inside_a_slice():
    """A change in one slice changes nothing in another, bit for bit."""
    tx = scale_by_gefen(min_size=0, axes={"a": (1, 1)})
    rng = np.random.default_rng(0)
    g = {"a": gradient((4, 64, 32), rng), "b": gradient((3, 128, 128), rng)}
    other = {name: x.at[1].multiply(100.0) for name, x in g.items()}
    update = jax.jit(tx.update)
    one, two = update(g, tx.init(g)), update(other, tx.init(g))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
        if a.ndim == 3 and a.shape[0] > 1:
            keep = np.arange(a.shape[0]) != 1
            np.testing.assert_array_equal(np.asarray(a)[keep], np.asarray(b)[keep])
    for name in g:
        assert np.all(np.asarray(one[1].mu_scale[name])[1] != np.asarray(two[1].mu_scale[name])[1])
