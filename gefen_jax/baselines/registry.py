"""Every optimizer of the comparison by one name, built from the same hyperparameters, with its state in bytes.

`PEERS` is read-only data. To compare another optimizer, make a larger mapping: ``{**PEERS, "mine": Peer(...)}``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gefen_jax import paths
from gefen_jax.baselines.adam4bit import adam4bit
from gefen_jax.baselines.adam8bit import adam8bit
from gefen_jax.baselines.adam_mini import adam_mini
from gefen_jax.baselines.leafwise import Scalar

Make = Callable[..., optax.GradientTransformation]
"""Constructor: ``(learning_rate, *, weight_decay, b1, b2, eps, mask, **options)``; ignores what it has no use for."""


class Peer(NamedTuple):
    """One optimizer of the comparison.

    Attributes:
      make: its constructor.
      bytes_per_parameter: optimizer state on GPT-2 124M with float32 parameters, everything counted.
      uses: which of ``b1``, ``b2`` and ``eps`` it heeds; all use the learning rate and decoupled weight decay.
      note: what it is, and what was chosen for it here.
    """

    make: Make
    bytes_per_parameter: float
    uses: tuple[str, ...]
    note: str


def build(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: Scalar = 1e-4,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    mask: Any | Callable[[Any], Any] | None = None,
    peers: Mapping[str, Peer] | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """The optimizer called ``name``. The update is ``-learning_rate * (direction + weight_decay * parameter)``.

    Args:
      name: a key of ``peers``.
      learning_rate: number, array or schedule.
      weight_decay, b1, b2, eps, mask: as in `optax.adamw`; ignored where the optimizer has no such thing.
      peers: where to look; ``None`` is `PEERS`.
      **options: handed to the optimizer alone, such as ``sizes={"head_dim": 64}`` for ``adam_mini``.

    Raises:
      ValueError: there is no such name; the message lists those there are.

    Examples:
      >>> tx = build("adam8bit", 1e-3, weight_decay=0.1)
      >>> state_bytes(tx, {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")})
      8324
    """
    peers = PEERS if peers is None else peers
    if name not in peers:
        raise ValueError(f"unknown optimizer {name!r}; choose one of: {', '.join(peers)}")
    return peers[name].make(learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps, mask=mask, **options)


def state_bytes(transformation: optax.GradientTransformation, params: Any) -> int:
    """Bytes of the optimizer state for parameters, or their shapes: computed without making it."""
    state = jax.eval_shape(transformation.init, params)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def state_table(
    params: Any,
    *,
    peers: Mapping[str, Peer] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Markdown table of the state of every peer, smallest first.

    Args:
      params: parameters, or their `jax.ShapeDtypeStruct`.
      peers: what to list; ``None`` is `PEERS`.
      options: keyword arguments of `build` by name, such as ``{"adam_mini": {"sizes": {"head_dim": 64}}}``.

    Examples:
      >>> shapes = {"mlp": {"kernel": jax.ShapeDtypeStruct((256, 256), "float32")}}
      >>> print(state_table(shapes, peers={name: PEERS[name] for name in ("adamw", "adam8bit")}))
      | optimizer | state bytes | bytes per parameter |
      |---|---:|---:|
      | adam8bit | 133,124 | 2.031 |
      | adamw | 524,292 | 8.000 |
    """
    peers = PEERS if peers is None else peers
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    rows = []
    for name in peers:
        transformation = build(name, 1e-3, peers=peers, **(options or {}).get(name, {}))
        rows.append((state_bytes(transformation, params), name))
    lines = [f"| {name} | {size:,} | {size / count:.3f} |" for size, name in sorted(rows)]
    return "\n".join(["| optimizer | state bytes | bytes per parameter |", "|---|---:|---:|", *lines])


def _decayed(
    direction: optax.GradientTransformation, learning_rate: optax.ScalarOrSchedule, weight_decay: Scalar, mask: Any
) -> optax.GradientTransformation:
    """``direction`` (of ascent) with decoupled weight decay and learning rate, in the order of `optax.adamw`."""
    return optax.chain(
        direction, optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
    )


def _adamw(learning_rate: Any, **hyperparameters: Any) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, **hyperparameters)


def _adamw_bf16(learning_rate: Any, **hyperparameters: Any) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, mu_dtype=jnp.bfloat16, **hyperparameters)


def _adafactor(
    learning_rate: Any, *, weight_decay: Any, b1: Any, b2: Any, eps: Any, mask: Any, **options: Any
) -> optax.GradientTransformation:
    del b1, b2, eps
    options = {"multiply_by_parameter_scale": False, **options}
    descent = optax.adafactor(learning_rate=None, **options)
    return _decayed(optax.chain(descent, optax.scale(-1.0)), learning_rate, weight_decay, mask)


def _sm3(
    learning_rate: Any, *, weight_decay: Any, b1: Any, b2: Any, eps: Any, mask: Any
) -> optax.GradientTransformation:
    del b2
    return _decayed(optax.scale_by_sm3(b1, eps=eps), learning_rate, weight_decay, mask)


def _lion(
    learning_rate: Any, *, weight_decay: Any, b1: Any, b2: Any, eps: Any, mask: Any, **options: Any
) -> optax.GradientTransformation:
    del b2, eps
    return optax.lion(learning_rate, b1=b1, weight_decay=weight_decay, mask=mask, **options)


def muon_matrices(params: Any) -> Any:
    """Which parameters Muon takes: the kernels of two axes that are neither embedding nor output head.

    Returns a tree of `optax.contrib.MuonDimensionNumbers`, or ``None`` where Adam is used.
    """

    def axes(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        outer = re.search(r"embed|(^|/)(wte|wpe|(lm_)?head|output)/", paths.name(path), re.IGNORECASE)
        return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 and not outer else None

    return jax.tree.map_with_path(axes, params)


def _muon(
    learning_rate: Any, *, weight_decay: Any, b1: Any, b2: Any, eps: Any, mask: Any, **options: Any
) -> optax.GradientTransformation:
    options = {"consistent_rms": 0.2, "muon_weight_dimension_numbers": muon_matrices, **options}
    descent = optax.contrib.muon(1.0, eps=eps, adam_b1=b1, adam_b2=b2, **options)
    return _decayed(optax.chain(descent, optax.scale(-1.0)), learning_rate, weight_decay, mask)


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "adamw": Peer(_adamw, 8.0, ("b1", "b2", "eps"), "Optax; moments in the parameter's dtype"),
        "adamw_bf16": Peer(_adamw_bf16, 6.0, ("b1", "b2", "eps"), "Optax; first moment in bfloat16"),
        "adam_mini": Peer(adam_mini, 4.007, ("b1", "b2", "eps"), "shared second moments; float32 first moment"),
        "adam8bit": Peer(adam8bit, 2.037, ("b1", "b2", "eps"), "block-wise dynamic quantisation, blocks of 256"),
        "adam4bit": Peer(adam4bit, 1.044, ("b1", "b2", "eps"), "blocks of 128; rank-1 normalised second moment"),
        "adafactor": Peer(
            _adafactor,
            0.01,
            (),
            "Optax; no momentum, its own decay 1 - t**-0.8, steps not scaled by the parameter, so that the learning "
            "rate means what it means for AdamW",
        ),
        "sm3": Peer(_sm3, 4.01, ("b1", "eps"), "Optax; sums of squares, never forgotten"),
        "lion": Peer(_lion, 4.0, ("b1",), "Optax; b2 = 0.99, its own; wants a learning rate 3 to 10 times smaller"),
        "muon": Peer(
            _muon,
            5.27,
            ("b1", "b2", "eps"),
            "Optax; momentum 0.95; steps of root mean square 0.2, AdamW's, so that the learning rate is AdamW's; Adam "
            "(with b1, b2) for embeddings, heads and all that is not a matrix",
        ),
    }
)
"""Name -> `Peer`."""
