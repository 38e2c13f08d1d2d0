"""The reference's block length: one period per leaf, read from its first gradient (Gefen, arXiv 2606.13894).

The logarithm of the squared gradient is averaged over blocks of every admissible length; a length whose
neighbouring block means differ more than those of the next shorter and the next longer length is a peak, and the
highest peak wins. This is the rule of the paper's public implementation, kept exact: `rule="reference"` uses it.
The default rule chooses with :mod:`gefen_jax.partition` instead.

Block sums are hierarchical: those of length p come from those of length p / (smallest prime factor of p). The tree
of lengths is walked depth-first, so one path of it is alive, less than twice the array of logarithms. Differences of
a cumulative sum would be simpler, but their rounding makes false peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gefen_jax._gradient import CHUNK, as_floating, chunks

Floats = npt.NDArray[np.float64]

LOG_FLOOR = 1e-12  # added to the squares before the logarithm
MIN_BLOCKS = 4  # a candidate leaves at least this many blocks
MIN_PERIOD = 8  # a peak must be longer than this
LONG_PERIOD = 1024  # longer choices are reduced to their smallest divisor above it
_FEW = 8  # up to this many parts, adding strided views is faster than reducing short rows


def divisors(n: int) -> list[int]:
    """All divisors of ``n >= 1``, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    found = [1]
    for prime, power in _factors(n):
        found = [d * prime**e for d in found for e in range(power + 1)]
    return sorted(found)


def _factors(n: int) -> list[tuple[int, int]]:
    """Prime factors and their powers, ascending."""
    factors, prime = [], 2
    while prime * prime <= n:
        power = 0
        while n % prime == 0:
            n, power = n // prime, power + 1
        if power:
            factors.append((prime, power))
        prime += 1
    return factors + [(n, 1)] * (n > 1)


def candidates(n: int) -> npt.NDArray[np.int64]:
    """Admissible periods of a leaf with ``n`` elements: divisors that leave at least four blocks.

    Args:
      n: number of elements, not negative.

    Returns:
      int64[k], ascending; empty for fewer than four elements, which take period 1 unseen.

    Examples:
      >>> candidates(40)
      array([ 1,  2,  4,  5,  8, 10])
    """
    if n < 0:
        raise ValueError(f"the number of elements must not be negative, found {n}")
    return np.array([p for p in divisors(n) if n // p >= MIN_BLOCKS] if n else [], np.int64)


def scores(grad: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Score of every candidate: mean absolute difference of neighbouring block means of ``log(g^2 + 1e-12)``.

    Squares are float32, everything after them float64, as in the reference. Extra memory peaks below 20 bytes an
    element.

    Args:
      grad: gradient of one leaf, any shape, any real floating dtype (``ml_dtypes`` included).

    Returns:
      ``(candidates, scores)``: int64[k] and float64[k]; scores are NaN or infinite where the gradient is.

    Raises:
      TypeError: the gradient is not real floating point.

    Examples:
      >>> grad = np.repeat(np.float32([1, 2, 4, 8]), 2)
      >>> periods, score = scores(grad)
      >>> periods, (score / np.log(4)).round(3)
      (array([1, 2]), array([0.429, 1.   ]))
    """
    grad = as_floating(grad)
    cand = candidates(grad.size)
    if not cand.size:
        return cand, np.empty(0)
    found = {}
    with np.errstate(invalid="ignore", over="ignore"):  # non-finite gradients are judged by choose_period
        for period, sums in block_sums(_log_squares(grad), cand, merge):
            found[period] = roughness(sums, period)
    return cand, np.array([found[int(p)] for p in cand])


def choose_period(cand: npt.ArrayLike, score: npt.ArrayLike, n: int) -> int:
    """The reference's choice among scored candidates.

    An entry is a peak if it is neither first nor last, longer than 8, and not below or level with either neighbour;
    the highest peak wins, among equals the longest. A choice P above 1024 becomes the smallest divisor of ``n`` above
    1024 that divides P. Without a peak the period is 1.

    Args:
      cand: int64[k], ascending.
      score: float64[k].
      n: number of elements of the leaf.

    Returns:
      The period, a divisor of ``n``.

    Raises:
      ValueError: the lengths differ, or a peak's score is not finite.

    Examples:
      >>> choose_period([1, 2, 4, 5, 8, 10, 20], [3, 1, 2, 1, 1, 2, 1], 80)
      10
    """
    periods, values = np.asarray(cand, np.int64), np.asarray(score, np.float64)
    if periods.shape != values.shape or periods.ndim != 1:
        raise ValueError(
            f"candidates and scores must be vectors of one length, found {periods.shape} and {values.shape}"
        )
    inner = np.arange(1, max(periods.size - 1, 1))
    # Written as "not (<=)": comparisons with NaN are false, so NaN counts as a peak and is reported below.
    peak = ~(values[inner] <= values[inner - 1]) & ~(values[inner] <= values[inner + 1]) if inner.size else inner > 0
    inner = inner[peak & (periods[inner] > MIN_PERIOD)]
    if not inner.size:
        return 1
    if not np.isfinite(values[inner]).all():
        raise ValueError(
            "the best period score is not finite: the gradient holds NaN, several infinities, or values whose float32 "
            "square overflows; use a finite first gradient"
        )
    best = int(periods[inner][values[inner] == values[inner].max()].max())
    if best > LONG_PERIOD:
        best = next(d for d in divisors(best) if d > LONG_PERIOD)
    assert n % best == 0
    return best


def reference_period(grad: npt.ArrayLike) -> int:
    """Period of one leaf by the reference's rule, from its first gradient.

    Args:
      grad: gradient, any shape, real floating dtype. Fewer than four elements (none included) give 1.

    Returns:
      A divisor of the number of elements.

    Raises:
      TypeError: the gradient is not real floating point.
      ValueError: the best score is not finite.

    Examples:
      >>> rng = np.random.default_rng(1)
      >>> scale = np.exp(2 * rng.normal(size=(40, 1)))
      >>> reference_period(scale * rng.normal(size=(40, 24)).astype(np.float32))
      24

    References:
      Benedek, Koren, Fried, "Gefen: Optimized Stochastic Optimizer", arXiv 2606.13894, 2026.
    """
    grad = as_floating(grad)
    return choose_period(*scores(grad), grad.size)


def _log_squares(grad: npt.NDArray[np.generic]) -> Floats:
    logs = np.empty(grad.size)
    for start, part in chunks(grad):
        out = logs[start : start + part.size]
        out[:] = np.square(part, out=part)  # float32: the reference squares before it widens
        out += LOG_FLOOR
        np.log(out, out=out)
    return logs


def block_sums(logs: Any, cand: npt.NDArray[np.int64], merge: Callable[[Any, int], Any]) -> Iterator[tuple[int, Any]]:
    """Depth-first over the tree of candidate lengths, with their block sums; one path is alive at a time.

    ``merge(sums, parts)`` adds up neighbours, of whatever arrays ``logs`` are.
    """
    wanted = set(cand.tolist())
    primes = [prime for prime, _ in _factors(logs.size)]

    def walk(period: int, sums: Any, largest: int) -> Iterator[tuple[int, Any]]:
        yield period, sums
        for prime in primes:
            # `period` is reached with its factors in falling order, so `prime` is the smallest of the child's.
            if prime <= largest and period * prime in wanted:
                yield from walk(period * prime, merge(sums, prime), prime)

    return walk(1, logs, primes[-1])


def merge(sums: Floats, parts: int) -> Floats:
    """Sums of every ``parts`` neighbours, the same operations for every block: equal blocks stay equal."""
    rows = sums.reshape(-1, parts)
    if parts > _FEW:
        return rows.sum(axis=1)  # pairwise, so long blocks lose no digits
    merged = rows[:, 0] + rows[:, 1]
    for part in range(2, parts):
        merged += rows[:, part]
    return merged


def roughness(sums: Floats, period: int) -> float:
    """Mean absolute difference of neighbouring block means."""
    steps = sums.size - 1
    parts = [np.abs(np.diff(sums[i : i + CHUNK + 1])).sum() for i in range(0, steps, CHUNK)]
    return float(np.sum(parts)) / (steps * period)
