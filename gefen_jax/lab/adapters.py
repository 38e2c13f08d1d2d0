"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685): a model stays as it is, and products of thin matrices learn.

The kernel W of a dense layer acts as W + scale * a @ b, with a of shape (inputs, rank) and b of shape (rank,
outputs). b starts at 0, so the first step is that of the model itself, and the first gradient of a is exactly 0.
"""

import math

import jax
import jax.numpy as jnp
from flax import traverse_util

from gefen_jax.lab.models import Params

SCALE = 2.0


def adapters(model: Params, rank: int, key: jax.Array) -> Params:
    """Fresh adapters of every dense kernel: ``{"h_0/attn_qkv": {"a": .., "b": ..}, ..}``, float32.

    Args:
      model: the model's parameters, or their shapes.
      rank: inner size of the products.
      key: a pure function of it.

    Examples:
      >>> from gefen_jax.lab import models
      >>> found = adapters(models.shapes(models.preset("gpt-tiny")), 4, jax.random.key(0))
      >>> sorted(found), found["h_0/mlp_in"]["a"].shape
      (['h_0/attn_out', 'h_0/attn_qkv', 'h_0/mlp_in', 'h_0/mlp_out'], (40, 4))
    """
    kernels = {path: leaf.shape for path, leaf in _flat(model).items() if path.endswith("/kernel") and leaf.ndim == 2}
    found = {}
    for (path, (inputs, outputs)), own in zip(kernels.items(), jax.random.split(key, len(kernels))):
        a = jax.random.normal(own, (inputs, rank)) / math.sqrt(inputs)
        found[path.removesuffix("/kernel")] = {"a": a, "b": jnp.zeros((rank, outputs))}
    return found


def merge(model: Params, adapters: Params, scale: float = SCALE) -> Params:
    """The model's parameters with the adapters added to their kernels."""
    flat = _flat(model)
    for name, adapter in adapters.items():
        flat[f"{name}/kernel"] = flat[f"{name}/kernel"] + scale * (adapter["a"] @ adapter["b"])
    return traverse_util.unflatten_dict(flat, sep="/")


def _flat(model: Params) -> dict[str, jax.Array]:
    return dict(traverse_util.flatten_dict(model, sep="/"))
