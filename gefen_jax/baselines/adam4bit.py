"""4-bit Adam: both moments as half a byte per element.

The first moment is quantised block by block (128 elements), the second with rank-1 normalisation: each element is
divided by the smallest of the maxima of the axis slices through it, so a large row or column does not spoil the rest.

Source: Li, Chen and Zhu, "Memory efficient optimizers with 4-bit states", arXiv 2309.01507.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax.baselines import leafwise, lowbit
from gefen_jax.baselines.lowbit_adam import Codec, Stored, scale_by_lowbit_adam

BLOCK = 128


class Adam4bitState(NamedTuple):
    """State of `scale_by_adam4bit`; each tree has one array per parameter.

    Attributes:
      count: int32 scalar, steps taken.
      mu, nu: uint8, shape ``(ceil(size / 2),)``: two codes per byte in C order, the earlier in the low four bits.
        float32 moments of the parameter's shape where the leaf keeps full precision.
      mu_scale: float32 absolute maxima of the blocks, shape ``(ceil(size / 128),)``.
      nu_scale: float32, shape ``(sum(shape),)``: for each axis in turn, the maximum of every slice across it. As
        ``mu_scale`` for a one-dimensional leaf. Both are ``(1,)`` and unused where the leaf keeps full precision.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


def axis_maxima(x: jax.Array) -> jax.Array:
    """For each axis in turn, the maximum of every slice across it: float32[sum(x.shape)].

    Examples:
      >>> axis_maxima(jnp.array([[1.0, 2.0, 3.0], [0.5, 8.0, 0.0]])).tolist()
      [3.0, 8.0, 1.0, 8.0, 3.0]
    """
    others = [tuple(i for i in range(x.ndim) if i != axis) for axis in range(x.ndim)]
    return jnp.concatenate([jnp.max(x, axis=reduced) for reduced in others])


def rank1_scale(maxima: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The scale of every element, from `axis_maxima`: the smallest maximum of the slices through it.

    Examples:
      >>> rank1_scale(jnp.array([3.0, 8.0, 1.0, 8.0, 3.0]), (2, 3)).tolist()
      [[1.0, 3.0, 3.0], [1.0, 8.0, 3.0]]
    """
    parts = jnp.split(maxima, np.cumsum(shape)[:-1])
    along = [p.reshape([-1 if i == axis else 1 for i in range(len(shape))]) for axis, p in enumerate(parts)]
    return functools.reduce(jnp.minimum, along)


def quantize_nu(nu: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes (of nu's shape) and scales of a second moment: rank-1 normalised, by blocks if one-dimensional."""
    words = lowbit.linear_map(4)
    if nu.ndim == 1:
        return lowbit.block_quantize(nu, words, BLOCK)
    maxima = axis_maxima(nu)
    scale = rank1_scale(maxima, nu.shape)
    return lowbit.nearest_code(nu / jnp.where(scale > 0, scale, 1), words), maxima


def dequantize_nu(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Inverse of `quantize_nu` up to rounding: at least 1/16 of an element's scale, never 0 beside larger ones."""
    words = lowbit.linear_map(4)
    if codes.ndim == 1:
        return lowbit.block_dequantize(codes, scale, words, BLOCK)
    return lowbit.words_of(codes, words) * rank1_scale(scale, codes.shape)


def _zeros(shape: tuple[int, ...]) -> Stored:
    size = math.prod(shape)
    blocks = -(-size // BLOCK)
    zero = int(np.searchsorted(lowbit.dynamic_map(4, signed=True), 0))
    mu = jnp.full((size + 1) // 2, zero | (zero << 4), jnp.uint8)
    nu_scale = jnp.zeros(blocks if len(shape) == 1 else sum(shape), jnp.float32)
    return mu, jnp.zeros(blocks, jnp.float32), jnp.zeros_like(mu), nu_scale


def _quantize(mu: jax.Array, nu: jax.Array) -> Stored:
    mu_codes, mu_scale = lowbit.block_quantize(mu, lowbit.dynamic_map(4, signed=True), BLOCK)
    nu_codes, nu_scale = quantize_nu(nu)
    return lowbit.pack_pairs(mu_codes), mu_scale, lowbit.pack_pairs(nu_codes), nu_scale


def _dequantize(stored: Stored, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    mu, mu_scale, nu, nu_scale = stored
    mu_codes, nu_codes = lowbit.unpack_pairs(mu, shape), lowbit.unpack_pairs(nu, shape)
    mu_words = lowbit.dynamic_map(4, signed=True)
    return lowbit.block_dequantize(mu_codes, mu_scale, mu_words, BLOCK), dequantize_nu(nu_codes, nu_scale)


CODEC = Codec(_zeros, _quantize, _dequantize)


def scale_by_adam4bit(
    b1: leafwise.Scalar = 0.9,
    b2: leafwise.Scalar = 0.999,
    eps: leafwise.Scalar = 1e-8,
    *,
    min_size: int | None = None,
    full_precision: str | None = None,
) -> optax.GradientTransformation:
    """Rescales by Adam, with both moments quantised to 4 bits.

    First moment: blocks of 128 elements in C order, the signed dynamic map. Second moment: rank-1 normalisation over
    all axes of the leaf and the linear map without zero; leaves of one axis by blocks of 128. Rounding is to the
    nearest word. The update is taken from the moments before they are quantised again. An element whose gradient is
    always 0 never moves. Scanned layers share the maxima across layers, as any axis does; ``jax.vmap`` keeps them
    apart. The arithmetic is float32 for any dtype of gradient.

    Args:
      b1, b2, eps: Adam's.
      min_size: leaves with fewer elements keep float32 moments; ``None`` is 4096.
      full_precision: regular expression; leaves in whose path it is found keep float32 moments.

    Returns:
      An Optax transformation with state `Adam4bitState`; updates have the gradient's dtype.

    Raises:
      ValueError: a hyperparameter out of range; gradients that do not fit the state (names the leaf).
      TypeError: a complex or integer leaf (names it).
    """
    return scale_by_lowbit_adam(CODEC, Adam4bitState, b1, b2, eps, min_size, full_precision)


def adam4bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: leafwise.Scalar = 0.9,
    b2: leafwise.Scalar = 0.999,
    eps: leafwise.Scalar = 1e-8,
    weight_decay: leafwise.Scalar = 1e-4,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    min_size: int | None = None,
    full_precision: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """4-bit Adam with decoupled weight decay: about 1.04 bytes of state per parameter.

    Args:
      learning_rate: number, array or schedule.
      b1, b2, eps, min_size, full_precision: see `scale_by_adam4bit`.
      weight_decay, mask: see `optax.adamw`.

    Examples:
      >>> params = {"kernel": jnp.ones((64, 65)), "bias": jnp.ones(64)}
      >>> state = adam4bit(1e-3).init(params)
      >>> jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", state[0].mu)
      {'bias': 'float32[64]', 'kernel': 'uint8[2080]'}
    """
    return optax.chain(
        scale_by_adam4bit(b1, b2, eps, min_size=min_size, full_precision=full_precision),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
