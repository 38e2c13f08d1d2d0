"""The same step, scheduled for a CPU's caches: a loop over chunks of a leaf.

`update.leaf_update` over whole arrays writes parameter-sized intermediates to memory. Here the momentum, its codes
and the output of about 128 KiB of gradient are finished before the next chunk is touched, and the output overwrites
the buffer it is made from. The equations are those of `update`, called on slices; only the order differs.

A leaf is seen as a matrix (rows, columns) in which every statistic is a tiling, and cut into groups of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gefen_jax import quantization, tiling, update
from gefen_jax.tiling import Shape
from gefen_jax.update import Codebook, Hyper, Leaf, Tail

CHUNK = 32768
"""Most elements of one chunk: 128 KiB of float32 stay in a core's second-level cache."""
LEAST = 4096
"""Fewest elements of a chunk for which the loop's own cost does not matter."""


class Layout(NamedTuple):
    """A leaf as a matrix cut into chunks.

    Attributes:
      shape: (rows, columns).
      rows: rows of one chunk; divides the number of rows.
      scale: ``mu_scale`` as a matrix.
      nu: ``nu`` as a matrix.
      cross: ``nu_cross`` as a matrix; (1, 1) where there is none.
    """

    shape: tuple[int, int]
    rows: int
    scale: tuple[int, int]
    nu: tuple[int, int]
    cross: tuple[int, int]


def layout(shape: Shape, scale: Shape, nu: Shape, cross: Shape, packed: int | None = None) -> Layout | None:
    """How to cut a leaf, or None where whole arrays serve better.

    That is so for leaves of at most one chunk, for blocks that are no tiles of any matrix view, for runs of an odd
    number of 4-bit codes, and where the number of rows has no divisor that gives chunks of a sensible size.

    Examples:
      >>> layout((768, 3072), (768, 12), (768, 1), (1, 3072)).rows
      8
      >>> layout((64, 64), (32, 1), (64, 1), (1, 64)) is None
      True
    """
    count = math.prod(shape)
    if count <= CHUNK or (packed is not None and packed != len(shape) - 1):
        return None
    for cut in range(len(shape) - 1, -1, -1):
        found = [_matrix(shape, stat, cut) for stat in (shape, scale, nu, cross)]
        matrices = [matrix for matrix in found if matrix is not None]
        if len(matrices) < len(found):
            continue
        (height, width), scales, nus, crosses = matrices
        if cut == 0:  # every block is a run of the flat array: rows are blocks
            if nus not in (scales, (1, width)) or crosses != (1, 1):
                continue
            height, run = scales[1], width // scales[1]
            nus = (height, 1) if nus == scales else (height, run)
            width, scales = run, (height, 1)
        if packed is not None and width % 2:
            continue  # two codes of one byte would lie in different rows
        rows = _chunk_rows(height, width, scales, (nus, crosses))
        if rows is not None:
            return Layout((height, width), rows, scales, nus, crosses)
    return None


def _matrix(shape: Shape, stat: Shape, cut: int) -> tuple[int, int] | None:
    """The statistic's shape once the axes before and after ``cut`` are merged; None if it is no tiling there."""
    if not tiling.is_tiling(shape, stat):
        return None
    for part, kept in ((shape[:cut], stat[:cut]), (shape[cut:], stat[cut:])):
        total = math.prod(part)
        if part and tiling.flat_statistic(part, total // math.prod(kept)) != kept:
            return None
    return math.prod(stat[:cut]), math.prod(stat[cut:])


def _chunk_rows(height: int, width: int, scale: tuple[int, int], others: tuple[tuple[int, int], ...]) -> int | None:
    """Most rows of a chunk that hold whole momentum blocks and meet every statistic's tiles evenly."""

    def fits(rows: int) -> bool:
        tall = [height // stat[0] for stat in others]
        return rows % (height // scale[0]) == 0 and all(rows % t == 0 or t % rows == 0 for t in tall)

    divisors = [d for d in range(1, min(height, max(CHUNK // width, 1)) + 1) if height % d == 0]
    rows = max((d for d in divisors if fits(d)), default=None)
    return rows if rows is not None and rows * width >= LEAST else None


def chunked_update(
    g: jax.Array,
    leaf: Leaf,
    codebook: Codebook,
    h: Hyper,
    plan: Layout,
    tail: Tail,
    parameter: jax.Array | None,
) -> tuple[jax.Array, Leaf]:
    """`update.leaf_update` followed by `update.finish`, chunk by chunk.

    Args:
      g: gradient.
      leaf: state of the leaf; its first moment is quantised.
      codebook: words and search table.
      h: the step's scalars.
      plan: from `layout`.
      tail: what follows the direction; a new parameter is written over the old one, an update over the gradient.
      parameter: the parameter, if ``tail`` reads it.

    Returns:
      The update or the new parameter, and the new state.
    """
    shape, dtype = g.shape, g.dtype
    nu, nu_cross = update.second_moment(g.astype(jnp.float32), leaf, h)
    root, columns = update.root_factors(nu, nu_cross, h)

    (height, width), rows = plan.shape, plan.rows
    chunks = height // rows
    packed = leaf.mu.size != g.size
    code_width = width // 2 if packed else width
    scale_rows = plan.scale[0] // chunks
    view = tiling.view((rows, width), (scale_rows, plan.scale[1]))
    root = root.reshape(plan.nu)
    columns = columns.reshape(plan.cross) if columns is not None else None

    def part(stat: jax.Array, i: jax.Array) -> jax.Array:
        """The rows of a statistic that chunk i meets."""
        tall = height // stat.shape[0]
        if tall >= rows:
            return lax.dynamic_slice_in_dim(stat, i * rows // tall, 1)
        return lax.dynamic_slice_in_dim(stat, i * (rows // tall), rows // tall)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, codes, scales = carry
        gradient = (source if tail.apply else out)[i].astype(jnp.float32)
        chunk_codes = quantization.unpack(codes[i], 1) if packed else codes[i]
        # The barriers keep XLA from copying whole statistics in every turn, and from decoding once per use.
        scale = lax.optimization_barrier(scales[i]).reshape(view.statistic)
        m = lax.optimization_barrier(
            update.first_moment(
                gradient.reshape(view.elements), chunk_codes.reshape(view.elements), scale, codebook.words, h
            )
        )
        new_codes, new_scale = update.requantize(m, view.reduce, codebook.table, scale)
        d = _direction(m.reshape(rows, width), part(root, i), None if columns is None else part(columns, i), h)
        p = out[i] if tail.apply else None if parameters is None else parameters[i]
        new_codes = new_codes.reshape(rows, width)
        new_codes = quantization.pack(new_codes, 1) if packed else new_codes
        return (
            lax.dynamic_update_index_in_dim(out, update.finish(d, p, tail, dtype), i, 0),
            lax.dynamic_update_index_in_dim(codes, new_codes, i, 0),
            lax.dynamic_update_index_in_dim(scales, new_scale.reshape(scales.shape[1:]), i, 0),
        )

    cut = (chunks, rows, width)
    source = g.reshape(cut)
    parameters = parameter.reshape(cut) if parameter is not None and tail.reads_parameter else None
    start = (
        parameters if tail.apply else source,
        leaf.mu.reshape(chunks, rows, code_width),
        leaf.mu_scale.reshape(chunks, scale_rows, plan.scale[1]),
    )
    out, codes, scales = lax.fori_loop(0, chunks, body, start)
    new = Leaf(codes.reshape(leaf.mu.shape), scales.reshape(leaf.mu_scale.shape), nu, nu_cross)
    return out.reshape(shape), new


def _direction(m: jax.Array, root: jax.Array, columns: jax.Array | None, h: Hyper) -> jax.Array:
    """`update.direction` where ``root`` holds one entry per block of a (rows, columns) chunk."""
    if columns is not None:
        entries = columns.shape[0]  # of the batch, whole ones, in this chunk
        d = update.direction(m.reshape(entries, -1, m.shape[1]), root.reshape(entries, -1, 1), columns[:, None], h)
        return d.reshape(m.shape)
    view = tiling.view(m.shape, root.shape)
    d = update.direction(m.reshape(view.elements), root.reshape(view.statistic), None, h)
    return d.reshape(m.shape)
