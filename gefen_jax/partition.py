"""Which elements share a second moment: the default rule's choice from the first gradients.

The paper's idea (Gefen, arXiv 2606.13894) is that the squared first gradient shows it. Here every leaf is viewed as
(batch | rows | columns) and the logarithm L of its squared gradient is explained by candidate structures: one mean
per run of columns, group of rows, run of rows, group of columns; row and column factors; every element for itself.
What a structure explains is the sum of squares between its cells, less what noise alone would give: L of a single
Gaussian sample varies by pi^2/2 around its mean, whatever its scale. All leaves then compete for a common budget of
stored numbers.

* Invariant to the gradient's scale: L is the logarithm of g^2 / mean(g^2) + 1e-12, in float64.
* Exact zeros are left out of every sum. They mark what took no part (unseen embedding rows, dead units), not a
  scale; with the floor in their place they would outweigh all else by (log 1e-12)^2.
* A structure must beat the next cheaper one by five standard deviations of the noise. A leaf without any such
  structure keeps the shape rule.
* Sums are hierarchical, in one pass over the rows: beside two chunks, memory goes with rows + columns.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from gefen_jax import _cells
from gefen_jax._cells import Candidate, Sums, structure_cost
from gefen_jax.reasons import FLAT, LEARNED, NON_FINITE, ZERO
from gefen_jax.tiling import Shape, Structure

__all__ = ["FLAT", "LEARNED", "NON_FINITE", "ZERO", "Candidate", "Choice", "Survey", "choose", "survey"]

CLEAR = 5.0
"""Standard deviations of the noise by which a structure must explain more than a cheaper one; see `_clear`."""
ELEMENTS_PER_STATISTIC = 170
"""The budget: one stored number for this many elements (or what the shape rule stores, if that is more)."""


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the first gradients say about one leaf.

    Attributes:
      shape: the leaf's shape.
      scales: numbers stored for its momentum's blocks.
      default: the shape rule's structure.
      default_cost: numbers that it stores.
      reason: `ZERO`, `FLAT` or `NON_FINITE` if the gradients decide nothing, else `LEARNED`.
      candidates: all that were scored, ascending in cost; the first keeps one mean per matrix.
      counted: elements with a gradient other than 0.
      noise: variance of L that is taken for noise.
    """

    shape: Shape
    scales: int
    default: Structure
    default_cost: int
    reason: str
    candidates: tuple[Candidate, ...] = ()
    counted: int = 0
    noise: float = math.nan


@dataclasses.dataclass(frozen=True)
class Choice:
    """The structure of one leaf's second moment, and why: `LEARNED`, `ZERO`, `FLAT` or `NON_FINITE`."""

    structure: Structure
    reason: str


def survey(
    gradients: Sequence[Any],
    *,
    tile: Shape,
    default: Structure,
    view: tuple[int, int] | None = None,
    factored: bool = True,
    full: bool = True,
    device: bool = False,
) -> Survey:
    """Score the candidate structures of one leaf.

    Several gradients are averaged, each in units of its own mean square. The more there are, the less noise there is
    in L; with two or more it is measured from their disagreement, with one from neighbours, and never taken below
    that of Gaussian samples. They should come from different batches.

    Args:
      gradients: one or more gradients of the leaf, real floating, of one shape.
      tile: block of the first moment, whose scales count towards the budget.
      default: structure of the second moment by the shape rule, in use where the gradients decide nothing.
      view: (number of leading batch axes, number of row axes); the columns are the rest, and no cell crosses a
        batch entry. None: every axis but the last two is a batch axis, the last is the columns.
      factored: whether row and column factors are a candidate.
      full: whether one number per element is a candidate.
      device: whether the gradients are JAX arrays that are summed up where they lie (`on_device`).

    Returns:
      The scores, or the reason why there are none.

    Raises:
      TypeError: a gradient is not real floating point.
      ValueError: there is no gradient, the shapes differ, or the view does not fit them.

    Examples:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> grad = np.exp(rng.normal(size=(64, 1))) * rng.normal(size=(64, 96))
      >>> found = survey([grad], tile=(1, 96), default=("factored", 0, 1), view=(0, 1))
      >>> choose([found])[0]
      Choice(structure=('tile', (1, 96)), reason='learned')
    """
    measure: Any = _cells
    if device:
        from gefen_jax import on_device as measure
    arrays = [measure.prepare(gradient) for gradient in gradients]
    if not arrays:
        raise ValueError("no gradient to learn from")
    shape = arrays[0].shape
    if any(array.shape != shape for array in arrays):
        raise ValueError(f"the gradients of one leaf differ in shape: {', '.join(str(a.shape) for a in arrays)}")
    batch, rows = _default_view(shape) if view is None else view
    if batch < 0 or rows < 0 or batch + rows > len(shape):
        raise ValueError(f"a view of {batch} batch and {rows} row axes does not fit an array of shape {shape}")
    size = math.prod(shape)
    scales = size // math.prod(tile)
    empty = Survey(shape, scales, default, structure_cost(shape, default), ZERO)
    if size == 0:
        return empty
    squares = [measure.mean_square(array) for array in arrays]
    if not all(map(math.isfinite, squares)):
        return dataclasses.replace(empty, reason=NON_FINITE)
    measured = [(array, square) for array, square in zip(arrays, squares) if square > 0]
    if not measured:
        return empty
    sums = Sums(shape, batch, rows, len(measured))
    measure.add(sums, measured)
    noise = sums.noise()
    candidates = sums.candidates(noise, factored, full)
    found = dataclasses.replace(empty, candidates=candidates, counted=int(sums.totals[0]), noise=noise)
    return dataclasses.replace(found, reason=LEARNED if len(_ascent(found)) > 1 else FLAT)


def restrict(found: Survey, keep: Callable[[Structure], bool]) -> Survey:
    """The survey of a leaf with those candidates alone that ``keep`` accepts."""
    found = dataclasses.replace(found, candidates=tuple(c for c in found.candidates if keep(c.structure)))
    return found if found.reason != LEARNED or len(_ascent(found)) > 1 else dataclasses.replace(found, reason=FLAT)


def choose(surveys: Sequence[Survey], budget: int | None = None) -> list[Choice]:
    """Structures of all leaves together, within a budget of stored numbers.

    Leaves whose gradients decide nothing take the shape rule. The others start with one mean per matrix and climb
    their upper hull of (cost, explained), always the steepest step of any leaf first that the budget still holds: the
    linear relaxation of the knapsack problem with one choice per leaf. What is then left goes, leaf by leaf, to the
    best structure off the hull that it can pay. Ties go to the cheaper step, then to the earlier leaf.

    Args:
      surveys: of all quantised leaves.
      budget: numbers that momentum scales and second moments together may store. None: one per 170 elements, or what
        the shape rule (or the cheapest candidate) stores if that is more.

    Returns:
      One `Choice` per survey.

    Raises:
      ValueError: the budget does not even hold the cheapest structures.
    """
    ascents = [_ascent(found) for found in surveys]
    if budget is None:
        cheapest = [a[0].cost if s.reason == LEARNED else 0 for s, a in zip(surveys, ascents)]
        default = sum(found.scales + max(found.default_cost, cost) for found, cost in zip(surveys, cheapest))
        budget = max(sum(math.prod(found.shape) for found in surveys) // ELEMENTS_PER_STATISTIC, default)
    left = budget - sum(found.scales for found in surveys)
    left -= sum(a[0].cost if s.reason == LEARNED else s.default_cost for s, a in zip(surveys, ascents))
    if left < 0:
        raise ValueError(f"a budget of {budget} statistics is {-left} short of the cheapest structures")

    steps: list[tuple[float, int, int]] = []  # (-slope, extra cost, leaf): the next step of each leaf

    def offer(leaf: int) -> None:
        if surveys[leaf].reason == LEARNED and reached[leaf] + 1 < len(ascents[leaf]):
            here, there = ascents[leaf][reached[leaf] : reached[leaf] + 2]
            extra = there.cost - here.cost
            heapq.heappush(steps, ((here.explained - there.explained) / extra, extra, leaf))

    reached = [0] * len(surveys)
    for leaf in range(len(surveys)):
        offer(leaf)
    stopped = []
    while steps:
        _, extra, leaf = heapq.heappop(steps)
        if extra > left:
            stopped.append(leaf)
            continue
        left -= extra
        reached[leaf] += 1
        offer(leaf)

    chosen = [ascent[step] if ascent else None for ascent, step in zip(ascents, reached)]
    for leaf in sorted(stopped):
        found, here = surveys[leaf], ascents[leaf][reached[leaf]]
        payable = [c for c in found.candidates if 0 < c.cost - here.cost <= left and _clear(found, here, c)]
        if payable:
            there = max(payable, key=lambda c: (c.explained, -c.cost))
            chosen[leaf] = there
            left -= there.cost - here.cost
    return [
        Choice(there.structure, LEARNED)
        if there is not None and found.reason == LEARNED
        else Choice(found.default, found.reason)
        for found, there in zip(surveys, chosen)
    ]


def _clear(found: Survey, here: Candidate, there: Candidate) -> bool:
    """Whether ``there`` explains more than ``here`` beyond doubt: a bound on the tail of chi-squared noise.

    With x = CLEAR^2 / 2, a chi-squared number with d degrees of freedom exceeds d + 2 sqrt(d x) + 2 x with a
    probability below exp(-x) (Laurent and Massart, 2000, lemma 1).
    """
    doubt = CLEAR * math.hypot(here.spread, there.spread) + CLEAR**2 * found.noise
    return there.explained - here.explained > doubt


def _ascent(found: Survey) -> list[Candidate]:
    """The leaf's candidates on the upper hull of (cost, explained), each clearly better than the one before."""
    ascent = list(found.candidates[:1])
    while ascent:
        here = ascent[-1]
        better = [c for c in found.candidates if c.cost > here.cost and _clear(found, here, c)]
        if not better:
            break
        ascent.append(max(better, key=lambda c: ((c.explained - here.explained) / (c.cost - here.cost), -c.cost)))
    return ascent


def _default_view(shape: Shape) -> tuple[int, int]:
    batch = max(len(shape) - 2, 0)
    return batch, max(len(shape) - batch - 1, 0)
