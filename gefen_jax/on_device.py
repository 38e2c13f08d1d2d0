"""What learning reads from a gradient, computed where it lies: on a GPU, or spread over many.

Twins of what `_cells`, `periods` and `codebook` do on the host, as jitted programs, so that a gradient never travels:
what does is a pair of numbers per candidate structure, arrays of at most `FEW` elements, and 4096 counts. The
decisions are then made on the host, by the same code.

* Arithmetic is float64 whatever JAX is set to, so sums differ from the host's in their last digits alone, and counts
  are the same integers. A period whose choice those digits could turn is left to the host (`is_certain`).
* Sums are hierarchical, axis by axis and never through a reshape that merges axes: with any axis sharded they stay
  where their elements are. The flat blocks of the reference's rule are the exception.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from gefen_jax import codebook, periods, tiling
from gefen_jax._cells import FLOOR, Chain, Sums
from gefen_jax._slabs import as_single, in_float64, place, slabs, take, to_host
from gefen_jax.quantization import BINS
from gefen_jax.tiling import Shape

FEW = 4096
"""Arrays of so few elements are worth no program of their own: they are copied to the host."""
DOUBT = 1e-8
"""Difference between two scores of periods that rounding could make: a bound far above what was measured (1e-12)."""

Array = Any  # of JAX, or of NumPy once it is small


def takes(gradients: Sequence[Any], where: str) -> bool:
    """Whether a leaf is read where it lies.

    Args:
      gradients: of one leaf.
      where: "host"; "device"; or "auto": on the device if all of them are on GPUs.

    Examples:
      >>> takes([jnp.ones(8192)], "device"), takes([jnp.ones(8)], "device"), takes([np.ones(8192)], "auto")
      (True, False, False)
    """
    if where == "host" or any(gradient.size <= FEW for gradient in gradients):
        return False
    return where == "device" or all(isinstance(g, jax.Array) and _is_on_gpu(g.sharding) for g in gradients)


def _is_on_gpu(sharding: jax.sharding.Sharding) -> bool:
    devices: set[Any] = sharding.device_set
    known = isinstance(sharding, NamedSharding | SingleDeviceSharding)
    return known and all(device.platform == "gpu" for device in devices)


@in_float64
def prepare(gradient: Any) -> jax.Array:
    """The gradient as an array whose mesh, if it has one, is automatic. Nothing moves.

    Raises:
      TypeError: it is not real floating point.
    """
    array = jnp.asarray(gradient)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"a gradient must be real floating point, found {array.dtype}")
    if isinstance(array.sharding, NamedSharding):
        placed = array.sharding
        mesh = Mesh(placed.mesh.devices, placed.mesh.axis_names)
        array = jax.device_put(array, NamedSharding(mesh, placed.spec, memory_kind=placed.memory_kind))
    return array


# -------------------------------------------------------------------------------- cells, for `partition`


@in_float64
def mean_square(array: jax.Array) -> float:
    """Mean of the squares; not finite if an element is not."""
    parts = [_sum_of_squares(array, *slab) for slab in slabs(array, range(array.ndim))]
    return float(np.sum(jax.device_get(parts))) / array.size


@functools.partial(jax.jit, static_argnames="sizes")
def _sum_of_squares(array: jax.Array, starts: Shape, sizes: Shape) -> jax.Array:
    return jnp.sum(jnp.square(as_single(take(array, starts, sizes))))


@in_float64
def add(sums: Sums, measured: Sequence[tuple[jax.Array, float]]) -> None:
    """Take gradients into ``sums``, each with its mean square: `Sums.add`, on the device."""
    arrays, squares = tuple(array for array, _ in measured), tuple(square for _, square in measured)
    rank, batch = len(sums.shape), sums.batch
    cut = rank if sums.flat else sums.cut
    row_axes, column_axes = range(batch, cut), range(cut, rank)
    totals = _Totals()

    row_sums = _Whole(sums.shape, column_axes)
    by_row = list(slabs(arrays[0], range(cut)))
    for starts, sizes in by_row:
        values, counts, statistics = _logarithms(arrays, squares, starts, sizes)
        totals.add("statistics", statistics)
        if not sums.flat:
            totals.add("rows", row_sums.add(starts, values, counts))
            totals.walk("column runs", sums.column_chain, cut, values, counts)

    column_sums = _Whole(sums.shape, row_axes)
    by_column = list(slabs(arrays[0], [*range(batch), *column_axes]))
    for starts, sizes in by_column:
        if by_column != by_row:
            values, counts, _ = _logarithms(arrays, squares, starts, sizes)
        column_sums.add(starts, values, counts)
        totals.walk("row runs", sums.row_chain, batch, values, counts)
        if not sums.flat:
            rest = _residuals(values, counts, row_sums.sums, row_sums.counts, starts)
            totals.add("columns", _merge(rest, counts, column_sums.ratio)[2])

    across = tuple(n if i in column_axes else 1 for i, n in enumerate(sums.shape))
    totals.add("matrices", _merge(column_sums.sums, column_sums.counts, across)[2])
    if not sums.flat:
        totals.walk("wide columns", sums.column_chain, cut, column_sums.sums, column_sums.counts)
        totals.walk("wide rows", sums.row_chain, batch, row_sums.sums, row_sums.counts)

    found = totals.on_host()
    samples, replicates, (squared,) = np.split(found["statistics"], [len(arrays) + 1, 2 * len(arrays) + 5])
    elements, matrices = samples[1:].sum(), found["matrices"]
    sums.samples += samples
    sums.replicates += replicates
    # With one column an element is a row, and the rows leave nothing.
    rows, columns = found.get("rows", (squared, elements)), found.get("columns", (0.0, matrices[1]))
    sums.totals += np.array([elements, squared, *matrices, *rows, *columns])
    trees = {"column runs": sums.column_runs, "row runs": sums.row_runs}
    trees |= {"wide columns": sums.wide_columns, "wide rows": sums.wide_rows}
    for name, tree in trees.items():
        for node in range(tree.lengths.size):
            between, cells = found[name, node]
            tree.between[node] += between
            tree.cells[node] += cells


class _Totals:
    """Small vectors added up where they are, and brought to the host together."""

    def __init__(self) -> None:
        self.vectors: dict[Any, Array] = {}

    def add(self, key: Any, vector: Array) -> None:
        self.vectors[key] = self.vectors[key] + vector if key in self.vectors else vector

    def walk(self, name: str, chain: Chain, axis: int, sums: Array, counts: Array) -> None:
        """Add what every cell of a chain explains, whose axes begin at ``axis``."""
        live = {-1: (sums, counts)}
        for node, (parent, tile) in enumerate(zip(chain.parents, chain.tiles)):
            source = chain.tiles[parent] if parent >= 0 else (1,) * len(tile)
            ratio = (1,) * axis + tuple(t // s for t, s in zip(tile, source))
            ratio += (1,) * (sums.ndim - len(ratio))
            cells, held, pair = _merge(*live[parent], ratio)
            live[node] = (cells, held)
            self.add((name, node), pair)
            for done in [other for other in live if other >= 0 and chain.skips[other] <= node + 1]:
                del live[done]

    def on_host(self) -> dict[Any, np.ndarray]:
        return dict(zip(self.vectors, jax.device_get(list(self.vectors.values()))))


class _Whole:
    """Sums over ``axes`` of an array that comes in slabs."""

    def __init__(self, shape: Shape, axes: Sequence[int]) -> None:
        self.shape = tuple(1 if i in axes else n for i, n in enumerate(shape))
        self.ratio = tuple(n if i in axes else 1 for i, n in enumerate(shape))
        self.sums: Array = None
        self.counts: Array = None

    def add(self, starts: Shape, values: Array, counts: Array) -> Array:
        """Take in a slab that is whole along the axes; returns its squares between, and cells, as `_merge` does."""
        values, counts, pair = _merge(values, counts, self.ratio)
        if values.shape == self.shape:
            self.sums, self.counts = values, counts
            return pair
        if self.sums is None:
            self.sums, self.counts = (jnp.zeros(self.shape, x.dtype) for x in (values, counts))
        self.sums, self.counts = place(self.sums, values, starts), place(self.counts, counts, starts)
        return pair


def _merge(sums: Array, counts: Array, ratio: Shape) -> tuple[Array, Array, Array]:
    """Sums and counts of cells from those of ``ratio`` cells along each axis, and [sum of sum^2 / count, cells].

    Only cells that hold something count.
    """
    if isinstance(sums, np.ndarray):
        return _merged(np, sums, counts, ratio)
    if sums.size <= FEW:
        return _merged(np, to_host(sums), to_host(counts), ratio)
    return _merged_on_device(sums, counts, ratio)


def _merged(xp: Any, sums: Array, counts: Array, ratio: Shape) -> tuple[Array, Array, Array]:
    shape = tuple(n // r for n, r in zip(sums.shape, ratio))
    split = tiling.view(sums.shape, shape)
    sums, counts = (
        xp.sum(x.reshape(split.elements), split.reduce).reshape(shape) if split.reduce else x for x in (sums, counts)
    )
    # Counts are whole numbers in float64, which XLA compiles several times faster than integers and booleans.
    return sums, counts, xp.stack([xp.sum(sums * sums / xp.maximum(counts, 1.0)), xp.sum(xp.minimum(counts, 1.0))])


@functools.partial(jax.jit, static_argnames="ratio")
def _merged_on_device(sums: jax.Array, counts: jax.Array, ratio: Shape) -> tuple[Array, Array, Array]:
    return _merged(jnp, sums, counts, ratio)


@functools.partial(jax.jit, static_argnames="sizes")
def _logarithms(
    arrays: tuple[jax.Array, ...], squares: tuple[float, ...], starts: Shape, sizes: Shape
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """L where it counts and 0 elsewhere; 1 where it counts and 0 elsewhere; and sums over the slab, all float64.

    The sums are what `Sums` has as ``samples`` and ``replicates``, then that of the squares of L.
    """
    relative = [jnp.square(as_single(take(g, starts, sizes))) / s for g, s in zip(arrays, squares)]
    samples: Array = sum((r > 0).astype(jnp.float64) for r in relative)
    mean = sum(relative) / len(relative)
    values = jnp.where(samples > 0, jnp.log(mean + FLOOR), 0.0)
    sums = [jnp.sum((samples == k).astype(jnp.float64)) for k in range(len(relative) + 1)]
    shared = samples == len(relative)
    if len(relative) > 1:
        logs = [jnp.where(shared, jnp.log(r + FLOOR), 0.0) for r in relative]
        both = jnp.where(shared, values, 0.0)
        pairs = (jnp.sum(jnp.square(sum(logs))) - sum(jnp.sum(jnp.square(x)) for x in logs)) / (
            len(logs) * (len(logs) - 1)
        )
        sums += [sums[-1], jnp.sum(both), jnp.sum(jnp.square(both)), pairs, *map(jnp.sum, logs)]
    else:
        sums += [jnp.zeros(())] * 5
    return values, jnp.minimum(samples, 1.0), jnp.stack([*sums, jnp.sum(jnp.square(values))])


@jax.jit
def _residuals(values: Array, counts: Array, row_sums: Array, row_counts: Array, starts: Shape) -> jax.Array:
    """What the means of the rows leave of the values."""
    sizes = tuple(n if whole > 1 else 1 for n, whole in zip(values.shape, row_sums.shape))
    starts = tuple(start if whole > 1 else 0 for start, whole in zip(starts, row_sums.shape))
    row_sums, row_counts = take(row_sums, starts, sizes), take(row_counts, starts, sizes)
    return values - row_sums / jnp.maximum(row_counts, 1) * counts


# -------------------------------------------------------------------------------- periods, for rule "reference"


@in_float64
def scores(array: jax.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], bool]:
    """`periods.scores` to about twelve digits, and whether the choice among them is certain to be the host's."""
    cand = periods.candidates(array.size)
    sums, least, most = _log_squares(array)
    if float(least) == float(most) < math.inf:  # then all sums of a length are equal on the host
        return cand, np.zeros(cand.size), True
    with np.errstate(invalid="ignore", over="ignore"):  # numbers that are not finite are never certain
        found = {p: _roughness(x, p) for p, x in periods.block_sums(sums, cand, _merge_runs)}
    score = np.array(jax.device_get([found[period] for period in cand.tolist()]), np.float64)
    return cand, score, is_certain(cand, score)


def is_certain(cand: npt.NDArray[np.int64], score: npt.NDArray[np.float64]) -> bool:
    """Whether `periods.choose_period` would choose the same if each score moved by less than half of `DOUBT`.

    Examples:
      >>> cand = np.array([1, 2, 4, 8, 16, 32, 64])
      >>> is_certain(cand, np.array([0, 0, 0, 0, 1.0, 0, 0.5])), is_certain(cand, np.zeros(7))
      (True, False)
    """
    if not np.isfinite(score).all():
        return False
    inner = score[1:-1]
    rise = inner - np.maximum(score[:-2], score[2:])
    long = cand[1:-1] > periods.MIN_PERIOD
    possible, sure = long & (rise > -DOUBT), long & (rise > DOUBT)
    if not sure.any():
        return not possible.any()
    return int((possible & (inner > inner[sure].max() - DOUBT)).sum()) == 1


@jax.jit
def _log_squares(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logarithms in C order, float64, and the least and the largest square."""
    squares = jnp.square(array.astype(jnp.float32))  # the reference squares before it widens
    logs = jnp.log(squares.astype(jnp.float64) + periods.LOG_FLOOR)
    return logs.reshape(-1), jnp.min(squares), jnp.max(squares)


def _merge_runs(sums: Array, parts: int) -> Array:
    if isinstance(sums, np.ndarray):
        return periods.merge(sums, parts)
    merged = _merged_runs(sums, parts)
    return merged if merged.size > FEW else to_host(merged)


@functools.partial(jax.jit, static_argnames="parts")
def _merged_runs(sums: jax.Array, parts: int) -> jax.Array:
    return jnp.sum(sums.reshape(-1, parts), axis=1)


def _roughness(sums: Array, period: int) -> Array:
    return periods.roughness(sums, period) if isinstance(sums, np.ndarray) else _mean_step(sums) / period


@jax.jit
def _mean_step(sums: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(sums[1:] - sums[:-1])) / (sums.size - 1)


# -------------------------------------------------------------------------------- counts, for `codebook`


@in_float64
def histogram(array: jax.Array, tile: Shape) -> codebook.Counts:
    """`codebook.histogram` of finite values: the same integers."""
    return _count(array, tile)[:-1]


@in_float64
def reference_histogram(array: jax.Array, period: int) -> codebook.Counts:
    """`codebook.reference_histogram` of finite values: the same integers."""
    statistic = tiling.flat_statistic(array.shape, period)
    if tiling.is_tiling(array.shape, statistic):
        counts = _count(array, tuple(n // s for n, s in zip(array.shape, statistic)))
    else:
        counts = _count(array.reshape(-1, period), (1, period))
    counts[BINS // 2] += counts[-1]
    return counts[:-1]


def _count(array: jax.Array, tile: Shape) -> codebook.Counts:
    """Counts in `BINS` bins, and of exact zeros, which are in none."""
    parts = [_bins(array, *slab, tile) for slab in slabs(array, range(array.ndim), tile)]
    return np.sum(np.stack(jax.device_get(parts)), axis=0, dtype=np.int64)


@functools.partial(jax.jit, static_argnames=("sizes", "tile"))
def _bins(array: jax.Array, starts: Shape, sizes: Shape, tile: Shape) -> jax.Array:
    view = tiling.view(sizes, tiling.tile_statistic(sizes, tile))
    values = as_single(take(array, starts, sizes)).reshape(view.elements)
    maxima = jnp.max(jnp.abs(values), view.reduce, keepdims=True)
    # A float64 quotient of two float32 numbers, rounded to float32, is the float32 quotient (53 >= 2 * 24 + 2 digits),
    # which GPU programs do not round correctly by themselves.
    quotient = (values / jnp.where(maxima > 0, maxima, 1.0)).astype(jnp.float32)
    bins = jnp.minimum(((quotient + jnp.float32(1)) * jnp.float32(BINS // 2)).astype(jnp.int32), BINS - 1)
    bins = jnp.where(values == 0, BINS, bins)
    width = jnp.int32 if values.size < 1 << 31 else jnp.int64
    # Not flattened: a reshape that merges axes would gather them if one is sharded.
    return jnp.zeros(BINS + 1, width).at[bins].add(jnp.ones((), width))
