"""Adam over quantised moments: the step written once, in float32; how moments are stored is an argument."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from gefen_jax import paths
from gefen_jax.baselines import leafwise

Stored = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Of one leaf: codes and scales of the first moment, codes and scales of the second."""

State = TypeVar("State", bound=tuple[Any, ...])


class Codec(NamedTuple):
    """How the two moments of a leaf are stored.

    Attributes:
      zeros: shape of the parameter -> `Stored` of moments that are 0.
      quantize: float32 first and second moment -> `Stored`, the codes as uint8.
      dequantize: `Stored` and the shape of the parameter -> the float32 moments.
    """

    zeros: Callable[[tuple[int, ...]], Stored]
    quantize: Callable[[jax.Array, jax.Array], Stored]
    dequantize: Callable[[Stored, tuple[int, ...]], tuple[jax.Array, jax.Array]]


class _Leaf(NamedTuple):
    update: Any
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


def scale_by_lowbit_adam(
    codec: Codec,
    state_type: Callable[..., State],
    b1: leafwise.Scalar,
    b2: leafwise.Scalar,
    eps: leafwise.Scalar,
    min_size: int | None,
    full_precision: str | None,
) -> optax.GradientTransformation:
    """Adam whose moments are dequantised, updated, used and quantised again, leaf by leaf.

    Args:
      codec: how moments are stored.
      state_type: NamedTuple with fields ``count, mu, mu_scale, nu, nu_scale``.
      b1, b2, eps: Adam's.
      min_size: leaves with fewer elements keep float32 moments; ``None`` is 4096.
      full_precision: regular expression; leaves in whose path it is found keep float32 moments.
    """
    leafwise.check_hyperparameters(b1, b2, eps)
    leafwise.check_pattern("full_precision", full_precision)
    smallest = leafwise.check_min_size(min_size)

    def init_leaf(path: Any, p: jax.Array) -> _Leaf:
        zeros = jnp.zeros(p.shape, jnp.float32)
        asked = full_precision is not None and re.search(full_precision, paths.name(path)) is not None
        if asked or p.size < smallest or p.size == 0 or p.ndim == 0:
            return _Leaf(None, zeros, jnp.zeros(1, jnp.float32), jnp.zeros_like(zeros), jnp.zeros(1, jnp.float32))
        return _Leaf(None, *codec.zeros(p.shape))

    def update_leaf(g: jax.Array, *stored: jax.Array, count: jax.Array) -> _Leaf:
        mu, mu_scale, nu, nu_scale = stored
        quantised = mu.dtype == jnp.uint8
        if quantised:
            mu, nu = codec.dequantize((mu, mu_scale, nu, nu_scale), g.shape)
        g = jnp.asarray(g)
        g32 = g.astype(jnp.float32)
        mu = b1 * mu + (1 - b1) * g32
        nu = b2 * nu + (1 - b2) * g32 * g32
        update = leafwise.adam_direction(mu, nu, count, b1, b2, eps).astype(g.dtype)
        if quantised:
            return _Leaf(update, *codec.quantize(mu, nu))
        return _Leaf(update, mu, mu_scale, nu, nu_scale)

    def shape_of_mu(g: jax.Array, mu: jax.Array) -> tuple[int, ...]:
        return jax.eval_shape(lambda: codec.zeros(g.shape))[0].shape if mu.dtype == jnp.uint8 else g.shape

    def init_fn(params: Any) -> State:
        leafwise.check_params(params)
        leaves = leafwise.unzip(jax.tree.map_with_path(init_leaf, params), _Leaf)
        return state_type(jnp.zeros([], jnp.int32), leaves.mu, leaves.mu_scale, leaves.nu, leaves.nu_scale)

    def update_fn(updates: Any, state: State, params: Any = None) -> tuple[Any, State]:
        del params
        count, mu, mu_scale, nu, nu_scale = state
        leafwise.check_gradients(updates, mu, shape_of_mu)
        count = optax.safe_increment(count)
        step = functools.partial(update_leaf, count=count)
        leaves = leafwise.unzip(jax.tree.map(step, updates, mu, mu_scale, nu, nu_scale), _Leaf)
        return leaves.update, state_type(count, leaves.mu, leaves.mu_scale, leaves.nu, leaves.nu_scale)

    return optax.GradientTransformation(init_fn, update_fn)
