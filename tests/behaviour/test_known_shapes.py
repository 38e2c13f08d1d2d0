"""How optimizers with compressed state have failed their users elsewhere: shapes, stacks, bytes, very large leaves."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import close, normal, train
from hypothesis import strategies

from gefen_jax import blocks, explain, gefen

SHAPES = [(), (1,), (0,), (0, 3), (1021,), (3, 5), (1, 5003), (5003, 1), (3, 3, 3, 8), (4, 64, 32), (2, 3, 4, 5, 6)]
SHAPES += [(1, 1, 1), (64, 4099), (257, 129), (128, 1, 128)]


@pytest.mark.parametrize("options", [{"min_size": 0}, {"min_size": 0, "bits": 4}, {"rule": "reference"}], ids=str)
def test_every_shape_steps(options):
    """Ranks 0 to 5, primes, axes of 1, no elements: the first step is that of Adam, by sign and size."""
    params = {f"{i:02}": normal(i, shape) for i, shape in enumerate(SHAPES)}
    grads = {name: normal(50 + i, p.shape) for i, (name, p) in enumerate(params.items())}
    tx = gefen(1e-3, weight_decay=0.0, **options)
    moved, state = train(tx, params, [grads])
    for name, p in params.items():
        update = np.asarray(moved[name] - p)
        assert update.shape == p.shape
        assert np.all(np.isfinite(update))
        if p.size:
            rms = np.sqrt(np.mean(update.astype(np.float64) ** 2))
            assert 0.7e-3 < rms < 1.3e-3, (p.shape, rms)
            assert np.mean(np.sign(update) == -np.sign(grads[name])) > 0.95
    assert len(explain(state).rows) == len(SHAPES)


STACKS = {
    "declared": ((4, 64, 32), {"axes": {"w": (1, 1)}}),
    "declared, four bits": ((2, 48, 4, 40), {"axes": {"w": (1, 1)}, "bits": 4}),
    "large slices": ((3, 128, 128), {}),
    "thin slices": ((6, 2, 300), {}),
    "vectors, declared": ((5, 320), {"axes": {"w": (1, 1)}}),
}


@pytest.mark.parametrize("which", STACKS)
def test_a_stack_of_slices_equals_its_slices(which):
    """Scanned layers, experts: no slice may share a statistic with another."""
    shape, options = STACKS[which]
    scales = np.geomspace(1e-3, 1e3, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    params = {"w": normal(0, shape)}
    grads = [{"w": normal(seed, shape) * scales.astype(np.float32)} for seed in (1, 2, 3)]
    stacked, state = train(gefen(1e-2, min_size=0, **options), params, grads)
    inner = dict(options)
    if inner.pop("axes", None) and len(shape) > 2:
        inner["axes"] = {"w": (0, 1)}
    tx = gefen(1e-2, min_size=0, **inner)
    for i in range(shape[0]):
        alone, alone_state = train(tx, {"w": params["w"][i]}, [{"w": g["w"][i]} for g in grads])
        close(stacked["w"][i], alone["w"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(state.mu["w"][i], alone_state.mu["w"])


def test_what_is_factored_follows_the_documented_rule():
    """Row and column statistics cost at most 1/32 of the elements (1/64 where leading axes are a stack)."""
    expected = {
        (12, 32): None, (32, 12): None, (2, 4096): None, (64, 64): (0, 1), (63, 64): None, (768, 3072): (0, 1),
        (768, 12, 64): (0, 1), (12, 64, 768): (0, 2), (16, 2048, 32, 64): (1, 1), (3, 3, 64, 64): (0, 3),
        (4, 128, 128): (1, 1), (4, 64, 32): None, (50257, 768): (0, 1),
    }  # fmt: skip
    params = {str(shape): jax.ShapeDtypeStruct(shape, jnp.float32) for shape in expected}
    state = jax.eval_shape(gefen(1e-3, min_size=0).init, params)
    for shape, split in expected.items():
        nu, cross = (tuple(getattr(state, name)[str(shape)].shape) for name in ("nu", "nu_cross"))
        if split is None:
            assert cross == (1,) * len(shape)
        else:
            batch, rows = split
            cut = batch + rows
            assert nu == shape[:cut] + (1,) * (len(shape) - cut)
            assert cross == shape[:batch] + (1,) * rows + shape[cut:]


def state_bytes(params, **options):
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(jax.eval_shape(gefen(1e-3, **options).init, params))
    )


def test_one_byte_per_parameter_on_a_llama_like_list_of_shapes():
    """Grouped-query attention, gated feed-forward, tied embedding; norm scales are exact Adam."""
    shapes = [(128256, 2048), (2048, 32, 64), (2048, 8, 64), (32, 64, 2048), (2048, 8192), (8192, 2048), (16, 2048)]
    for shape in shapes:
        leaf = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        assert state_bytes([leaf]) < 1.1 * math.prod(shape) + 1100
    small = [jax.ShapeDtypeStruct((2048,), jnp.bfloat16)]
    assert state_bytes(small) <= 8 * 2048 + 8 + 1100


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    strategies.lists(
        strategies.lists(strategies.integers(0, 300), max_size=5).filter(lambda s: math.prod(s) < 10**7), max_size=6
    ),
    strategies.sampled_from([None, 0, 100]),
    strategies.sampled_from([8, 4]),
)
def test_state_is_never_larger_than_adams(shapes, min_size, bits):
    """8 bytes per parameter, 20 per leaf and 1.1 KiB, whatever the shapes."""
    params = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]
    count = sum(math.prod(shape) for shape in shapes)
    assert state_bytes(params, min_size=min_size, bits=bits) <= 8 * count + 20 * len(shapes) + 1.1 * 1024


@pytest.mark.parametrize("options", [{}, {"second_moment": "block"}, {"bits": 4}, {"rule": "reference"}], ids=str)
@pytest.mark.parametrize("shape", [(2**31 + 8,), (2**16 + 8, 2**15 + 16), (2**33,)], ids=str)
def test_leaves_beyond_32_bits_of_index_lower(shape, options):
    """Shapes only: nothing counts elements of the leaf in 32 bits."""
    tx = gefen(1e-3, **options)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)
    text = jax.jit(tx.update).lower(params, state, params).as_text()
    sizes = {math.prod(shape), *shape}
    indices = [line for line in text.splitlines() if "iota" in line and "i32" in line]
    assert not [line for line in indices if any(f"<{size}x" in line for size in sizes if size > 2**31)]
    assert explain(state).bytes > 0


def test_the_codebooks_table_is_made_once_for_all_leaves():
    """Otherwise trace and compile time grow with the number of leaves."""

    def equations(leaves):
        params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * leaves
        tx = gefen(1e-3, min_size=0)
        text = str(jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params))
        return text.count("cumsum"), len(text.splitlines())

    (few, short), (many, long) = equations(2), equations(40)
    assert few == many > 0
    assert long < 40 * short / 2


@pytest.mark.parametrize("leaf", [(4095,), (4096,), (4097,), (63, 65), (64, 64)])
def test_min_size_counts_elements(leaf):
    exact = blocks(gefen(1e-3).init([jnp.zeros(leaf)]))["0"].exact
    assert exact == (math.prod(leaf) < 4096)


def test_tied_weights_are_two_leaves():
    """The same array twice: two parameters with states of their own, whose buffers can be donated."""
    w = normal(0, (96, 128))
    params = {"in": w, "out": w}
    tx = gefen(1e-3)
    state = tx.init(params)
    assert len({id(x) for x in jax.tree.leaves(state)}) == len(jax.tree.leaves(state))
    step = jax.jit(lambda s, p, g: tx.update(g, s, p), donate_argnums=0)
    updates, new = step(state, params, params)
    assert int(new.count) == 1
    shared = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(shared["in"], shared["out"])
