"""Moments in and out of a leaf's state: decode them to arrays of the parameter's shape, encode them again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gefen_jax import quantization, state, tiling, update
from gefen_jax.plan import LeafPlan, Options
from gefen_jax.update import Leaf


def decode_moments(leaf: Leaf, decision: LeafPlan, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and second moment of a leaf as float32 arrays of the parameter's shape."""
    shape = decision.shape
    nu = leaf.nu.astype(jnp.float32)
    if decision.nu[0] == "factored":
        v = nu * update.column_ratio(nu, leaf.nu_cross)
    else:
        view = tiling.view(shape, nu.shape)
        v = jnp.broadcast_to(nu.reshape(view.statistic), view.elements).reshape(shape)
    if decision.exact:
        return leaf.mu, v
    axis = update.packed_axis(shape, leaf.mu)
    codes = leaf.mu if axis is None else quantization.unpack(leaf.mu, axis)
    view = tiling.view(shape, leaf.mu_scale.shape)
    scale = leaf.mu_scale.astype(jnp.float32).reshape(view.statistic)
    m = quantization.decode(codes.reshape(view.elements), words) * scale
    return m.reshape(shape), v


def encode_moments(
    m: jax.Array, v: jax.Array, decision: LeafPlan, words: jax.Array, encoding: Options, statistic: Any
) -> Leaf:
    """State of a leaf that holds these moments: scales are block maxima, second moments block, row and column means."""
    scale_shape, nu_shape, cross_shape = decision.statistics()
    if decision.nu[0] == "factored":
        nu = jnp.mean(v, update.reduced(v.shape, nu_shape), keepdims=True)
        cross = jnp.mean(v, update.reduced(v.shape, cross_shape), keepdims=True)
    else:
        view = tiling.view(v.shape, nu_shape)
        nu = jnp.mean(v.reshape(view.elements), view.reduce).reshape(nu_shape)
        cross = jnp.ones(cross_shape, jnp.float32)
    if decision.exact:
        return Leaf(m, jnp.zeros(scale_shape, statistic), nu.astype(statistic), cross)
    view = tiling.view(m.shape, scale_shape)
    blocked = m.reshape(view.elements)
    codes, scale = update.requantize(blocked, view.reduce, update.codebook(words, encoding.codec).table, blocked)
    if encoding.rule == "reference":  # its words have no 0, on which the search table relies
        codes = quantization.nearest(blocked / jnp.where(scale > 0, scale, 1.0), words)
    codes = codes.reshape(m.shape)
    axis = state.packed_axis(decision, encoding.bits)
    codes = codes if axis is None else quantization.pack(codes, axis)
    return Leaf(codes, scale.reshape(scale_shape).astype(statistic), nu.astype(statistic), cross)
