"""Blocks: which elements of an array share a statistic, and the view in which that is one reduction.

A statistic (a momentum scale, a second moment) has the rank of its parameter. Its shape alone says which
elements share one of its entries, so no structure has to be stored beside it:

* **tile**: every ``stat[i]`` divides ``shape[i]``; the blocks are boxes of ``shape[i] // stat[i]``;
* **flat**: ``stat == (x, 1, .., 1)`` and x does not divide ``shape[0]``; the blocks are runs of n / x elements
  in C order.

`View` is that structure in a form that broadcasts: reductions keep their dimensions and an axis is split
only where it must be, so a sharded axis stays sharded (a reshape to (blocks, length) would gather it).
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

Shape = tuple[int, ...]
Structure = tuple[Any, ...]
"""What shares a statistic: ("tile", sizes), ("flat", length), ("full",) or ("factored", batch axes, row axes)."""

RUN = 256
"""Longest momentum block along the last axis."""
RUN_OF_FOUR_BITS = 128
"""The same for 4-bit codes, whose coarser words suffer more from one large neighbour (0.545 B/param and less)."""
SHORT = 128
"""A run shorter than this takes in elements of the axis before the last."""
TINY = 64
"""Blocks of fewer elements than this are not worth their scale."""
TALL = 16
"""Rows-to-columns ratio from which ``second_moment="block"`` keeps one mean per row (embeddings)."""


class View(NamedTuple):
    """How to see an array so that its blocks are the axes ``reduce``.

    Attributes:
      elements: shape to reshape the array to.
      statistic: shape to reshape the statistic to; broadcasts against ``elements``.
      reduce: the axes of ``elements`` that lie inside a block.
      size: elements per block.
    """

    elements: Shape
    statistic: Shape
    reduce: tuple[int, ...]
    size: int


def view(shape: Shape, stat: Shape) -> View:
    """The `View` of an array of ``shape`` whose statistic has shape ``stat``.

    Raises:
      ValueError: if ``stat`` is neither a tiling nor a flat partition of ``shape``.

    Examples:
      >>> view((6, 8), (6, 2))
      View(elements=(6, 2, 4), statistic=(6, 2, 1), reduce=(2,), size=4)
      >>> view((6, 8), (1, 8)).reduce, view((6, 8), (16, 1)).elements
      ((0,), (16, 3))
    """
    if is_tiling(shape, stat):
        elements: list[int] = []
        statistic: list[int] = []
        reduce: list[int] = []
        for size, blocks in zip(shape, stat):
            tile = size // blocks if blocks else 1
            if blocks > 1 or tile == 1:
                elements.append(blocks)
                statistic.append(blocks)
            if tile > 1:
                reduce.append(len(elements))
                elements.append(tile)
                statistic.append(1)
        block = math.prod(elements[i] for i in reduce)
        return View(tuple(elements), tuple(statistic), tuple(reduce), block)
    if is_flat(shape, stat):
        length = math.prod(shape) // stat[0]
        return View((stat[0], length), (stat[0], 1), (1,), length)
    raise ValueError(f"a statistic of shape {stat} is neither a tiling nor a flat partition of shape {shape}")


def is_tiling(shape: Shape, stat: Shape) -> bool:
    """Whether every ``stat[i]`` divides ``shape[i]`` (an axis of size 0 is divided by 0 and by 1)."""
    if len(shape) != len(stat):
        return False
    return all((blocks > 0 and size % blocks == 0 and (size > 0 or blocks == 1)) for size, blocks in zip(shape, stat))


def is_flat(shape: Shape, stat: Shape) -> bool:
    """Whether ``stat`` is (x, 1, .., 1) with x dividing the number of elements but not ``shape[0]``."""
    if len(shape) != len(stat) or not shape or stat[0] < 1 or any(s != 1 for s in stat[1:]):
        return False
    return shape[0] % stat[0] != 0 and math.prod(shape) % stat[0] == 0


def tile_statistic(shape: Shape, tile: Shape) -> Shape:
    """Shape of the statistic of blocks of shape ``tile``; axes without elements give 1.

    Examples:
      >>> tile_statistic((768, 12, 64), (1, 2, 64))
      (768, 6, 1)
    """
    if len(shape) != len(tile) or any(t < 1 or s % t for s, t in zip(shape, tile)):
        raise ValueError(f"tiles of shape {tile} do not divide an array of shape {shape}")
    if math.prod(shape) == 0:
        return (1,) * len(shape)
    return tuple(s // t for s, t in zip(shape, tile))


def flat_statistic(shape: Shape, length: int) -> Shape:
    """Shape of the statistic of runs of ``length`` elements in C order, as a tiling where it is one.

    Examples:
      >>> flat_statistic((6, 8), 4), flat_statistic((6, 8), 16), flat_statistic((6, 8), 3)
      ((6, 2), (3, 1), (16, 1))
    """
    count = math.prod(shape)
    if count == 0 or not shape:
        return (1,) * len(shape)
    if length < 1 or count % length:
        raise ValueError(f"runs of {length} elements do not divide an array of shape {shape}")
    inner = 1  # elements of the axes after axis k
    for k in reversed(range(len(shape))):
        along, rest = divmod(length, inner)
        if rest == 0 and along <= shape[k] and shape[k] % along == 0:
            return shape[:k] + (shape[k] // along,) + (1,) * (len(shape) - k - 1)
        inner *= shape[k]
    return (count // length,) + (1,) * (len(shape) - 1)


def largest_divisor(n: int, cap: int) -> int:
    """Largest divisor of n that is at most cap (1 for n = 0)."""
    return next((d for d in range(min(n, cap), 0, -1) if n % d == 0), 1)


def smallest_divisor(n: int, floor: int) -> int:
    """Smallest divisor of n that is at least ``floor``; n itself if there is none."""
    return next((d for d in range(max(floor, 1), n) if n % d == 0), n)


def default_split(shape: Shape) -> tuple[int, int] | None:
    """The default view of a leaf as (batch axes | row axes | column axes).

    For each number of leading batch axes, largest first, the cut between rows and columns with the fewest row
    and column statistics is taken (ties: the later cut); the first that costs at most n/64 elements is accepted,
    n/32 where no batch axis is left. Rows and columns must both exceed 1.

    Returns:
      (number of batch axes, number of row axes), or None if no split is acceptable: the leaf is then not factored.

    Examples:
      >>> default_split((768, 12, 64)), default_split((12, 64, 768)), default_split((16, 2048, 32, 64))
      ((0, 1), (0, 2), (1, 1))
      >>> default_split((3, 3, 64, 64)), default_split((1, 5003)), default_split((768,))
      ((0, 3), None, None)
    """
    for batch in range(len(shape) - 2, -1, -1):
        costs = [
            (_factor_count(shape, batch, rows), -rows)
            for rows in range(1, len(shape) - batch)
            if _factorable(shape, batch, rows)
        ]
        if costs and _acceptable(shape, min(costs)[0], leading=batch > 0):
            return batch, -min(costs)[1]
    return None


def declared_split(shape: Shape, axes: tuple[int, int]) -> tuple[int, int] | None:
    """``axes`` if the slices that it declares are worth factoring, by the rule for a leaf without batch axes."""
    batch, rows = axes
    if not _factorable(shape, batch, rows):
        return None
    return axes if _acceptable(shape, _factor_count(shape, batch, rows), leading=False) else None


def check_axes(path: str, shape: Shape, axes: Any) -> tuple[int, int]:
    """``axes`` as (batch, rows), or a ValueError that names the leaf."""
    try:
        batch, rows = (operator.index(a) for a in axes)
    except (TypeError, ValueError):
        batch, rows = -1, -1
    if batch < 0 or rows < 1 or batch + rows > len(shape):
        raise ValueError(
            f"axes[{path!r}] = {axes!r} does not fit the parameter's shape {shape}: expected a pair "
            "(number of leading batch axes >= 0, number of row axes >= 1) with a sum of at most the rank"
        )
    return batch, rows


def _extent(shape: Shape, batch: int, rows: int) -> tuple[int, int, int]:
    """Sizes of the (batch | rows | columns) view."""
    cut = batch + rows
    return math.prod(shape[:batch]), math.prod(shape[batch:cut]), math.prod(shape[cut:])


def _factor_count(shape: Shape, batch: int, rows: int) -> int:
    stack, height, width = _extent(shape, batch, rows)
    return stack * (height + width)


def _factorable(shape: Shape, batch: int, rows: int) -> bool:
    _, height, width = _extent(shape, batch, rows)
    return height > 1 and width > 1


def _acceptable(shape: Shape, cost: int, *, leading: bool) -> bool:
    return cost * (64 if leading else 32) <= math.prod(shape)


def factored_statistics(shape: Shape, batch: int, rows: int) -> tuple[Shape, Shape]:
    """Shapes of the row factor (columns reduced) and of the column factor (rows reduced).

    Examples:
      >>> factored_statistics((16, 2048, 32, 64), 1, 1)
      ((16, 2048, 1, 1), (16, 1, 32, 64))
    """
    if batch < 0 or rows < 1 or not _factorable(shape, batch, rows):
        raise ValueError(f"{batch} batch and {rows} row axes leave an array of shape {shape} no rows and columns")
    cut = batch + rows
    row_factor = shape[:cut] + (1,) * (len(shape) - cut)
    column_factor = shape[:batch] + (1,) * rows + shape[cut:]
    return row_factor, column_factor


def momentum_tile(shape: Shape, batch: int = 0, align: int = 1, longest: int = RUN) -> Shape:
    """Block of the first moment by the shape rule: a run along the last axis.

    The run is the last axis's largest divisor <= ``longest``. If that is shorter than 128 it takes in the smallest
    number of elements of the axis before (a divisor) that reaches 128, or that whole axis. Blocks that still have
    fewer than 64 elements become the whole last axis, or all of the last two axes where the last one is shorter than
    64. A block never crosses a batch axis, nor the last two axes, unless those hold a single element.

    Args:
      shape: the parameter's shape.
      batch: leading axes that no block may cross.
      align: blocks stay inside the parts of an axis that is cut in ``align`` (if it divides the axis).
      longest: `RUN`, or `RUN_OF_FOUR_BITS`.

    Examples:
      >>> momentum_tile((512, 512), align=8)
      (2, 64)
      >>> momentum_tile((768, 3072)), momentum_tile((16, 2048)), momentum_tile((768, 12, 64))
      ((1, 256), (1, 256), (1, 2, 64))
      >>> momentum_tile((50257,)), momentum_tile((1, 5003)), momentum_tile((64, 4099)), momentum_tile((7, 5))
      ((50257,), (1, 5003), (64, 1), (7, 5))
    """
    if not shape or math.prod(shape) == 0:
        return (1,) * len(shape)
    own = tuple(size // align if size % align == 0 else size for size in shape[batch:])
    if not own:
        return (1,) * len(shape)
    last = own[-1]
    before = own[-2] if len(own) > 1 else 1
    run = largest_divisor(last, longest)
    rows = 1 if run >= SHORT else smallest_divisor(before, -(-SHORT // run))
    if run * rows < TINY:
        run, rows = last, (1 if last >= TINY else before)
    if run * rows == 1:
        return (1,) * batch + own
    return ((1,) * len(shape) + (rows, run))[-len(shape) :] if len(own) > 1 else (1,) * batch + (run,)


def is_aligned(shape: Shape, tile: Shape, align: int) -> bool:
    """Whether blocks stay inside the parts of each axis that ``align`` cuts evenly.

    Examples:
      >>> is_aligned((512, 512), (1, 64), 8), is_aligned((512, 512), (1, 128), 8)
      (True, False)
    """
    return all(size % align or (size // align) % length == 0 for size, length in zip(shape, tile))


def block_tile(shape: Shape, split: tuple[int, int] | None, tile: Shape, align: int = 1) -> Shape:
    """Block of the second moment for ``second_moment="block"``.

    One mean per batch entry and column (an output unit of a Flax kernel), or per row where there are at least 16
    times as many rows as columns (an embedding); without a split, the momentum's ``tile``. Each is cut so that it
    stays inside the parts of an axis that ``align`` cuts evenly.

    Examples:
      >>> block_tile((768, 3072), (0, 1), (1, 256)), block_tile((50257, 768), (0, 1), (1, 256))
      ((768, 1), (1, 768))
      >>> block_tile((768, 3072), (0, 1), (1, 256), align=8)
      (96, 1)
    """
    if split is None:
        return tile
    batch, rows = split
    _, height, width = _extent(shape, batch, rows)
    cut = batch + rows
    local = tuple(size // align if size % align == 0 else size for size in shape)
    if height >= TALL * width:
        return (1,) * cut + local[cut:]
    return (1,) * batch + local[batch:cut] + (1,) * (len(shape) - cut)


def packed_axis(shape: Shape) -> int | None:
    """The last axis of even size, along which 4-bit codes share bytes; None if there is none.

    Examples:
      >>> packed_axis((3, 4, 5)), packed_axis((3, 5))
      (1, None)
    """
    return next((i for i in reversed(range(len(shape))) if shape[i] % 2 == 0 and shape[i] > 0), None)
