"""Compiled loops behind `codebook` and `partition`. Imported when first needed: Numba takes a second to load.

Nothing is cached on disk (an installed package may be read-only or shared by machines of different kinds); each
function is used with one signature only, so that each is compiled once per process.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

# IEEE division instead of Python's ZeroDivisionError; no fast-math: results are part of the contract.
compiled = numba.njit(error_model="numpy", boundscheck=False)


@compiled
def _first_block(row, shape, tile):
    """Index of the first block of a row (all axes but the last) of a C-ordered statistic."""
    block, stride = 0, shape[-1] // tile[-1]
    for axis in range(shape.size - 2, -1, -1):
        row, index = row // shape[axis], row % shape[axis]
        block += stride * (index // tile[axis])
        stride *= shape[axis] // tile[axis]
    return block


@compiled
def block_maxima(values, start, shape, tile, maxima):
    """Raise `maxima` to the largest magnitudes of the part of an array that begins at flat index `start`.

    Returns whether all values are finite.
    """
    width, run = shape[-1], tile[-1]
    position, finite = 0, True
    while position < values.size:
        row, column = (start + position) // width, (start + position) % width
        block = _first_block(row, shape, tile) + column // run
        stop = min(values.size, position + width - column)
        while position < stop:
            end = min(stop, position + run - column % run)
            largest = maxima[block]
            for i in range(position, end):
                magnitude = abs(values[i])
                finite &= magnitude < np.inf
                largest = max(largest, magnitude)
            maxima[block] = largest
            column += end - position
            position = end
            block += 1
    return finite


@compiled
def count_bins(values, start, shape, tile, maxima, counts):
    """Count value / block maximum in bins over [-1, 1]. Returns the number of exact zeros, which are not counted."""
    width, run = shape[-1], tile[-1]
    half, one = np.float32(counts.size // 2), np.float32(1)
    position, zeros = 0, 0
    while position < values.size:
        row, column = (start + position) // width, (start + position) % width
        block = _first_block(row, shape, tile) + column // run
        stop = min(values.size, position + width - column)
        while position < stop:
            end = min(stop, position + run - column % run)
            for i in range(position, end):
                if values[i] == 0:
                    zeros += 1
                else:
                    index = np.int64((values[i] / maxima[block] + one) * half)
                    counts[min(index, counts.size - 1)] += 1
            column += end - position
            position = end
            block += 1
    return zeros


@compiled
def _segment_cost(weight, moment, square, origin, i, j, fixed, centre):
    """Squared error of bins i..j (inclusive) around `centre` if fixed, else around their own mean.

    The prefix sums are integers, so moving the origin into the segment is exact and leaves nothing to cancel.
    """
    w = weight[j + 1] - weight[i]
    x = moment[j + 1] - moment[i]
    q = square[j + 1] - square[i]
    c = centre if fixed else origin[i]
    q = float(q - 2 * c * x + c * c * w)
    if fixed:
        return q
    x = float(x - c * w)
    return q - x * x / w


@compiled
def segment(points, weights, words, pin_first, first, pin_last, last, least):
    """Exact least-squares segmentation of weighted points into `words` contiguous, non-empty segments.

    Dynamic programming over segments; within one, the best start grows with the end (the cost is concave Monge),
    so starts are searched between those of neighbouring ends, halving the gaps: O(words * n * log n).

    Args:
      points: int64[n], ascending.
      weights: int64[n], positive; sum(weights) * max(points)^2 < 2^62.
      words: number of segments, at least 2 if an end is pinned; least - 1 + words <= n.
      pin_first, first: whether the first centre is fixed, and where (int64).
      pin_last, last: the same for the last centre.
      least: points that the first segment must hold at least.

    Returns:
      int64[words], the index of each segment's first point. Ties go to the smallest start.
    """
    n = points.size
    weight, moment, square = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    for i in range(n):
        weight[i + 1] = weight[i] + weights[i]
        moment[i + 1] = moment[i] + weights[i] * points[i]
        square[i + 1] = square[i] + weights[i] * points[i] * points[i]

    error, previous = np.empty(n), np.empty(n)
    starts = np.zeros((words, n), np.int32)
    for end in range(n):
        error[end] = _segment_cost(weight, moment, square, points, 0, end, pin_first, first)
    for word in range(1, words):
        error, previous = previous, error
        pinned = pin_last and word == words - 1
        low, high = least - 1 + word, n - words + word
        if word == words - 1:
            low = high  # only the end that covers all points matters
        gap = 1
        while gap <= high - low + 1:
            gap *= 2
        while gap > 1:
            for end in range(low + gap // 2 - 1, high + 1, gap):
                begin, stop = least - 1 + word, end
                if end - gap // 2 >= low:
                    begin = starts[word, end - gap // 2]
                if end + gap // 2 <= high:
                    stop = min(stop, starts[word, end + gap // 2])
                best, where = np.inf, begin
                for start in range(begin, stop + 1):
                    total = previous[start - 1] + _segment_cost(
                        weight, moment, square, points, start, end, pinned, last
                    )
                    if total < best:
                        best, where = total, start
                error[end], starts[word, end] = best, where
            gap //= 2

    result = np.zeros(words, np.int64)
    end = n - 1
    for word in range(words - 1, 0, -1):
        result[word] = starts[word, end]
        end = result[word] - 1
    return result


class Tree(NamedTuple):
    """Sums over all cell lengths of a chain, each formed from the sums of a shorter one that divides it.

    Attributes:
      lengths: int64[k], each after the one that it is formed from, and all that follow from it next (preorder).
      parents: int64[k], index of the length whose sums are added up, -1 for single elements.
      skips: int64[k], index of the first length that does not follow from this one.
      offsets: int64[k], where each length's cells begin in the two buffers.
      sums, counts: float64 buffers, one entry per cell.
      between: float64[k], total of sum^2 / count over the cells seen so far.
      cells: float64[k], number of cells seen so far that hold something.
    """

    lengths: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64]
    skips: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]
    between: npt.NDArray[np.float64]
    cells: npt.NDArray[np.float64]


@compiled
def _score_cells(sums, counts, node, tree):
    """Add a row of cells to a node's totals."""
    between, cells = 0.0, 0.0
    for i in range(sums.size):
        if counts[i] > 0:
            between += sums[i] * sums[i] / counts[i]
            cells += 1
    tree.between[node] += between
    tree.cells[node] += cells


@compiled
def _add_runs(values, counts, tree):
    """Score a row of elements at every length of `tree`."""
    for node in range(tree.lengths.size):
        source, weights, length = values, counts, 1
        parent = tree.parents[node]
        if parent >= 0:
            length = tree.lengths[parent]
            begin, end = tree.offsets[parent], tree.offsets[parent] + values.size // length
            source, weights = tree.sums[begin:end], tree.counts[begin:end]
        parts = tree.lengths[node] // length
        begin, end = tree.offsets[node], tree.offsets[node] + values.size // tree.lengths[node]
        sums, totals = tree.sums[begin:end], tree.counts[begin:end]
        for cell in range(sums.size):
            total, count = 0.0, 0.0
            for i in range(cell * parts, (cell + 1) * parts):
                total += source[i]
                count += weights[i]
            sums[cell], totals[cell] = total, count
        _score_cells(sums, totals, node, tree)


@compiled
def _add_row(row, values, counts, tree):
    """Score runs along rows, one per column: row number `row` arrives and completes the runs that end with it."""
    width = values.size
    node = 0
    while node < tree.lengths.size:
        length, begin = tree.lengths[node], tree.offsets[node]
        sums, totals = tree.sums[begin : begin + width], tree.counts[begin : begin + width]
        source, weights, part = values, counts, 1
        parent = tree.parents[node]
        if parent >= 0:
            part, begin = tree.lengths[parent], tree.offsets[parent]
            source, weights = tree.sums[begin : begin + width], tree.counts[begin : begin + width]
        if (row + 1 - part) % length == 0:
            sums[:] = 0
            totals[:] = 0
        for column in range(width):
            sums[column] += source[column]
            totals[column] += weights[column]
        if (row + 1) % length == 0:
            _score_cells(sums, totals, node, tree)
            node += 1
        else:  # nothing that is formed from this length is complete
            node = tree.skips[node]


class Matrix(NamedTuple):
    """Running sums over one (rows, columns) matrix of a stack; all float64.

    Attributes:
      row_sums, row_counts: of each row; of no elements where single rows need not be told apart.
      column_sums, column_counts: of each column.
      residuals: of each column, of what the row means leave.
    """

    row_sums: npt.NDArray[np.float64]
    row_counts: npt.NDArray[np.float64]
    column_sums: npt.NDArray[np.float64]
    column_counts: npt.NDArray[np.float64]
    residuals: npt.NDArray[np.float64]


@compiled
def survey(values, counts, first, rows, matrix, column_runs, row_runs, wide_columns, wide_rows, totals):
    """Score every candidate partition on consecutive rows of a stack of matrices.

    Args:
      values: float64[m, columns], 0 where not counted.
      counts: float64[m, columns], 1 where counted, else 0.
      first: number of the first row, over the whole stack.
      rows: rows of one matrix.
      matrix: sums of the current matrix.
      column_runs: tree of runs of columns in one row.
      row_runs: tree of runs of rows in one column.
      wide_columns: tree of runs of columns over all rows.
      wide_rows: tree of runs of rows over all columns.
      totals: float64[8], added to: elements, squares, between matrices, matrices, between rows, rows,
        between columns after rows, columns. Only those that hold something are counted.
    """
    for i in range(values.shape[0]):
        row = (first + i) % rows
        if row == 0:
            matrix.column_sums[:] = 0
            matrix.column_counts[:] = 0
            matrix.residuals[:] = 0
        total, count = 0.0, 0.0
        for column in range(values.shape[1]):
            total += values[i, column]
            count += counts[i, column]
            totals[1] += values[i, column] * values[i, column]
        mean = total / count if count > 0 else 0.0
        for column in range(values.shape[1]):
            matrix.column_sums[column] += values[i, column]
            matrix.column_counts[column] += counts[i, column]
            matrix.residuals[column] += values[i, column] - mean * counts[i, column]
        if count > 0:
            totals[0] += count
            totals[4] += total * mean
            totals[5] += 1
        if matrix.row_sums.size > 0:
            matrix.row_sums[row], matrix.row_counts[row] = total, count
        _add_runs(values[i], counts[i], column_runs)
        _add_row(row, values[i], counts[i], row_runs)
        if row == rows - 1:
            total, count = 0.0, 0.0
            for column in range(values.shape[1]):
                if matrix.column_counts[column] > 0:
                    total += matrix.column_sums[column]
                    count += matrix.column_counts[column]
                    totals[6] += matrix.residuals[column] ** 2 / matrix.column_counts[column]
                    totals[7] += 1
            if count > 0:
                totals[2] += total * total / count
                totals[3] += 1
            _add_runs(matrix.column_sums, matrix.column_counts, wide_columns)
            _add_runs(matrix.row_sums, matrix.row_counts, wide_rows)
