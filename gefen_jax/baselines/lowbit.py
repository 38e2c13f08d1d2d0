"""Quantisation for the 8-bit and 4-bit baselines: number maps, nearest code, blocks with one scale each."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BIN_SHIFT = 16  # of the 23 bits of the mantissa, a bin of the search table is told by the first 7
FIRST_BIN, LAST_BIN = (int(np.float32(x).view(np.uint32)) >> BIN_SHIFT for x in (2.0**-25, 1.0))


@functools.cache
def dynamic_map(bits: int, signed: bool) -> np.ndarray:
    """The dynamic-exponent map: float32[2**bits], ascending, with exact 0 and 1.

    One decade per exponent, ``10**(e + 2 - bits) * (0.1, 1]`` for ``e = 0 .. bits - 2``. A decade is cut into
    ``2**e`` equal cells (``2**(e + 1)`` where no sign is stored) and each cell gives its centre: precision goes where
    the large values are, range to the small ones. The signed map has each centre with both signs and no -1.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", arXiv 1511.04561; used for optimizer
    state in arXiv 2110.02861 (8 bits) and arXiv 2309.01507 (4 bits).

    Examples:
      >>> print(dynamic_map(3, signed=False))
      [0. 0.0325 0.0775 0.2125 0.4375 0.6625 0.8875 1. ]
    """
    centres = [
        10.0 ** (e + 2 - bits) * (0.1 + 0.9 * (cell + 0.5) / cells)
        for e in range(bits - 1)
        for cells in [2**e if signed else 2 ** (e + 1)]
        for cell in range(cells)
    ]
    words = np.sort(np.array([0.0, 1.0, *centres, *(-c for c in centres if signed)], np.float32))
    words.flags.writeable = False
    return words


@functools.cache
def linear_map(bits: int) -> np.ndarray:
    """The linear map without zero: ``k / 2**bits`` for ``k = 1 .. 2**bits``, float32, ascending.

    Source: arXiv 2309.01507, section 4.1: a second moment rounded to 0 would divide by eps.

    Examples:
      >>> linear_map(2).tolist()
      [0.25, 0.5, 0.75, 1.0]
    """
    words = np.arange(1, 2**bits + 1, dtype=np.float32) / 2**bits
    words.flags.writeable = False
    return words


def nearest_code(y: jax.Array, words: np.ndarray) -> jax.Array:
    """uint8 index of the word nearest to each element of float32 ``y``; ties go down.

    Two look-ups in a `search_table` and a comparison, which XLA fuses with what surrounds them. (A binary search
    takes several times longer to run and to compile, and a temporary array per level.)

    Examples:
      >>> nearest_code(jnp.array([-3.0, 0.3, 0.9]), linear_map(2)).tolist()
      [0, 0, 3]
    """
    table = search_table(tuple(words.tolist()))
    bits = jax.lax.bitcast_convert_type(y, jnp.uint32)
    magnitude = jnp.clip((bits & 0x7FFFFFFF) >> BIN_SHIFT, FIRST_BIN, LAST_BIN) - FIRST_BIN
    bins = magnitude + (bits >> 31) * (LAST_BIN - FIRST_BIN + 1)
    code = jnp.asarray(table.code).at[bins].get(mode="promise_in_bounds")
    midpoint = jnp.asarray(table.midpoint).at[bins].get(mode="promise_in_bounds")
    return code + (y > midpoint).astype(jnp.uint8)


class SearchTable(NamedTuple):
    """Bins of the numbers from -1 to 1 by the leading bits of a float: those of each sign from 0 to 1.

    Attributes:
      code: uint8[bins], the code nearest to the lower end of the bin.
      midpoint: float32[bins], the midpoint of two words inside the bin, above which the code is one higher; or inf.
    """

    code: np.ndarray
    midpoint: np.ndarray


@functools.cache
def search_table(words: tuple[float, ...]) -> SearchTable:
    """The table of a map.

    Raises:
      ValueError: two midpoints share a bin, that is, words lie closer than 0.8 % or nearer to zero than 2**-25.
    """
    exact = np.array(words)
    midpoints = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    edges = (np.arange(FIRST_BIN, LAST_BIN + 2, dtype=np.uint32) << BIN_SHIFT).view(np.float32)
    low, high = np.append(np.float32(0), edges[1:-1]), np.append(edges[1:-1], np.float32(np.inf))
    # bins of positive numbers hold their lower end, those of negative numbers their upper
    first = np.concatenate([np.searchsorted(midpoints, low, "left"), np.searchsorted(midpoints, -high, "right")])
    after = np.concatenate([np.searchsorted(midpoints, high, "left"), np.searchsorted(midpoints, -low, "right")])
    if (after - first > 1).any():
        raise ValueError("the words lie too close together for the search table")
    inside = np.append(midpoints, np.float32(np.inf))[first]
    return SearchTable(first.astype(np.uint8), np.where(after > first, inside, np.float32(np.inf)))


def words_of(codes: jax.Array, words: np.ndarray) -> jax.Array:
    """float32 words of ``codes``."""
    return jnp.take(jnp.asarray(words), codes.astype(jnp.int32), mode="clip")


def to_blocks(x: jax.Array, block: int) -> jax.Array:
    """``x`` in C order as rows of ``block`` elements, the last filled up with zeros.

    Examples:
      >>> to_blocks(jnp.arange(1, 6).reshape(1, 5), 4).tolist()
      [[1, 2, 3, 4], [5, 0, 0, 0]]
    """
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def from_blocks(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `to_blocks`."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def block_quantize(x: jax.Array, words: np.ndarray, block: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of ``x``: each block of ``block`` elements in C order is divided by its absolute maximum.

    Args:
      x: float32 array of any shape.
      words: the map, ascending within [-1, 1].
      block: elements per scale; the last block may be shorter.

    Returns:
      uint8 codes of x's shape and float32 scales of shape ``(ceil(x.size / block),)``. A block of zeros gets
      scale 0 and so stays exactly 0 whatever its codes.
    """
    rows = to_blocks(x, block)
    scale = jnp.max(jnp.abs(rows), axis=1)
    codes = nearest_code(rows / jnp.where(scale > 0, scale, 1)[:, None], words)
    return from_blocks(codes, x.shape), scale


def block_dequantize(codes: jax.Array, scale: jax.Array, words: np.ndarray, block: int) -> jax.Array:
    """Inverse of `block_quantize` up to rounding: float32 of the codes' shape.

    Examples:
      >>> x = jnp.array([0.5, -0.25, 0.0, 100.0])
      >>> words = dynamic_map(8, signed=True)
      >>> print(block_dequantize(*block_quantize(x, words, block=2), words, block=2).round(4))
      [  0.5      -0.2504   0.     100.    ]
    """
    return from_blocks(words_of(to_blocks(codes, block), words) * scale[:, None], codes.shape)


def pack_pairs(codes: jax.Array) -> jax.Array:
    """Two 4-bit codes per byte in C order, the earlier in the low four bits: uint8[ceil(codes.size / 2)].

    Examples:
      >>> pack_pairs(jnp.array([[1, 2, 3]], jnp.uint8)).tolist()
      [33, 3]
    """
    pairs = to_blocks(codes, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack_pairs(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `pack_pairs`, for codes of ``shape``.

    Examples:
      >>> unpack_pairs(jnp.array([33, 3], jnp.uint8), (1, 3)).tolist()
      [[1, 2, 3]]
    """
    return from_blocks(jnp.stack([packed & 15, packed >> 4], axis=1), shape)
