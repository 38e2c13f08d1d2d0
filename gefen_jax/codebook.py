"""The codebook: which numbers in [-1, 1] the codes of the first moment stand for.

Momentum divided by its block's largest magnitude is counted in 4096 bins; the words minimise the squared error of
that histogram, exactly, by dynamic programming (Gefen, arXiv 2606.13894). Two programs share one solver:

* `reference_histogram` and `reference_codebook`: the paper's public implementation, kept exact;
* `histogram` and `learn_codebook`: the default. The words are symmetric under change of sign, the ends are -1 and
  1, and 0 is a word, so that an element without gradient never moves.

All of it runs on the host, once per training run. `prior_codebook` needs no data and no compilation.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math

import numpy as np
import numpy.typing as npt

from gefen_jax._gradient import as_floating, chunks
from gefen_jax.quantization import BINS, SIDE
from gefen_jax.tiling import Shape

Counts = npt.NDArray[np.int64]
Words = npt.NDArray[np.float32]

_UNIT = BINS  # the solver's points are integers, multiples of 1/4096: bin centres are the odd ones
_FINEST = 2.0**-20  # words of the default rule are multiples of this
_PRIOR_SHARE = 2.0**-18  # weight of the prior density beside the counts
_WEIGHT_BITS = 36  # sum of the solver's integer weights; times _UNIT^2 it stays below 2^62


def reference_histogram(grad: npt.ArrayLike, period: int) -> Counts:
    """Histogram of one leaf by the reference's rule: blocks of ``period`` elements in C order.

    Exact zeros fall into bin 2048, which begins at 0. With period 1 every other element is -1 or 1.

    Args:
      grad: gradient, any shape, real floating dtype; computed in float32.
      period: block length, a divisor of the number of elements.

    Returns:
      int64[4096], bins of width 1/2048 over [-1, 1]; 1 counts in the last.

    Raises:
      TypeError: the gradient is not real floating point.
      ValueError: ``period`` does not divide the number of elements, or the gradient is not finite.

    Examples:
      >>> counts = reference_histogram(np.float32([1, -2, 0, 4]), 2)
      >>> np.flatnonzero(counts)
      array([   0, 2048, 3072, 4095])
    """
    array = as_floating(grad)
    if period < 1 or array.size % period:
        raise ValueError(f"period {period} does not divide a leaf of {array.size} elements")
    counts, zeros = _count(array, (array.size,), (period,))
    counts[BINS // 2] += zeros
    return counts


def histogram(values: npt.ArrayLike, tile: Shape) -> Counts:
    """Histogram of momentum candidates in the blocks that will quantise them.

    Exact zeros are not counted: 0 is a word of every codebook of the default rule, so they cost no error whatever
    the other words are, and blocks without gradient (unseen embedding rows) must not draw words to themselves.

    Args:
      values: gradient or momentum of one leaf, any shape, real floating dtype; computed in float32.
      tile: block shape, of the same rank, dividing the shape axis by axis.

    Returns:
      int64[4096], bins of width 1/2048 over [-1, 1]; 1 counts in the last. All 0 if there is nothing but zeros.

    Raises:
      TypeError: the values are not real floating point.
      ValueError: the tile does not divide the shape, or a value is not finite.

    Examples:
      >>> counts = histogram(np.float32([[1, -2], [0, 4]]), (1, 2))
      >>> np.flatnonzero(counts)
      array([   0, 3072, 4095])
    """
    array = as_floating(values)
    if len(tile) != array.ndim or any(t < 1 or s % t for s, t in zip(array.shape, tile)):
        raise ValueError(f"tiles of shape {tile} do not divide an array of shape {array.shape}")
    return _count(array, array.shape, tile)[0]


def _count(array: npt.NDArray[np.generic], shape: Shape, tile: Shape) -> tuple[Counts, int]:
    """Counts without the exact zeros, and the number of those. Extra memory: a chunk and 4 bytes a block."""
    from gefen_jax import _numba  # here, so that using a learned codebook does not load Numba

    counts = np.zeros(BINS, np.int64)
    if array.size == 0:
        return counts, 0
    merged = _merge_axes(shape, tile)
    sizes, tiles = np.array([s for s, _ in merged]), np.array([t for _, t in merged])
    maxima = np.zeros(array.size // math.prod(tile), np.float32)
    for start, part in chunks(array):
        if not _numba.block_maxima(part, start, sizes, tiles, maxima):
            raise ValueError("the histogram of a gradient with NaN or infinite values is undefined")
    zeros = sum(_numba.count_bins(part, start, sizes, tiles, maxima, counts) for start, part in chunks(array))
    return counts, int(zeros)


def _merge_axes(shape: Shape, tile: Shape) -> list[tuple[int, int]]:
    """(size, tile) of the fewest axes that have the same blocks in the same order."""
    merged = [(1, 1)]
    for size, length in zip(shape, tile):
        before, across = merged[-1]
        if across == 1 or length == size:
            merged[-1] = (before * size, across * length)
        else:
            merged.append((size, length))
    return merged


def reference_codebook(counts: npt.ArrayLike, num_codes: int = 256, force_endpoints: bool = True) -> Words:
    """The codebook of a histogram by the reference's rule.

    The bins that hold something, at their centres, are cut into ``num_codes`` contiguous segments of least squared
    error; with ``force_endpoints`` the first and the last centre are -1 and 1. If fewer bins than words hold
    something they are the words, the last one repeated, and then -1 replaces the lowest.

    Args:
      counts: int64[4096], as from `reference_histogram`.
      num_codes: number of words, at least 2 (1 without forced ends).
      force_endpoints: whether -1 and 1 are words.

    Returns:
      float32[num_codes], ascending.

    Raises:
      TypeError: the counts are not integers.
      ValueError: the shape is wrong, a count is negative, all are 0, or ``num_codes`` is too small.

    Examples:
      >>> counts = np.zeros(4096, int)
      >>> counts[[0, 1024, 1025, 3072, 4095]] = 1
      >>> reference_codebook(counts, num_codes=4).tolist()
      [-1.0, -0.49951171875, 0.500244140625, 1.0]

    References:
      Benedek, Koren, Fried, "Gefen: Optimized Stochastic Optimizer", arXiv 2606.13894, 2026.
    """
    array = _checked(counts)
    if num_codes < 1 + bool(force_endpoints):
        raise ValueError(f"num_codes={num_codes} leaves no room for the ends; use at least 2")
    active = np.flatnonzero(array)
    points = 2 * active + 1 - BINS
    if active.size < num_codes:
        words = np.append(points, np.full(num_codes - active.size, points[-1])) / _UNIT
        if force_endpoints:
            words[0], words[-1] = -1, 1
    else:
        weights = array[active].astype(np.float32).astype(np.int64)  # the reference accumulates in float32
        ends = (-_UNIT, _UNIT) if force_endpoints else (None, None)
        words = _solve(points, _fitted(weights), num_codes, *ends) / _UNIT
    return np.sort(words.astype(np.float32))


def learn_codebook(counts: npt.ArrayLike, *, bits: int = 8, relative: float | None = None) -> Words:
    """The codebook of the default rule: optimal for a histogram among the sign-symmetric ones that hold 0.

    Both halves of the histogram are added up and one half-line is segmented: 0 serves the bins next to it, 1 the
    last ones, and the words between are the means of what they serve. Of the 256 words of 8 bits 0 is two (words 127
    and 128), so that word i is minus word 255 - i; of the 16 words of 4 bits it is the 8th, 7 are below and 8 above.

    A density known beforehand (`gefen_jax.prior`) is mixed in at a weight of 2^-18: a histogram with mass
    everywhere hardly notices (its error grows by a relative 1e-5 at most), and words that a poor histogram, such as
    that of a gradient with equal magnitudes, would leave unused go where momentum is expected later.

    Words are rounded to multiples of 2^-20, each serves at least one of the 4096 bins of [-1, 1], and 0 at least
    two on either side. Midpoints of neighbouring words are then exact in float32 and no bin holds two of them: a
    table over the bins and one comparison find the nearest word.

    Args:
      counts: int64[4096], as from `histogram`.
      bits: 8 or 4.
      relative: None for the squared error; d for the squared error divided by x^2 + d^2, which treats small
        elements more alike to large ones.

    Returns:
      float32[256] or float32[16], ascending, from -1 to 1.

    Raises:
      TypeError: the counts are not integers.
      ValueError: the shape is wrong, a count is negative, all are 0, or ``bits`` or ``relative`` is out of range.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> words = learn_codebook(histogram(rng.normal(size=(64, 256)).astype(np.float32), (1, 256)), bits=4)
      >>> [round(float(words[i]), 2) for i in (0, 1, 6, 7, 8, 9, 14, 15)]
      [-1.0, -0.74, -0.1, 0.0, 0.08, 0.17, 0.76, 1.0]
    """
    from gefen_jax.prior import prior_counts  # here, as that module is also a command

    array = _checked(counts)
    if bits not in (4, 8):
        raise ValueError(f"bits={bits!r}: codes have 8 or 4 bits")
    if relative is not None and not relative > 0:
        raise ValueError(f"relative={relative!r} must be positive, in units of the block maximum")
    known = prior_counts()
    density = _folded(array) / array.sum() + _PRIOR_SHARE * _folded(known) / known.sum()
    points = 2 * np.arange(BINS // 2) + 1
    if relative is not None:
        density = density / ((points / _UNIT) ** 2 + relative**2)
    weights = np.maximum(np.rint(density * (2.0**_WEIGHT_BITS / density.sum())), 1).astype(np.int64)

    def half(words: int) -> npt.NDArray[np.float64]:
        centres = _solve(points, weights, words, 0, _UNIT, least=2) / _UNIT
        return np.rint(centres / _FINEST) * _FINEST

    if bits == 8:
        upper = half(128)
        lower = upper
    else:
        upper, lower = half(9), half(8)[1:]
    return np.concatenate([0.0 - lower[::-1], upper]).astype(np.float32)  # 0 - 0 is 0, not -0


def _folded(counts: Counts) -> Counts:
    """Counts of the magnitudes: int64[2048], the bins of [0, 1]."""
    return counts[BINS // 2 :] + counts[: BINS // 2][::-1]


def _checked(counts: npt.ArrayLike) -> Counts:
    array = np.asarray(counts)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"histogram counts must be integers, found {array.dtype}")
    if array.shape != (BINS,):
        raise ValueError(f"histogram counts must have shape ({BINS},), found {array.shape}")
    if array.min() < 0:
        raise ValueError(f"histogram counts must not be negative, found {array.min()} in bin {array.argmin()}")
    if not array.any():
        raise ValueError("the histogram is empty: it needs at least one gradient with a value other than zero")
    return array.astype(np.int64)


def _fitted(weights: Counts) -> Counts:
    """Weights whose sum the solver can hold exactly: beyond 2^36 the last binary digits go."""
    excess = int(weights.sum()).bit_length() - _WEIGHT_BITS
    return np.maximum(weights >> excess, 1) if excess > 0 else weights


def _solve(
    points: Counts, weights: Counts, words: int, first: int | None, last: int | None, least: int = 1
) -> npt.NDArray[np.float64]:
    """Centres of the optimal segments, in the points' unit; ``first`` and ``last`` are pinned unless None."""
    from gefen_jax import _numba

    starts = _numba.segment(points, weights, words, first is not None, first or 0, last is not None, last or 0, least)
    centres = np.add.reduceat(points * weights, starts) / np.add.reduceat(weights, starts)
    if first is not None:
        centres[0] = first
    if last is not None:
        centres[-1] = last
    return centres


def companding_codebook(c: float) -> Words:
    """float32[256] in closed form (`quantization.Companding`): symmetric, ends -1 and 1, two zeros in the middle.

    Examples:
      >>> words = companding_codebook(1.0)
      >>> words[[0, 127, 128, 255]].tolist(), round(float(words[192]), 4)
      ([-1.0, 0.0, 0.0, 1.0], 0.3368)
    """
    y = np.arange(1, SIDE + 1) / SIDE
    side = (y / (1 + c * (1 - y))).astype(np.float32)
    return np.concatenate([-side[::-1], np.zeros(2, np.float32), side])


def fit_companding(counts: npt.ArrayLike) -> float:
    """The c of `companding_codebook` with the least squared error on a histogram, by golden-section search.

    The error has one minimum over the searched range, 0 (uniform words) to 16 (a 16th of the spacing near 0).

    Raises:
      ValueError: as `learn_codebook`.
    """
    checked = _checked(counts)
    low, high = 0.0, 16.0
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-3:
        left, right = high - golden * (high - low), low + golden * (high - low)
        if mse(checked, companding_codebook(left)) <= mse(checked, companding_codebook(right)):
            high = right
        else:
            low = left
    return (low + high) / 2


def mse(counts: npt.ArrayLike, codebook: npt.ArrayLike) -> float:
    """Mean squared error of a histogram's bin centres under nearest-word coding.

    Args:
      counts: int64[4096].
      codebook: float[words], ascending.

    Returns:
      The error per element, in units of the squared block maximum.

    Raises:
      TypeError, ValueError: the counts are not a histogram, or the codebook is not sorted.

    Examples:
      >>> counts = np.zeros(4096, int)
      >>> counts[[1024, 3072]] = 3, 1
      >>> mse(counts, [-0.5, 0.5]) == 2.0**-24
      True
    """
    array = _checked(counts)
    words = np.asarray(codebook, np.float64)
    if words.ndim != 1 or not words.size or (np.diff(words) < 0).any():
        raise ValueError("a codebook must be a vector of words in ascending order")
    centres = (2 * np.arange(BINS) + 1 - BINS) / _UNIT
    nearest = words[np.searchsorted((words[1:] + words[:-1]) / 2, centres)]
    return float(np.sum(array * (centres - nearest) ** 2) / array.sum())


@functools.cache
def _stored() -> dict[str, list[float]]:
    return json.loads(importlib.resources.files("gefen_jax").joinpath("prior.json").read_text())


def prior_codebook(bits: int) -> Words:
    """The codebook in use until one is learned: `learn_codebook` of the density in `gefen_jax.prior`, stored.

    Args:
      bits: 8 or 4.

    Returns:
      float32[256] or float32[16], with the properties that `learn_codebook` states.

    Raises:
      ValueError: ``bits`` is neither.

    Examples:
      >>> words = prior_codebook(8)
      >>> words[[0, 127, 128, 255]].tolist(), bool((words == -words[::-1]).all())
      ([-1.0, 0.0, 0.0, 1.0], True)
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits!r}: codes have 8 or 4 bits")
    return np.array(_stored()[str(bits)], np.float32)
