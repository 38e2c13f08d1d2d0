"""One plan and one codebook from the same gradients, wherever they lie; calibration of sharded states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_cases import AUTO, EXPLICIT, LAYOUTS, assert_lies, close, placed, same, train, tree

from gefen_jax import calibrate, gefen, learn_plan, plan_from_state, state_sharding

GRADS = tree(1)
PARAMS = tree(0)
OPTIONS = {"factored": {}, "block": {"second_moment": "block", "align": 8}, "reference": {"rule": "reference"}}
PLACES = [("data", AUTO), ("rows", AUTO), ("columns", EXPLICIT), ("2x4", AUTO), ("4x2", EXPLICIT)]
EACH = pytest.mark.parametrize(("layout", "kind"), PLACES, ids=[f"{layout}-{kind.name}" for layout, kind in PLACES])


@functools.cache
def alone(option):
    """The plan that one device finds."""
    return learn_plan(jax.tree.map(jnp.asarray, GRADS), **OPTIONS[option])


@pytest.mark.parametrize(
    ("layout", "kind", "option"),
    [(*place, "factored") for place in PLACES]
    + [(*place, option) for option in ("block", "reference") for place in PLACES[2:4]],
)
def test_plan_and_codebook_are_those_of_one_device(layout, kind, option):
    plan = learn_plan(placed(GRADS, LAYOUTS[layout].shardings(kind)), **OPTIONS[option])
    assert plan == alone(option)
    assert np.asarray(plan.codebook).tobytes() == np.asarray(alone(option).codebook).tobytes()
    assert plan.dumps() == alone(option).dumps()


@EACH
def test_a_calibrated_state_lies_like_its_parameters(layout, kind):
    """Structure changes, placement does not: the first step after it is the only compilation."""
    shardings = LAYOUTS[layout].shardings(kind)
    tx, params, grads = gefen(1e-2), placed(PARAMS, shardings), placed(GRADS, shardings)
    opt_state = calibrate(tx.init(params), grads)
    assert_lies(opt_state, state_sharding(opt_state, shardings))
    same(opt_state, gefen(1e-2, plan=alone("factored")).init(jax.tree.map(jnp.asarray, PARAMS)))
    _, after, compilations = train(tx, params, opt_state, [grads] * 2)
    assert compilations == 1
    assert_lies(after, state_sharding(after, shardings))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_calibrating_in_the_middle_of_a_run(kind):
    """Moments are decoded and encoded again, where they are."""
    tx = gefen(1e-2)
    shardings = LAYOUTS["2x4"].shardings(kind)
    params, grads = placed(PARAMS, shardings), placed(GRADS, shardings)
    _, running, _ = train(tx, params, tx.init(params), [grads])
    found = calibrate(running, grads)
    assert_lies(found, state_sharding(found, shardings))
    here = jax.tree.map(jnp.asarray, PARAMS)
    _, running_here, _ = train(tx, here, tx.init(here), [GRADS])
    expected = calibrate(running_here, GRADS)
    same(found.mu, expected.mu)
    close(found, expected, rtol=2e-6)
    assert plan_from_state(found) == plan_from_state(expected)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_nan_on_one_shard_is_a_step_that_never_was(kind):
    """All devices must see it, not only the one that holds it: then no bit of the state changes anywhere."""
    tx = optax.apply_if_finite(gefen(1e-2, plan=alone("factored")), 5)
    shardings = LAYOUTS["2x4"].shardings(kind)
    params, grads = placed(PARAMS, shardings), placed(GRADS, shardings)
    params, opt_state, _ = train(tx, params, tx.init(params), [grads])
    bad = tree(2)
    bad["attention"]["kernel"][127, 255] = np.nan
    moved, skipped, _ = train(tx, params, opt_state, [placed(bad, shardings)])
    same((moved, skipped.inner_state), (params, opt_state.inner_state))
    assert int(skipped.total_notfinite) == 1
    assert not bool(skipped.last_finite)
    good = [placed(tree(3), shardings)]
    same(train(tx, moved, skipped, good)[0], train(tx, params, opt_state, good)[0])


def test_accumulation_of_sharded_gradients():
    """`optax.MultiSteps` under FSDP: its accumulators and the state are placed, and compiled once."""
    tx = optax.MultiSteps(gefen(1e-2, plan=alone("factored")), 2)
    shardings = LAYOUTS["rows"].shardings()
    halves = [jax.tree.map(lambda g, w=w: np.float32(w) * g, GRADS) for w in (0.5, 1.5)]
    params = placed(PARAMS, shardings)
    opt_state = jax.device_put(tx.init(params), state_sharding(tx.init(params), shardings))
    moved, after, compilations = train(tx, params, opt_state, [placed(g, shardings) for g in halves], shardings)
    assert compilations == 1
    assert_lies(after, state_sharding(after, shardings))
    here = jax.tree.map(jnp.asarray, PARAMS)
    expected, state_here, _ = train(tx, here, tx.init(here), halves)
    same(after.inner_opt_state.mu, state_here.inner_opt_state.mu)
    close(moved, expected, rtol=5e-7, atol=1e-7)


def test_zero1_is_the_same_run():
    """Parameters on every device, state divided: codes to the bit, updates to rounding."""
    plan = alone("factored")
    tx = gefen(1e-2, plan=plan)
    everywhere, rows = LAYOUTS["data"].shardings(), LAYOUTS["rows"].shardings()
    params = placed(PARAMS, everywhere)
    held = state_sharding(jax.eval_shape(tx.init, PARAMS), rows)
    opt_state = jax.jit(tx.init, out_shardings=held)(params)

    @functools.partial(jax.jit, out_shardings=(everywhere, held), donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    gradients = [tree(seed) for seed in (1, 2)]
    for grads in gradients:
        params, opt_state = step(params, opt_state, placed(grads, everywhere))
    assert step._cache_size() == 1
    assert_lies(params, everywhere)
    assert_lies(opt_state, held)
    here = jax.tree.map(jnp.asarray, PARAMS)
    expected, state_here, _ = train(tx, here, tx.init(here), gradients)
    same(opt_state.mu, state_here.mu)
    close(params, expected, rtol=5e-7, atol=1e-7)
