"""Shapes are the structure: tiles and flat runs never collide, and what shapes cannot tell is in the format words."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import gradients, mixed

from gefen_jax import Plan, blocks, gefen, learn_plan, plan_from_state, tiling
from gefen_jax.choices import CODECS, RULES, SECOND_MOMENTS
from gefen_jax.plan import LeafPlan, Options
from gefen_jax.reasons import REASONS
from gefen_jax.state import decode_format, encode_format


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def partition_of(shape, stat):
    """Number of the block of each element, from the view alone, with blocks numbered by their first element."""
    view = tiling.view(shape, stat)
    assert view.size * math.prod(stat) == math.prod(shape)
    numbers = np.broadcast_to(np.arange(math.prod(stat)).reshape(view.statistic), view.elements).reshape(-1)
    return numbers.tobytes()


SMALL = [1, 2, 3, 4, 6, 8, 9, 12]


def test_tiles_and_flat_runs_never_collide():
    """Each statistic's shape stands for one partition: for ranks 1 to 4 all tiles and all runs of equal length."""
    cases = 0
    for rank, most in ((1, 40), (2, 96), (3, 96), (4, 72)):
        for shape in itertools.product([*SMALL, *([30, 40] if rank == 1 else [])], repeat=rank):
            n = math.prod(shape)
            if n > most:
                continue
            index = np.indices(shape).reshape(rank, -1)
            flat = {}
            for run in divisors(n):
                stat = tiling.flat_statistic(shape, run)
                assert stat not in flat
                flat[stat] = run
                assert partition_of(shape, stat) == (np.arange(n) // run).tobytes()
                cases += 1
            for stat in itertools.product(*map(divisors, shape)):
                assert tiling.is_tiling(shape, stat)
                tile = [size // blocks for size, blocks in zip(shape, stat)]
                numbers = np.ravel_multi_index([i // t for i, t in zip(index, tile)], stat)
                assert partition_of(shape, stat) == numbers.astype(np.int64).tobytes()
                assert tiling.tile_statistic(shape, tuple(tile)) == stat
                cases += 1
            for stat, run in flat.items():  # a shape that both could mean has one meaning: that partition
                if tiling.is_tiling(shape, stat):
                    assert not tiling.is_flat(shape, stat)
                else:
                    assert tiling.is_flat(shape, stat)
                    assert stat[0] * run == n
    assert cases > 15_799


def test_rank_zero_and_empty_axes():
    assert tiling.view((), ()) == tiling.View((), (), (), 1)
    for shape in ((0,), (3, 0), (0, 3, 0)):
        assert tiling.tile_statistic(shape, (1,) * len(shape)) == (1,) * len(shape)
        assert tiling.flat_statistic(shape, 1) == (1,) * len(shape)
        assert tiling.is_tiling(shape, (1,) * len(shape))


@pytest.mark.parametrize(
    ("shape", "mu", "nu"),
    [
        ((768, 12, 64), ("tile", (1, 2, 64)), ("factored", 0, 1)),
        ((12, 64, 768), ("tile", (1, 1, 256)), ("factored", 0, 2)),
        ((16, 2048, 32, 64), ("tile", (1, 1, 2, 64)), ("factored", 1, 1)),
        ((3, 3, 64, 64), ("tile", (1, 1, 2, 64)), ("factored", 0, 3)),
        ((50257, 768), ("tile", (1, 256)), ("factored", 0, 1)),
        ((50257,), ("tile", (50257,)), ("tile", (50257,))),
        ((1, 5003), ("tile", (1, 5003)), ("tile", (1, 5003))),
        ((64, 4099), ("tile", (64, 1)), ("factored", 0, 1)),
        ((16, 2048), ("tile", (1, 256)), ("tile", (1, 256))),
    ],
)
def test_the_shape_rule_is_the_documented_one(shape, mu, nu):
    nothing = np.broadcast_to(np.float32(0), shape)  # without memory
    leaf = blocks(gefen(1e-3).init({"w": nothing}))["w"]
    assert (leaf.mu, leaf.nu) == (mu, nu)


@st.composite
def leaf_plans(draw):
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=5)))
    exact = draw(st.booleans())
    tile = tuple(draw(st.sampled_from(divisors(size))) for size in shape)
    mu = ("full",) if exact else ("tile", tile)
    reason = draw(st.sampled_from(REASONS))
    axes = None
    if len(shape) >= 2 and draw(st.booleans()):
        batch = draw(st.integers(0, len(shape) - 2))
        axes = (batch, draw(st.integers(1, len(shape) - batch - 1)))
    nu = ("factored", *axes) if axes and draw(st.booleans()) else draw(st.sampled_from([("full",), ("tile", tile)]))
    return LeafPlan(shape, mu, nu, reason, axes)


@settings(max_examples=300)
@given(
    st.lists(leaf_plans(), max_size=5),
    st.sampled_from(RULES),
    st.sampled_from(SECOND_MOMENTS),
    st.sampled_from([8, 4]),
    st.integers(0, 2**32 - 1),
    st.sampled_from(CODECS),
)
def test_format_words_say_what_was_encoded(leaves, rule, second_moment, bits, min_size, codec):
    options = Options(rule=rule, second_moment=second_moment, bits=bits, min_size=min_size, codec=codec)
    words = encode_format(options, leaves)
    assert (words.dtype, words.shape) == (np.uint32, (2 + len(leaves),))
    found = decode_format(words)
    assert (found.version, found.rule, found.second_moment, found.bits) == (1, rule, second_moment, bits)
    assert (found.min_size, found.codec, found.normalised) == (min_size, codec, False)
    for leaf, word in zip(leaves, found.leaves, strict=True):
        assert word.reason == leaf.reason
        assert word.axes == (leaf.nu[1:] if leaf.nu[0] == "factored" else leaf.axes)
        even = [i for i, size in enumerate(leaf.shape) if size % 2 == 0]
        assert word.packed == (even[-1] if bits == 4 and even and leaf.mu != ("full",) else None)


TREE = [(64, 128), (7, 5), (3, 67, 64), (), (131,), (0, 4), (4, 128, 128), (2, 3, 4, 5, 6), (64, 4099), (1, 5003)]
WAYS = [
    {},
    {"bits": 4, "min_size": 0},
    {"second_moment": "block", "min_size": 100},
    {"second_moment": "full"},
    {"second_moment": "factored", "axes": {"p2": (1, 1), "p6": (0, 1)}},
    {"full_precision": "p6|p8"},
    {"codec": "companding"},
    {"rule": "reference"},
]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_state_tells_the_plan_that_it_was_made_by(options, learned, tmp_path):
    """`plan_from_state` inverts ``gefen(plan=plan).init``, and a file keeps a plan: structure, words and all."""
    params = {n: p for n, p in mixed(TREE, [jnp.float32]).items() if not (options.get("rule") and p.size == 0)}
    if learned:
        plan = learn_plan(gradients(params, 0), **options)
    else:
        plan = plan_from_state(gefen(1e-3, **options).init(params))
    tx = gefen(1e-3, plan=plan)
    state = tx.init(params)
    found = plan_from_state(state)
    assert (found.rule, found.bits, found.codec, found.min_size) == (plan.rule, plan.bits, plan.codec, plan.min_size)
    np.testing.assert_array_equal(found.codebook, plan.codebook)
    for path, leaf in plan.leaves.items():
        if 0 not in leaf.shape:  # which a state cannot tell
            told = found.leaves[path]
            assert (told.shape, told.mu, told.reason) == (leaf.shape, leaf.mu, leaf.reason)
            assert told.statistics() == leaf.statistics()
            assert told.nu == leaf.nu or math.prod(leaf.shape) == 1  # one element: a tile and full are the same
    assert list(found.leaves) == list(params)
    again = gefen(1e-3, plan=found).init(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), again) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    np.testing.assert_array_equal(again.format, state.format)

    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.dumps() == plan.dumps()
    if plan.counts is not None:
        np.testing.assert_array_equal(loaded.counts, plan.counts)
    # From the metadata of a checkpoint: shapes, and the format words read first.
    metadata = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)._asdict()
    template = plan_from_state({"opt": [metadata]}, np.asarray(state.format))
    assert template.codebook is None
    assert dict(template.leaves) == dict(found.leaves)
