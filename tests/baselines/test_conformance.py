"""What Optax users expect of a transformation, for the three of our own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gefen_jax.baselines import (
    adam4bit,
    adam8bit,
    adam_mini,
    scale_by_adam4bit,
    scale_by_adam8bit,
    scale_by_adam_mini,
)

MINI = functools.partial(adam_mini, sizes={"head_dim": 8})
MAKERS = {"adam_mini": MINI, "adam8bit": adam8bit, "adam4bit": adam4bit}
SCALES = {"adam_mini": scale_by_adam_mini, "adam8bit": scale_by_adam8bit, "adam4bit": scale_by_adam4bit}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def tree(dtype=jnp.float32, seed=0):
    """Leaves that are quantised (``mlp``) and leaves that are too small for it."""
    draw = np.random.RandomState(seed)
    shapes = {
        "query": {"kernel": (16, 24)},
        "mlp": {"kernel": (65, 67)},
        "temperature": (),
        "empty": {"kernel": (0, 3)},
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(draw.standard_normal(shape), dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def run(tx, params, *gradients, state=None):
    """Last updates, parameters and state after a step with each of the gradients."""
    step = jax.jit(tx.update)
    state = tx.init(params) if state is None else state
    for grads in gradients:
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    return updates, params, state


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, rtol=1e-5, atol=1e-7):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@each
def test_one_trace_and_the_same_types_after_a_step(make):
    traces = []
    tx = make(optax.linear_schedule(1e-3, 0, 5))

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = tree(), tx.init(tree())
    for seed in range(3):
        before = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
        params, state = step(params, state, tree(seed=seed))
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == before
    assert len(traces) == 1
    abstract = jax.eval_shape(tx.init, tree())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


@each
def test_state_is_donated(make):
    tx = make(1e-3)
    state = tx.init(tree())
    compiled = jax.jit(tx.update, donate_argnums=1).lower(tree(), state, tree()).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


@each
def test_schedule_and_inject_hyperparams_equal_numbers(make):
    # exact in float32, so that traced and plain hyperparameters are the same numbers
    hyperparameters = {"b1": 0.5, "b2": 0.75, "weight_decay": 0.125}
    gradients = tree(seed=1), tree(seed=2)
    _, expected, _ = run(make(2.0**-7, **hyperparameters), tree(), *gradients)
    _, injected, _ = run(optax.inject_hyperparams(make)(2.0**-7, **hyperparameters), tree(), *gradients)
    _, scheduled, _ = run(make(lambda count: jnp.float32(2.0**-7), **hyperparameters), tree(), *gradients)
    close(injected, expected, rtol=1e-6)
    close(scheduled, expected, rtol=1e-6)


@each
def test_inject_hyperparams_in_bfloat16_is_refused_by_name(make):
    params = tree(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"hyperparam_dtype=jnp\.float32"):
        optax.inject_hyperparams(make)(1e-2).init(params)
    updates, _, _ = run(optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(1e-2), params, params)
    assert all(np.isfinite(np.asarray(u, np.float32)).all() for u in jax.tree.leaves(updates))


@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_updates_have_the_gradients_dtype_and_the_float32_value(make, dtype):
    tx = make(1e-3, weight_decay=0.0)
    grads = tree(dtype, seed=1)
    updates, _, state = run(tx, tree(dtype), grads)
    assert all(u.dtype == dtype for u in jax.tree.leaves(updates))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state[0])} <= {"int32", "float32", "uint8"}
    expected, _, _ = run(tx, tree(), jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    close(
        jax.tree.map(lambda u: u.astype(jnp.float32), updates), expected, {4: 1e-6, 2: 0.02}[jnp.dtype(dtype).itemsize]
    )


@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_zero_gradients_give_zero_updates(make, dtype):
    zeros = jax.tree.map(jnp.zeros_like, tree(dtype))
    updates, _, state = run(make(1e-3, weight_decay=0.0), tree(dtype), zeros, zeros, zeros)
    same(updates, zeros)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))


@each
def test_elements_without_gradient_never_move(make):
    tx = make(1e-2, weight_decay=0.0)
    start = {"mlp": {"kernel": jnp.ones((64, 128))}, "embed": {"embedding": jnp.ones((512, 16))}}
    scale = jnp.where(jnp.arange(512)[:, None] % 3 == 0, 1e-3, 1.0)

    def step(carry, key):
        params, state = carry
        grads = {
            "embed": {"embedding": jax.random.normal(key, (512, 16)) * scale * (jnp.arange(512)[:, None] % 2)},
            "mlp": {"kernel": jax.random.normal(key, (64, 128)) * (jnp.arange(128) % 16 > 0)},
        }
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (start, tx.init(start)), jax.random.split(jax.random.key(0), 200))
    assert (params["mlp"]["kernel"][:, ::16] == 1).all()
    assert (params["embed"]["embedding"][::2] == 1).all()
    assert (params["mlp"]["kernel"][:, 1:16] != 1).all()


@each
def test_float16_gradients_beyond_256_do_not_overflow(make):
    grads = {"mlp": {"kernel": jnp.full((65, 67), 6e4, jnp.float16)}}
    updates, _, state = run(make(1e-3, weight_decay=0.0), grads, grads)
    np.testing.assert_allclose(np.asarray(updates["mlp"]["kernel"], np.float32), -1e-3, rtol=1e-3)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))


@each
def test_map_params_reaches_one_array_per_parameter(make):
    tx = make(1e-3)
    state = tx.init(tree())
    names = jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path), tree())
    seen = []
    optax.tree.map_params(tx, lambda leaf, name: seen.append(name), state, names)
    fields = len(state[0]) - 1
    assert sorted(seen) == sorted(jax.tree.leaves(names) * fields)


@each
def test_masked_partition_and_missing_leaves(make):
    params, grads = {**tree(), "frozen": None}, {**tree(seed=1), "frozen": None}
    expected, _, _ = run(make(1e-3), params, grads)
    mask = {**jax.tree.map(lambda _: True, tree()), "query": {"kernel": False}, "frozen": None}
    updates, _, _ = run(optax.masked(make(1e-3), mask), params, grads)
    same(updates["query"]["kernel"], grads["query"]["kernel"])
    close(updates["mlp"], expected["mlp"])
    labels = jax.tree.map_with_path(lambda path, _: "ours" if "mlp" in str(path) else "sgd", params)
    updates, _, _ = run(optax.partition({"ours": make(1e-3), "sgd": optax.sgd(1.0)}, labels), params, grads)
    close(updates["mlp"], expected["mlp"])


@each
def test_multi_steps_equals_one_step_on_the_mean(make):
    params = tree(jnp.bfloat16)
    updates, _, _ = run(optax.MultiSteps(make(1e-2), 2), params, tree(seed=1), tree(seed=2))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, tree(seed=1), tree(seed=2))
    expected, _, _ = run(make(1e-2), params, mean)
    close(updates, expected, rtol=1e-4, atol=2e-5)


@each
def test_apply_if_finite_leaves_every_bit_of_the_state(make):
    tx = optax.apply_if_finite(make(1e-2), 5)
    _, params, state = run(tx, tree(), tree(seed=1))
    bad = tree(seed=2)
    bad["mlp"]["kernel"] = bad["mlp"]["kernel"].at[0, 0].set(jnp.inf)
    updates, _, after = run(tx, params, bad, state=state)
    same(after.inner_state, state.inner_state)
    same(updates, jax.tree.map(jnp.zeros_like, params))


@each
def test_constant_gradient_moves_by_the_learning_rate(make):
    grads = jax.tree.map(lambda p: jnp.where(jnp.arange(p.size).reshape(p.shape) % 2, 0.3, -0.3), tree())
    updates, _, _ = run(make(1e-3, weight_decay=0.0), tree(), *50 * [grads])
    # the maps have no -1: the most negative element of a block is stored as -0.8875 (4 bits), -0.993 (8 bits)
    close(updates, jax.tree.map(lambda g: -1e-3 * jnp.sign(g), grads), rtol=0.11 if make is adam4bit else 0.01)


@each
def test_state_survives_a_trip_through_numpy(make):
    tx = make(1e-2)
    _, params, state = run(tx, tree(), tree(seed=1))
    leaves, structure = jax.tree.flatten(state)
    back = structure.unflatten([jnp.asarray(np.array(leaf)) for leaf in leaves])
    same(run(tx, params, tree(seed=2), state=back), run(tx, params, tree(seed=2), state=state))


@each
def test_nnx_optimizer(make):
    model = nnx.Linear(64, 65, rngs=nnx.Rngs(0))
    kernel, bias = np.array(model.kernel[...]), np.array(model.bias[...])
    optimizer = nnx.Optimizer(model, make(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.mean((m(jnp.ones((2, 64))) - 1) ** 2))(model))

    step(model, optimizer)
    step(model, optimizer)
    assert (model.kernel[...] != kernel).any()
    assert (model.bias[...] != bias).any()


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
class TestErrors:
    def test_missing_gradient(self, scale):
        tx = scale()
        params = {"mlp": {"kernel": jnp.ones((65, 67)), "bias": jnp.ones(67)}}
        with pytest.raises(ValueError, match=r"'mlp/bias' has optimizer state but no gradient"):
            tx.update({"mlp": {**params["mlp"], "bias": None}}, tx.init(params))
        with pytest.raises(ValueError, match=r"'mlp/bias' has optimizer state but no gradient"):
            tx.update({"mlp": {"kernel": params["mlp"]["kernel"]}}, tx.init(params))

    def test_unknown_gradient(self, scale):
        tx = scale()
        params = {"mlp": {"kernel": jnp.ones((65, 67))}}
        with pytest.raises(ValueError, match=r"'mlp/bias' has a gradient but no optimizer state"):
            tx.update({"mlp": {**params["mlp"], "bias": jnp.ones(3)}}, tx.init(params))

    @pytest.mark.parametrize("shape", [(65, 68), (66, 67), (4,)])
    def test_wrong_shape(self, scale, shape):
        tx = scale()
        state = tx.init({"mlp": {"kernel": jnp.ones((65, 67))}})
        with pytest.raises(ValueError, match=r"'mlp/kernel'.*shape"):
            tx.update({"mlp": {"kernel": jnp.ones(shape)}}, state)

    @pytest.mark.parametrize("dtype", ["int32", "complex64"])
    def test_dtypes(self, scale, dtype):
        tx = scale()
        good = {"mlp": {"kernel": jnp.ones((3, 4))}}
        bad = {"mlp": {"kernel": jnp.ones((3, 4), dtype)}}
        with pytest.raises(TypeError, match=rf"'mlp/kernel'.*parameter.*{dtype}"):
            tx.init(bad)
        with pytest.raises(TypeError, match=rf"'mlp/kernel'.*gradient.*{dtype}"):
            tx.update(bad, tx.init(good))

    @pytest.mark.parametrize(("name", "value"), [("b1", 1.0), ("b2", -0.1), ("b2", 1), ("eps", 0.0)])
    def test_hyperparameters(self, scale, name, value):
        with pytest.raises(ValueError, match=rf"{name} must be .* found {value}"):
            scale(**{name: value})

    def test_beta_of_zero_is_allowed(self, scale):
        tx = scale(b1=0.0, b2=0.0)
        grads = {"mlp": {"kernel": jnp.array([[2.0, -3.0]])}}
        updates, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(updates["mlp"]["kernel"], [[1.0, -1.0]], rtol=1e-6)


@pytest.mark.parametrize("make", [adam8bit, adam4bit], ids=["adam8bit", "adam4bit"])
class TestQuantisedLeaves:
    def test_min_size_counts_elements(self, make):
        params = {"small": jnp.ones((63, 65)), "large": jnp.ones((64, 64)), "scalar": jnp.ones(())}
        mu = make(1e-3).init(params)[0].mu
        assert {name: leaf.dtype.name for name, leaf in mu.items()} == {
            "small": "float32",
            "large": "uint8",
            "scalar": "float32",
        }

    def test_full_precision_leaves_are_exact_adam(self, make):
        params = {"embed": jnp.ones((65, 67)), "other": jnp.ones((65, 67))}
        keys = jax.random.split(jax.random.key(0), 3)
        gradients = [dict.fromkeys(params, jax.random.normal(key, (65, 67))) for key in keys]
        updates, _, _ = run(make(1e-3, full_precision="embed"), params, *gradients)
        expected, _, _ = run(optax.adamw(1e-3), params, *gradients)
        np.testing.assert_allclose(updates["embed"], expected["embed"], rtol=2e-5, atol=1e-9)
        assert not np.allclose(updates["other"], expected["other"], rtol=2e-5, atol=1e-9)

    def test_full_precision_must_be_a_regular_expression(self, make):
        with pytest.raises(ValueError, match=r"full_precision '\(' is not a regular expression"):
            make(1e-3, full_precision="(")
        with pytest.raises(TypeError, match=r"full_precision must be a regular expression.*found list"):
            make(1e-3, full_precision=["embed"])

    def test_min_size_as_an_array_is_refused(self, make):
        with pytest.raises(TypeError, match=r"static_args=\(\"min_size\",\)"):
            optax.inject_hyperparams(make)(1e-3, min_size=0).init({"x": jnp.ones(3)})
        optax.inject_hyperparams(make, static_args=("min_size",))(1e-3, min_size=0).init({"x": jnp.ones(3)})


@pytest.mark.parametrize("make", [MINI, adam8bit], ids=["adam_mini", "adam8bit"])
def test_float64_gradients_are_computed_in_float32(make):
    grads = {"mlp": tree(seed=1)["mlp"]}
    tx = make(1e-2, weight_decay=0.0)
    updates, _ = tx.update(jax.tree.map(lambda g: np.asarray(g, np.float64), grads), tx.init(grads), grads)
    expected, _, _ = run(tx, grads, grads)
    close(updates, expected, rtol=1e-5)
