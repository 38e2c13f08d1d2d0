"""A plain-JAX training loss for a `Decoder`: something real to trace, compile and count."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gefen_jax.accounting.decoder import Decoder

__all__ = ["decoder_loss", "decoder_tokens"]


def decoder_tokens(batch: int, length: int) -> jax.ShapeDtypeStruct:
    """The shape of a batch of training text: ``length`` tokens to read and one more to predict, int32."""
    return jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)


def decoder_loss(
    decoder: Decoder, params: Any, tokens: jax.Array, *, dtype: Any = jnp.float32, remat: bool = False
) -> jax.Array:
    """Mean cross entropy of the next token.

    Weights are cast to ``dtype`` where they are used; norms, softmax and the loss are computed in float32.
    Attention materialises its probabilities.

    Args:
      decoder: the sizes.
      params: a tree as `Decoder.parameters` describes it.
      tokens: int32 of shape (batch, length + 1).
      dtype: dtype of the matrix multiplications.
      remat: recompute each layer in the backward pass (`jax.checkpoint`).

    Returns:
      A float32 scalar.

    Examples:
      >>> import jax
      >>> tiny = Decoder("tiny", "llama", 1, 8, 2, 1, 4, 16, 11, 5)
      >>> jax.eval_shape(partial(decoder_loss, tiny), tiny.parameters(), decoder_tokens(2, 5))
      ShapeDtypeStruct(shape=(), dtype=float32)
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    x = params["embedding"].astype(dtype)[inputs]
    if decoder.style == "gpt":
        x = x + params["position_embedding"].astype(dtype)[:length]
    layer: Callable[[Any, jax.Array], jax.Array] = partial(_layer, decoder, dtype)
    if remat:
        layer = jax.checkpoint(layer)
    for index in range(decoder.layers):
        x = layer(params[f"layer_{index}"], x)
    x = _norm(params["norm"], x)
    head = params["embedding"].T if decoder.tied else params["head"]["kernel"]
    logits = (x @ head.astype(dtype)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _layer(decoder: Decoder, dtype: Any, params: Any, x: jax.Array) -> jax.Array:
    h = _norm(params["norm_1"], x)
    if decoder.style == "gpt":
        query, key, value = jnp.split(_dense(params["qkv"], h, dtype), 3, axis=-1)
    else:
        query, key, value = (_dense(params[name], h, dtype) for name in ("query", "key", "value"))
    batch, length, _ = x.shape
    query = query.reshape(batch, length, decoder.heads, decoder.head_size)
    key, value = (t.reshape(batch, length, decoder.kv_heads, decoder.head_size) for t in (key, value))
    if decoder.qk_norm:
        query, key = _norm(params["query_norm"], query), _norm(params["key_norm"], key)
    if decoder.style == "llama":
        query, key = _rotate(query), _rotate(key)
    mixed = _attend(query, key, value, decoder.heads // decoder.kv_heads)
    x = x + _dense(params["output"], mixed.reshape(batch, length, decoder.attention), dtype)
    h = _norm(params["norm_2"], x)
    if decoder.style == "gpt":
        h = jax.nn.gelu(_dense(params["up"], h, dtype))
    else:
        h = jax.nn.silu(_dense(params["gate"], h, dtype)) * _dense(params["up"], h, dtype)
    return x + _dense(params["down"], h, dtype)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, groups: int) -> jax.Array:
    """Causal attention; each key and value head serves ``groups`` query heads."""
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, heads // groups, groups, size)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key).astype(jnp.float32) / math.sqrt(size)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(query.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, value).reshape(batch, length, heads, size)


def _norm(params: Any, x: jax.Array) -> jax.Array:
    """LayerNorm where there is a bias, else RMSNorm; over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    if "bias" in params:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5) * params["scale"]
    return (wide + params["bias"] if "bias" in params else wide).astype(x.dtype)


def _dense(params: Any, x: jax.Array, dtype: Any) -> jax.Array:
    y = x @ params["kernel"].astype(dtype)
    return y + params["bias"].astype(dtype) if "bias" in params else y


def _rotate(x: jax.Array, base: float = 500_000.0) -> jax.Array:
    """Rotary positions: halves of each head turned by position x base^(-i / half)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * base ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
