"""The step of the reference implementation, to the bit: ``rule="reference"`` (SPEC section 5).

Independent of the default step in `update`, from which it differs in rounding (statistics live in the parameter's
dtype), in the order of operations, and in that the update uses the momentum after it was quantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gefen_jax import quantization, tiling
from gefen_jax.update import Leaf, Scalar, bias_correction, is_zero


class ReferenceHyper(NamedTuple):
    """Scalars of one step.

    Attributes:
      b1, b2, eps: as the caller gave them.
      inverse: 1 / (1 - b1^t).
      root: square root of 1 - b2^t.
      zero: an int32 0 that the compiler cannot know to be one.
    """

    b1: Scalar
    b2: Scalar
    eps: Scalar
    inverse: jax.Array
    root: jax.Array
    zero: jax.Array


EXACT_STEPS = 4096
"""Steps for which the bias corrections are rounded once from double precision, as the reference does."""


def hyper(b1: Scalar, b2: Scalar, eps: Scalar, count: jax.Array) -> ReferenceHyper:
    """The scalars of step ``count`` (1 at the first step)."""
    inverse = _correction(b1, count, lambda c: 1 / c)
    root = _correction(b2, count, lambda c: c**0.5)
    return ReferenceHyper(b1, b2, eps, inverse, root, count >> 31)


def _correction(b: Scalar, count: jax.Array, function: Callable[[Any], Any]) -> jax.Array:
    """``function`` of 1 - b^count."""
    late = function(bias_correction(b, count))
    if not isinstance(b, float | int):
        return late
    early = [function(1 - float(b) ** max(step, 1)) for step in range(EXACT_STEPS)]
    return jnp.where(count < EXACT_STEPS, jnp.asarray(early, jnp.float32)[jnp.minimum(count, EXACT_STEPS - 1)], late)


def reference_update(g: jax.Array, leaf: Leaf, codebook: jax.Array, h: ReferenceHyper) -> tuple[jax.Array, Leaf]:
    """One step of one leaf.

    Args:
      g: gradient of the parameter's shape; its statistics' dtype s is that of ``leaf.nu``.
      leaf: its state.
      codebook: float32[256].
      h: the step's scalars.

    Returns:
      q * r, the direction before the learning rate (float32), and the new state.
    """
    shape, kept = g.shape, leaf.nu.dtype
    if g.size == 0:
        return g.astype(jnp.float32), leaf
    g = g.astype(jnp.float32)
    nu_view = tiling.view(shape, leaf.nu.shape)
    mean = _mean((g * g).reshape(nu_view.elements), nu_view.reduce).reshape(leaf.nu.shape)
    nu = _round(_rounded(h.b2 * leaf.nu.astype(jnp.float32), h) + (1 - h.b2) * mean, kept)
    inverse = h.inverse / (jnp.sqrt(nu.astype(jnp.float32)) / h.root + h.eps)

    view = tiling.view(shape, leaf.mu_scale.shape)
    words = _round(codebook, kept).astype(jnp.float32)
    g = g.reshape(view.elements)
    old_scale = leaf.mu_scale.reshape(view.statistic).astype(jnp.float32)
    m = _rounded(quantization.decode(leaf.mu.reshape(view.elements), words) * old_scale, h)
    m = _lerp(m, g, 1 - h.b1)
    scale = _round(jnp.max(jnp.abs(m), view.reduce, keepdims=True), kept)
    divisor = scale.astype(jnp.float32)
    y = jnp.where(divisor == 0, 0.0, m / jnp.where(divisor == 0, 1.0, divisor))
    codes = quantization.nearest(y, codebook)
    q = _round(quantization.decode(codes, words) * divisor, kept).astype(jnp.float32).reshape(shape)

    scaled = _rounded(q.reshape(nu_view.elements) * inverse.reshape(nu_view.statistic), h)
    new = Leaf(codes.reshape(shape), scale.reshape(leaf.mu_scale.shape), nu, leaf.nu_cross)
    return scaled.reshape(shape), new


def reference_parameter(
    p: jax.Array, direction: jax.Array, learning_rate: Scalar, decay: Scalar, h: ReferenceHyper
) -> jax.Array:
    """The new parameter: decay before the update, each rounded to the parameter's dtype."""
    w = p.astype(jnp.float32)
    if not is_zero(decay):
        w = _round(_rounded(w * (1 - learning_rate * decay), h), p.dtype).astype(jnp.float32)
    return _round(w - _rounded(direction * learning_rate, h), p.dtype)


def _lerp(m: jax.Array, g: jax.Array, weight: Scalar) -> jax.Array:
    """m + weight (g - m), from the nearer end: one rounding after the difference where XLA fuses it."""
    near = m + weight * (g - m)
    far = g - (g - m) * (1 - jnp.float32(weight))
    if isinstance(weight, float | int):
        return near if math.fabs(weight) < 0.5 else far
    return jnp.where(jnp.abs(weight) < 0.5, near, far)


def _mean(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Mean over ``axes``, which are kept, by halving: its error grows with the logarithm of the block's length."""
    count = math.prod(x.shape[axis] for axis in axes)
    for axis in axes:
        while x.shape[axis] > 1:
            half = x.shape[axis] // 2
            head = lax.slice_in_dim(x, 0, half, axis=axis) + lax.slice_in_dim(x, half, 2 * half, axis=axis)
            rest = lax.slice_in_dim(x, 2 * half, x.shape[axis], axis=axis)
            x = lax.concatenate([head, rest], axis) if rest.shape[axis] else head
    return x / count


def _rounded(x: jax.Array, h: ReferenceHyper) -> jax.Array:
    """``x`` rounded to float32 here. Seen as integers and changed by an unknown 0, the product cannot be fused into
    a later sum, where the reference rounds it (an optimization barrier does not prevent that on the CPU)."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ h.zero, jnp.float32)


def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round float32 to ``dtype``; behind a barrier, or XLA drops the pair of casts and keeps excess precision."""
    return x if dtype == jnp.float32 else lax.optimization_barrier(x.astype(dtype))
