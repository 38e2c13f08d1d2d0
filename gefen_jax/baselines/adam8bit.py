"""8-bit Adam: both moments as one byte per element, with one scale per block of 256.

Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise quantization", arXiv 2110.02861.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax.baselines import leafwise, lowbit
from gefen_jax.baselines.lowbit_adam import Codec, Stored, scale_by_lowbit_adam

BLOCK = 256


class Adam8bitState(NamedTuple):
    """State of `scale_by_adam8bit`; each tree has one array per parameter.

    Attributes:
      count: int32 scalar, steps taken.
      mu, nu: uint8 codes of the parameter's shape; float32 moments where the leaf keeps full precision.
      mu_scale, nu_scale: float32 absolute maxima of the blocks, shape ``(ceil(size / 256),)``; ``(1,)`` and unused
        where the leaf keeps full precision.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


def _zeros(shape: tuple[int, ...]) -> Stored:
    words = lowbit.dynamic_map(8, signed=True), lowbit.dynamic_map(8, signed=False)
    mu, nu = (jnp.full(shape, np.searchsorted(w, 0), jnp.uint8) for w in words)
    scale = jnp.zeros(-(-math.prod(shape) // BLOCK), jnp.float32)
    return mu, scale, nu, jnp.zeros_like(scale)


def _quantize(mu: jax.Array, nu: jax.Array) -> Stored:
    return (
        *lowbit.block_quantize(mu, lowbit.dynamic_map(8, signed=True), BLOCK),
        *lowbit.block_quantize(nu, lowbit.dynamic_map(8, signed=False), BLOCK),
    )


def _dequantize(stored: Stored, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    mu, mu_scale, nu, nu_scale = stored
    return (
        lowbit.block_dequantize(mu, mu_scale, lowbit.dynamic_map(8, signed=True), BLOCK),
        lowbit.block_dequantize(nu, nu_scale, lowbit.dynamic_map(8, signed=False), BLOCK),
    )


CODEC = Codec(_zeros, _quantize, _dequantize)


def scale_by_adam8bit(
    b1: leafwise.Scalar = 0.9,
    b2: leafwise.Scalar = 0.999,
    eps: leafwise.Scalar = 1e-8,
    *,
    min_size: int | None = None,
    full_precision: str | None = None,
) -> optax.GradientTransformation:
    """Rescales by Adam, with both moments quantised to 8 bits block by block.

    Blocks are runs of 256 elements in C order, so on a Flax kernel ``(in, out)`` they run along the outputs. The
    first moment uses the signed dynamic map, the second the unsigned one. The update is taken from the moments before
    they are quantised again. As in the original, a second moment below 1.6e-7 of its block's largest is stored as 0:
    if the gradient of such an element then vanishes, its remaining first moment is divided by ``eps``. An element
    whose gradient is always 0 never moves. The arithmetic is float32 for any dtype of gradient.

    Args:
      b1, b2, eps: Adam's.
      min_size: leaves with fewer elements keep float32 moments; ``None`` is 4096.
      full_precision: regular expression; leaves in whose path it is found keep float32 moments (the paper does so
        for embeddings).

    Returns:
      An Optax transformation with state `Adam8bitState`; updates have the gradient's dtype.

    Raises:
      ValueError: a hyperparameter out of range; gradients that do not fit the state (names the leaf).
      TypeError: a complex or integer leaf (names it).
    """
    return scale_by_lowbit_adam(CODEC, Adam8bitState, b1, b2, eps, min_size, full_precision)


def adam8bit(
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
    """8-bit Adam with decoupled weight decay: about 2.03 bytes of state per parameter.

    Args:
      learning_rate: number, array or schedule.
      b1, b2, eps, min_size, full_precision: see `scale_by_adam8bit`.
      weight_decay, mask: see `optax.adamw`.

    Examples:
      >>> params = {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}
      >>> state = adam8bit(1e-3).init(params)
      >>> jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", state[0].mu)
      {'bias': 'float32[64]', 'kernel': 'uint8[64, 64]'}
    """
    return optax.chain(
        scale_by_adam8bit(b1, b2, eps, min_size=min_size, full_precision=full_precision),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
