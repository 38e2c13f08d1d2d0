"""Which twin of the step runs a leaf, and why."""

from __future__ import annotations

import jax

from gefen_jax import chunks, update
from gefen_jax.update import Codebook, Hyper, Leaf, Tail

IMPLEMENTATIONS = ("auto", "jnp", "chunked")
"""auto; whole arrays in plain `jax.numpy`; a loop over cache-sized chunks of a leaf (CPU)."""


def check(requested: str) -> None:
    """Raise a ValueError for an unknown implementation."""
    if requested not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; found {requested!r}")


def choose(requested: str, shape: tuple[int, ...], leaf: Leaf) -> tuple[str, str]:
    """(implementation, reason) for one leaf; ``leaf`` may hold arrays or only their shapes and dtypes."""
    if update.is_exact(leaf.mu):
        return "jnp", "exact Adam"
    if requested == "jnp":
        return "jnp", "asked for"
    if requested == "auto":
        if jax.default_backend() != "cpu":
            return "jnp", f"no kernel for {jax.default_backend()}"
        if jax.device_count() > 1:
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
) -> tuple[list[jax.Array], list[Leaf]]:
    """One step of all leaves under the default rule: updates or new parameters, and new state."""
    outputs, new = [], []
    for g, p, leaf, tail in zip(gradients, parameters, leaves, tails):
        if choose(requested, g.shape, leaf)[0] == "chunked":
            cut = layout(g.shape, leaf)
            assert cut is not None
            output, leaf = chunks.chunked_update(g, leaf, codebook, h, cut, tail, p)
        else:
            d, leaf = update.leaf_update(g, leaf, codebook, h)
            output = update.finish(d, p, tail, g.dtype)
        outputs.append(output)
        new.append(leaf)
    return outputs, new
