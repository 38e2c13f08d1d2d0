"""Decoder-only language models in Flax: the GPT-2 and the Llama 3 (and Qwen3) block.

Both map tokens, integers of shape (batch, length), to logits of shape (batch, length, vocab). Parameters are
plain nested dicts of float32 arrays; cast them to compute in another dtype (norms and softmax stay in float32).

Sources: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2); Llama team,
arXiv 2407.21783 (Llama 3); Shazeer, arXiv 2002.05202 (SwiGLU); Su et al., arXiv 2104.09864 (rotary positions);
Ainslie et al., arXiv 2305.13245 (grouped queries); Qwen team, arXiv 2505.09388 (Qwen3).
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

STDDEV = 0.02  # of the initial weights, as in GPT-2


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT-2 style model: learned positions, LayerNorm, GELU, fused q/k/v, tied head."""

    vocab: int
    context: int  # longest sequence, tokens
    layers: int
    heads: int
    width: int
    stddev: float = STDDEV  # of the initial weights

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"GPTConfig: width {self.width} is not a multiple of heads {self.heads}")

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama 3 style model: RMSNorm, rotary positions, SwiGLU, grouped queries, untied head."""

    vocab: int
    context: int  # longest sequence it is trained on, tokens; the parameters do not depend on it
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int  # inner width of SwiGLU
    head_dim: int | None = None  # None: width / heads
    rope_theta: float = 500_000.0
    tied: bool = False  # one matrix for embedding and head
    qk_norm: bool = False  # RMSNorm over each query and key head (Qwen3)
    split_heads: bool = False  # projections as (width, heads, head_dim) instead of (width, heads * head_dim)
    scan: bool = False  # layers stacked along a leading axis, compiled once
    stddev: float = STDDEV  # of the initial weights

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"LlamaConfig: heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"LlamaConfig: width {self.width} is not a multiple of heads {self.heads}")
        if self.head_size % 2:
            raise ValueError(f"LlamaConfig: rotary positions need an even head size, found {self.head_size}")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads


def normal(stddev: float = STDDEV) -> Any:
    return nn.initializers.normal(stddev)


class GPTBlock(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        residual = normal(c.stddev / math.sqrt(2 * c.layers))  # keeps the sum of all branches at unit scale
        batch, length, _ = x.shape

        h = nn.LayerNorm(epsilon=1e-5, name="ln_1")(x)
        q, k, v = jnp.split(nn.Dense(3 * c.width, kernel_init=normal(c.stddev), name="attn_qkv")(h), 3, axis=-1)
        q, k, v = (t.reshape(batch, length, c.heads, c.head_size) for t in (q, k, v))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, c.width)
        x = x + nn.Dense(c.width, kernel_init=residual, name="attn_out")(h)

        h = nn.LayerNorm(epsilon=1e-5, name="ln_2")(x)
        h = nn.gelu(nn.Dense(4 * c.width, kernel_init=normal(c.stddev), name="mlp_in")(h))
        return x + nn.Dense(c.width, kernel_init=residual, name="mlp_out")(h)


class GPT(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        if tokens.shape[1] > c.context:
            raise ValueError(f"GPT: {tokens.shape[1]} tokens, but the model has positions for {c.context}")
        tokens = tokens.astype(jnp.int32)
        embed = nn.Embed(c.vocab, c.width, embedding_init=normal(c.stddev), name="wte")
        positions = nn.Embed(c.context, c.width, embedding_init=normal(c.stddev), name="wpe")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for i in range(c.layers):
            x = GPTBlock(c, name=f"h_{i}")(x)
        return embed.attend(nn.LayerNorm(epsilon=1e-5, name="ln_f")(x))


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) on x of shape (batch, length, heads, head size).

    Element i of the first half of a head and element i of the second half turn together, by the angle
    position * theta^(-2 i / head size). Computed in float32.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 4))
    >>> bool((rotate(x, 1e4)[:, 0] == x[:, 0]).all())  # position 0 does not turn
    True
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class LlamaBlock(nn.Module):
    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        residual = normal(c.stddev / math.sqrt(2 * c.layers))
        batch, length, _ = x.shape

        def heads(h: jax.Array, count: int, name: str) -> jax.Array:
            shape = (count, c.head_size) if c.split_heads else count * c.head_size
            h = nn.DenseGeneral(shape, use_bias=False, kernel_init=normal(c.stddev), name=name)(h)
            return h.reshape(batch, length, count, c.head_size)

        h = nn.RMSNorm(epsilon=1e-5, name="attn_norm")(x)
        q, k, v = heads(h, c.heads, "q"), heads(h, c.kv_heads, "k"), heads(h, c.kv_heads, "v")
        if c.qk_norm:
            q = nn.RMSNorm(epsilon=1e-6, name="q_norm")(q)
            k = nn.RMSNorm(epsilon=1e-6, name="k_norm")(k)
        q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        if not c.split_heads:
            h = h.reshape(batch, length, c.heads * c.head_size)
        axes = (-2, -1) if c.split_heads else -1
        x = x + nn.DenseGeneral(c.width, axis=axes, use_bias=False, kernel_init=residual, name="o")(h)

        h = nn.RMSNorm(epsilon=1e-5, name="mlp_norm")(x)
        gate = nn.silu(nn.Dense(c.hidden, use_bias=False, kernel_init=normal(c.stddev), name="gate")(h))
        h = gate * nn.Dense(c.hidden, use_bias=False, kernel_init=normal(c.stddev), name="up")(h)
        return x + nn.Dense(c.width, use_bias=False, kernel_init=residual, name="down")(h)


class ScannedLlamaBlock(nn.Module):
    """The block as the body of a scan over layers: carry in, carry out, no output."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return LlamaBlock(self.config, name="block")(x), None


class Llama(nn.Module):
    config: LlamaConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        embed = nn.Embed(c.vocab, c.width, embedding_init=normal(c.stddev), name="embed")
        x = embed(tokens.astype(jnp.int32))
        if c.scan:
            stack = nn.scan(
                ScannedLlamaBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers
            )
            x, _ = stack(c, name="layers")(x, None)
        else:
            for i in range(c.layers):
                x = LlamaBlock(c, name=f"layer_{i}")(x)
        x = nn.RMSNorm(epsilon=1e-5, name="norm")(x)
        if c.tied:
            return embed.attend(x)
        return nn.Dense(c.vocab, use_bias=False, kernel_init=normal(c.stddev), name="head")(x)
