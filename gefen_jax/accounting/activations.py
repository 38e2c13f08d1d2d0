"""Activations as a function of the microbatch: in closed form, traced, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gefen_jax.accounting.decoder import Decoder
from gefen_jax.accounting.memory import step_memory
from gefen_jax.accounting.residuals import residuals

__all__ = ["Activations", "analytic_activations", "compiled_activations", "traced_activations"]


@dataclass(frozen=True)
class Activations:
    """Bytes that a backward pass holds: ``fixed + per_sequence * microbatch``, and where the numbers come from."""

    per_sequence: float
    fixed: float = 0.0
    source: str = "given"

    def bytes(self, microbatch: int) -> float:
        """Bytes for a microbatch of this many sequences (never below 0)."""
        return max(0.0, self.fixed + self.per_sequence * microbatch)


def analytic_activations(
    decoder: Decoder, length: int, dtype: Any = jnp.bfloat16, *, attention: str = "materialised", remat: bool = False
) -> Activations:
    """Closed form for a transformer, `Decoder.activation_bytes`: what a careful implementation keeps.

    Whole steps of `decoder_loss` (GPT-2 124M with 1024 tokens, Llama 1.5B with 2048; microbatches 1, 2, 4; float32 and
    mixed precision; AdamW), compiled by XLA for an H100, needed 4 % less to 33 % more memory than budgets with these
    activations; `compiled_activations` tells what a given loss needs.

    Args:
      decoder: the sizes.
      length: tokens of a sequence.
      dtype: dtype of the computation.
      attention: "materialised" (JAX's default) or "fused" (flash attention).
      remat: recompute each layer.

    Examples:
      >>> from gefen_jax.accounting.decoder import DECODERS
      >>> round(analytic_activations(DECODERS["gpt2-124m"], 1024, "float32").bytes(4) / 2**30, 2)
      6.06
    """
    size = decoder.activation_bytes(length, dtype, attention=attention, remat=remat)
    how = f"{attention} attention" + (", layers recomputed" if remat else "")
    return Activations(
        size, 0.0, f"closed form (XLA may need up to a third more), {length} tokens, {jnp.dtype(dtype).name}, {how}"
    )


def traced_activations(loss: Callable[..., Any], params: Any, batch_of: Callable[[int], Any]) -> Activations:
    """What ``jax.vjp`` of a loss keeps, traced at microbatches 1 and 2: an upper bound, before XLA fuses.

    Args:
      loss: ``loss(params, batch)``, a scalar.
      params: arrays or shapes.
      batch_of: microbatch -> the batch, arrays or shapes.
    """
    one, two = (residuals(loss, params, batch_of(n)).bytes for n in (1, 2))
    return _line(one, two, "traced: what jax.vjp keeps")


def compiled_activations(
    loss: Callable[..., Any], params: Any, batch_of: Callable[[int], Any], target: Any = None
) -> Activations:
    """Temporaries of a compiled gradient accumulation at microbatches 1 and 2: what XLA really needs.

    The compiled program adds the gradient of a microbatch to gradients that exist already, so that nothing can hide
    in the memory of gradients to come; the temporaries hold activations, casts and work space.

    Args:
      loss: ``loss(params, batch)``, a scalar.
      params: arrays or shapes.
      batch_of: microbatch -> the batch, arrays or shapes.
      target: a GPU that is not there, see `gefen_jax.accounting.targets`; ``None`` for the default device.
    """

    def accumulate(grads: Any, params: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.add, grads, jax.grad(loss)(params, batch))

    temporaries, platform = [], ""
    for microbatch in (1, 2):
        report = step_memory(accumulate, params, params, batch_of(microbatch), donate_argnums=0, target=target)
        temporaries.append(report.memory.temporaries)
        platform = report.program.platform
    return _line(temporaries[0], temporaries[1], f"compiled for {platform}: temporaries at microbatches 1 and 2")


def _line(one: int, two: int, source: str) -> Activations:
    """The line through the values at 1 and 2."""
    return Activations(two - one, 2 * one - two, source)
