"""Launches and their tables."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_pallas import schedule
from gefen_pallas.geometry import LeafShape, plan_leaf

F32 = ("float32", "float32")


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from([5, 6])), max_size=300),
    st.integers(400, 4352),
    st.integers(1, 100),
    st.integers(1, 6),
)
def test_split_holds_all_leaves_once_within_the_limits(leaves, size, most, kinds):
    classes, pointers = [(c,) for c, _ in leaves], [n for _, n in leaves]
    launches = schedule.split(classes, pointers, parameter_bytes=size, max_leaves=most, max_classes=kinds)
    assert sorted(i for launch in launches for i in launch) == list(range(len(leaves)))
    for launch in launches:
        assert 0 < len(launch) <= most
        assert 8 * sum(pointers[i] for i in launch) + schedule.RESERVED_BYTES <= size
        assert len({classes[i] for i in launch}) <= kinds
        runs = [classes[i] for i in launch]
        assert len(set(runs)) == 1 + sum(a != b for a, b in itertools.pairwise(runs)), "a class is torn apart"


@given(st.integers(1, 3000), st.sampled_from([5, 6]), st.integers(1, 600))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_equal_leaves_take_the_fewest_launches(count, pointers, most):
    launches = schedule.split([(0,)] * count, [pointers] * count, max_leaves=most)
    fit = min((schedule.PARAMETER_BYTES - schedule.RESERVED_BYTES) // 8 // pointers, most)
    assert len(launches) == math.ceil(count / fit)


def test_limits_of_old_and_new_drivers():
    leaves = [(0,)] * 2000
    assert len(schedule.split(leaves, [5] * 2000)) == 4
    assert len(schedule.split(leaves, [5] * 2000, max_leaves=10**6)) == 3
    assert len(schedule.split(leaves[:148], [5] * 148, parameter_bytes=schedule.OLD_PARAMETER_BYTES)) == 2


def test_a_leaf_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="does not fit"):
        schedule.split([(0,)], [6], parameter_bytes=schedule.RESERVED_BYTES + 40)


def _cuts():
    shapes = [
        LeafShape((768, 3072), (768, 3072), (768, 12), (768, 1), (1, 3072), False, *F32),
        LeafShape((768,), (768,), (1,), (768,), (1,), True, *F32),
        LeafShape((4, 64, 256), (4, 64, 256), (4, 64, 1), (4, 64, 1), (4, 1, 256), False, *F32),
        LeafShape((768, 3072), (768, 3072), (768, 12), (1, 3072), (1, 1), False, *F32),
    ]
    return [plan_leaf(leaf) for leaf in shapes]


def test_step_table():
    cuts = _cuts()
    table = schedule.step_table(cuts, [0, 1, 2, 3], [1, 0, 0, 1], [0, 0, 7, 0])
    assert table.leaves[0] == 3, "the longest programs come first"
    assert table.programs == sum(cut.programs for cut in cuts)
    order = [cuts[i] for i in table.leaves]
    np.testing.assert_array_equal(table.meta[:, 0], np.cumsum([0] + [cut.programs for cut in order])[:-1])
    np.testing.assert_array_equal(table.starts[:4], table.meta[:, 0])
    assert (table.starts[4:] == np.iinfo(np.int32).max).all()
    assert table.starts.size > len(order)
    for row, i in zip(table.meta, table.leaves):
        assert table.classes[row[1]] == tuple(cuts[i].kind)
        assert row[3] == schedule.FIRST_DECAY + [1, 0, 0, 1][i]
    crosses = [row[2] for row, i in zip(table.meta, table.leaves) if i in (0, 2)]
    assert crosses == [0, 1]


def test_scratch_of_the_sums_is_small():
    cuts = _cuts()
    table, scratch, starts = schedule.sums_table(cuts, [0, 2])
    elements = 768 * 3072 + 4 * 64 * 256
    assert 4 * (scratch.rows + scratch.columns + scratch.stripes + scratch.means) <= 0.3 * elements
    assert starts == [0, 1]
    assert scratch.means == 5
    assert table.programs == 12 * 48 + 4 * 4
