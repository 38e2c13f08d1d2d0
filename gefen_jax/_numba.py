"""Compiled loops behind `codebook` and `partition`. Imported when first needed: Numba takes a second to load.

Nothing is cached on disk (an installed package may be read-only or shared by machines of different kinds); each
function is used with one signature only, so that each is compiled once per process.
"""

from __future__ import annotations

import numba
import numpy as np

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
