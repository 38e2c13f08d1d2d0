"""What every Optax optimizer must do: the properties that Optax tests its contributed optimizers for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import apply, close, kinds, same, train, tree

from gefen_jax import gefen, scale_by_gefen

OPTIMIZERS = {
    "default": {},
    "quantised": {"min_size": 0},
    "four bits": {"min_size": 0, "bits": 4},
    "block": {"min_size": 0, "second_moment": "block"},
    "full": {"min_size": 0, "second_moment": "full"},
    "reference": {"rule": "reference"},
}
EACH = pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)

NAMES = ("default", "quantised", "reference")
SOME = pytest.mark.parametrize("options", [OPTIMIZERS[n] for n in NAMES], ids=NAMES)

START = {"parabola": [-1.0, 10.0, 1.0], "rosenbrock": [0.0, 0.0]}
GOAL = {"parabola": [1.0, -1.0, 1.0], "rosenbrock": [1.0, 1.0]}


def loss(target, params):
    if target == "parabola":
        return jnp.sum((params - jnp.array(GOAL["parabola"])) ** 2)
    return (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2


def minimise(tx, value, params, steps):
    """Parameters after so many steps, in one compiled loop; the state has been through `optax.tree.map_params`."""
    opt_state = optax.tree.map_params(tx, lambda v: v, tx.init(params))

    def body(carry, _):
        return apply(tx, *carry, jax.grad(value)(carry[0])), None

    return jax.jit(lambda *carry: jax.lax.scan(body, carry, length=steps)[0])(params, opt_state)[0]


@EACH
@pytest.mark.parametrize("target", START)
def test_finds_the_minimum(options, target):
    """A vector of two or three elements is one block: its elements share a second moment where it is not full."""
    schedule = optax.cosine_decay_schedule(3e-2, 20_000)
    found = minimise(
        gefen(schedule, weight_decay=0.0, **options), lambda p: loss(target, p), jnp.array(START[target]), 20_000
    )
    np.testing.assert_allclose(found, GOAL[target], rtol=3e-2, atol=3e-2)


@EACH
def test_finds_the_minimum_over_a_matrix_and_a_mixed_tree(options):
    goal = {"matrix": tree(1, (24, 40)), "vector": tree(2, (7,)), "scalar": jnp.float32(0.5), "list": [tree(3, (5,))]}

    def value(params):
        return sum(jnp.sum((p - q) ** 2) for p, q in zip(jax.tree.leaves(params), jax.tree.leaves(goal)))

    schedule = optax.cosine_decay_schedule(3e-2, 3000)
    found = minimise(gefen(schedule, weight_decay=0.0, **options), value, jax.tree.map(jnp.zeros_like, goal), 3000)
    close(found, goal, rtol=3e-2, atol=3e-2)


@EACH
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_keeps_every_dtype_shape_and_weak_type(options, dtype):
    params = {"a": jnp.ones((5, 4), dtype), "b": [jnp.ones((), dtype)], "c": jnp.ones((0, 3), dtype)}
    tx = gefen(1e-3, **options)
    opt_state = tx.init(params)
    updates, new = jax.eval_shape(tx.update, params, opt_state, params)
    assert kinds(new) == kinds(opt_state) == kinds(jax.eval_shape(tx.init, params))
    expected = jnp.float32 if options.get("rule") == "reference" else dtype
    assert [u.dtype for u in jax.tree.leaves(updates)] == [expected] * 3
    moved = jax.eval_shape(optax.apply_updates, params, updates)
    assert kinds(moved) == kinds(params)
    assert not any(x.weak_type for x in jax.tree.leaves((opt_state, updates)))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_updates_have_the_gradients_dtype(dtype):
    params = tree(0)
    tx = gefen(1e-3)
    grads = jax.tree.map(lambda p: p.astype(dtype), params)
    updates, new = jax.eval_shape(tx.update, grads, tx.init(params), params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert kinds(new) == kinds(tx.init(params))


@EACH
def test_the_second_step_is_not_compiled_again(options):
    tx = gefen(optax.linear_schedule(1e-3, 0.0, 10), **options)
    params = tree(0)
    traces = []

    @jax.jit
    def step(params, opt_state, grads):
        traces.append(1)
        return apply(tx, params, opt_state, grads)

    opt_state = tx.init(params)
    for _ in range(3):
        params, opt_state = step(params, opt_state, params)
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_weakly_typed_parameters_and_gradients_leave_the_state_as_it_is():
    params = {"w": jnp.asarray(2.0), "v": jnp.full((3,), 1.0)}
    assert params["w"].weak_type
    tx = gefen(1e-3, min_size=0)
    opt_state = tx.init(params)
    _, new = jax.jit(tx.update)(params, opt_state, params)
    assert kinds(opt_state) == kinds(new)


@SOME
def test_inject_hyperparams_gives_the_same_steps(options):
    """Hyper-parameters are then arrays: 1 - b1 is rounded in float32, so the steps agree to rounding."""
    static = {"static_args": ("bits", "min_size")}
    params, grads = tree(0), [tree(1), tree(2)]
    plain, injected = gefen(1e-2, **options), optax.inject_hyperparams(gefen, **static)(1e-2, **options)
    expected, expected_state = train(plain, params, grads)
    found, state = train(injected, params, grads)
    close(found, expected, rtol=3e-6, atol=3e-6)
    inner = state.inner_state
    assert kinds(inner) == kinds(expected_state)
    for name in ("mu_scale", "nu", "nu_cross"):
        close(getattr(inner, name), getattr(expected_state, name), rtol=3e-5)
    same(inner.format, expected_state.format)


@EACH
def test_tree_map_params_finds_every_array_of_a_parameter(options):
    params = tree(0)
    tx = optax.chain(optax.clip(1.0), gefen(1e-3, **options))
    opt_state = tx.init(params)
    seen = []
    mapped = optax.tree.map_params(
        tx, lambda s, p: seen.append((s.shape, p.shape)) or s, opt_state, params, transform_non_params=lambda x: x + 0
    )
    same(mapped, opt_state)
    assert len(seen) == 4 * len(jax.tree.leaves(params))
    assert all(len(s) == len(p) for s, p in seen)


@SOME
def test_a_scan_over_steps_equals_the_loop(options):
    """The state bit for bit; XLA may contract the parameter's own sum differently, by one unit in the last place."""
    tx = gefen(1e-2, **options)
    params, grads = tree(0), [tree(seed) for seed in (1, 2, 3)]
    looped, looped_state = train(tx, params, grads)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    scan = jax.jit(lambda carry, xs: jax.lax.scan(lambda c, g: (apply(tx, *c, g), None), carry, xs)[0])
    found, found_state = scan((params, tx.init(params)), stacked)
    same(found_state, looped_state)
    close(found, looped, rtol=3e-7)


def test_extra_arguments_are_let_through():
    params = {"w": jnp.ones(3)}
    for tx in (gefen(1e-3), optax.chain(scale_by_gefen(), optax.scale(-1e-3))):
        expected = tx.update(params, tx.init(params), params)
        same(tx.update(params, tx.init(params), params, value=1.0, loss=2.0, anything=None), expected)


def test_scale_by_gefen_in_a_chain_is_gefen():
    params, grads = tree(0), [tree(1), tree(2)]
    chain = optax.chain(scale_by_gefen(), optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(1e-2))
    found, found_state = train(chain, params, grads)
    expected, expected_state = train(gefen(1e-2), params, grads)
    close(found, expected, rtol=1e-6, atol=1e-7)
    same(found_state[0].mu, expected_state.mu)


def test_defaults_are_those_of_adamw():
    """On a tree of small leaves the two are one algorithm."""
    params, grads = (
        {"a": tree(0, (5, 7)), "b": jnp.float32(3)},
        [{"a": tree(i, (5, 7)), "b": jnp.float32(i)} for i in (1, 2)],
    )
    close(train(gefen(1e-2), params, grads)[0], train(optax.adamw(1e-2), params, grads)[0], rtol=1e-6, atol=5e-7)


def test_arguments_are_keywords_of_adamw_by_name():
    options = {"b1": 0.8, "b2": 0.95, "eps": 1e-4, "weight_decay": 0.1, "mask": {"a": True, "b": False}}
    params, grads = {"a": tree(0, (5, 7)), "b": tree(1, (3,))}, [{"a": tree(2, (5, 7)), "b": tree(3, (3,))}] * 3
    ours, theirs = gefen(1e-2, **options), optax.adamw(1e-2, **options)
    close(train(ours, params, grads)[0], train(theirs, params, grads)[0], rtol=2e-6, atol=1e-7)


def test_tree_get_and_set():
    params = tree(0)
    tx = optax.chain(optax.clip(1.0), gefen(1e-3))
    opt_state = tx.init(params)
    assert int(optax.tree.get(opt_state, "count")) == 0
    assert optax.tree.get(opt_state, "mu")["dense"]["kernel"].dtype == jnp.uint8
    moved = optax.tree.set(opt_state, count=jnp.int32(41))
    _, after = train(tx, params, [params], moved)
    assert int(optax.tree.get(after, "count")) == 42
    last = 2**31 - 1
    _, after = train(tx, params, [params], optax.tree.set(opt_state, count=jnp.int32(last)))
    assert int(optax.tree.get(after, "count")) == last


def test_empty_trees_and_parameters_without_elements_pass_through():
    for params in ({}, [], (), {"a": {}}, {"a": jnp.zeros((0, 3)), "b": None}):
        tx = gefen(1e-3, min_size=0)
        updates, new = jax.jit(tx.update)(params, tx.init(params), params)
        same(updates, params)
        assert int(new.count) == 1
