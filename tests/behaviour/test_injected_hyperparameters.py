"""`optax.inject_hyperparams(gefen)`: bare, with schedules, masks and functions, and its clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import apply, close, same, structured, train, tree

from gefen_jax import blocks, calibrate, explain, gefen, learn_plan

GRADS = [tree(seed) for seed in (1, 2)]


def injected(*args, static_args=(), **kw):
    return optax.inject_hyperparams(gefen, static_args=static_args)(*args, **kw)


def moves(tx, params=None, grads=GRADS):
    """Parameters after the steps."""
    return train(tx, tree(0) if params is None else params, grads)[0]


def test_bare_it_works_from_a_jitted_init_on():
    tx, params = injected(1e-2), tree(0)
    state = jax.jit(tx.init)(params)
    same(state, tx.init(params))
    assert set(state.hyperparams) == {"learning_rate", "b1", "b2", "eps", "weight_decay"}
    moved, _ = train(tx, params, GRADS, state)
    close(moved, moves(gefen(1e-2)), rtol=3e-6, atol=1e-6)


def test_hyperparameters_can_be_changed_between_steps_without_compiling_again():
    tx, params = injected(1e-2), tree(0)
    state = tx.init(params)
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        return apply(tx, params, state, grads)

    step(params, state, GRADS[0])
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    still, state = step(params, state, GRADS[0])
    same(still, params)
    state.hyperparams["learning_rate"] = jnp.float32(1e-2)
    moved, _ = step(still, state, GRADS[1])
    assert not np.array_equal(moved["table"], params["table"])
    assert len(traces) == 1


def test_transformations_of_other_hyperparameters_are_the_same_program():
    """So a sweep that builds one for every rate finds the compiled step in the compilation cache."""
    params = tree(0)

    def program(**changed):
        tx = injected(**({"learning_rate": 1e-2, "weight_decay": 0.1} | changed))
        state = jax.eval_shape(tx.init, params)
        return jax.jit(lambda p, s, g: apply(tx, p, s, g)).lower(params, state, params).as_text()

    assert program() == program(learning_rate=3e-3, b1=0.95, b2=0.99, eps=1e-6, weight_decay=0.2)
    assert program() != program(second_moment="block")


def test_schedules_and_arrays():
    schedule = optax.linear_schedule(1e-2, 0.0, 4)
    expected = moves(gefen(schedule, weight_decay=0.01))
    close(moves(injected(schedule, weight_decay=jnp.float32(0.01))), expected, rtol=3e-6, atol=1e-6)
    assert float(injected(schedule).init(tree(0)).hyperparams["learning_rate"]) == pytest.approx(1e-2)
    decay = optax.linear_schedule(0.1, 0.0, 4)  # what gefen itself does not take
    state = injected(1e-2, weight_decay=decay).init(tree(0))
    assert float(state.hyperparams["weight_decay"]) == pytest.approx(0.1)


def test_a_mask_as_a_tree():
    mask = {"dense": {"bias": False, "kernel": True}, "table": False}
    expected = moves(gefen(1e-2, weight_decay=0.1, mask=mask))
    close(moves(injected(1e-2, weight_decay=0.1, mask=mask)), expected, rtol=3e-6, atol=1e-6)


def test_functions_through_static_args():
    kw = {
        "mask": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        "full_precision": lambda path, leaf: path == "table",
    }
    tx = injected(1e-2, weight_decay=0.1, **kw, static_args=("mask", "full_precision"))
    close(moves(tx), moves(gefen(1e-2, weight_decay=0.1, **kw)), rtol=3e-6, atol=1e-6)
    assert blocks(tx.init(tree(0)))["table"].reason == "full precision"


def test_full_precision_as_a_regular_expression():
    assert blocks(injected(1e-2, full_precision="table").init(tree(0)))["table"].reason == "full precision"


@pytest.mark.parametrize("keep", [lambda p: p.ndim > 1, lambda p: True, lambda p: p > 0])
def test_a_function_as_mask_without_static_args_is_told_apart(keep):
    """It must not pass for a mask that decays nothing, or everything."""
    tx = injected(1e-2, mask=lambda params: jax.tree.map(keep, params))
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(TypeError, match=r"calls every function as a schedule: pass static_args=\('mask', 'full_p"):
            init(tree(0))


def test_a_function_as_full_precision_that_takes_one_argument_is_told_apart():
    tx = injected(1e-2, full_precision=lambda *path_and_leaf: False)
    with pytest.raises(TypeError, match=r"full_precision must be a regular expression or a function"):
        tx.init(tree(0))
    with pytest.raises(TypeError, match="add 'full_precision' to its static_args"):
        injected(1e-2, full_precision=lambda *path_and_leaf: jnp.float32(0)).init(tree(0))


@pytest.mark.parametrize(("name", "value"), [("bits", 8), ("min_size", 0)])
def test_numbers_that_decide_structure_arrive_as_arrays(name, value):
    tx = injected(1e-2, **{name: value})
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(ValueError, match=f"{name} must be .*optax.inject_hyperparams: add '{name}' to its static_"):
            init(tree(0))
    injected(1e-2, **{name: value}, static_args=name).init(tree(0))


def test_names_need_no_static_args():
    tx = injected(1e-2, rule="gefen", second_moment="block", implementation="jnp", axes={"table": (0, 1)})
    assert {row.implementation for row in explain(tx.init(tree(0)), implementation="jnp").rows} == {"jnp"}


def test_with_a_plan_and_calibrated():
    plan = learn_plan(structured(0))
    tx = injected(1e-2, plan=plan)
    state = tx.init(tree(0))
    same(calibrate(injected(1e-2).init(tree(0)), plan), state)
    same(jax.jit(tx.init)(tree(0)), state)
    close(train(tx, tree(0), GRADS)[0], moves(gefen(1e-2, plan=plan)), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_parameters_need_hyperparameters_in_float32(dtype):
    """Optax casts them to the parameters' dtype, in which b2 is 1 or eps is 0: `optax.adamw` then gives NaN."""
    params, grads = tree(0, dtype=dtype), [tree(1, dtype=dtype)]
    with pytest.raises(TypeError, match=f"b1 arrives in {jnp.dtype(dtype)}.*hyperparam_dtype=jnp.float32"):
        injected(1e-2).init(params)
    tx = optax.inject_hyperparams(gefen, hyperparam_dtype=jnp.float32)(1e-2)
    moved = moves(tx, params, grads)
    expected = moves(gefen(1e-2), params, grads)
    close(moved, expected, rtol=1e-2, atol=1e-3)


def test_a_learning_rate_in_bfloat16_is_only_rounded():
    static = ("b1", "b2", "eps", "weight_decay")
    tx = injected(1e-2, static_args=static)
    params = tree(0, dtype=jnp.bfloat16)
    state = tx.init(params)
    assert state.hyperparams["learning_rate"].dtype == jnp.bfloat16
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


def test_vmapped_over_learning_rates():
    tx, params = injected(1e-2), tree(0)
    rates = jnp.array([0.0, 1e-3, 1e-2])

    def run(rate):
        state = tx.init(params)
        state.hyperparams["learning_rate"] = rate
        moved = params
        for g in GRADS:
            moved, state = apply(tx, moved, state, g)
        return moved

    together = jax.jit(jax.vmap(run))(rates)
    same(jax.tree.map(lambda x: x[0], together), params)
    for i, rate in ((1, 1e-3), (2, 1e-2)):
        close(jax.tree.map(lambda x, i=i: x[i], together), moves(gefen(rate)), rtol=3e-6, atol=1e-6)


def test_two_learning_rates_are_one_program():
    params = tree(0)
    programs = set()
    for rate in (1e-3, 3e-4):
        tx = injected(rate)
        state = jax.eval_shape(tx.init, params)
        programs.add(jax.jit(lambda p, s, g, tx=tx: apply(tx, p, s, g)).lower(params, state, params).as_text())
    assert len(programs) == 1
