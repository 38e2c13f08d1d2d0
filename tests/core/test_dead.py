"""A coordinate whose gradient is always exactly zero never moves, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import bits_of, gradient

from gefen_jax import gefen, learn_plan

STEPS = 200
SCALES = (1e-8, 1e-3, 1.0, 1e4)
WAYS = [("auto", 8), ("auto", 4), ("block", 8), ("block", 4), ("full", 8), ("full", 4)]
DTYPES = ("float32", "bfloat16", "float16")


def dead_masks():
    """Where leaves never have a gradient: columns, rows, scattered entries, unseen rows of an embedding, half a vector,
    and a whole matrix. Small leaves are quantised under min_size=0 alone."""
    rng = np.random.default_rng(0)
    masks = {
        "columns": np.zeros((64, 128), bool),
        "rows": np.zeros((64, 128), bool),
        "embedding": np.zeros((512, 64), bool),
        "vector": np.arange(300) % 2 == 0,
        "small": rng.random((7, 5)) < 0.5,
        "scattered": rng.random((3, 67, 64)) < 0.5,
        "all": np.ones((64, 96), bool),
    }
    masks["columns"][:, ::16] = True
    masks["rows"][::16] = True
    masks["embedding"][1::2] = True
    return masks


MASKS = dead_masks()


def dtypes(turn):
    """A dtype for each leaf; three turns give each leaf each."""
    return {name: DTYPES[(i + turn) % 3] for i, name in enumerate(MASKS)}


def initial(turn=None):
    rng = np.random.default_rng(3)
    kinds = dict.fromkeys(MASKS, "float32") if turn is None else dtypes(turn)
    return {name: jnp.asarray(rng.normal(size=mask.shape), kinds[name]) for name, mask in MASKS.items()}


def masked(params, scale):
    """Gradients with their dead coordinates."""
    rng = np.random.default_rng(1)
    live = {name: jnp.clip(gradient(mask.shape, rng, np.float32, scale), -5e4, 5e4) for name, mask in MASKS.items()}
    return {name: jnp.where(mask, 0, live[name].astype(params[name].dtype)) for name, mask in MASKS.items()}


def train(tx):
    """A jitted run of STEPS steps: the given gradients, turned and shortened at random in each."""

    def step(carry, key):
        params, state, grads = carry
        factor = jax.random.uniform(key, minval=-1)
        turned = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        updates, state = tx.update(turned, state, params)
        return (optax.apply_updates(params, updates), state, grads), None

    @jax.jit
    def run(params, grads):
        keys = jax.random.split(jax.random.key(0), STEPS)
        (params, state, _), _ = jax.lax.scan(step, (params, tx.init(params), grads), keys)
        return params, state

    return run


def assert_dead_stay(before, after):
    for name, mask in MASKS.items():
        old, new = np.asarray(before[name]), np.asarray(after[name])
        assert bits_of(old[mask]) == bits_of(new[mask]), name
        assert np.all(np.isfinite(new.astype(np.float32))), name


@pytest.mark.parametrize(("second_moment", "bits"), WAYS, ids=str)
def test_dead_coordinates_never_move(second_moment, bits):
    run = train(gefen(1e-3, weight_decay=0.0, second_moment=second_moment, bits=bits, min_size=0))
    before = initial(turn=WAYS.index((second_moment, bits)))
    for scale in SCALES:
        after, _ = run(before, masked(before, scale))
        assert_dead_stay(before, after)
    moved = [np.asarray(b != after[name])[~MASKS[name]] for name, b in before.items() if b.dtype == np.float32]
    assert np.mean(np.concatenate(moved)) > 0.99  # and the others do


@pytest.mark.parametrize("learned", [False, True])
def test_dead_coordinates_never_move_by_default(learned):
    """Small leaves are exact Adam there; a learned structure and codebook change nothing either."""
    before = initial()
    grads = masked(before, 1e-3)
    after, state = train(gefen(1e-3, weight_decay=0.0, plan=learn_plan(grads) if learned else None))(before, grads)
    assert_dead_stay(before, after)
    assert state.mu["small"].dtype == np.float32
    assert state.mu["columns"].dtype == np.uint8


def test_dead_coordinates_decay_as_in_adamw():
    """With weight decay they shrink by lr * decay a step and by nothing else."""
    lr, decay = 1e-2, 0.1
    before = initial()
    after, _ = train(gefen(lr, weight_decay=decay))(before, masked(before, 1.0))
    for name, mask in MASKS.items():
        kept = np.asarray(before[name])[mask].astype(np.float64) * (1 - lr * decay) ** STEPS
        np.testing.assert_allclose(np.asarray(after[name])[mask], kept, rtol=STEPS * 2**-23)


def test_a_coordinate_that_falls_silent_comes_to_rest():
    """Once the gradient is zero for good, momentum decays to exactly zero instead of staying at a word near it."""
    rng = np.random.default_rng(5)
    grads = {"w": gradient((64, 128), rng), "b": gradient((256,), rng)}
    tx = gefen(1e-3, weight_decay=0.0, min_size=0)
    params = jax.tree.map(jnp.zeros_like, grads)

    @jax.jit
    def run(params):
        def step(carry, alive):
            params, state = carry
            g = jax.tree.map(lambda g: g * alive, grads)
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), (jnp.arange(2000) < 10).astype(jnp.float32))[0]

    _, state = run(params)
    for scale, nu in zip(jax.tree.leaves(state.mu_scale), jax.tree.leaves(state.nu)):
        assert np.all(np.asarray(scale) == 0)
        assert np.all(np.asarray(nu) > 0)
    assert all(np.all(np.asarray(codes) == 127) for codes in jax.tree.leaves(state.mu))
