"""The step of one leaf, in plain `jax.numpy`: the paper's equations, and the oracle of every kernel.

With g the gradient, m and v the first and second moment, t the step and B the codebook (Gefen, arXiv 2606.13894;
SPEC section 5 with the departures of section 11):

    m_t = b1 * B[code] * scale + (1 - b1) * g          first moment, per element
    v_t = b2 * v + (1 - b2) * mean_over_block(g^2)     second moment, per block, row and column, or element
    d_t = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + eps)
    scale = max_over_block |m_t|,   code = index of the word of B nearest to m_t / scale

A factored second moment keeps row means r and column means c of g^2; its estimate is ``r * (c / mean(r))``, 0 where
that mean is 0, and NaN where it is not finite. All arithmetic is float32, whatever the gradient's dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gefen_jax import quantization, tiling
from gefen_jax.quantization import Companding, SearchTable
from gefen_jax.sharding import max_over, mean_over

Scalar = jax.Array | float
TINY = 1.1754944e-38
"""Smallest normal float32. Momentum below it is stored as zero: its reciprocal would overflow."""


class Leaf(NamedTuple):
    """State of one parameter of shape P.

    Attributes:
      mu: first moment: uint8 codes of shape P (packed along one axis for 4 bits), or float32 of shape P (exact).
      mu_scale: float32, largest absolute first moment of each block; shape (1, .., 1) for exact leaves.
      nu: float32 second moment: of shape P, one per block, or the row factor.
      nu_cross: float32 column factor, or ones of shape (1, .., 1).
    """

    mu: jax.Array
    mu_scale: jax.Array
    nu: jax.Array
    nu_cross: jax.Array


class Hyper(NamedTuple):
    """Scalars of one step: decay rates, their complements, bias corrections 1 - b^t, and eps."""

    b1: Scalar
    b2: Scalar
    w1: Scalar
    w2: Scalar
    bc1: jax.Array
    bc2: jax.Array
    eps: Scalar


class Tail(NamedTuple):
    """What follows the direction of one leaf.

    Attributes:
      learning_rate: float32 (); None leaves the direction as it is (`scale_by_gefen`).
      decay: decoupled weight decay of this leaf.
      apply: whether the result is the new parameter instead of its update.
    """

    learning_rate: jax.Array | None
    decay: Scalar
    apply: bool

    @property
    def reads_parameter(self) -> bool:
        """Whether the parameter is needed."""
        return self.apply or not is_zero(self.decay)


class Codebook(NamedTuple):
    """The words and what finds the code of a number."""

    words: jax.Array
    table: SearchTable | Companding


def codebook(words: jax.Array, codec: str) -> Codebook:
    """The `Codebook` of float32 words, for codec "table" or "companding"."""
    finds = quantization.companding if codec == "companding" else quantization.search_table
    return Codebook(words, finds(words))


def single(value: Scalar) -> Scalar:
    """A hyper-parameter as Python number or float32 array: NumPy and float64 scalars would widen the state under x64.

    Examples:
      >>> import numpy as np
      >>> type(single(np.float64(0.5))).__name__, single(jnp.asarray(0.5)).dtype.name
      ('float', 'float32')
    """
    return value.astype(jnp.float32) if isinstance(value, jax.Array) else float(value)


def is_zero(value: Scalar) -> bool:
    """Whether a hyper-parameter is known to be 0 when the step is traced: arrays never are."""
    return isinstance(value, float | int) and value == 0


def bias_correction(b: Scalar, count: jax.Array) -> jax.Array:
    """1 - b^count in float32 without cancellation, for count >= 1.

    Examples:
      >>> float(bias_correction(0.999, jnp.int32(1)))
      0.00099999...
    """
    if isinstance(b, float | int):
        log_b = jnp.float32(math.log(b) if b > 0 else -math.inf)
    else:
        log_b = jnp.log(jnp.asarray(b, jnp.float32))
    return -jnp.expm1(count.astype(jnp.float32) * log_b)


def hyper(b1: Scalar, b2: Scalar, eps: Scalar, count: jax.Array) -> Hyper:
    """The `Hyper` of step ``count`` (1 at the first step)."""
    return Hyper(b1, b2, 1 - b1, 1 - b2, bias_correction(b1, count), bias_correction(b2, count), eps)


def is_exact(mu: jax.Array) -> bool:
    """Whether the leaf keeps Adam's own first moment instead of codes."""
    return mu.dtype != jnp.uint8


def is_factored(leaf: Leaf) -> bool:
    """Whether the second moment is row and column factors: shapes alone say so."""
    return leaf.nu_cross.shape != (1,) * leaf.nu_cross.ndim


def packed_axis(shape: tuple[int, ...], mu: jax.Array) -> int | None:
    """The axis along which two 4-bit codes share a byte; None for whole bytes."""
    return next((i for i, (full, kept) in enumerate(zip(shape, mu.shape)) if full != kept), None)


def second_moment(g: jax.Array, leaf: Leaf, h: Hyper) -> tuple[jax.Array, jax.Array]:
    """New ``nu`` and ``nu_cross`` from a float32 gradient."""
    if not is_factored(leaf):
        return h.b2 * leaf.nu + h.w2 * _block_mean(g * g, leaf.nu), leaf.nu_cross
    rows = mean_over(g * g, reduced(g.shape, leaf.nu.shape), like=leaf.nu)
    # The same squares in other words: XLA would compute g * g once and write it to memory for both reductions.
    columns = mean_over(jnp.abs(g) * jnp.abs(g), reduced(g.shape, leaf.nu_cross.shape), like=leaf.nu_cross)
    return h.b2 * leaf.nu + h.w2 * rows, h.b2 * leaf.nu_cross + h.w2 * columns


def root_factors(nu: jax.Array, nu_cross: jax.Array, h: Hyper) -> tuple[jax.Array, jax.Array | None]:
    """Square root of the bias-corrected second moment, as (root, None) or as the factors (rows, columns).

    The square root of the estimate is their product. Each factor is near the gradient's own scale, so nothing
    overflows where r * c would (gradients of 1e10 or 1e-10).
    """
    root = jnp.sqrt(nu / h.bc2)
    if nu_cross.shape == (1,) * nu_cross.ndim:
        return root, None
    return root, jnp.sqrt(column_ratio(nu, nu_cross))


def column_ratio(nu: jax.Array, nu_cross: jax.Array) -> jax.Array:
    """c / mean(r), by which the row factor ``nu`` is multiplied in each column; 0 where that mean is 0.

    NaN where it is not finite: with 0 the other rows would be divided by eps alone, and leap.
    """
    mean = mean_over(nu, reduced(nu.shape, nu_cross.shape), like=nu_cross)
    ratio = jnp.where(mean > 0, nu_cross / jnp.where(mean > 0, mean, 1.0), 0.0)
    return jnp.where(jnp.isfinite(mean), ratio, jnp.nan)


def reduced(shape: tuple[int, ...], stat: tuple[int, ...]) -> tuple[int, ...]:
    """The axes over which a statistic of a factored leaf was averaged.

    Examples:
      >>> reduced((16, 2048, 64), (16, 1, 64))
      (1,)
    """
    return tuple(i for i, (full, kept) in enumerate(zip(shape, stat)) if kept == 1 and full > 1)


def first_moment(g: jax.Array, codes: jax.Array, scale: jax.Array, words: jax.Array, h: Hyper) -> jax.Array:
    """m_t in a block view: ``scale`` broadcasts against ``g`` and ``codes``."""
    return quantization.decode(codes, words) * (h.b1 * scale) + h.w1 * g


def requantize(
    m: jax.Array, reduce: tuple[int, ...], table: SearchTable | Companding, like: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Codes and scale of ``m``, with one block along the axes ``reduce``; ``like`` is the old scale."""
    scale = max_over(jnp.abs(m), reduce, like=like)
    scale = jnp.where(scale < TINY, 0.0, scale)
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return quantization.encode(m * inverse, table), scale


def direction(m: jax.Array, root: jax.Array, columns: jax.Array | None, h: Hyper) -> jax.Array:
    """Adam's update direction d_t (without learning rate and sign)."""
    denominator = root + h.eps if columns is None else root * columns + h.eps
    return m / (denominator * h.bc1)


def finish(d: jax.Array, p: jax.Array | None, tail: Tail, dtype: jnp.dtype) -> jax.Array:
    """The update in the gradient's ``dtype``, or the new parameter, from a direction: elementwise."""
    u = d
    if tail.learning_rate is not None:
        if not is_zero(tail.decay):
            assert p is not None  # the caller has checked it, with the leaf's name
            u = u + tail.decay * p.astype(jnp.float32)
        u = -tail.learning_rate * u
    u = u.astype(dtype)
    if not tail.apply:
        return u
    assert p is not None
    return (p + u).astype(p.dtype)


def leaf_update(g: jax.Array, leaf: Leaf, codebook: Codebook, h: Hyper) -> tuple[jax.Array, Leaf]:
    """One step of one leaf over whole arrays.

    Args:
      g: gradient of the parameter's shape, any float dtype.
      leaf: its state.
      codebook: words and search table.
      h: the step's scalars.

    Returns:
      The direction d_t, float32 of the parameter's shape (the update is ``-learning_rate * d_t``), and the new state.
    """
    shape = g.shape
    g = g.astype(jnp.float32)
    if g.size == 0:
        return g, leaf
    nu, nu_cross = second_moment(g, leaf, h)
    root, columns = root_factors(nu, nu_cross, h)
    if is_exact(leaf.mu):
        m = h.b1 * leaf.mu + h.w1 * g
        return direction(m, root, columns, h), Leaf(m, leaf.mu_scale, nu, nu_cross)

    axis = packed_axis(shape, leaf.mu)
    codes = leaf.mu if axis is None else quantization.unpack(leaf.mu, axis)
    view = tiling.view(shape, leaf.mu_scale.shape)
    old_scale = leaf.mu_scale.reshape(view.statistic)
    m = first_moment(g.reshape(view.elements), codes.reshape(view.elements), old_scale, codebook.words, h)
    new_codes, scale = requantize(m, view.reduce, codebook.table, old_scale)
    m = m.reshape(shape)
    nu_view = tiling.view(shape, nu.shape) if columns is None else None
    if nu_view is None or not nu_view.reduce:
        d = direction(m, root, columns, h)
    else:
        d = direction(m.reshape(nu_view.elements), root.reshape(nu_view.statistic), None, h).reshape(shape)
    new_codes = new_codes.reshape(shape)
    mu = new_codes if axis is None else quantization.pack(new_codes, axis)
    return d, Leaf(mu, scale.reshape(leaf.mu_scale.shape), nu, nu_cross)


def _block_mean(squares: jax.Array, stat: jax.Array) -> jax.Array:
    view = tiling.view(squares.shape, stat.shape)
    return mean_over(squares.reshape(view.elements), view.reduce, like=stat).reshape(stat.shape)
