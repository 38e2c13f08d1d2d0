"""The step of the reference implementation, to the bit: ``rule="reference"`` (SPEC section 5).

Independent of the default step in `update`, from which it differs in rounding (statistics live in the parameter's
dtype), in the order of operations, and in that the update uses the momentum after it was quantised.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gefen_jax import blocks, quantization
from gefen_jax.update import Leaf, Scalar, bias_correction


class ReferenceHyper(NamedTuple):
    """Scalars of one step."""

    b1: Scalar
    b2: Scalar
    bc1: jax.Array
    bc2: jax.Array
    eps: Scalar


_EXACT_STEPS = 4096


def hyper(b1: Scalar, b2: Scalar, eps: Scalar, count: jax.Array) -> ReferenceHyper:
    """The scalars of step ``count`` (1 at the first step)."""
    return ReferenceHyper(b1, b2, _correction(b1, count), _correction(b2, count), eps)


def _correction(b: Scalar, count: jax.Array) -> jax.Array:
    """1 - b^count, for the first steps rounded once from double precision as the reference does."""
    late = bias_correction(b, count)
    if not isinstance(b, float | int):
        return late
    early = jnp.asarray([1 - float(b) ** step for step in range(_EXACT_STEPS)], jnp.float32)
    return jnp.where(count < _EXACT_STEPS, early[jnp.minimum(count, _EXACT_STEPS - 1)], late)


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
    nu_view = blocks.view(shape, leaf.nu.shape)
    mean = jnp.mean((g * g).reshape(nu_view.elements), nu_view.reduce, keepdims=True).reshape(leaf.nu.shape)
    nu = _round(h.b2 * leaf.nu.astype(jnp.float32) + (1 - h.b2) * mean, kept)
    inverse = (1 / h.bc1) / (jnp.sqrt(nu.astype(jnp.float32)) / jnp.sqrt(h.bc2) + h.eps)

    view = blocks.view(shape, leaf.mu_scale.shape)
    words = _round(codebook, kept).astype(jnp.float32)
    g = g.reshape(view.elements)
    old_scale = leaf.mu_scale.reshape(view.statistic).astype(jnp.float32)
    m = quantization.decode(leaf.mu.reshape(view.elements), words) * old_scale
    m = _lerp(m, g, 1 - h.b1)
    scale = _round(jnp.max(jnp.abs(m), view.reduce, keepdims=True), kept)
    divisor = scale.astype(jnp.float32)
    y = jnp.where(divisor == 0, 0.0, m / jnp.where(divisor == 0, 1.0, divisor))
    codes = quantization.nearest(y, codebook)
    q = _round(quantization.decode(codes, words) * divisor, kept).astype(jnp.float32).reshape(shape)

    scaled = q.reshape(nu_view.elements) * inverse.reshape(nu_view.statistic)
    new = Leaf(codes.reshape(shape), scale.reshape(leaf.mu_scale.shape), nu, leaf.nu_cross)
    return scaled.reshape(shape), new


def reference_parameter(p: jax.Array, direction: jax.Array, learning_rate: Scalar, decay: Scalar) -> jax.Array:
    """The new parameter: decay before the update, each rounded to the parameter's dtype."""
    w = p.astype(jnp.float32)
    if not (isinstance(decay, float | int) and decay == 0):
        w = _round(w * (1 - learning_rate * decay), p.dtype).astype(jnp.float32)
    return _round(w - direction * learning_rate, p.dtype)


def _lerp(m: jax.Array, g: jax.Array, weight: Scalar) -> jax.Array:
    """m + weight (g - m), from the nearer end: one rounding after the difference where XLA fuses it."""
    near = m + weight * (g - m)
    far = g - (g - m) * (1 - jnp.float32(weight))
    if isinstance(weight, float | int):
        return near if math.fabs(weight) < 0.5 else far
    return jnp.where(jnp.abs(weight) < 0.5, near, far)


def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round float32 to ``dtype``; behind a barrier, or XLA drops the pair of casts and keeps excess precision."""
    return x if dtype == jnp.float32 else lax.optimization_barrier(x.astype(dtype))
