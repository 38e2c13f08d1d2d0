"""Decoder-only transformers as shapes: parameters, FLOPs and activations in closed form; well-known sizes.

Sources: Kaplan et al., arXiv 2001.08361 (6 N D); Chowdhery et al., arXiv 2204.02311, appendix B (the attention
terms, MFU); Korthikanti et al., arXiv 2205.05198 (activations of a layer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gefen_jax.accounting.report import Formatter, Report, Row, format_count, format_percent, format_plain

__all__ = ["DECODERS", "Decoder", "DecoderFlops"]

Shapes = dict[str, Any]


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder-only transformer.

    ``style`` "gpt": LayerNorm with biases, learned positions, fused query/key/value, GELU with two matrices.
    ``style`` "llama": RMSNorm, rotary positions, grouped queries, SwiGLU with three matrices, no biases.
    Matrices are laid out as JAX does, (inputs, outputs).
    """

    name: str
    style: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    context: int
    tied: bool = True
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.style not in ("gpt", "llama"):
            raise ValueError(f"Decoder {self.name}: found style {self.style!r}, expected 'gpt' or 'llama'")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"Decoder {self.name}: found {self.heads} heads and {self.kv_heads} key/value heads, expected the first"
                " to be a multiple of the second"
            )

    @property
    def attention(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_size

    def parameters(self, dtype: Any = jnp.float32) -> Shapes:
        """The parameters as a tree of `jax.ShapeDtypeStruct`; no memory is used.

        Examples:
          >>> import math, jax
          >>> sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(DECODERS["gpt2-124m"].parameters()))
          124439808
        """

        def shape(*sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        def norm(size: int) -> Shapes:
            gain = {"scale": shape(size)}
            return gain | {"bias": shape(size)} if self.style == "gpt" else gain

        def dense(inputs: int, outputs: int) -> Shapes:
            kernel = {"kernel": shape(inputs, outputs)}
            return kernel | {"bias": shape(outputs)} if self.style == "gpt" else kernel

        def layer() -> Shapes:
            block: Shapes = {"norm_1": norm(self.width), "norm_2": norm(self.width)}
            if self.style == "gpt":
                block["qkv"] = dense(self.width, self.attention + 2 * self.kv)
            else:
                block["query"] = dense(self.width, self.attention)
                block["key"], block["value"] = dense(self.width, self.kv), dense(self.width, self.kv)
                block["gate"] = dense(self.width, self.hidden)
            if self.qk_norm:
                block["query_norm"], block["key_norm"] = norm(self.head_size), norm(self.head_size)
            block["output"] = dense(self.attention, self.width)
            block["up"], block["down"] = dense(self.width, self.hidden), dense(self.hidden, self.width)
            return block

        tree: Shapes = {"embedding": shape(self.vocabulary, self.width)}
        if self.style == "gpt":
            tree["position_embedding"] = shape(self.context, self.width)
        tree |= {f"layer_{i}": layer() for i in range(self.layers)}
        tree["norm"] = norm(self.width)
        if not self.tied:
            tree["head"] = {"kernel": shape(self.width, self.vocabulary)}
        return tree

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.parameters()))

    @property
    def layer_multiplying(self) -> int:
        """Weights of one layer that take part in matrix multiplications."""
        attention = self.width * (self.attention + 2 * self.kv) + self.attention * self.width
        return attention + (2 if self.style == "gpt" else 3) * self.width * self.hidden

    @property
    def multiplying(self) -> int:
        """Weights that take part in matrix multiplications: all matrices and the head, not the table lookups."""
        return self.layers * self.layer_multiplying + self.width * self.vocabulary

    def flops(self, batch: int, length: int) -> DecoderFlops:
        """Model FLOPs of one training step on ``batch`` sequences of ``length`` tokens, term by term.

        Forward costs 2 per weight and token, backward twice that, hence 6 N D; attention adds
        12 x layers x query width x length per token (scores and weighted sum, forward and backward, the masked
        half included, as matrices are multiplied whole). Norms, activations and softmax are not counted.

        Examples:
          >>> flops = DECODERS["gpt2-124m"].flops(1, 1024)
          >>> flops.total == 6 * DECODERS["gpt2-124m"].multiplying * 1024 + 12 * 12 * 768 * 1024 * 1024
          True
        """
        return DecoderFlops(self, batch, length)

    def activation_bytes(
        self, length: int, dtype: Any = jnp.bfloat16, *, attention: str = "fused", remat: bool = False
    ) -> int:
        """Bytes that training holds per sequence for the backward pass, at its peak, in closed form.

        Per token and layer: two norms' inputs and outputs (4 width), queries, keys and values, attention's output,
        and the feed-forward's inner tensors (2 hidden, gated 3 hidden). ``attention="materialised"`` adds the
        probabilities (heads x length); "fused" (flash attention) adds one float32 a head instead. At the end the
        norm's input and output and the logits: in ``dtype``, in float32, and their gradient. ``remat`` keeps only each
        layer's input, and one layer whole.

        Args:
          length: tokens of a sequence.
          dtype: dtype of the computation.
          attention: "fused" or "materialised".
          remat: recompute each layer in the backward pass.

        Examples:
          >>> gpt = DECODERS["gpt2-124m"]
          >>> gpt.activation_bytes(1024) < gpt.activation_bytes(1024, attention="materialised")
          True
        """
        if attention not in ("fused", "materialised"):
            raise ValueError(f"attention: found {attention!r}, expected 'fused' or 'materialised'")
        size = jnp.dtype(dtype).itemsize
        inner = (2 if self.style == "gpt" else 3) * self.hidden
        layer = size * (4 * self.width + 2 * self.attention + 2 * self.kv + inner)
        layer += size * self.heads * length if attention == "materialised" else 4 * self.heads
        kept = self.layers * layer if not remat else (self.layers * size * self.width) + layer
        ends = 2 * size * self.width + self.vocabulary * (2 * size + 4 if size < 4 else 2 * size)
        return length * (kept + ends)


@dataclass(frozen=True)
class DecoderFlops(Report):
    """Model FLOPs of a training step of a `Decoder`, term by term."""

    decoder: Decoder
    batch: int
    length: int

    columns: ClassVar[Mapping[str, Formatter]] = {
        "term": format_plain,
        "formula": format_plain,
        "FLOPs": format_count,
        "per token": format_count,
        "share": format_percent,
    }

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def title(self) -> str:
        return f"Model FLOPs of a training step of {self.decoder.name}, {self.batch} x {self.length} tokens"

    @property
    def rows(self) -> list[Row]:
        decoder = self.decoder
        layers, head = decoder.layers * decoder.layer_multiplying, decoder.width * decoder.vocabulary
        terms = [
            ("layers", f"6 x {layers:,} x D", 6 * layers * self.tokens),
            ("head", f"6 x {head:,} x D", 6 * head * self.tokens),
            (
                "attention",
                f"12 x {decoder.layers} layers x {decoder.attention} x {self.length} x D",
                12 * decoder.layers * decoder.attention * self.length * self.tokens,
            ),
        ]
        total = sum(flops for _, _, flops in terms)
        return [
            {
                "term": term,
                "formula": formula,
                "FLOPs": flops,
                "per token": flops / self.tokens,
                "share": flops / total,
            }
            for term, formula, flops in terms
        ]

    @property
    def total(self) -> int:
        """All terms: the FLOPs that MFU counts."""
        return sum(row["FLOPs"] for row in self.rows)

    @property
    def six_n_d(self) -> int:
        """The rule of thumb with all parameters and without attention: 6 N D."""
        return 6 * self.decoder.count * self.tokens

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"D = {self.tokens:,} tokens; forward a third of it, backward two thirds",
            f"6 N D with all N = {self.decoder.count:,} parameters: {format_count(self.six_n_d)}"
            f" ({self.six_n_d / self.total:.3f} of the total {format_count(self.total)})",
        )


def _gpt(name: str, layers: int, width: int, heads: int) -> Decoder:
    return Decoder(name, "gpt", layers, width, heads, heads, width // heads, 4 * width, 50257, 1024)


# gpt2-1b is our choice of sizes (OpenAI has none of that size); llama-1.5b is Llama 3.2 1B with its own head.
_ALL = (
    _gpt("gpt2-124m", 12, 768, 12),
    _gpt("gpt2-1b", 24, 1792, 28),
    _gpt("gpt2-1.5b", 48, 1600, 25),
    Decoder("llama-1.5b", "llama", 16, 2048, 32, 8, 64, 8192, 128256, 8192, tied=False),
    Decoder("llama-7b", "llama", 32, 4096, 32, 32, 128, 11008, 32000, 2048, tied=False),
    Decoder("llama-13b", "llama", 40, 5120, 40, 40, 128, 13824, 32000, 2048, tied=False),
    Decoder("qwen-1.7b", "llama", 28, 2048, 16, 8, 128, 6144, 151936, 32768, qk_norm=True),
)

DECODERS: Mapping[str, Decoder] = MappingProxyType({decoder.name: decoder for decoder in _ALL})
