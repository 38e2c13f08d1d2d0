"""Optimizer state in host memory between steps: the same bits, and it does come back to the host."""

import functools

import jax
import numpy as np
import optax
import pytest
from eight_cases import AUTO, LAYOUTS, placed, same, train, tree

from gefen_jax import gefen, learn_plan, state_sharding

PARAMS = tree(0)
GRADIENTS = [tree(seed) for seed in (1, 2, 3)]
PLAN = learn_plan(GRADIENTS[0])


def offloaded(opt_state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(opt_state)} == {"pinned_host"}


def setting(layout):
    """(transformation, parameters, state in host memory, shardings of both)."""
    tx = gefen(1e-2, weight_decay=0.1, plan=PLAN)
    shardings = LAYOUTS[layout].shardings(AUTO)
    params = placed(PARAMS, shardings)
    held = state_sharding(jax.eval_shape(tx.init, PARAMS), shardings, "pinned_host")
    return tx, params, jax.device_put(tx.init(params), held), shardings, held


def update(tx, params, opt_state, grads):
    """One step with the state brought to the device and back."""
    opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), jax.device_put(opt_state, jax.memory.Space.Host)


@pytest.mark.parametrize("layout", ["data", "rows", "2x4"])
def test_steps_are_those_of_a_state_on_the_device(layout):
    tx, params, opt_state, shardings, held = setting(layout)
    gradients = [placed(grads, shardings) for grads in GRADIENTS]
    expected = train(tx, params, tx.init(params), gradients, shardings)[:2]
    assert offloaded(opt_state)
    step = jax.jit(functools.partial(update, tx), donate_argnums=(0, 1), out_shardings=(shardings, held))
    for grads in gradients:
        params, opt_state = step(params, opt_state, grads)
        assert offloaded(opt_state)
    assert step._cache_size() == 1
    assert not any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(params))
    same((params, opt_state), expected)


def test_a_scan_carries_it_on_the_host():
    tx, params, opt_state, shardings, _ = setting("rows")
    gradients = [placed(grads, shardings) for grads in GRADIENTS]
    expected = train(tx, params, tx.init(params), gradients, shardings)[1]
    stacked = jax.tree.map(lambda *x: np.stack(x), *GRADIENTS)
    scan = jax.jit(lambda *carry: jax.lax.scan(lambda c, g: (update(tx, *c, g), None), carry, stacked)[0])
    _, found = scan(params, opt_state)
    assert offloaded(found)
    same(found.mu, expected.mu)


def test_a_state_left_on_the_host_is_an_error_of_jax():
    """Nothing moves it silently: that would cost a transfer nobody asked for."""
    tx, params, opt_state, shardings, _ = setting("rows")
    with pytest.raises(ValueError, match="memory"):
        jax.jit(tx.update)(placed(GRADIENTS[0], shardings), opt_state, params)
