"""The chunked step against the one over whole arrays: one mathematics, two schedules; and `apply` against `update`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import DTYPES, gradients, mixed, same_bits
from twins import check_twin

from gefen_jax import explain, gefen, learn_plan

SHAPES = [(64, 1024), (4, 128, 128), (40000,), (130, 7, 64), (5000, 8), (3, 3, 64, 64), (2, 5, 64, 128), (1, 65536)]
"""More than one chunk each: a matrix, a stack whose chunks hold several matrices or cut them, vectors, odd rows."""
VARIANTS = [
    ({}, SHAPES),
    ({"bits": 4}, [(49152,) if shape == (40000,) else shape for shape in SHAPES]),
    ({"second_moment": "block"}, [(64, 1024), (4, 128, 128), (5000, 8), (40000,)]),
    ({"second_moment": "block", "bits": 4}, [(1, 65536), (2, 5, 64, 128), (12, 64, 96)]),
    ({"second_moment": "full"}, [(130, 7, 64), (40000,), (97, 512)]),
    ({"codec": "companding"}, [(64, 1024), (36, 1024)]),
    ({"axes": {"p0": (1, 1), "p1": (2, 1)}}, [(16, 64, 64), (4, 4, 64, 64), (200, 200)]),
]


@pytest.mark.parametrize(("options", "shapes"), VARIANTS, ids=[str(options) for options, _ in VARIANTS])
def test_chunks_are_the_whole(options, shapes):
    check_twin("chunked", options, mixed(shapes))


def test_blocks_of_an_odd_number_of_4_bit_codes_are_stepped_whole():
    """Blocks of 125 share bytes with their neighbours: no row of a chunk may begin inside a byte."""
    params = {"p": jnp.ones(40000)}
    whole, chunked = (gefen(1e-2, bits=4, min_size=0, implementation=i) for i in ("jnp", "chunked"))
    state = whole.init(params)
    assert state.mu_scale["p"].shape == (320,)
    assert explain(state, tx=chunked).rows[0].implementation == "jnp"
    grads = {"p": jnp.sin(jnp.arange(40000.0))}
    for x, y in zip(*(jax.tree.leaves(tx.update(grads, state, params)) for tx in (whole, chunked)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("options", "implementation"),
    [({}, "chunked"), ({"bits": 4}, "chunked"), ({"weight_decay": 0.0, "second_moment": "block"}, "jnp")],
    ids=str,
)
def test_apply_is_update_and_apply_updates(options, implementation):
    """Parameters and state of three steps, bit for bit, with bf16 and fp16 leaves, exact ones and empty ones."""
    shapes = [(64, 1024), (3, 128, 128), (300, 128), (7, 5), (), (0, 3)]
    params = mixed(shapes, [*DTYPES[1:], DTYPES[0]])
    tx = gefen(0.125, implementation=implementation, **options)

    state = tx.init(params)
    update, add, apply = jax.jit(tx.update), jax.jit(optax.apply_updates), jax.jit(tx.apply)
    for seed in range(3):
        g = gradients(params, seed)
        updates, expected = update(g, state, params)
        moved, new = apply(g, params, state)
        assert same_bits(new, expected)
        assert same_bits(moved, add(params, updates))
        params, state = moved, new


def test_apply_mixes_dtypes_as_apply_updates_does():
    """float32 parameters with bf16 gradients, and bf16 parameters with float32 gradients."""
    tx = gefen(0.125, weight_decay=0.1)
    for p, g in ((jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)):
        params, grads = mixed([(64, 1024), (5,)], [p]), mixed([(64, 1024), (5,)], [g])
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        moved, new = jax.jit(tx.apply)(grads, params, tx.init(params))
        assert {u.dtype for u in updates.values()} == {jnp.dtype(g)}
        assert same_bits(new, state)
        assert same_bits(moved, optax.apply_updates(params, updates))


def test_learned_structures_run_in_chunks_too():
    """Whatever `learn_plan` chooses for tall, wide and stacked leaves, both steps agree over ten steps."""
    rng = np.random.default_rng(0)
    shapes = {"rows": (256, 512), "columns": (512, 256), "groups": (1024, 64), "stack": (4, 128, 128)}
    scale = {
        "rows": np.exp(2 * rng.normal(size=(256, 1))),
        "columns": np.exp(2 * rng.normal(size=256)),
        "groups": np.repeat(np.exp(2 * rng.normal(size=(16, 1))), 64, axis=0),
        "stack": np.exp(2 * rng.normal(size=(4, 1, 1))),
    }
    grads = {n: jnp.asarray(rng.normal(size=shape) * scale[n], jnp.float32) for n, shape in shapes.items()}
    plan = learn_plan(grads)
    assert {leaf.nu[0] for leaf in plan.leaves.values()} >= {"tile"}
    whole, chunked = (gefen(0.1, plan=plan, implementation=i) for i in ("jnp", "chunked"))
    params = jax.tree.map(jnp.zeros_like, grads)

    @jax.jit
    def run(grads):
        def step(carry, key):
            (p, s), (q, r) = carry
            g = jax.tree.map(lambda g: g * jax.random.normal(key, g.shape), grads)
            return (whole.apply(g, p, s), chunked.apply(g, q, r)), None

        start = (params, whole.init(params)), (params, chunked.init(params))
        return jax.lax.scan(step, start, jax.random.split(jax.random.key(1), 10))[0]

    (p, s), (q, r) = run(grads)
    for name in shapes:
        assert np.mean(np.asarray(s.mu[name]) != np.asarray(r.mu[name])) <= 1e-4
        difference = np.abs(np.asarray(p[name], np.float64) - np.asarray(q[name]))
        assert np.mean(difference > 1e-5) <= 1e-4, name
        assert difference.max() <= 10 * 0.1 * 0.02, name
