"""The default rule in float64 NumPy, from its equations alone: it shares no code with the library.

Sources: Gefen, arXiv 2606.13894, with one scale per block of the first moment, and a second moment that is one mean
per block, row and column means (their product over the mean of the rows), or full. A structure is ("tile", sizes),
("full",) or ("factored", batch axes, row axes), as in a plan.
"""

import math
from typing import NamedTuple

import numpy as np

ULP = 2.0**-24
"""Half the distance from 1 to the next float32: the largest relative error of one rounding."""


class Moments(NamedTuple):
    """First moment, and second moment as it is stored: float64, of the shapes that `zeros` gives them."""

    m: np.ndarray
    nu: np.ndarray
    cross: np.ndarray


class Hyper(NamedTuple):
    """Decay rates and eps."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8


def block_numbers(shape, structure):
    """Number of the block that each element is in."""
    if structure[0] == "full":
        return np.arange(math.prod(shape)).reshape(shape)
    counts = [size // tile for size, tile in zip(shape, structure[1])]
    index = [i // tile for i, tile in zip(np.indices(shape), structure[1])]
    return np.ravel_multi_index(index, counts) if shape else np.zeros((), int)


def _matrices(x, nu):
    """``x`` as (batch, rows, columns) of a factored leaf."""
    batch, rows = nu[1], nu[2]
    cut = batch + rows
    return x.reshape(math.prod(x.shape[:batch]), math.prod(x.shape[batch:cut]), math.prod(x.shape[cut:]))


def zeros(leaf):
    """The moments of a fresh leaf (anything with shape, mu and nu)."""
    m = np.zeros(leaf.shape)
    if leaf.nu[0] == "factored":
        stack, height, width = _matrices(m, leaf.nu).shape
        return Moments(m, np.zeros((stack, height)), np.zeros((stack, width)))
    return Moments(m, np.zeros(math.prod(leaf.shape) if leaf.nu[0] == "full" else _blocks(leaf.shape, leaf.nu)), m)


def _blocks(shape, structure):
    return math.prod(size // tile for size, tile in zip(shape, structure[1]))


def block_mean(x, structure):
    """Mean of each block, in their order."""
    numbers = block_numbers(x.shape, structure).ravel()
    return np.bincount(numbers, x.ravel()) / np.bincount(numbers)


def block_max(x, structure):
    """Largest element of its block, for each element."""
    numbers = block_numbers(x.shape, structure).ravel()
    largest = np.full(numbers.max() + 1, -np.inf)
    np.maximum.at(largest, numbers, x.ravel())
    return largest[numbers].reshape(x.shape)


def estimate(leaf, nu, cross):
    """Second moment of each element."""
    if leaf.nu[0] != "factored":
        return nu[block_numbers(leaf.shape, leaf.nu)]
    mean = nu.mean(axis=1)[:, None, None]
    v = np.divide(nu[:, :, None] * cross[:, None, :], mean, out=np.zeros((*nu.shape, cross.shape[1])), where=mean > 0)
    return v.reshape(leaf.shape)


def second(leaf, old, g, h):
    """New second moment as stored."""
    square = g * g
    if leaf.nu[0] == "factored":
        square = _matrices(square, leaf.nu)
        rows = h.b2 * old.nu + (1 - h.b2) * square.mean(axis=2)
        return rows, h.b2 * old.cross + (1 - h.b2) * square.mean(axis=1)
    return h.b2 * old.nu + (1 - h.b2) * block_mean(square, leaf.nu), old.cross


def step(leaf, old, g, t, h):
    """Direction of step t (1 is the first) and the moments after it, the first one not yet quantised."""
    g = np.asarray(g).astype(np.float64)
    m = h.b1 * old.m + (1 - h.b1) * g
    nu, cross = second(leaf, old, g, h)
    root = np.sqrt(estimate(leaf, nu, cross) / (1 - h.b2**t))
    return m / (1 - h.b1**t) / (root + h.eps), Moments(m, nu, cross)


def quantise(leaf, m, words):
    """Codes (a word of two copies counts as the first) and the first moment that they stand for."""
    if leaf.mu == ("full",) or m.size == 0:
        return None, m
    scale = block_max(np.abs(m), leaf.mu)
    distinct, first = np.unique(words.astype(np.float64), return_index=True)
    y = np.divide(m, scale, out=np.zeros_like(m), where=scale > 0)
    nearest = np.searchsorted((distinct[1:] + distinct[:-1]) / 2, y)
    return first[nearest], distinct[nearest] * scale


def read(leaf, state, words):
    """The moments that a library state holds; ``state`` has mu, mu_scale, nu and nu_cross."""
    mu, scale, nu, cross = (np.asarray(x).astype(np.float64) for x in state)
    if leaf.mu != ("full",):
        codes = np.asarray(state[0])
        if codes.size != math.prod(leaf.shape):
            codes = unpack(codes, leaf.shape)
        scale = scale.ravel()[block_numbers(leaf.shape, leaf.mu)]
        mu = words.astype(np.float64)[codes] * scale
    if leaf.nu[0] == "factored":
        batch, cut = leaf.nu[1], leaf.nu[1] + leaf.nu[2]
        stack = math.prod(leaf.shape[:batch])
        width = math.prod(leaf.shape[cut:])
        return Moments(mu, nu.reshape(stack, -1), cross.reshape(stack, width))
    return Moments(mu, nu.ravel(), cross)


def unpack(codes, shape):
    """One code per element from bytes of two: the even element in the low four bits, along the axis that is halved."""
    axis = next(i for i, (full, kept) in enumerate(zip(shape, codes.shape)) if full != kept)
    out = np.zeros(shape, np.uint8)
    even, odd = ([slice(None)] * axis + [slice(start, None, 2)] for start in (0, 1))
    out[tuple(even)], out[tuple(odd)] = codes & 15, codes >> 4
    return out


def rounding_of(leaf, old, moments, g, t, h):
    """Error that float32 leaves in the first moment, and what the direction multiplies it by.

    A product, a product, a sum: relative to its terms, which may cancel.
    """
    error = 4 * ULP * (h.b1 * np.abs(old.m) + (1 - h.b1) * np.abs(np.asarray(g).astype(np.float64)))
    root = np.sqrt(estimate(leaf, moments.nu, moments.cross) / (1 - h.b2**t))
    return error, 1 / (1 - h.b1**t) / (root + h.eps)


def check_step(leaf, before, after, g, direction, t, words, h, *, slack=2e-5):
    """Assert that one step of the library is `step` and `quantise` to float32 rounding.

    Args:
      leaf: shape, mu and nu.
      before, after: the library's states of the leaf around the step.
      g: gradient, in its own dtype.
      direction: what the library returned for `scale_by_gefen`, in the gradient's dtype.
      t: the step, 1 for the first.
      words: codebook.
      h: hyper-parameters.
      slack: relative error allowed to a second moment: sums of many float32 squares.
    """
    old, new = read(leaf, before, words), read(leaf, after, words)
    expected, moments = step(leaf, old, g, t, h)
    np.testing.assert_allclose(new.nu, moments.nu, rtol=slack, atol=1e-37)
    if leaf.nu[0] == "factored":
        np.testing.assert_allclose(new.cross, moments.cross, rtol=slack, atol=1e-37)
    g = np.asarray(g)
    error, gain = rounding_of(leaf, old, moments, g, t, h)
    rounding, floor = {"float32": (2 * ULP, 1e-37), "bfloat16": (2.0**-8, 1e-37), "float16": (2.0**-10, 2.0**-24)}[
        g.dtype.name
    ]
    difference = np.abs(np.asarray(direction).astype(np.float64) - expected)
    assert np.all(difference <= error * gain + (slack + rounding) * np.abs(expected) + floor), (leaf, difference.max())
    if leaf.mu == ("full",):
        assert np.all(np.abs(new.m - moments.m) <= error + 1e-37), leaf
        return
    # Scale: the largest magnitude of the block. Codes: no word is nearer by more than rounding.
    scale = np.asarray(after[1]).astype(np.float64).ravel()[block_numbers(leaf.shape, leaf.mu)]
    worst = block_max(error, leaf.mu)
    largest = block_max(np.abs(moments.m), leaf.mu)
    assert np.all(np.abs(scale - largest) <= worst + 1.2e-38), leaf
    _, best = quantise(leaf, moments.m, words)
    excess = np.abs(new.m - moments.m) - np.abs(best - moments.m)
    assert np.all(excess <= 4 * worst + 4 * ULP * largest + 2.4e-38), (leaf, excess.max())
