"""Which leaves go into which launch, and the tables that a launch reads: pure functions.

A kernel receives one pointer per array, and its parameter space is limited. Leaves beyond that are split into the
fewest launches, as multi-tensor-apply does. Leaves of one class stay together, for code size; within a launch those
whose programs work longest come first, so that the last programs to finish are short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gefen_pallas.geometry import FACTORED, STRIPS, Cut, TileClass

PARAMETER_BYTES = 32764
"""Parameter space of a kernel since PTX 8.1 (driver R530); before, `OLD_PARAMETER_BYTES`."""
OLD_PARAMETER_BYTES = 4352
RESERVED_BYTES = 8 * 16
"""Room for the pointers that do not belong to a leaf, and for those that Triton adds."""
MAX_LEAVES = 512
"""Leaves of a launch, for the time that tracing and compiling its operands takes."""
MAX_CLASSES = 12
"""Tile classes of a launch: each is a copy of the kernel's body."""
META = 16
"""Numbers per leaf in a launch's table."""
SUM_TILE = 64
"""Rows and columns of a tile of `gefen_sums`."""
NORM_TILE, NORM_REPEAT = 4096, 8
"""Elements of a tile of `gefen_norm`, and tiles of one of its programs."""
FIRST_DECAY = 9
"""Where the weight decays begin in the vector of hyper-parameters."""


class Table(NamedTuple):
    """What a launch reads besides arrays.

    Attributes:
      leaves: positions of the launch's leaves, in the order of its columns.
      meta: int32 (leaves, META).
      starts: int32 (slots,), first program of each leaf, then the largest int32.
      classes: the classes compiled into the launch.
      programs: size of the grid.
    """

    leaves: tuple[int, ...]
    meta: np.ndarray
    starts: np.ndarray
    classes: tuple[tuple[int, ...], ...]
    programs: int


class Scratch(NamedTuple):
    """Lengths of the temporary vectors of `gefen_sums`: row and column sums, sums of stripes, means, counters."""

    rows: int
    columns: int
    stripes: int
    means: int
    counters: int


def split(
    classes: Sequence[tuple[int, ...]],
    pointers: Sequence[int],
    *,
    parameter_bytes: int = PARAMETER_BYTES,
    max_leaves: int = MAX_LEAVES,
    max_classes: int = MAX_CLASSES,
) -> list[list[int]]:
    """The fewest launches that hold all leaves.

    Args:
      classes: what each leaf needs compiled.
      pointers: how many pointers each leaf passes.
      parameter_bytes: parameter space of a launch.
      max_leaves: leaves of a launch at most.
      max_classes: classes of a launch at most.

    Returns:
      Positions of leaves, launch by launch; equal classes next to each other.

    Raises:
      ValueError: if one leaf alone does not fit.

    Examples:
      >>> split([(0,), (1,), (0,)], [5, 5, 5])
      [[0, 2, 1]]
      >>> split([(0,)] * 5, [5] * 5, max_leaves=2)
      [[0, 1], [2, 3], [4]]
    """
    room = (parameter_bytes - RESERVED_BYTES) // 8
    if any(count > room for count in pointers) or max_leaves < 1 or max_classes < 1:
        raise ValueError(f"a leaf does not fit into a launch of {parameter_bytes} bytes")
    first: dict[tuple[int, ...], int] = {}
    for kind in classes:
        first.setdefault(kind, len(first))
    order = sorted(range(len(classes)), key=lambda i: (first[classes[i]], i))
    launches: list[list[int]] = []
    used, kinds = 0, set[tuple[int, ...]]()
    for i in order:
        full = launches and (used + pointers[i] > room or len(launches[-1]) == max_leaves)
        if not launches or full or len(kinds | {classes[i]}) > max_classes:
            launches.append([])
            used, kinds = 0, set()
        launches[-1].append(i)
        used += pointers[i]
        kinds.add(classes[i])
    return launches


def pointers(cut: Cut, *, reads: bool) -> int:
    """Pointers that a leaf passes to `gefen_step`: gradient, first moment, scale, second moment, and more."""
    return 4 + int(reads) + int(cut.kind.second == FACTORED and not cut.kind.exact)


def step_table(cuts: Sequence[Cut], leaves: Sequence[int], decays: Sequence[int], means: Sequence[int]) -> Table:
    """The table of one launch of `gefen_step`.

    Args:
      cuts: of all leaves.
      leaves: positions of the launch's leaves.
      decays: of all leaves, which weight decay each has.
      means: of all leaves, where the mean of the row factor stands (anything for leaves without).
    """
    leaves = sorted(leaves, key=lambda i: (-_work(cuts[i]), leaves.index(i)))
    kinds: dict[TileClass, int] = {}
    meta = np.zeros((len(leaves), META), np.int32)
    first = crosses = 0
    for row, i in zip(meta, leaves):
        cut = cuts[i]
        factored = cut.kind.second == FACTORED and not cut.kind.exact
        kind = kinds.setdefault(cut.kind, len(kinds))
        row[:14] = (
            *(first, kind, crosses if factored else 0, FIRST_DECAY + decays[i], cut.cells, cut.across, cut.rows),
            *(cut.columns, cut.width, cut.strip_rows, cut.strip_columns, cut.batch_rows, means[i] if factored else 0),
            cut.repeat,
        )
        first += cut.programs
        crosses += factored
    return Table(tuple(leaves), meta, _starts(meta[:, 0]), tuple(map(tuple, kinds)), first)


def sums_table(cuts: Sequence[Cut], leaves: Sequence[int]) -> tuple[Table, Scratch, list[int]]:
    """The table of one launch of `gefen_sums`, its temporaries, and where each leaf's means begin."""
    kinds: dict[tuple[int, ...], int] = {}
    meta = np.zeros((len(leaves), META), np.int32)
    first = rows = columns = stripes = means = counters = 0
    starts = []
    for row, i in zip(meta, leaves):
        cut = cuts[i]
        height, width, batch = cut.batch_rows, cut.width, cut.batch
        down, along = -(-height // SUM_TILE), -(-width // SUM_TILE)
        kind = kinds.setdefault((cut.kind.gradient, next(v for v in (16, 4, 1) if width % v == 0)), len(kinds))
        row[:12] = (first, kind, height, width, down, along, rows, columns, stripes, means, counters, batch)
        starts.append(means)
        first += batch * down * along
        rows += batch * along * height
        columns += batch * down * width
        stripes += batch * down
        means += batch
        counters += batch * (down + along + 1)
    table = Table(tuple(leaves), meta, _starts(meta[:, 0]), tuple(kinds), first)
    return table, Scratch(rows, columns, stripes, means, counters), starts


def norm_table(sizes: Sequence[int], dtypes: Sequence[int], leaves: Sequence[int]) -> Table:
    """The table of one launch of `gefen_norm` over leaves of ``sizes`` elements and `DTYPES` codes ``dtypes``."""
    kinds: dict[tuple[int, ...], int] = {}
    meta = np.zeros((len(leaves), META), np.int32)
    first = 0
    for row, i in zip(meta, leaves):
        kind = kinds.setdefault((dtypes[i], 4 if sizes[i] % 4 == 0 else 1), len(kinds))
        row[:3] = (first, kind, sizes[i])
        first += -(-sizes[i] // (NORM_TILE * NORM_REPEAT))
    return Table(tuple(leaves), meta, _starts(meta[:, 0]), tuple(kinds), first)


def _work(cut: Cut) -> int:
    """Tiles that one program walks."""
    if cut.kind.loop == STRIPS:
        return -(-cut.strip_rows * cut.strip_columns // cut.kind.x)
    return max(-(-cut.rows // cut.kind.y), -(-cut.columns // cut.kind.z)) if not cut.kind.exact else 1


def _starts(first: np.ndarray) -> np.ndarray:
    """First programs, padded to a power of two with the largest int32.

    There is always at least one pad: XLA rewrites a constant in arithmetic progression to a launch of its own.
    """
    slots = max(16, 1 << len(first).bit_length())
    starts = np.full(slots, np.iinfo(np.int32).max, np.int32)
    starts[: len(first)] = first
    return starts
