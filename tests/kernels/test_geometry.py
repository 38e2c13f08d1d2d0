"""How leaves are cut into programs: every element exactly once, with the blocks that its state has."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_pallas import geometry
from gefen_pallas.geometry import (
    CELL,
    CHUNKS,
    COLUMN,
    FACTORED,
    FULL,
    ONCE,
    ROWS,
    STRIPS,
    TILE,
    Cut,
    LeafShape,
    plan_leaf,
)


def elements(cut):
    """For every program the flat indices of its elements and their cells, as the kernels compute them."""
    kind = cut.kind
    x, y, z = (np.arange(n) for n in (kind.x, kind.y, kind.z))
    x, y, z = x[:, None, None], y[None, :, None], z[None, None, :]
    for program in range(cut.programs):
        if kind.loop == STRIPS:
            trips = -(-cut.strip_rows * cut.strip_columns // kind.x)
        else:
            trips = {ONCE: cut.repeat, ROWS: -(-cut.rows // kind.y), CHUNKS: -(-cut.columns // kind.z)}[kind.loop]
        for j in range(trips):
            yy, zz = y, z
            if kind.loop == STRIPS:
                strips = cut.across // cut.strip_columns
                q = j * kind.x + x
                row = program // strips * cut.strip_rows + q // cut.strip_columns
                column = program % strips * cut.strip_columns + q % cut.strip_columns
                cell, here = row * cut.across + column, q < cut.strip_rows * cut.strip_columns
            else:
                cell = (program * cut.repeat + j if kind.loop == ONCE else program) * kind.x + x
                yy = j * kind.y + y if kind.loop == ROWS else y
                zz = j * kind.z + z if kind.loop == CHUNKS else z
                row, column, here = cell // cut.across, cell % cut.across, cell < cut.cells
            offset = (row * cut.rows + yy) * cut.width + column * cut.columns + zz
            mask = np.broadcast_to(here & (yy < cut.rows) & (zz < cut.columns), offset.shape)
            yield program, offset[mask], np.broadcast_to(cell, offset.shape)[mask], (row * cut.rows + yy + 0 * zz)[mask]


def numbers(shape, stat):
    """Which entry of a statistic each element belongs to."""
    if any(n % s for n, s in zip(shape, stat)):
        return np.arange(math.prod(shape)) // (math.prod(shape) // math.prod(stat))
    index = [np.arange(n) // (n // s) for n, s in zip(shape, stat)]
    grid = np.meshgrid(*index, indexing="ij")
    return np.ravel_multi_index(grid, stat).ravel() if shape else np.zeros(1, int)


@st.composite
def leaves(draw):
    """Shapes of rank 1 to 4 with any two tilings of them."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 17, 32, 48, 97]), min_size=1, max_size=4)))

    def stat():
        return tuple(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape)

    scale, nu, cross = stat(), stat(), (1,) * len(shape)
    if len(shape) > 1 and draw(st.booleans()):
        batch = draw(st.integers(0, len(shape) - 2))
        split = draw(st.integers(batch + 1, len(shape) - 1))
        nu = shape[:split] + (1,) * (len(shape) - split)
        cross = shape[:batch] + (1,) * (split - batch) + shape[split:]
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return LeafShape(shape, shape, scale, nu, cross, False, dtype, "float32")


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(leaves())
def test_every_element_is_written_once_and_blocks_are_the_states(leaf):
    cut = plan_leaf(leaf)
    if isinstance(cut, str):
        return
    kind, size = cut.kind, math.prod(leaf.shape)
    assert kind.x * kind.y * kind.z <= TILE
    assert all(n & (n - 1) == 0 for n in (kind.x, kind.y, kind.z))
    seen, cells, rows, programs = (np.full(size, -1) for _ in range(4))
    count = 0
    for program, offset, cell, row in elements(cut):
        seen[offset], cells[offset], rows[offset], programs[offset] = offset, cell, row, program
        count += offset.size
    assert count == size
    assert (seen == np.arange(size)).all()
    scale = numbers(leaf.shape, leaf.scale)
    blocks = rows if kind.row_scale else cells
    assert _same(blocks, scale)
    if kind.loop == STRIPS:
        nu = numbers(leaf.shape, leaf.nu)
        assert _finer(nu, programs), "a second moment is shared between programs"
    elif kind.second in (CELL, FULL):
        assert _same(cells if kind.second == CELL else np.arange(size), numbers(leaf.shape, leaf.nu))
    elif kind.second == COLUMN:
        assert _same(cells * cut.columns + np.arange(size) % cut.width % cut.columns, numbers(leaf.shape, leaf.nu))
    elif kind.second == FACTORED:
        assert (rows == numbers(leaf.shape, leaf.nu)).all()
        batch = np.arange(size) // cut.width // cut.batch_rows
        assert (batch * cut.width + np.arange(size) % cut.width == numbers(leaf.shape, leaf.cross)).all()
    else:
        assert _same(rows, numbers(leaf.shape, leaf.nu))
    if kind.vector > 1:
        assert cut.columns % kind.vector == 0
        assert cut.width % kind.vector == 0


def _finer(a, b):
    """Whether equal numbers of ``a`` have equal numbers of ``b``."""
    return len(np.unique(np.stack([a, b]), axis=1).T) == len(np.unique(a))


def _same(a, b):
    """Whether two numberings are the same partition, in the same order of their entries."""
    return (a == b).all() or (_finer(a, b) and _finer(b, a) and (np.unique(a) == np.unique(b)).all())


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (LeafShape((64, 64), (64, 64), (64, 1), (64, 1), (1, 64), False, "float64", "float32"), "gradients of float64"),
        (LeafShape((64, 0), (1, 1), (1, 1), (1, 1), (1, 1), False, "float32", "float32"), "no elements"),
        (LeafShape((64, 15), (32, 15), (1, 15), (1, 15), (1, 1), False, "float32", "float32"), "not the last"),
        (LeafShape((64, 30), (64, 15), (64, 2), (64, 2), (1, 1), False, "float32", "float32"), "share a byte"),
        (LeafShape((64, 64), (64, 64), (1, 1), (64, 1), (1, 1), True, "float32", "float32"), "shared second moment"),
        (LeafShape((768, 768), (768, 768), (768, 3), (1, 12), (1, 1), False, "float32", "float32"), "do not nest"),
        (LeafShape((4096, 4096), (4096,) * 2, (4096, 16), (1, 1), (1, 1), False, "float32", "float32"), "together"),
        (LeafShape((8, 6, 4), (8, 6, 4), (2, 2, 2), (2, 2, 2), (1,) * 3, False, "float32", "float32"), "no tiles"),
    ],
)
def test_what_has_no_kernel_says_why(leaf, reason):
    found = plan_leaf(leaf)
    assert isinstance(found, str)
    assert reason in found


def test_huge_leaves_are_refused():
    shape = (2**20, 2**12)
    assert "elements" in plan_leaf(
        LeafShape(shape, shape, (2**20, 16), (2**20, 1), (1, 2**12), False, *["float32"] * 2)
    )


def test_default_structures_of_real_models_all_have_kernels():
    import jax
    import jax.numpy as jnp

    from gefen_jax import gefen

    shapes = [
        (50257, 768),
        (1024, 768),
        (768, 2304),
        (768, 12, 64),
        (12, 64, 768),
        (16, 2048, 32, 64),
        (3, 3, 64, 64),
        (16, 2048),
        (8192, 2048),
        (151936, 2048),
        (24, 2048, 11008),
        (64, 4099),
        (5003,),
        (1, 5003),
        (7, 1031),
    ]
    params = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    for second in ("auto", "block", "full"):
        state = jax.eval_shape(gefen(1e-3, second_moment=second).init, params)
        for p, leaf in zip(params, state.leaves()):
            shapes_of = (x.shape for x in leaf)
            cut = plan_leaf(LeafShape(p.shape, *shapes_of, leaf.mu.dtype != jnp.uint8, "bfloat16", "bfloat16"))
            assert isinstance(cut, Cut), (second, p.shape, cut)
            assert cut.kind.x * cut.kind.y * cut.kind.z <= geometry.TILE
