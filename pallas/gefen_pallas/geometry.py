"""How a leaf is cut into tiles that one program of a kernel can finish alone: pure functions of shapes.

A leaf is seen as a matrix of R rows and C columns (consecutive axes merged) in which every statistic is a tiling.
Its unit is the **cell** of a rows and b columns: what shares a momentum scale, or the few momentum blocks that share
a second moment. A program holds X cells as an array (X, Y, Z), with Y >= a and Z >= b powers of two, and masks the
rest. Cells too large for that are walked in a loop.

`plan_leaf` returns this as a `Cut`: a `TileClass` (what the kernel is compiled for) and a few run-time numbers; or the
reason in words why there is no kernel for the leaf.
"""

from __future__ import annotations

import math
from typing import NamedTuple

Shape = tuple[int, ...]

TILE = 2048
"""Elements of a tile: 8 per thread at 8 warps, in 64 registers. Half of it where accesses are scalar."""
REPEAT = 4
"""Tiles that a program finishes one after the other: what it prepares serves all of them."""
STRIP = 1 << 22
"""Most elements that one program may walk alone: beyond, too few programs are left to fill a device."""
LIMIT = 2**31 - 1
"""Numbers of cells and strides are int32 in the kernels."""

DTYPES = ("float32", "bfloat16", "float16")
"""Gradients and parameters that kernels read; the position is the code in `TileClass`."""

# Second moment of a tile.
CELL, ROW, FULL, FACTORED, COLUMN = range(5)
# Loops of a program: none; over the rows of a cell; over the chunks of a long run; over the cells of a strip.
ONCE, ROWS, CHUNKS, STRIPS = range(4)


class LeafShape(NamedTuple):
    """What decides how a leaf runs: the shapes of its state and three dtypes.

    Attributes:
      shape: the parameter's shape.
      mu: shape of the first moment (one axis halved for 4 bits).
      scale: shape of the momentum scales.
      nu: shape of the second moment.
      cross: shape of the column factor; (1, .., 1) where there is none.
      exact: whether the first moment is float32 instead of codes.
      gradient: dtype of the gradient.
      parameter: dtype of the parameter.
    """

    shape: Shape
    mu: Shape
    scale: Shape
    nu: Shape
    cross: Shape
    exact: bool
    gradient: str
    parameter: str


class TileClass(NamedTuple):
    """What a kernel is compiled for; all numbers, so that it can be a compile-time constant.

    Attributes:
      exact: 1 for exact Adam: a flat run of X elements.
      x, y, z: cells, rows of a cell and columns of a cell in a tile; powers of two.
      vector: number by which columns are divisible: 16, 4 or 1.
      row_scale: 1 if every row of a cell has its own momentum scale (the cell then is one second moment).
      second: CELL, ROW, FULL, FACTORED or COLUMN: what shares a second moment.
      loop: ONCE, ROWS, CHUNKS or STRIPS.
      packed: 1 for two codes in a byte.
      gradient, parameter: positions in `DTYPES`.
    """

    exact: int
    x: int
    y: int
    z: int
    vector: int
    row_scale: int
    second: int
    loop: int
    packed: int
    gradient: int
    parameter: int


class Cut(NamedTuple):
    """A leaf cut into programs.

    Attributes:
      kind: the `TileClass`.
      programs: how many programs it takes.
      cells: number of cells (exact: of elements).
      across: cells next to each other in a row of the matrix.
      rows: rows a of a cell.
      columns: columns b of a cell.
      width: columns C of the matrix.
      strip_rows: STRIPS: cells above each other that share a second moment.
      strip_columns: STRIPS: cells beside each other that share it.
      batch_rows: FACTORED: rows of one batch entry.
      repeat: ONCE: tiles that a program finishes one after the other.
    """

    kind: TileClass
    programs: int
    cells: int
    across: int
    rows: int
    columns: int
    width: int
    strip_rows: int = 1
    strip_columns: int = 1
    batch_rows: int = 1
    repeat: int = 1

    @property
    def batch(self) -> int:
        """FACTORED: number of batch entries."""
        return self.cells // self.across * self.rows // self.batch_rows


def plan_leaf(leaf: LeafShape) -> Cut | str:
    """How the leaf runs, or why no kernel can run it.

    Examples:
      >>> ones = (1, 1)
      >>> shape, dtypes = (768, 3072), ["float32"] * 2
      >>> found = plan_leaf(LeafShape(shape, shape, (768, 12), (768, 1), (1, 3072), False, *dtypes))
      >>> found.kind.x, found.kind.z, found.programs, found.repeat
      (8, 256, 288, 4)
      >>> plan_leaf(LeafShape((64, 15), (32, 15), (1, 15), (1, 15), ones, False, "float32", "float32"))
      'its 4-bit codes share bytes along an axis that is not the last'
    """
    dtypes = leaf.gradient, leaf.parameter
    for what, dtype in zip(("gradients", "parameters"), dtypes):
        if dtype not in DTYPES:
            return f"{what} of {dtype} have no kernel"
    size = math.prod(leaf.shape)
    if size == 0:
        return "it has no elements"
    if size > LIMIT:
        return f"more than {LIMIT} elements"
    codes = tuple(DTYPES.index(dtype) for dtype in dtypes)
    if leaf.exact:
        return _exact(leaf, size, *codes)
    packed = leaf.mu != leaf.shape
    if packed and leaf.mu[:-1] != leaf.shape[:-1]:
        return "its 4-bit codes share bytes along an axis that is not the last"
    cut: Cut | str = "its blocks are no tiles of a matrix"
    for axis in range(len(leaf.shape) + 1):
        found = _matrix(leaf, axis, packed, codes)
        if isinstance(found, Cut):
            return found
        cut = found or cut
    return cut


def _exact(leaf: LeafShape, size: int, gradient: int, parameter: int) -> Cut | str:
    if leaf.nu != leaf.shape:
        return "exact Adam with a shared second moment"
    vector = 4 if size % 4 == 0 else 1
    kind = TileClass(1, TILE, 1, 1, vector, 0, FULL, ONCE, 0, gradient, parameter)
    return Cut(kind, -(-size // TILE), size, 1, 1, 1, 1)


def _matrix(leaf: LeafShape, axis: int, packed: bool, codes: tuple[int, ...]) -> Cut | str | None:
    """The leaf as a matrix whose rows are the axes before ``axis``; None if its blocks are no tiles of that matrix."""
    height, width = math.prod(leaf.shape[:axis]), math.prod(leaf.shape[axis:])
    block = _tile(leaf.shape, leaf.scale, axis)
    if block is None:
        return None
    if any(s != 1 for s in leaf.cross):
        batch_rows = _factored_rows(leaf, axis)
        if batch_rows is None:
            return None
        found = _cut(height, width, block, FACTORED, packed, codes)
        return found._replace(batch_rows=batch_rows) if isinstance(found, Cut) else found
    second = _tile(leaf.shape, leaf.nu, axis)
    if second is None:
        return None
    return _combine(height, width, block, second, packed, codes)


def _factored_rows(leaf: LeafShape, axis: int) -> int | None:
    """Rows of one batch entry of a factored leaf, if its rows are the axes before ``axis``."""
    rows, columns = leaf.shape[:axis], leaf.shape[axis:]
    if leaf.nu != rows + (1,) * len(columns) or leaf.cross[axis:] != columns:
        return None
    batch = math.prod(leaf.cross[:axis])
    leading = next((i for i in range(axis + 1) if math.prod(rows[:i]) == batch), None)
    if leading is None or leaf.cross[:axis] != rows[:leading] + (1,) * (axis - leading):
        return None
    return math.prod(rows) // batch


def _combine(height: int, width: int, block: Shape, second: Shape, packed: bool, codes: tuple[int, ...]) -> Cut | str:
    """The cut of a matrix with momentum blocks and second-moment blocks of any two shapes."""
    (a, b), (c, d) = block, second
    if second == block:
        return _cut(height, width, block, CELL, packed, codes)
    if second == (1, 1):
        return _cut(height, width, block, FULL, packed, codes)
    if second == (a, 1):
        return _cut(height, width, block, COLUMN, packed, codes)
    runs = [rows * columns for rows, columns in (block, second) if rows == 1 or columns == width]
    if len(runs) == 2:
        long, short = max(runs), min(runs)
        if long % short == 0 and _power(long // short) * _power(short) <= (TILE if short % 4 == 0 else TILE // 2):
            cell = (long // short, short)
            kind = CELL if runs[1] == long else ROW
            return _cut(height * width // short, short, cell, kind, packed, codes, row_scale=kind == CELL)
    if c % a == 0 and (d == 1 or d % b == 0):
        walked = c * max(d, b)
        if walked > STRIP:
            return f"its second moment ties {walked} elements together, too many for one program"
        strip = (c // a, max(d // b, 1))
        return _cut(height, width, block, COLUMN if d == 1 else CELL, packed, codes, strip=strip)
    return f"momentum blocks of {a} x {b} and second moments of {c} x {d} do not nest"


def _cut(
    height: int,
    width: int,
    cell: Shape,
    second: int,
    packed: bool,
    codes: tuple[int, ...],
    *,
    row_scale: bool = False,
    strip: tuple[int, int] | None = None,
) -> Cut | str:
    """Tile and loop for cells of (rows, columns)."""
    a, b = cell
    if packed and b % 2:
        return "two 4-bit codes of different blocks share a byte"
    y, z = _power(a), _power(b)
    cells, across = height // a * (width // b), width // b
    loop = STRIPS if strip else ONCE
    vector = next(v for v in (16, 4, 1) if b % v == 0 and width % v == 0)
    limit = TILE if vector > 1 else TILE // 2
    if y * z <= limit:
        x = limit // (y * z)
    elif strip or row_scale or second == ROW:
        return f"blocks of {a} x {b} elements within larger ones"
    elif a == 1:
        x, y, z, loop = 1, 1, limit, CHUNKS
    elif z <= limit:
        x = min(_power(across), max(32 // z, 1))
        y, loop = limit // (x * z), ROWS
    else:
        return f"blocks of {a} x {b} elements that are no runs"
    kind = TileClass(0, x, y, z, vector, int(row_scale), second, loop, int(packed), *codes)
    if strip:
        return Cut(kind, cells // math.prod(strip), cells, across, a, b, width, *strip)
    tiles = -(-cells // x)
    repeat = min(REPEAT, tiles) if loop == ONCE else 1
    return Cut(kind, -(-tiles // repeat), cells, across, a, b, width, repeat=repeat)


def _power(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _tile(shape: Shape, stat: Shape, axis: int) -> tuple[int, int] | None:
    """Rows and columns of one block once the axes before and after ``axis`` are merged; None if it is no box there."""
    if axis == 0 and shape and shape[0] % stat[0] and all(s == 1 for s in stat[1:]):  # a flat run
        size = math.prod(shape)
        return (1, size // stat[0]) if size % stat[0] == 0 else None
    if any(full % kept for full, kept in zip(shape, stat)):
        return None
    sides = []
    for part, kept in ((shape[:axis], stat[:axis]), (shape[axis:], stat[axis:])):
        tile = [full // count for full, count in zip(part, kept)]
        inside = [i for i, length in enumerate(tile) if length > 1]
        if inside and any(tile[i] != part[i] for i in range(inside[0] + 1, len(part))):
            return None
        sides.append(math.prod(tile))
    return sides[0], sides[1]
