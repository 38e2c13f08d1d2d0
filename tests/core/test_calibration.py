"""`calibrate`: what it does to moments that are already there, and first gradients that must not decide the run."""

import float64
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import gradient, gradients, leaves, mixed, same_bits

from gefen_jax import blocks, calibrate, gefen, learn_plan, plan_from_state
from gefen_jax.codebook import prior_codebook

SHAPES = [(64, 128), (4, 128, 128), (7, 5), (1, 5003), (), (96, 130)]


def trained(tx, params, steps=3):
    update = jax.jit(tx.update)
    state = tx.init(params)
    for seed in range(steps):
        _, state = update(gradients(params, seed), state, params)
    return state


@pytest.mark.parametrize(
    "options", [{}, {"bits": 4, "min_size": 0, "second_moment": "block"}, {"rule": "reference"}], ids=str
)
def test_the_plan_in_force_changes_nothing(options):
    """Bit for bit, fresh or trained, by the plan that built the state or the one read off it, in any wrapper."""
    params = mixed(SHAPES, [jnp.float32])
    plan = learn_plan(gradients(params, 9), **options)
    tx = gefen(1e-3, plan=plan)
    for state in (tx.init(params), trained(tx, params)):
        assert same_bits(calibrate(state, plan), state)
        assert same_bits(calibrate(state, plan_from_state(state)), state)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(tx, dict.fromkeys(params, True)))
    state = chain.init(params)
    assert same_bits(calibrate(state, plan), state)


def encoded(leaf, m, v):
    """What a leaf's scales, second moments and column factors should be: block maxima, and block, row, column means."""
    scale = float64.block_max(np.abs(m), leaf.mu) if leaf.mu != ("full",) else np.zeros(m.shape)
    if leaf.nu[0] == "factored":
        matrices = v.reshape(float64.zeros(leaf).nu.shape[0], -1, float64.zeros(leaf).cross.shape[1])
        return scale, matrices.mean(axis=2), matrices.mean(axis=1)
    return scale, float64.block_mean(v, leaf.nu), None


WAYS = [("auto", "block", 8), ("full", "auto", 8), ("block", "full", 4)]


@pytest.mark.parametrize(("before", "after", "bits"), WAYS)
def test_running_moments_are_decoded_averaged_and_encoded(before, after, bits):
    """Against float64: momentum to the nearest word of the new codebook under new block maxima; means of the second
    moment; step count, exact leaves and everything that the new structure shares with the old one kept."""
    params = mixed(SHAPES, [jnp.float32])
    old = trained(gefen(1e-3, second_moment=before, bits=bits), params)
    plan = learn_plan([gradients(params, seed) for seed in (7, 8)], second_moment=after, bits=bits)
    new = calibrate(old, plan)
    words, new_words = np.asarray(old.codebook), np.asarray(new.codebook)
    np.testing.assert_array_equal(new_words, plan.codebook)
    assert not np.array_equal(words, new_words)
    assert int(new.count) == int(old.count) == 3
    np.testing.assert_array_equal(new.format, gefen(1e-3, plan=plan).init(params).format)
    changed = 0
    for (path, leaf, was), (_, now_leaf, now) in zip(leaves(old), leaves(new)):
        assert now_leaf == plan.leaves[path]
        if leaf.mu == ("full",):
            assert same_bits(was, now)
            continue
        changed += leaf.nu != now_leaf.nu
        held = float64.read(leaf, was, words)
        v = float64.estimate(leaf, held.nu, held.cross)
        scale, nu, cross = encoded(now_leaf, held.m, v)
        found = float64.read(now_leaf, now, new_words)
        np.testing.assert_allclose(found.nu, nu, rtol=2e-5, err_msg=path)
        if cross is not None:
            np.testing.assert_allclose(found.cross, cross, rtol=2e-5, err_msg=path)
        blocks_of = float64.block_numbers(leaf.shape, now_leaf.mu)
        np.testing.assert_allclose(np.asarray(now.mu_scale, np.float64).ravel()[blocks_of], scale, rtol=4e-7)
        _, best = float64.quantise(now_leaf, held.m, new_words)
        assert np.all(np.abs(found.m - held.m) <= np.abs(best - held.m) + 8 * float64.ULP * scale), path
    assert changed >= 2


def test_fresh_states_take_the_plan_as_if_built_by_it():
    params = mixed(SHAPES)
    plan = learn_plan(gradients(params, 0), bits=4, min_size=0)
    state = calibrate(gefen(1e-3, bits=4, min_size=0).init(params), plan)
    assert same_bits(state, gefen(1e-3, plan=plan).init(params))


def test_calibrating_is_learning_a_plan():
    """By gradients, by a list of them, or by the plan: the same state."""
    params = mixed(SHAPES)
    trees = [gradients(params, seed) for seed in (0, 1)]
    state = gefen(1e-3).init(params)
    assert same_bits(calibrate(state, trees[0]), calibrate(state, learn_plan(trees[0])))
    assert same_bits(calibrate(state, trees), calibrate(state, learn_plan(trees)))


BAD = {
    "zero": (0.0, "zero gradient"),
    "constant": (1.5, "flat gradient"),
    "nan": (np.nan, "non-finite gradient"),
    "infinite": (np.inf, "non-finite gradient"),
}


def spoilt(kind, shape):
    g = np.array(gradient(shape, np.random.default_rng(3)))
    if kind in ("zero", "constant"):
        return np.full(shape, BAD[kind][0], np.float32)
    g[3, 5] = BAD[kind][0]
    return g


@pytest.mark.parametrize("second_moment", ["auto", "block"])
def test_bad_first_gradients_do_not_decide(second_moment):
    """Zero, constant, NaN and infinite leaves take the shape rule and say why; the others learn as if alone."""
    shape = (128, 192)
    good = {"good": gradient(shape, np.random.default_rng(1))}
    grads = good | {kind: spoilt(kind, shape) for kind in BAD}
    plan = learn_plan(grads, second_moment=second_moment)
    default = blocks(gefen(1e-3, second_moment=second_moment).init(grads))
    for kind, (_, reason) in BAD.items():
        assert plan.leaves[kind].reason == reason
        assert (plan.leaves[kind].mu, plan.leaves[kind].nu) == (default[kind].mu, default[kind].nu)
    assert plan.leaves["good"].reason == "learned"
    # The words come from the leaves that have something to say: finite, and a histogram that is not empty.
    assert np.all(np.isfinite(plan.codebook))
    alone = learn_plan(good | {"constant": grads["constant"]}, second_moment=second_moment)
    np.testing.assert_array_equal(plan.codebook, alone.codebook)
    assert np.abs(np.asarray(plan.codebook) - prior_codebook(8)).max() > 0


def test_exact_leaves_may_have_any_first_gradient():
    grads = {"kernel": gradient((128, 192), np.random.default_rng(1)), "bias": np.full(192, np.nan, np.float32)}
    plan = learn_plan(grads)
    assert plan.leaves["bias"].reason == "small"
    assert plan.leaves["kernel"].reason == "learned"


def test_a_run_survives_its_first_gradient():
    """After a bad first gradient for the plan, 50 steps go where those of an undisturbed run go: cosine above 0.99."""
    shape = (128, 192)
    good = gradient(shape, np.random.default_rng(1))
    sizes = {"a": gradient(shape, np.random.default_rng(2)), "b": good}
    params = jax.tree.map(jnp.zeros_like, sizes)
    tx = gefen(1e-3, weight_decay=0.0)

    @jax.jit
    def run(state):
        def step(carry, keys):
            p, s = carry
            g = {name: x * jax.random.normal(key, x.shape) for (name, x), key in zip(sizes.items(), keys)}
            return tx.apply(g, p, s), None

        keys = jax.random.split(jax.random.key(0), (50, 2))
        return jax.lax.scan(step, (params, state), keys)[0][0]["a"]

    def end(first):
        plan = learn_plan({"a": first, "b": good})
        return np.asarray(run(gefen(1e-3, plan=plan).init(params)), np.float64).ravel()

    undisturbed = end(gradient(shape, np.random.default_rng(2)))
    for kind in BAD:
        one = end(spoilt(kind, shape))
        assert one @ undisturbed / np.linalg.norm(one) / np.linalg.norm(undisturbed) > 0.99, kind


def times(tree, factor):
    return jax.tree.map(lambda g: g * factor, tree)


def test_learning_ignores_the_scale_of_the_gradients():
    """A power of two changes nothing at all, from 2^-60 to 2^60; other factors change no structure."""
    params = mixed(SHAPES, [jnp.float32])
    grads = gradients(params, 0)
    plan = learn_plan(grads, min_size=0)
    for factor in (2.0**-60, 2.0**60):
        other = learn_plan(times(grads, factor), min_size=0)
        assert other == plan
    other = learn_plan(times(grads, 1e-7), min_size=0)
    assert dict(other.leaves) == dict(plan.leaves)
    np.testing.assert_allclose(other.codebook, plan.codebook, atol=2e-6)
