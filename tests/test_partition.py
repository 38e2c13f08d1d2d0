"""The default rule's choice of structure: sums against plain analysis of variance, planted structures."""

import itertools
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import RNG, choice, normal, scales, survey

from gefen_jax import partition

# Sums


def plain_between(logs, counted, labels):
    """Sum over cells of sum^2 / count, and the number of cells that hold something."""
    sums = np.bincount(labels[counted], logs[counted])
    counts = np.bincount(labels[counted])
    filled = counts > 0
    return np.sum(sums[filled] ** 2 / counts[filled]), filled.sum()


def plain_scores(grad, batch, rows):
    """structure -> (sum of squares between cells beyond one mean per batch entry, degrees of freedom), by labels."""
    shape = grad.shape
    own = shape[batch:]
    squares = np.square(np.asarray(grad, np.float64))
    logs = np.log(squares / squares.mean() + 1e-12).reshape(-1)
    counted = squares.reshape(-1) > 0
    index = np.indices(shape).reshape(len(shape), -1)

    def labels(tile):
        return np.ravel_multi_index([i // t for i, t in zip(index, tile)], [s // t for s, t in zip(shape, tile)])

    base, matrices = plain_between(logs, counted, labels((1,) * batch + own))
    found = {("full",): (np.sum(logs[counted] ** 2) - base, counted.sum() - matrices)}
    for tile in itertools.product(*([d for d in range(1, s + 1) if s % d == 0] for s in own)):
        between, cells = plain_between(logs, counted, labels((1,) * batch + tile))
        found["tile", (1,) * batch + tile] = between - base, cells - matrices
    row, column = labels((1,) * (batch + rows) + own[rows:]), labels((1,) * batch + own[:rows] + (1,) * len(own[rows:]))
    between_rows, filled_rows = plain_between(logs, counted, row)
    sums, counts = (
        np.bincount(row[counted], logs[counted], row.max() + 1),
        np.bincount(row[counted], minlength=row.max() + 1),
    )
    mean = sums / np.maximum(counts, 1)
    residual = np.where(counted, logs - mean[row], 0)
    between_columns, filled_columns = plain_between(residual, counted, column)
    freedom = filled_rows + filled_columns - 2 * matrices
    found["factored", batch, rows] = between_rows + between_columns - base, freedom
    return found


@st.composite
def leaf_and_view(draw):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 9, 12]), min_size=1, max_size=4)))
    batch = draw(st.integers(0, len(shape) - 1))
    return shape, batch, draw(st.integers(0, len(shape) - batch))


@settings(max_examples=60, deadline=None)
@given(leaf_and_view(), st.sampled_from([0, 0.3, 0.9]), st.integers(0, 2**32))
def test_sums_equal_plain_analysis_of_variance(leaf, zeros, seed):
    shape, batch, rows = leaf
    rng = RNG(seed)
    grad = np.asarray(rng.normal(size=shape) * (rng.random(shape) >= zeros), np.float32)
    found = partition.survey([grad], tile=shape, default=("tile", shape), view=(batch, rows))
    if not grad.any():
        assert found.reason == partition.ZERO
        return
    expected = plain_scores(grad, batch, rows)
    assert found.counted == np.count_nonzero(grad)
    assert found.noise >= math.pi**2 / 2
    for candidate in found.candidates:
        between, freedom = expected[candidate.structure]
        explained = between - freedom * found.noise if freedom > 0 else 0
        assert candidate.explained == pytest.approx(explained, rel=1e-9, abs=1e-7 * grad.size)
        assert candidate.cost == partition.structure_cost(shape, candidate.structure)


def names(found):
    return {candidate.name for candidate in found.candidates}


def test_which_candidates_are_compared():
    whole = survey(normal(4, 6), (0, 1))
    runs = {"1 x 2", "1 x 3", "1 x 6", "2 x 6", "2 x 1", "4 x 1", "4 x 2", "4 x 3", "4 x 6"}
    assert names(whole) == runs | {"factored", "full"}
    assert whole.candidates[0].name == "4 x 6"
    assert [c.cost for c in whole.candidates] == sorted(c.cost for c in whole.candidates)
    # A group of axes is cut as a run of its elements: never part of a later axis and several of an earlier one.
    heads = survey(normal(6, 4, 6), (0, 1))
    assert {"1 x 2", "1 x 6", "1 x 12", "1 x 24", "3 x 24", "6 x 12"} <= names(heads)
    assert not {"1 x 4", "1 x 8"} & names(heads)
    assert {c.name: c.structure for c in heads.candidates}["1 x 12"] == ("tile", (1, 2, 6))
    # Vectors, rows alone and columns alone have runs only.
    assert names(survey(normal(12))) == {"1 x 2", "1 x 3", "1 x 4", "1 x 6", "1 x 12", "full"}
    assert names(survey(normal(6, 1), (0, 1))) == {"2 x 1", "3 x 1", "6 x 1", "full"}
    assert names(survey(normal(4, 6), (0, 1), factored=False, full=False)) == runs


def test_no_cell_crosses_a_batch_entry():
    for shape, view in [((4, 6, 8), (1, 1)), ((2, 3, 4, 8), (2, 1)), ((5, 7), (1, 0)), ((5, 7), (2, 0))]:
        for candidate in survey(normal(*shape), view).candidates:
            if candidate.structure[0] == "tile":
                assert candidate.structure[1][: view[0]] == (1,) * view[0]


def test_chunks_do_not_matter(monkeypatch):
    grad = (scales(3, 1, 40) * normal(3, 50, 40)).astype(np.float32)
    whole = survey(grad, (1, 1))
    monkeypatch.setattr("gefen_jax._cells._CHUNK", 7)
    for part, expected in zip(survey(grad, (1, 1)).candidates, whole.candidates):
        assert part.explained == pytest.approx(expected.explained, rel=1e-9, abs=1e-6)


# What is found

PLANTED = {
    "rows": (scales(256, 1) * normal(256, 384), ("tile", (1, 384))),
    "columns": (scales(1, 384) * normal(256, 384), ("tile", (256, 1))),
    "rows and columns": (scales(256, 1) * scales(1, 384, seed=2) * normal(256, 384), ("factored", 0, 1)),
    "heads among rows": (np.repeat(scales(6, 1), 64, axis=0) * normal(384, 256), ("tile", (64, 256))),
    "heads among columns": (np.repeat(scales(1, 6), 64, axis=1) * normal(256, 384), ("tile", (256, 64))),
    "heads as an axis": (scales(1, 12, 1) * normal(768, 12, 64), ("tile", (768, 1, 64))),
    "heads as a row axis": (scales(12, 1, 1) * normal(12, 64, 768), ("tile", (1, 64, 768))),
    "runs in a vector": (np.repeat(scales(64), 512) * normal(64 * 512), ("tile", (512,))),
    "convolution outputs": (scales(1, 1, 1, 64) * normal(3, 3, 64, 64), ("tile", (3, 3, 64, 1))),
    "rows of a stack": (scales(8, 128, 1) * normal(8, 128, 128), ("tile", (1, 1, 128))),
    "weak columns": (scales(1, 384) ** 0.1 * normal(256, 384), ("tile", (256, 1))),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_structure_is_found(kind):
    grad, structure = PLANTED[kind]
    assert choice(grad) == partition.Choice(structure, partition.LEARNED)
    assert survey(grad).noise == pytest.approx(math.pi**2 / 2, rel=0.05)  # none of it taken for noise


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("scale", [1e-8, 1e4, 2.0**-60])
def test_scale_does_not_matter(kind, scale):
    grad, structure = PLANTED[kind]
    assert choice((grad * scale).astype(np.float32)).structure == structure


@pytest.mark.parametrize("kind", PLANTED)
def test_bfloat16_finds_the_same(kind):
    grad, structure = PLANTED[kind]
    assert choice(grad.astype(ml_dtypes.bfloat16)).structure == structure


def test_powers_of_two_change_nothing_at_all():
    grad = PLANTED["rows and columns"][0].astype(np.float32)
    assert survey(grad) == survey(grad * np.float32(2.0**-40))


DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "student": lambda rng, shape: rng.standard_t(3, size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, size=shape),
    "product of normals": lambda rng, shape: rng.normal(size=shape) * rng.normal(size=shape),
    "signs": lambda rng, shape: rng.choice([-1.0, 1.0], size=shape),
    "sparse": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) < 0.03),
}


@pytest.mark.parametrize("shape", [(96, 128), (8, 64, 64), (5000,), (64, 4099)])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_noise_keeps_the_shape_rule(kind, shape):
    for gradients in (1, 2, 3):
        for seed in range(3):
            found = survey([DISTRIBUTIONS[kind](RNG((seed, i)), shape) for i in range(gradients)])
            assert partition.choose([found]) == [partition.Choice(found.default, partition.FLAT)]


def test_scores_of_noise_have_the_stated_mean_and_spread():
    standard = []
    for seed in range(150):
        found = survey(normal(24, 36, seed=seed), (0, 1))
        # Undo the noise that was estimated from the leaf itself: judge the formulas, not the estimate.
        ratio = found.noise / (math.pi**2 / 2)
        assert ratio < 1.6
        standard.append([c.explained / c.spread for c in found.candidates if c.spread > 0 and c.cost < 24 * 36 / 4])
    mean, deviation = np.mean(standard, axis=0), np.std(standard, axis=0)
    assert (np.abs(mean + 0.1) < 0.35).all()  # a little below 0, as the noise is never taken below the Gaussian's
    assert ((deviation > 0.75) & (deviation < 1.25)).all()


def test_several_gradients_lower_the_noise():
    scale = scales(256, 384)
    found = [survey([scale * normal(256, 384, seed=i) for i in range(k)]) for k in (1, 2, 4, 8)]
    assert [f.noise for f in found[1:]] == pytest.approx([math.pi**2 / 6, 0.6449, 0.2838], rel=0.05)
    # One sample cannot tell its own scale from noise; several can.
    assert found[0].reason == partition.FLAT
    for several in found[1:]:
        assert partition.choose([several], budget=10**6)[0].structure == ("full",)
    # Two gradients show columns too weak for one.
    weak = scales(1, 96) ** 0.05
    assert choice(weak * normal(512, 96)).reason == partition.FLAT
    assert choice([weak * normal(512, 96, seed=i) for i in range(4)]).structure == ("tile", (512, 1))


def test_each_gradient_counts_alike():
    few = [scales(1, 96) * normal(64, 96, seed=i) for i in range(3)]
    loud = [few[0], few[1] * 1e6, few[2] * 1e-6]
    for one, other in zip(survey(loud).candidates, survey(few).candidates):
        assert one.explained == pytest.approx(other.explained, rel=1e-6, abs=1e-3)


# Zeros


def with_zeros(grad, rows=(), columns=()):
    grad = grad.copy()
    grad[list(rows)] = 0
    grad[:, list(columns)] = 0
    return grad


def test_dead_columns_and_unseen_rows_are_no_structure():
    dead = range(0, 384, 3)
    assert choice(with_zeros(normal(256, 384), columns=dead)).reason == partition.FLAT
    assert choice(with_zeros(PLANTED["rows"][0], columns=dead)).structure == ("tile", (1, 384))
    assert choice(with_zeros(PLANTED["columns"][0], columns=dead)).structure == ("tile", (256, 1))
    unseen = np.flatnonzero(RNG(0).random(5000) < 0.7)
    assert choice(with_zeros(normal(5000, 64), rows=unseen)).reason == partition.FLAT
    assert choice(with_zeros(scales(5000, 1) * normal(5000, 64), rows=unseen)).structure == ("tile", (1, 64))
    both = scales(5000, 1) * scales(1, 64, seed=2) * normal(5000, 64)
    assert choice(with_zeros(both, rows=unseen)).structure == ("factored", 0, 1)


def test_scattered_zeros_hide_nothing():
    keep = RNG(3).random((256, 384)) < 0.2
    for kind in ("rows", "columns", "rows and columns"):
        grad, structure = PLANTED[kind]
        assert choice(grad * keep).structure == structure


def test_gradients_that_decide_nothing():
    shape = (64, 96)
    default = ("factored", 0, 1)
    assert choice(np.zeros(shape)) == partition.Choice(default, partition.ZERO)
    assert choice([np.zeros(shape), np.zeros(shape)]).reason == partition.ZERO
    assert choice(np.full(shape, -0.3)) == partition.Choice(default, partition.FLAT)
    one = np.zeros(shape)
    one[3, 4] = 1
    assert choice(one).reason == partition.FLAT
    for value in (np.nan, np.inf, -np.inf):
        bad = normal(*shape)
        bad[5, 6] = value
        assert choice(bad) == partition.Choice(default, partition.NON_FINITE)
        assert choice([normal(*shape), bad]).reason == partition.NON_FINITE
    assert choice(np.full(shape, 1e300)).reason == partition.NON_FINITE  # beyond float32
    assert survey(np.zeros((0, 4)), (0, 1)).reason == partition.ZERO
    # A zero gradient among others is as if it had not been given.
    rows = PLANTED["rows"][0]
    assert survey([rows, 0 * rows]) == survey(rows)


def test_extreme_magnitudes_are_not_lost():
    for scale in (1e-30, 1e30):  # float32 squares would vanish or overflow
        grad = (PLANTED["columns"][0] * scale).astype(np.float32)
        assert choice(grad).structure == ("tile", (256, 1))


def test_blocks_only():
    grad = PLANTED["rows and columns"][0]
    assert choice(grad, factored=False, full=False).structure[0] == "tile"
    assert {c.structure[0] for c in survey(grad, factored=False, full=False).candidates} == {"tile"}


# Bad input and cost


def test_bad_input_is_refused():
    good = {"tile": (4, 4), "default": ("full",), "view": (0, 1)}
    with pytest.raises(ValueError, match="no gradient"):
        partition.survey([], **good)
    with pytest.raises(ValueError, match=r"differ in shape: \(4, 4\), \(4, 5\)"):
        partition.survey([normal(4, 4), normal(4, 5)], **good)
    with pytest.raises(TypeError, match="int64"):
        partition.survey([np.ones((4, 4), int)], **good)
    for view in [(-1, 1), (0, 3), (2, 1)]:
        with pytest.raises(ValueError, match="does not fit an array of shape"):
            partition.survey([normal(4, 4)], **good | {"view": view})


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (1, 1), (1, 7), (7, 1), (2, 3), (2, 1, 3), (13, 1, 1, 2, 5), (3, 3, 2, 2)]
)
def test_every_shape_and_view(shape):
    for batch in range(len(shape) + 1):
        for rows in range(len(shape) - batch + 1):
            found = partition.survey([normal(*shape)], tile=shape, default=("tile", shape), view=(batch, rows))
            assert partition.choose([found], 10**6)[0].structure == ("tile", shape)
    assert partition.survey([normal(*shape)], tile=shape, default=("tile", shape)).scales == 1


@pytest.mark.parametrize("shape", [(2048, 768), (2**20,), (5, 200_003), (8, 8, 1000, 20)])
def test_peak_memory(shape):
    grad = normal(*shape).astype(np.float32)
    survey(grad)
    tracemalloc.start()
    try:
        survey(grad)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 24 * grad.size
