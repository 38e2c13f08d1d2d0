"""Which twin of the step runs a leaf, and why."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gefen_jax import chunks, kernels, update
from gefen_jax.update import Codebook, Hyper, Leaf, Scalar, Tail

IMPLEMENTATIONS = ("auto", "triton", "pallas", "jnp", "chunked")
"""auto; all leaves in one kernel launch (GPU); one kernel launch per leaf (GPU; interpreted elsewhere); whole arrays
in plain `jax.numpy`; a loop over cache-sized chunks of a leaf (CPU)."""


def check(requested: str) -> None:
    """Raise a ValueError for an unknown implementation, or one whose packages are missing."""
    if requested not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; found {requested!r}")
    if requested == "triton":
        from gefen_pallas import compiled

        reason = compiled.unavailable()
        if reason is not None:
            raise ValueError(f"implementation='triton' cannot be used: {reason}; 'auto' takes what there is")


def choose(
    requested: str, shape: tuple[int, ...], leaf: Leaf, gradient: Any = None, parameter: Any = None
) -> tuple[str, str]:
    """(implementation, reason) for one leaf.

    Args:
      requested: one of `IMPLEMENTATIONS`.
      shape: the parameter's shape.
      leaf: its state: arrays or only their shapes and dtypes.
      gradient: the gradient, if it is known; its dtype and placement matter to kernels.
      parameter: the parameter, if it is known.
    """
    if requested == "jnp":
        return "jnp", "asked for"
    auto = requested == "auto"
    if requested in ("triton", "pallas") or (auto and jax.default_backend() != "cpu"):
        name = "triton" if auto else requested
        reason = (kernels.unavailable(name) if auto else None) or kernels.shared(name, leaf, gradient)
        dtypes = [jnp.float32 if x is None else x.dtype for x in (gradient, parameter)]
        reason = reason or kernels.why_not(shape, leaf, *dtypes)
        return ("jnp", f"no kernel: {reason}") if reason else (name, "GPU: all leaves at once" if auto else "asked for")
    if update.is_exact(leaf.mu):
        return "jnp", "exact Adam"
    if auto and jax.device_count() > 1:
        return "jnp", "several devices: whole arrays keep their sharding"
    if layout(shape, leaf) is None:
        small = leaf.mu.size <= chunks.CHUNK
        return "jnp", "fits one chunk" if small else "its blocks or row count give no chunks of a sensible size"
    return "chunked", "asked for" if requested == "chunked" else "CPU: cache-sized chunks"


def layout(shape: tuple[int, ...], leaf: Leaf) -> chunks.Layout | None:
    """How the leaf is cut into chunks, or None."""
    if 0 in shape:
        return None
    packed = update.packed_axis(shape, leaf.mu)
    return chunks.layout(shape, leaf.mu_scale.shape, leaf.nu.shape, leaf.nu_cross.shape, packed)


def step(
    requested: str,
    gradients: list[jax.Array],
    parameters: list[jax.Array | None],
    leaves: list[Leaf],
    codebook: Codebook,
    h: Hyper,
    tails: list[Tail],
    factor: Scalar | None = None,
) -> tuple[list[jax.Array], list[Leaf]]:
    """One step of all leaves under the default rule: updates or new parameters, and new state.

    ``factor`` multiplies the gradients (clipping by their norm); None is 1.
    """
    if requested == "triton" and (reason := kernels.unavailable("triton")) is not None:
        raise ValueError(f"gefen: implementation='triton' cannot run here: {reason}; 'auto' takes what there is")
    outputs: list[Any] = [None] * len(gradients)
    new = list(leaves)
    names = [choose(requested, g.shape, leaf, g, p)[0] for g, p, leaf in zip(gradients, parameters, leaves)]
    for name in ("triton", "pallas"):
        members = [i for i, chosen in enumerate(names) if chosen == name]
        if members:
            found, state = kernels.step(
                name,
                [gradients[i] for i in members],
                [parameters[i] for i in members],
                [leaves[i] for i in members],
                codebook,
                h,
                [tails[i] for i in members],
                1.0 if factor is None else factor,
            )
            for i, output, leaf in zip(members, found, state):
                outputs[i], new[i] = output, leaf
    for i, (name, g, p, leaf, tail) in enumerate(zip(names, gradients, parameters, leaves, tails)):
        if name in ("triton", "pallas"):
            continue
        if factor is not None:
            g = (g.astype(jnp.float32) * factor).astype(g.dtype)
        if name == "chunked":
            cut = layout(g.shape, leaf)
            assert cut is not None
            outputs[i], new[i] = chunks.chunked_update(g, leaf, codebook, h, cut, tail, p)
        else:
            d, new[i] = update.leaf_update(g, leaf, codebook, h)
            outputs[i] = update.finish(d, p, tail, g.dtype)
    return outputs, new
