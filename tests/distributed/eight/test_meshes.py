"""One result on every mesh: data parallel, FSDP on any axis, tensor parallel; automatic and explicit."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from eight_cases import AUTO, EXPLICIT, LAYOUTS, assert_lies, bytes_on_one_device, close, placed, same, train, tree

from gefen_jax import gefen, learn_plan, state_sharding

GRADIENTS = [tree(seed, scale=3.0**seed) for seed in (1, 2, 3)]
PARAMS = tree(0)

OPTIONS = {
    "factored": {},
    "block": {"second_moment": "block"},
    "4 bits": {"bits": 4},
    "companding": {"codec": "companding"},
    "reference": {"rule": "reference"},
}


@functools.cache
def made(option):
    """A transformation with a learned plan, and its run on one device."""
    plan = learn_plan(GRADIENTS[0], **OPTIONS[option])
    rate = optax.linear_schedule(1e-2, 1e-3, 10)
    tx = gefen(rate, weight_decay=0.1, plan=plan)
    params = jax.tree.map(jnp.asarray, PARAMS)
    return tx, *train(tx, params, tx.init(params), GRADIENTS)[:2]


CASES = [
    ("data", AUTO, "factored"),
    ("rows", AUTO, "factored"),
    ("columns", AUTO, "factored"),
    ("2x4", AUTO, "factored"),
    ("rows", EXPLICIT, "factored"),
    ("4x2", EXPLICIT, "factored"),
    ("rows", AUTO, "block"),
    ("2x4", EXPLICIT, "block"),
    ("columns", AUTO, "4 bits"),
    ("4x2", EXPLICIT, "4 bits"),
    ("columns", EXPLICIT, "companding"),
    ("rows", EXPLICIT, "reference"),
    ("2x4", AUTO, "reference"),
]


@pytest.mark.parametrize(("layout", "kind", "option"), CASES, ids=[f"{a}-{k.name}-{o}" for a, k, o in CASES])
def test_three_steps_are_those_of_one_device(layout, kind, option):
    """Codes to the bit, the rest to rounding; placed like the parameters from the start, so compiled once."""
    tx, params_alone, alone = made(option)
    shardings = LAYOUTS[layout].shardings(kind)
    params = placed(PARAMS, shardings)
    opt_state = tx.init(params)
    wanted = state_sharding(jax.eval_shape(tx.init, PARAMS), shardings)
    assert_lies(opt_state, wanted)
    gradients = [placed(grads, shardings) for grads in GRADIENTS]
    params, opt_state, compilations = train(tx, params, opt_state, gradients)
    assert compilations == 1
    assert_lies(opt_state, wanted)
    assert_lies(params, shardings)
    same(opt_state.mu, alone.mu)
    # A compiler that fuses b1 * m + w1 * g rounds it once less, and decides so by the shape of a shard.
    close(opt_state.mu_scale, alone.mu_scale, rtol=3e-7)
    same((opt_state.count, opt_state.format, opt_state.codebook), (alone.count, alone.format, alone.codebook))
    close((opt_state.nu, opt_state.nu_cross), (alone.nu, alone.nu_cross), rtol=2e-6)
    close(params, params_alone, rtol=5e-7, atol=1e-7)
    if layout in ("rows", "columns") and option != "4 bits":
        split = [opt_state.mu["attention"], opt_state.mu["embed"], opt_state.mu["layers"]]
        assert sum(x.nbytes for x in jax.tree.leaves(split)) == 8 * bytes_on_one_device(split)


def test_half_precision():
    """Parameters and gradients in bfloat16 and float16: codes to the bit, parameters to one rounding a step."""
    dtypes = [jnp.bfloat16, jnp.float16]
    leaves, treedef = jax.tree.flatten(PARAMS)
    half = treedef.unflatten([dtypes[i % 2] for i in range(len(leaves))])
    params, *gradients = (jax.tree.map(jnp.asarray, x, half) for x in (PARAMS, *GRADIENTS))
    tx = gefen(1e-2, weight_decay=0.1, plan=learn_plan(gradients[0]))
    params_alone, alone, _ = train(tx, params, tx.init(params), gradients)
    shardings = LAYOUTS["rows"].shardings(EXPLICIT)
    moved = placed(params, shardings)
    moved, opt_state, compilations = train(tx, moved, tx.init(moved), [placed(g, shardings) for g in gradients])
    assert compilations == 1
    assert_lies(moved, shardings)
    same(opt_state.mu, alone.mu)
    close((opt_state.nu, opt_state.nu_cross), (alone.nu, alone.nu_cross), rtol=2e-6)
    close(moved, params_alone, rtol=3 * 2.0**-8, atol=1e-4)
