"""How much of a leaf's log-squared gradient each candidate structure explains; see `partition`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gefen_jax._gradient import as_floating, chunks
from gefen_jax.periods import divisors
from gefen_jax.tiling import Shape, Structure

Floats = npt.NDArray[np.float64]

FLOOR = 1e-12
"""Of the squared gradient, in units of its mean."""
_REPLICATED = 0.9  # share of the elements that all gradients must have to be compared with each other
_CHUNK = 1 << 15  # elements at a time: float64 rows that stay in the cache


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A structure of the second moment and how it scored.

    Attributes:
      name: "full", "factored" or "height x width" of its cells in the (rows, columns) view.
      structure: ("full",), ("tile", sizes) or ("factored", batch axes, row axes).
      cost: numbers that it stores.
      explained: sum of squares of L that it explains beyond one mean per matrix, the noise's share taken off.
      spread: standard deviation of ``explained`` under noise.
    """

    name: str
    structure: Structure
    cost: int
    explained: float
    spread: float


def structure_cost(shape: Shape, structure: Structure) -> int:
    """Numbers that a structure stores."""
    size = math.prod(shape)
    if structure[0] == "full":
        return size
    if structure[0] == "tile":
        return size // math.prod(structure[1])
    _, batch, rows = structure
    cut = batch + rows
    return math.prod(shape[:batch]) * (math.prod(shape[batch:cut]) + math.prod(shape[cut:]))


prepare = as_floating


def mean_square(array: npt.NDArray[np.generic]) -> float:
    """Mean of the squares in float64, which holds every float32 square."""
    return sum(float(np.square(part.astype(np.float64)).sum()) for _, part in chunks(array, _CHUNK)) / array.size


class Chain(NamedTuple):
    """The cells longer than one element that consecutive axes can be cut into.

    Each is formed from a shorter one that divides it, its parent, and comes right after it and the others that do
    (preorder), so that a walk can skip what does not follow.
    """

    lengths: list[int]
    tiles: list[Shape]
    parents: list[int]
    skips: list[int]

    @classmethod
    def of(cls, axes: Shape) -> Chain:
        """All cells that are tiles of the axes and runs of elements; the longest covers them.

        Examples:
          >>> chain = Chain.of((2, 6))
          >>> chain.lengths, chain.tiles
          ([3, 6, 12, 2], [(1, 3), (1, 6), (2, 6), (1, 2)])
          >>> chain.parents, chain.skips
          ([-1, 0, 1, -1], [3, 3, 3, 4])
        """
        tiles, inner = {1: (1,) * len(axes)}, 1
        for axis in reversed(range(len(axes))):
            for part in divisors(axes[axis])[1:]:
                tiles[part * inner] = (1,) * axis + (part,) + axes[axis + 1 :]
            inner *= axes[axis]
        below: dict[int, list[int]] = {length: [] for length in tiles}
        for length in list(tiles)[1:]:
            below[max(shorter for shorter in tiles if shorter < length and length % shorter == 0)].append(length)
        chain = cls([], [], [], [])

        def walk(length: int, parent: int) -> None:
            for longer in sorted(below[length], reverse=True):
                node = len(chain.lengths)
                chain.lengths.append(longer)
                chain.tiles.append(tiles[longer])
                chain.parents.append(parent)
                chain.skips.append(0)
                walk(longer, node)
                chain.skips[node] = len(chain.lengths)

        walk(1, -1)
        return chain

    def tree(self, size: int, width: int | None = None) -> Any:
        """An empty `_numba.Tree` for rows of ``size`` elements, or for runs of rows of ``width`` elements."""
        from gefen_jax import _numba

        cells = [width or size // length for length in self.lengths]
        offsets = np.cumsum([0, *cells])
        index = [np.array(values, np.int64) for values in (self.lengths, self.parents, self.skips, offsets[:-1])]
        buffers = [np.zeros(n) for n in (offsets[-1], offsets[-1], len(cells), len(cells))]
        return _numba.Tree._make([*index, *buffers])


def add(sums: Sums, measured: list[tuple[npt.NDArray[np.generic], float]]) -> None:
    """Take gradients into ``sums``, each with its mean square."""
    size = max(1, _CHUNK // sums.columns) * sums.columns
    for parts in zip(*(chunks(array, size) for array, _ in measured)):
        sums.take(parts[0][0], [(part, square) for (_, part), (_, square) in zip(parts, measured)])


class Sums:
    """Sums of squares of L between the cells of every candidate of one leaf."""

    def __init__(self, shape: Shape, batch: int, rows: int, gradients: int) -> None:
        from gefen_jax import _numba

        cut = batch + rows
        self.shape, self.batch, self.cut = shape, batch, cut
        self.stack, self.rows, self.columns = (math.prod(s) for s in (shape[:batch], shape[batch:cut], shape[cut:]))
        self.flat = self.rows == 1 or self.columns == 1
        if self.flat:  # seen as one column: nothing but runs of it can share
            self.rows, self.columns = self.rows * self.columns, 1
            self.row_chain, self.column_chain = Chain.of(shape[batch:]), Chain.of(())
        else:
            self.row_chain, self.column_chain = Chain.of(shape[batch:cut]), Chain.of(shape[cut:])
        single = 0 if self.flat else self.rows
        wide = Chain.of(()) if self.flat else self.row_chain
        self.matrix = _numba.Matrix(*(np.zeros(n) for n in (single, single, *(self.columns,) * 3)))
        self.column_runs, self.wide_columns = (self.column_chain.tree(self.columns) for _ in range(2))
        self.row_runs, self.wide_rows = self.row_chain.tree(self.rows, self.columns), wide.tree(self.rows)
        self.totals = np.zeros(8)
        self.samples = np.zeros(gradients + 1)  # elements by the number of gradients in which they are not 0
        self.replicates = np.zeros(4 + gradients)

    def take(self, start: int, parts: list[tuple[npt.NDArray[np.float32], float]]) -> None:
        """Take in a part of each gradient, whole rows from the flat index ``start`` on."""
        from gefen_jax import _numba

        relative = [_relative_squares(part, square) for part, square in parts]
        samples = sum((part > 0 for part in relative), np.zeros(relative[0].size, np.int32))
        self.samples += np.bincount(samples, minlength=self.samples.size)
        if len(relative) > 1:
            shared = samples == len(relative)
            self.replicates += _moments([part[shared] for part in relative])
        mean = relative[0] if len(relative) == 1 else np.mean(relative, axis=0)
        counts = (mean > 0).astype(np.float64)
        mean += FLOOR
        values = np.log(mean, out=mean)
        values *= counts
        form = (-1, self.columns)
        trees = (self.column_runs, self.row_runs, self.wide_columns, self.wide_rows)
        first = start // self.columns
        _numba.survey(values.reshape(form), counts.reshape(form), first, self.rows, self.matrix, *trees, self.totals)

    def gaussian(self) -> tuple[float, float]:
        """Variance and fourth cumulant of L around its mean for Gaussian samples, averaged over the elements."""
        share = self.samples[1:] / self.samples[1:].sum()
        cumulants = [(_second_cumulant(k), _fourth_cumulant(k)) for k in range(1, self.samples.size)]
        second, fourth = share @ np.array(cumulants)
        return float(second), float(fourth)

    def noise(self) -> float:
        """Variance of L around its mean for an element of known scale; at least that of Gaussian samples.

        Two independent gradients share nothing but the scales, so the covariance of their logarithms is the variance
        of the scales, and noise is the rest of L's variance. A single gradient (or several that are not 0 in the
        same elements) is compared with its neighbours instead, in either direction, and with the additive model; what
        differs from element to element at random is then taken for noise too.
        """
        elements, squares, _, matrices, rows, filled_rows, columns, filled_columns = self.totals.tolist()
        count = self.replicates[0]
        if count >= _REPLICATED * elements:
            _, total, square, covariance = self.replicates[:4] / count
            mean = self.replicates[4:] / count
            pairs = (mean.sum() ** 2 - np.square(mean).sum()) / (mean.size * (mean.size - 1))
            variances = [square - total**2 - (covariance - pairs)]
        else:
            runs = [tree for tree in (self.column_runs, self.row_runs) if tree.cells.size]
            nearest = [(tree, int(np.argmin(tree.lengths))) for tree in runs]
            within = [(squares - tree.between[node], elements - tree.cells[node]) for tree, node in nearest]
            within.append((squares - rows - columns, elements - filled_rows - filled_columns + matrices))
            variances = [square / freedom for square, freedom in within if freedom > 0]
        return max(self.gaussian()[0], float(min(variances, default=0.0)))

    def candidates(self, noise: float, factored: bool, full: bool) -> tuple[Candidate, ...]:
        """All candidates, ascending in cost."""
        elements, squares, base, matrices, rows, filled_rows, columns, filled_columns = self.totals.tolist()
        variance, fourth = self.gaussian()
        excess = fourth / variance**2
        found = []

        def score(name: str, structure: Structure, between: float, cells: float, means: float) -> None:
            freedom = max(cells - means, 0.0)
            spread = noise * math.sqrt(freedom * (2 + excess * cells / elements))
            explained = between - base - freedom * noise if freedom else 0.0
            found.append(
                Candidate(name, structure, structure_cost(self.shape, structure), float(explained), float(spread))
            )

        def tile(height: Shape, width: Shape, between: float, cells: float) -> None:
            sizes = (1,) * self.batch + height + width
            name = f"{math.prod(height)} x {math.prod(width)}"
            score(name, ("tile", sizes), between, cells, matrices)

        own = self.shape[self.batch :]
        height, width = self.shape[self.batch : self.cut], self.shape[self.cut :]
        tile(height, width, base, matrices)
        if self.flat:
            for sizes, between, cells in zip(self.row_chain.tiles, self.row_runs.between, self.row_runs.cells):
                if sizes != own:
                    tile(sizes[: len(height)], sizes[len(height) :], between, cells)
        else:
            thin, low = (1,) * len(height), (1,) * len(width)
            for i, sizes in enumerate(self.column_chain.tiles):
                tile(thin, sizes, self.column_runs.between[i], self.column_runs.cells[i])
                if sizes != width:
                    tile(height, sizes, self.wide_columns.between[i], self.wide_columns.cells[i])
            for i, sizes in enumerate(self.row_chain.tiles):
                tile(sizes, low, self.row_runs.between[i], self.row_runs.cells[i])
                if sizes != height:
                    tile(sizes, width, self.wide_rows.between[i], self.wide_rows.cells[i])
            if factored:
                structure = ("factored", self.batch, self.cut - self.batch)
                score("factored", structure, rows + columns, filled_rows + filled_columns, 2 * matrices)
        if full and math.prod(own) > 1:
            score("full", ("full",), squares, elements, matrices)
        return tuple(sorted(found, key=lambda candidate: candidate.cost))


def _relative_squares(part: npt.NDArray[np.float32], square: float) -> Floats:
    relative = part.astype(np.float64)
    relative *= relative
    relative /= square
    return relative


def _moments(relative: list[Floats]) -> Floats:
    """Of elements that all gradients have: number, sum and squares of L, products of pairs of logs, sums of logs."""
    values = np.log(np.mean(relative, axis=0) + FLOOR)
    logs = np.log(np.add(relative, FLOOR))
    pairs = np.square(logs.sum(axis=0)).sum() - np.square(logs).sum()
    head = [values.size, values.sum(), np.square(values).sum(), pairs / (len(logs) * (len(logs) - 1))]
    return np.concatenate([head, logs.sum(axis=1)])


def _second_cumulant(k: int) -> float:
    """Variance of the logarithm of a chi-squared number with k degrees of freedom: trigamma(k / 2).

    Examples:
      >>> _second_cumulant(1) == math.pi**2 / 2, round(_second_cumulant(4), 6)
      (True, 0.644934)
    """
    x, value = (0.5, math.pi**2 / 2) if k % 2 else (1.0, math.pi**2 / 6)
    while x < k / 2:
        value, x = value - x**-2, x + 1
    return value


def _fourth_cumulant(k: int) -> float:
    """Fourth cumulant of the same: the third derivative of the digamma function at k / 2.

    Examples:
      >>> round(_fourth_cumulant(1) / _second_cumulant(1) ** 2, 6)
      4.0
    """
    x, value = (0.5, math.pi**4) if k % 2 else (1.0, math.pi**4 / 15)
    while x < k / 2:
        value, x = value - 6 * x**-4, x + 1
    return value
