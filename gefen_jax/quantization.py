"""Quantisation of the first moment: codes, one codebook, and an exact search for the nearest word.

A block of momentum is stored as its absolute maximum and, per element, the index of the codebook word nearest
to the element divided by that maximum. "Nearest" is decided by the float32 rule of SPEC section 4: the lower word
wins where ``|y - lower| <= |y - upper|`` in float32 arithmetic.

The fast search rests on decision thresholds, not on midpoints: ``thresholds(B)[i]`` is the largest float32 that
the rule still gives to a word <= i, so that ``code = number of thresholds < y`` is the rule itself, bit for bit.
A table over 4096 bins of [-1, 1] gives that number up to the thresholds inside the bin of y; one comparison adds
the last. It is exact as long as no bin holds two thresholds (`codebook.learn_codebook` guarantees it).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SIDE = 127
"""Words on each side of zero in a codebook of 256, whose two zeros are words 127 and 128."""
BINS = 4096
"""Bins over [-1, 1] of the histogram that the codebook is learned from, and of the search table."""


class SearchTable(NamedTuple):
    """What `encode` needs of a codebook.

    Attributes:
      codes: int32[4096], for each bin the code below its threshold, plus 256 times the code above it.
      threshold: float32[4096], the threshold inside this bin, +inf where there is none.
    """

    codes: jax.Array
    threshold: jax.Array


class Companding(NamedTuple):
    """A codebook in closed form: word j of a side is ``y / (1 + c (1 - y))`` at y = j / 127.

    Attributes:
      c: float32 (), how much finer the words are near 0; 0 is a uniform grid.
    """

    c: jax.Array


def nearest(y: jax.Array, codebook: jax.Array) -> jax.Array:
    """Index of the nearest codebook word: the rule itself (SPEC section 4), by binary search.

    Args:
      y: float32 array of any shape.
      codebook: float32[words], ascending.

    Returns:
      uint8 array of y's shape. Ties go to the lower word; values beyond the ends to the ends; NaN to the last.

    Examples:
      >>> nearest(jnp.array([-2.0, 0.2, 0.25, 0.3]), jnp.array([-1.0, 0.0, 0.5, 1.0])).tolist()
      [0, 1, 1, 2]
    """
    last = codebook.shape[0] - 1
    insertion = jnp.searchsorted(codebook, y, side="left")
    lower = jnp.maximum(insertion - 1, 0)
    upper = jnp.minimum(insertion, last)
    take_lower = jnp.abs(y - codebook[lower]) <= jnp.abs(y - codebook[upper])
    return jnp.where(take_lower, lower, upper).astype(jnp.uint8)


def thresholds(codebook: jax.Array) -> jax.Array:
    """Decision thresholds: float32[words - 1], the largest float32 that goes to a word <= i.

    Found among the float32 neighbours of the midpoint, which holds it for every pair of words that does not
    straddle zero: the codebook must contain 0 (those of the default rule do). Where a word stands twice (the two
    zeros of 256 words) its second copy is never chosen: both thresholds are then the upper one.
    """
    lower, upper = codebook[:-1], codebook[1:]
    middle = lower + (upper - lower) * 0.5
    best = lower
    for step in range(-2, 3):
        y = middle
        for _ in range(abs(step)):
            y = jnp.nextafter(y, jnp.float32(np.sign(step) * np.inf))
        keeps_lower = (jnp.abs(y - lower) <= jnp.abs(y - upper)) & (y < upper)
        best = jnp.where(keeps_lower, jnp.maximum(best, y), best)
    following = jnp.append(best[1:], jnp.float32(1.0))
    return jnp.where(lower == upper, following, best)


def bin_of(y: jax.Array) -> jax.Array:
    """int32 bin of y in [-1, 1]; monotone in y, so tables built with it are exact. Values outside are clipped."""
    return jnp.clip((y + 1.0) * (BINS / 2), 0, BINS - 1).astype(jnp.int32)


def search_table(codebook: jax.Array) -> SearchTable:
    """The `SearchTable` of a codebook: a few operations on 4096 integers, made anew in each step.

    It depends on the codebook alone; carrying it in the state would cost 32 KiB and could disagree with it.
    """
    limits = thresholds(codebook)
    bins = bin_of(limits)
    inside = jnp.zeros(BINS, jnp.int32).at[bins].add(1, mode="promise_in_bounds")
    above = jnp.cumsum(inside, dtype=jnp.int32)
    threshold = jnp.full(BINS, jnp.inf, jnp.float32).at[bins].min(limits, mode="promise_in_bounds")
    return SearchTable((above - inside) | (above << 8), threshold)


def companding(codebook: jax.Array) -> Companding:
    """The `Companding` whose words these are, read off the word in the middle of the positive side.

    Examples:
      >>> from gefen_jax.codebook import companding_codebook
      >>> round(float(companding(jnp.asarray(companding_codebook(0.6))).c), 4)
      0.6
    """
    y = SIDE // 2 / SIDE
    return Companding((y / codebook[SIDE + 1 + SIDE // 2] - 1) / (1 - y))


def encode(y: jax.Array, table: SearchTable | Companding) -> jax.Array:
    """The code of y: `nearest` through a table, with two look-ups and one comparison per element, or in closed form.

    The closed form rounds after companding, where the words are evenly spaced. Next to the middle between two words
    that is not always the nearer one; the difference in squared error is below 0.1 %.

    Args:
      y: float32 array of any shape; values outside [-1, 1] count as the ends.
      table: from `search_table` or `companding`.

    Returns:
      uint8 codes of y's shape.

    Examples:
      >>> encode(jnp.array([-2.0, 0.2, 0.25, 0.3]), search_table(jnp.array([-1.0, 0.0, 0.5, 1.0]))).tolist()
      [0, 1, 1, 2]
    """
    if isinstance(table, Companding):
        size = jnp.minimum(jnp.abs(y), 1.0)
        level = _round_to_int(size * (1 + table.c) / (1 + table.c * size) * SIDE)
        return jnp.where(y > 0, SIDE + level + (level > 0).astype(jnp.int32), SIDE - level).astype(jnp.uint8)
    bins = bin_of(y)
    codes = table.codes.at[bins].get(mode="promise_in_bounds")
    threshold = table.threshold.at[bins].get(mode="promise_in_bounds")
    return jnp.where(y > threshold, codes >> 8, codes).astype(jnp.uint8)


def _round_to_int(x: jax.Array) -> jax.Array:
    """int32 nearest to 0 <= x < 2^22: the sum leaves it in the low bits (half the cost of `jnp.round` on the CPU)."""
    shift = jnp.float32(1.5 * 2**23)
    return jax.lax.bitcast_convert_type(x + shift, jnp.int32) - jax.lax.bitcast_convert_type(shift, jnp.int32)


def decode(codes: jax.Array, codebook: jax.Array) -> jax.Array:
    """Codebook words of ``codes``: float32 of the codes' shape.

    Examples:
      >>> decode(jnp.array([0, 2], jnp.uint8), jnp.array([-1.0, 0.0, 1.0])).tolist()
      [-1.0, 1.0]
    """
    return jnp.take(codebook, codes.astype(jnp.int32), mode="clip")


def zero_code(words: int) -> int:
    """Code of the number 0, with which fresh state and blocks without momentum are filled.

    Examples:
      >>> zero_code(256), zero_code(16)
      (127, 7)
    """
    return words // 2 - 1


def pack(codes: jax.Array, axis: int) -> jax.Array:
    """Two 4-bit codes per byte along ``axis``: element 2j in the low four bits of byte j, 2j + 1 in the high.

    Examples:
      >>> pack(jnp.array([1, 2, 3, 4], jnp.uint8), 0).tolist()
      [33, 67]
    """
    pairs = codes.reshape(codes.shape[:axis] + (codes.shape[axis] // 2, 2) + codes.shape[axis + 1 :])
    low = jax.lax.index_in_dim(pairs, 0, axis + 1, keepdims=False)
    high = jax.lax.index_in_dim(pairs, 1, axis + 1, keepdims=False)
    return low | (high << 4)


def unpack(packed: jax.Array, axis: int) -> jax.Array:
    """Inverse of `pack`.

    Examples:
      >>> unpack(jnp.array([33, 67], jnp.uint8), 0).tolist()
      [1, 2, 3, 4]
    """
    pairs = jnp.stack([packed & 15, packed >> 4], axis=axis + 1)
    return pairs.reshape(packed.shape[:axis] + (packed.shape[axis] * 2,) + packed.shape[axis + 1 :])
