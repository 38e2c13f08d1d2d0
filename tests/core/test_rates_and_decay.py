"""Learning rates of every kind and size, weight decay and its masks, and programs with and without x64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import bits_of, gradients, mixed, same_bits

from gefen_jax import gefen, scale_by_gefen

SHAPES = [(64, 128), (7,)]


def one_step(tx, params, seed=0):
    """The first update."""
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(gradients(params, seed), params)


@pytest.fixture(scope="module")
def params():
    return mixed(SHAPES, [jnp.float32])


@pytest.fixture(scope="module")
def reference(params):
    """The update at learning rate 1/8, and the direction."""
    return one_step(gefen(0.125), params), one_step(scale_by_gefen(), params)


@pytest.mark.parametrize(
    "rate",
    [
        np.float32(0.125),
        np.float64(0.125),
        np.array(0.125),
        jnp.float32(0.125),
        jnp.bfloat16(0.125),
        lambda count: 0.125,
        lambda count: jnp.where(count == 0, 0.125, jnp.nan),
        optax.constant_schedule(0.125),
        optax.piecewise_constant_schedule(0.125, {1: 0.5}),
    ],
    ids=lambda rate: type(rate).__name__,
)
def test_rates_of_every_kind_are_the_same_rate(rate, params, reference):
    """And the first step reads schedule(0)."""
    assert same_bits(one_step(gefen(rate), params), reference[0])


def test_integer_rates_are_not_truncated(params, reference):
    for rate in (1, jnp.int32(1), np.int64(1)):
        u = one_step(gefen(rate, weight_decay=0.0), params)
        for name, d in reference[1].items():
            np.testing.assert_array_equal(np.asarray(u[name]), -np.asarray(d))


@pytest.mark.parametrize("rate", [1e-37, 1e-12, 1e30])
def test_rates_of_every_size(rate, params, reference):
    """The update is the direction times the rate, to one rounding; products below the smallest normal may be 0."""
    u = one_step(gefen(rate, weight_decay=0.0), params)
    for name, d in reference[1].items():
        expected = -np.float64(np.float32(rate)) * np.asarray(d, np.float64)
        np.testing.assert_allclose(np.asarray(u[name], np.float64), expected, rtol=2**-23, atol=1.2e-38)


@pytest.mark.parametrize("apply", [False, True])
def test_rate_zero_changes_nothing_but_the_state(apply):
    """With weight decay too; the moments advance all the same."""
    params = mixed(SHAPES)
    tx = gefen(0.0, weight_decay=0.1)
    state = tx.init(params)
    new, after = params, state
    for seed in range(3):
        g = gradients(params, seed)
        if apply:
            new, after = jax.jit(tx.apply)(g, new, after)
        else:
            u, after = jax.jit(tx.update)(g, after, new)
            new = optax.apply_updates(new, u)
    for name, p in params.items():
        np.testing.assert_array_equal(np.asarray(new[name], np.float32), np.asarray(p, np.float32))
    assert int(after.count) == 3
    assert bits_of(after.nu["p0"]) != bits_of(state.nu["p0"])


def test_a_schedule_is_read_at_the_steps_taken_before():
    rates = np.float32([0.5, 0.25, 0.0, 1.0])
    tx = gefen(lambda count: jnp.asarray(rates)[count], weight_decay=0.0)
    plain = scale_by_gefen()
    params = mixed(SHAPES, [jnp.float32])
    state, other = tx.init(params), plain.init(params)
    update, scale = jax.jit(tx.update), jax.jit(plain.update)
    for t, rate in enumerate(rates):
        g = gradients(params, t)
        u, state = update(g, state, params)
        d, other = scale(g, other)
        for name in params:
            np.testing.assert_allclose(np.asarray(u[name]), -rate * np.asarray(d[name]), rtol=1e-6, atol=1e-12)


DECAYED = {"layer": {"kernel": (64, 128), "bias": (64,)}, "head": {"kernel": (96, 128), "bias": (3,)}}
MASKS = {
    "tree": {"layer": {"kernel": True, "bias": False}, "head": {"kernel": False, "bias": True}},
    "prefix": {"layer": True, "head": False},
    "function": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    "arrays": {"layer": {"kernel": np.True_, "bias": np.False_}, "head": {"kernel": jnp.array(True), "bias": True}},
    "none": None,
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_mean_what_they_mean_to_adamw(kind):
    """Decay is what the update with it has beyond that without: lr * decay * p where Optax's own has it, else 0."""
    lr, decay, mask = 0.5, 0.25, MASKS[kind]
    rng = np.random.default_rng(0)
    shapes = jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), DECAYED, is_leaf=_is_shape)
    with_decay = one_step(gefen(lr, weight_decay=decay, mask=mask), shapes)
    without = one_step(gefen(lr, weight_decay=0.0), shapes)
    concrete = jax.tree.map(bool, mask) if kind == "arrays" else mask
    theirs = one_step(optax.adamw(lr, weight_decay=decay, mask=concrete), shapes)
    plain = one_step(optax.adamw(lr, weight_decay=0.0), shapes)
    decayed = 0
    for a, b, c, d, p in zip(*map(jax.tree.leaves, (with_decay, without, theirs, plain, shapes))):
        found, expected = np.asarray(a) - np.asarray(b), np.asarray(c) - np.asarray(d)
        assert np.any(expected) in (False, True)
        if np.any(expected):
            np.testing.assert_allclose(found, -lr * decay * np.asarray(p), rtol=0, atol=4e-7)
            decayed += 1
        else:
            assert bits_of(a) == bits_of(b)
    assert decayed == {"tree": 2, "prefix": 2, "function": 2, "arrays": 3}.get(kind, 4)


def _is_shape(node):
    return isinstance(node, tuple)


def test_decay_may_be_an_array_and_needs_parameters():
    params = mixed([(64, 128), (5,)], [jnp.float32])
    a, b = (one_step(gefen(0.5, weight_decay=decay), params) for decay in (0.25, jnp.float32(0.25)))
    assert same_bits(a, b)
    tx = gefen(0.5, weight_decay=0)
    assert same_bits(*[tx.update(gradients(params, 0), tx.init(params), p)[0] for p in (params, None)])


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)


@pytest.mark.parametrize(
    ("kind", "implementation"), [("numpy", "jnp"), ("numpy", "chunked"), ("arrays", "jnp"), ("arrays", "chunked")]
)
def test_x64_changes_no_dtype_of_the_state(kind, implementation):
    """float64 gradients, parameters and hyper-parameters are accepted and computed in float32; updates are float64.

    The numbers are those of the program without x64, to rounding.
    """
    hyper = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    narrow = mixed([(3, 128, 128), (7,)], [jnp.float32])
    plain = gefen(0.125, implementation=implementation, **hyper)
    expected_types = types(plain.init(narrow))
    g = gradients(narrow, 0)
    expected, after = jax.jit(plain.update)(g, plain.init(narrow), narrow)
    with jax.enable_x64(True):
        wider = np.float64 if kind == "numpy" else lambda value: jnp.asarray(value, jnp.float64)
        tx = gefen(
            optax.constant_schedule(np.float64(0.125)),
            implementation=implementation,
            **{name: wider(value) for name, value in hyper.items()},
        )
        params, wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (narrow, g))
        state = tx.init(params)
        assert types(state) == expected_types
        u, new = jax.jit(tx.update)(wide, state, params)
        moved, other = jax.eval_shape(tx.apply, wide, params, state)
        assert types(new) == types(other) == expected_types
        assert types(u) == types(moved) == types(params)
        u, new = jax.device_get((u, new))
    for name in narrow:
        np.testing.assert_allclose(u[name], np.asarray(expected[name]), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(new.nu[name], np.asarray(after.nu[name]), rtol=2e-5)  # 1 - b2 of a float32 b2
    assert np.mean(new.mu["p0"] != np.asarray(after.mu["p0"])) <= 1e-3
