"""Families of codebooks for the first moment, by name: what a learned codebook is compared with.

Each is a function (counts, bits) -> float32 words, ascending, from -1 to 1; ``counts`` is the histogram of
`gefen_jax.codebook.histogram`. All but "nozero" hold 0 where the default rule has it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from gefen_jax.codebook import learn_codebook, mse, prior_codebook, reference_codebook
from gefen_jax.quantization import BINS

Words = Callable[[np.ndarray, int], np.ndarray]
STEP = 2 / BINS  # width of a bin of the search table: words closer than this are not told apart
RELATIVE = {8: 0.01, 4: 0.05}  # d of the relative error, in units of the block maximum
LLOYD_STEPS = 200


def from_sides(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """A codebook from the magnitudes of its negative and its positive words; 8 bits hold two zeros, 4 bits one."""
    zeros = np.zeros(2 if len(lower) == len(upper) else 1)
    return np.concatenate([-lower[::-1], zeros, upper]).astype(np.float32)


def sides(bits: int) -> tuple[int, int]:
    """Number of words below and above 0."""
    return (127, 127) if bits == 8 else (7, 8)


def learned(counts: np.ndarray, bits: int) -> np.ndarray:
    """Exact optimum for the squared error."""
    return learn_codebook(counts, bits=bits)


def prior(counts: np.ndarray, bits: int) -> np.ndarray:
    """The words of a gradient that was never seen."""
    return prior_codebook(bits)


def uniform(counts: np.ndarray, bits: int) -> np.ndarray:
    """Evenly spaced on either side."""
    return from_sides(*(np.arange(1, n + 1) / n for n in sides(bits)))


def logarithmic(counts: np.ndarray, bits: int) -> np.ndarray:
    """Each word a constant multiple of the one before, but no closer to it than a bin.

    >>> upper = logarithmic(np.zeros(BINS), 4)[8:]
    >>> bool((upper[-1] / upper[-2]).round(3) == (upper[4] / upper[3]).round(3))
    True
    """

    def side(count: int) -> np.ndarray:
        low, high = 1.0, 64.0
        for _ in range(60):  # bisection on the multiple
            ratio = (low + high) / 2
            found = [STEP]
            while len(found) < count:
                found.append(max(found[-1] + STEP, found[-1] * ratio))
            low, high = (ratio, high) if found[-1] < 1 else (low, ratio)
        return np.asarray(found[:-1] + [1.0])

    return from_sides(*map(side, sides(bits)))


def lloyd(counts: np.ndarray, bits: int) -> np.ndarray:
    """Lloyd's iterations, ends and zero held: a local optimum (Lloyd 1982, Max 1960).

    They start from the words of high-resolution theory, whose density is the cube root of the data's. From evenly
    spaced ones they stop at once: no word moves far enough to pass a bin on.
    """
    folded = (counts[BINS // 2 :] + counts[: BINS // 2][::-1]).astype(np.float64)
    centres = (np.arange(BINS // 2) + 0.5) * STEP
    mass = np.cumsum(np.cbrt(folded + 1e-3))

    def side(count: int) -> np.ndarray:
        words = np.interp(np.arange(count + 1) / count, mass / mass[-1], centres)
        words[0], words[-1] = 0, 1
        for _ in range(LLOYD_STEPS):
            served = np.searchsorted((words[1:] + words[:-1]) / 2, centres)
            weight = np.bincount(served, folded, count + 1)
            mean = np.bincount(served, folded * centres, count + 1) / np.where(weight > 0, weight, 1)
            words[1:-1] = np.where(weight > 0, mean, words)[1:-1]
        return words[1:]

    return from_sides(*map(side, sides(bits)))


def relative(counts: np.ndarray, bits: int) -> np.ndarray:
    """Exact optimum for the squared error relative to the element's size."""
    return learn_codebook(counts, bits=bits, relative=RELATIVE[bits])


def nozero(counts: np.ndarray, bits: int) -> np.ndarray:
    """Exact optimum for the squared error without a word for 0: the reference's."""
    return reference_codebook(counts, num_codes=2**bits)


FAMILIES: Mapping[str, Words] = MappingProxyType(
    {
        "learned": learned,
        "prior": prior,
        "uniform": uniform,
        "log": logarithmic,
        "lloyd": lloyd,
        "relative": relative,
        "nozero": nozero,
    }
)
"""Name -> words."""


def errors(counts: np.ndarray, bits: int) -> dict[str, float]:
    """Mean squared error of each family on a histogram, by name, relative to the learned codebook's."""
    best = mse(counts, learned(counts, bits))
    return {name: mse(counts, words(counts, bits)) / best for name, words in FAMILIES.items()}
