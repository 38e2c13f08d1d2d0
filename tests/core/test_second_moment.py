"""The second moment is float32 whatever the gradient's dtype: no overflow, no underflow, no stall."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import gradient, mixed

from gefen_jax import gefen, scale_by_gefen

SHAPES = {"matrix": (64, 128), "vector": (300,), "tiny": (4, 8), "stack": (3, 128, 128)}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, "float16"), ({"second_moment": "block"}, "bfloat16"), ({"second_moment": "full", "bits": 4}, "float16")],
    ids=str,
)
def test_narrow_gradients_leave_the_state_of_wide_ones(options, dtype):
    """The same numbers in 16 bits and in 32 give the same state to rounding, also where their squares overflow."""
    rng = np.random.default_rng(0)
    narrow = {name: gradient(shape, rng, dtype, 10.0) for name, shape in SHAPES.items()}
    narrow["matrix"] = narrow["matrix"].at[0, :4].set(jnp.asarray([256, 6e4, -6e4, 6e-8], dtype))
    wide = {name: g.astype(jnp.float32) for name, g in narrow.items()}
    tx = scale_by_gefen(min_size=64, **options)
    update = jax.jit(tx.update)
    states = [tx.init(wide), tx.init(narrow)]
    for _ in range(3):
        outputs, states = zip(*[update(g, state) for g, state in zip((wide, narrow), states)])
    assert jax.tree.map(lambda x: x.dtype, states[0]) == jax.tree.map(lambda x: x.dtype, states[1])
    for name, u in outputs[1].items():
        for field in ("mu_scale", "nu", "nu_cross"):
            a, b = (np.asarray(getattr(state, field)[name]) for state in states)
            np.testing.assert_allclose(a, b, rtol=4e-7, err_msg=f"{field} of {name}")
        first, second = (np.asarray(state.mu[name]) for state in states)
        if first.dtype == np.uint8:  # a momentum next to a threshold may go either way
            assert np.mean(first != second) <= 1e-3
        else:
            np.testing.assert_allclose(first, second, rtol=4e-7, atol=1e-7, err_msg=f"mu of {name}")
        assert u.dtype == dtype
        rounded = np.asarray(outputs[0][name].astype(dtype), np.float32)
        np.testing.assert_allclose(np.asarray(u, np.float32), rounded, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize(("dtype", "min_size"), [("bfloat16", None), ("bfloat16", 0), ("float16", 0)])
def test_no_stall_after_a_drop(dtype, min_size):
    """Gradients of size 1 for 300 steps, then of 0.01 for 1500: steps are Adam's within 2 %, in 16 bits too.

    (Stored in bf16, v would stop at 0.195 for ever and the last steps would be 40 times too small.)
    """
    signs = np.sign(np.random.default_rng(0).normal(size=(16, 32)))
    sizes = np.where(np.arange(1800) < 300, 1.0, 0.01)
    tx = gefen(1.0, weight_decay=0.0, min_size=min_size)
    params = jnp.zeros((16, 32), dtype)

    @jax.jit
    def run(sizes):
        def step(state, size):
            u, state = tx.update((signs * size).astype(dtype), state, params)
            return state, jnp.mean(u.astype(jnp.float32) * -signs)

        return jax.lax.scan(step, tx.init(params), sizes)[1]

    m = v = 0.0
    expected = []
    for t, size in enumerate(np.asarray(sizes.astype(dtype), np.float64), 1):
        m, v = 0.9 * m + 0.1 * size, 0.999 * v + 0.001 * size**2
        expected.append(m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8))
    np.testing.assert_allclose(np.asarray(run(sizes)), expected, rtol=0.02)
    assert 0.01 < expected[-1] < 0.1  # the drop is still remembered, and less and less


OPTIONS = [{}, {"second_moment": "block"}, {"second_moment": "full"}, {"bits": 4}, {"bits": 4, "second_moment": "full"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_constant_gradient_gives_steps_of_the_learning_rate(options):
    """-lr * sign(c) within 1 % from the first step to the 50th, for c from 1e-5 to 1e10, and b1, b2 of all kinds."""
    shapes = {"matrix": (64, 128), "vector": (300,), "row": (1, 131), "scalar": ()}
    sizes = np.float32([1e-5, 1e-3, 1.0, 1e4, 1e10])
    rng = np.random.default_rng(0)
    signs = {name: jnp.asarray(np.sign(rng.normal(size=shape)), jnp.float32) for name, shape in shapes.items()}
    tx = gefen(1e-3, weight_decay=0.0, min_size=0, **options)

    @jax.jit
    def run(size):
        g = jax.tree.map(lambda s: s * size, signs)

        def step(state, _):
            u, state = tx.update(g, state, g)
            return state, jax.tree.map(lambda u, s: -u * s, u, signs)

        return jax.lax.scan(step, tx.init(g), length=50)[1]

    for size in sizes:
        for steps in jax.tree.leaves(run(size)):
            np.testing.assert_allclose(np.asarray(steps), 1e-3, rtol=0.01)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.95, 0.98), (0.5, 0.99999)])
def test_bias_corrections_belong_to_the_decay_rates(betas):
    """A constant gradient shows any disagreement between the averages and their corrections."""
    tx = gefen(1.0, *betas, weight_decay=0.0)
    g = {"matrix": jnp.full((64, 128), -0.25), "bias": jnp.full(3, 4.0)}

    @jax.jit
    def run():
        def step(state, _):
            u, state = tx.update(g, state, g)
            return state, jax.tree.map(lambda u: jnp.abs(u).max(), u)

        return jax.lax.scan(step, tx.init(g), length=300)[1]

    for steps in jax.tree.leaves(run()):
        np.testing.assert_allclose(np.asarray(steps), 1.0, rtol=1e-3)


@pytest.mark.parametrize("size", [1e-4, 1e-7, 300.0, 6e4])
def test_half_precision_gradients_of_any_size(size):
    """fp16 squares underflow below 2e-4 and overflow above 256; steps are of the learning rate all the same."""
    g = {"w": jnp.full((64, 128), size, jnp.float16), "b": jnp.full(5, -size, jnp.float16)}
    tx = gefen(0.01, eps=1e-12, weight_decay=0.0)
    u, _ = tx.update(g, tx.init(g), g)
    np.testing.assert_allclose(np.asarray(u["w"], np.float32), -0.01, rtol=2e-3)
    np.testing.assert_allclose(np.asarray(u["b"], np.float32), 0.01, rtol=2e-3)


@pytest.mark.parametrize("min_size", [None, 0])
def test_gradients_of_zero_give_updates_of_zero(min_size):
    params = mixed([(4,), (3, 5), (64, 128), (4,), (64, 128), (3, 5), (64, 128), (3, 5), (4,)])
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = gefen(1e-3, weight_decay=0.0, min_size=min_size)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(3):
        u, state = update(zeros, state, params)
        for name, p in params.items():
            assert u[name].dtype == p.dtype
            assert np.all(np.asarray(u[name]) == 0)
