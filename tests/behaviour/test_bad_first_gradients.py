"""What `learn_plan` and `calibrate` refuse to learn from, and that nothing is changed by a refusal."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import same, snapshot, structured, tree

from gefen_jax import calibrate, gefen, learn_plan, plan_from_state


def learn(grads):
    return learn_plan(grads)


def recalibrate(grads):
    return calibrate(gefen(1e-3).init(tree(0)), grads)


BOTH = pytest.mark.parametrize("learning", [learn, recalibrate], ids=["learn_plan", "calibrate"])


@BOTH
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
def test_gradients_that_are_not_real_numbers(learning, dtype):
    grads = structured(0) | {"table": jnp.zeros((640, 16), dtype)}
    with pytest.raises(
        TypeError, match=f"gradient of 'table' must be a real floating-point array; found {grads['table'].dtype}"
    ):
        learning(grads)


@BOTH
def test_gradients_that_are_no_arrays(learning):
    with pytest.raises(TypeError, match="gradient of 'table' must be a real floating-point array; found float"):
        learning(structured(0) | {"table": 1.0})


@BOTH
def test_gradients_without_values(learning):
    with pytest.raises(TypeError, match=r"gradient of 'dense/bias' has no values here \(ShapeDtypeStruct\)"):
        learning(jax.eval_shape(lambda: structured(0)))


def test_gradients_inside_jit():
    opt_state = gefen(1e-3).init(tree(0))
    for learning in (learn, lambda grads: calibrate(opt_state, grads)):
        with pytest.raises(TypeError, match=r"has no values here .*learn_plan and calibrate run outside jit"):
            jax.jit(lambda g, learning=learning: len(jax.tree.leaves(learning(g))))(structured(0))


@BOTH
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_gradients_of_which_none_is_usable(learning, value):
    grads = jax.tree.map(lambda g: jnp.full_like(g, value), structured(0))
    with pytest.raises(
        ValueError, match=r"all quantised parameters are zero or not finite.*calibrate with another batch"
    ):
        learning(grads)


@BOTH
def test_an_empty_list(learning):
    with pytest.raises(ValueError, match="at least one tree of gradients; found an empty list"):
        learning([])
    for nothing in (None, [structured(0), None]):
        with pytest.raises(ValueError, match="learning needs gradients; found None"):
            learning(nothing)


@BOTH
def test_gradients_of_different_shapes_in_one_list(learning):
    other = structured(1) | {"table": jnp.ones((640, 8))}
    with pytest.raises(ValueError, match=r"gradients of 'table' differ in shape: \(640, 16\) and \(640, 8\)"):
        learning([structured(0), other])


def test_lists_of_different_trees():
    with pytest.raises(ValueError, match="the trees of gradients differ in structure"):
        learn_plan([structured(0), {"dense": structured(0)["dense"]}])
    with pytest.raises(ValueError, match="no gradient for 'table'"):
        recalibrate([structured(0), {"dense": structured(0)["dense"]}])


def test_a_tree_that_is_a_list_needs_a_list_around_it():
    grads = [structured(0)["dense"]["kernel"], structured(0)["table"]]
    with pytest.raises(ValueError, match="to pass one tree that is itself a list, put it into a list"):
        learn_plan(grads)
    plan = learn_plan([grads])
    assert list(plan.leaves) == ["0", "1"]
    params = [jnp.zeros_like(g) for g in grads]
    same(calibrate(gefen(1e-3).init(params), grads), gefen(1e-3, plan=plan).init(params))


def test_reference_rule_learns_from_one_gradient():
    with pytest.raises(ValueError, match="rule 'reference' learns from exactly one gradient; give one tree"):
        learn_plan([structured(0), structured(1)], rule="reference")


def test_trees_with_two_leaves_of_one_path():
    with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
        learn_plan({"a": {"b": jnp.ones((64, 64))}, "a/b": jnp.ones((64, 64))})


class TestCalibrate:
    """What only a state can tell."""

    def test_a_missing_gradient(self):
        for missing in ({"table": None}, {"table": {}}):
            with pytest.raises(ValueError, match="no gradient for 'table', which the optimizer state holds: pass the"):
                recalibrate(structured(0) | missing)

    @pytest.mark.parametrize("shape", [(640, 8), (16, 640), (10240,), (0, 16), ()])
    def test_a_gradient_of_another_shape(self, shape):
        message = (
            f"gradient of 'table' has shape {shape}, the parameter (640, 16): pass the gradients of the parameters"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            recalibrate(structured(0) | {"table": jnp.ones(shape)})

    def test_a_state_inside_jit(self):
        opt_state, grads = gefen(1e-3).init(tree(0)), structured(0)
        with pytest.raises(TypeError, match="needs concrete arrays outside jit; for abstract states build"):
            jax.jit(lambda s: calibrate(s, grads))(opt_state)

    def test_an_abstract_state(self):
        with pytest.raises(TypeError, match=r"build the transformation with gefen\(\.\.\., plan=plan\)"):
            calibrate(jax.eval_shape(gefen(1e-3).init, tree(0)), structured(0))

    def test_a_stack_of_states(self):
        stacked = jax.vmap(gefen(1e-3).init)(jax.tree.map(lambda x: jnp.stack([x, x]), tree(0)))
        with pytest.raises(
            ValueError, match=r"is a stack of states \(made under jax\.vmap\): take one out of it first"
        ):
            calibrate(stacked, structured(0))
        calibrate(jax.tree.map(lambda x: x[0], stacked), structured(0))

    def test_states_that_differ_in_rule_or_width(self):
        states = (gefen(1e-3).init(tree(0)), gefen(1e-3, bits=4).init(tree(0)))
        with pytest.raises(ValueError, match="the Gefen states differ in rule or bits: calibrate them one at a time"):
            calibrate(states, structured(0))

    def test_part_of_the_state_replaced_by_another_leafs(self):
        opt_state = gefen(1e-3).init(tree(0))
        broken = opt_state._replace(mu_scale=opt_state.mu_scale | {"table": jnp.ones((7, 1))})
        with pytest.raises(ValueError, match=r"state of 'table': mu_scale has shape \(7, 1\), which does not divide"):
            calibrate(broken, structured(0))
        with pytest.raises(
            ValueError, match="format describes 3 leaves, and there are 2: was part of the state replaced"
        ):
            calibrate(
                opt_state._replace(
                    **gefen(1e-3).init({"a": jnp.ones(3), "b": jnp.ones(3)})._asdict() | {"format": opt_state.format}
                ),
                structured(0),
            )

    @pytest.mark.parametrize("bad", ["late leaf", "zero", "shape", "plan"])
    def test_a_refusal_leaves_the_state_as_it_was(self, bad):
        tx = optax.chain(optax.clip(1.0), gefen(1e-3))
        opt_state = tx.init(tree(0))
        before = snapshot(opt_state)
        argument = {
            "late leaf": structured(0) | {"table": None},
            "zero": jax.tree.map(jnp.zeros_like, structured(0)),
            "shape": structured(0) | {"table": jnp.ones((16, 640))},
            "plan": learn_plan(structured(0), bits=4),
        }[bad]
        with pytest.raises(ValueError, match=r"table|quantised|bits"):
            calibrate(opt_state, argument)
        same(opt_state, before)
        same(calibrate(opt_state, structured(0)), calibrate(tx.init(tree(0)), structured(0)))

    def test_twice_is_once(self):
        once = calibrate(gefen(1e-3).init(tree(0)), structured(0))
        for again in (structured(0), plan_from_state(once)):
            same(calibrate(once, again), once)
