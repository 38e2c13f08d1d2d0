"""Which twin of the step runs a leaf, and why."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gefen_jax import chunks, cpu, kernels, local, update
from gefen_jax.update import Codebook, Hyper, Leaf, Scalar, Tail

IMPLEMENTATIONS = ("auto", "triton", "pallas", "jnp", "chunked", "numba")
"""auto; all leaves in one kernel launch (GPU); one kernel launch per leaf (GPU; interpreted elsewhere); whole arrays
in plain `jax.numpy`; a loop over cache-sized chunks of a leaf (CPU); one compiled loop per leaf (CPU)."""


def check(requested: str) -> None:
    """Raise a ValueError for an unknown implementation, or one whose packages are missing."""
    if requested not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; found {requested!r}")
    if requested == "triton":
        from gefen_pallas import compiled

        reason = compiled.unavailable()
        if reason is not None:
            raise ValueError(f"implementation='triton' cannot be used: {reason}; 'auto' takes what there is")
    if requested == "numba" and jax.default_backend() != "cpu":
        raise ValueError(
            f"implementation='numba' runs on CPUs, and programs run on {jax.default_backend()} here; 'auto' takes what "
            "there is"
        )


def wants_kernels(requested: str) -> bool:
    """Whether leaves run in kernels where they can."""
    return requested in ("triton", "pallas") or (requested == "auto" and jax.default_backend() != "cpu")


def choose(
    requested: str,
    shape: tuple[int, ...],
    leaf: Leaf,
    gradient: Any = None,
    parameter: Any = None,
    home: NamedSharding | None = None,
    large: bool = False,
) -> tuple[str, str]:
    """(implementation, reason) for one leaf.

    Args:
      requested: one of `IMPLEMENTATIONS`.
      shape: the parameter's shape.
      leaf: its state: arrays or only their shapes and dtypes.
      gradient: the gradient, if it is known; its dtype and placement matter to kernels.
      parameter: the parameter, if it is known.
      home: where the leaf lives, if that is several devices and known (`local.home`).
      large: whether the whole tree repays compiling a loop for CPUs (`is_large`).
    """
    if requested == "jnp":
        return "jnp", "asked for"
    auto = requested == "auto"
    if wants_kernels(requested):
        name = "triton" if auto else requested
        dtypes = [jnp.float32 if x is None else x.dtype for x in (gradient, parameter)]
        reason = kernels.unavailable(name) if auto else None
        if home is None:
            reason = reason or kernels.shared(name, leaf, gradient) or kernels.why_not(shape, leaf, *dtypes)
        else:
            reason = reason or local.why_not(shape, leaf, home, *dtypes)
        if reason:
            return "jnp", f"no kernel: {reason}"
        return name, ("GPU: all leaves at once" if auto else "asked for") + (", shard by shard" if home else "")
    if update.is_exact(leaf.mu):
        return "jnp", "exact Adam"
    if requested != "chunked" and jax.device_count() > 1:
        return "jnp", "several devices: whole arrays keep their sharding"
    cut = layout(shape, leaf)
    if cut is None:
        small = leaf.mu.size <= chunks.CHUNK
        return "jnp", "fits one chunk" if small else "its blocks or row count give no chunks of a sensible size"
    if requested == "chunked":
        return "chunked", "asked for"
    if auto and not large:
        return "chunked", f"CPU: cache-sized chunks; less than {cpu.LEAST_TREE:,} elements do not repay a compiled loop"
    dtypes = [jnp.float32 if x is None else x.dtype for x in (gradient, parameter)]
    reason = cpu.why_not(shape, leaf, cut, *dtypes)
    if reason:
        return "chunked", f"no compiled loop: {reason}"
    return "numba", "CPU: one compiled loop" if auto else "asked for"


def is_large(shapes: list[tuple[int, ...]], leaves: list[Leaf]) -> bool:
    """Whether the quantised leaves of a tree are large enough together to repay compiling a loop for CPUs."""
    sizes = (math.prod(shape) for shape, leaf in zip(shapes, leaves) if not update.is_exact(leaf.mu))
    return sum(size for size in sizes if size > chunks.CHUNK) >= cpu.LEAST_TREE


def homes(
    requested: str,
    stated: local.Stated,
    names: list[str],
    gradients: list[Any],
    parameters: list[Any],
    leaves: list[Leaf],
) -> list[NamedSharding | None]:
    """Where the leaves live that kernels step shard by shard; None for all others."""
    found: list[NamedSharding | None] = [None] * len(leaves)
    if not wants_kernels(requested):
        return found
    for i, (path, g, p, leaf) in enumerate(zip(names, gradients, parameters, leaves)):
        home = local.home(stated, path, leaf, g, p)
        if home is not None and choose(requested, g.shape, leaf, g, p, home)[0] != "jnp":
            found[i] = home
    return found


def how(tx: Any) -> str:
    """How `gefen_jax.apply` runs a step of ``tx``, in words.

    Examples:
      >>> import optax
      >>> how(optax.adam(1e-3))
      'update, then optax.apply_updates: GradientTransformationExtraArgs has no apply of its own'
    """
    if getattr(tx, "apply", None) is None:
        return f"update, then optax.apply_updates: {type(tx).__name__} has no apply of its own"
    requested = getattr(tx, "implementation", "auto")
    if requested in ("jnp", "chunked", "numba"):
        return f"at once, without kernels: implementation={requested!r} was asked for"
    where = "" if getattr(tx, "shardings", None) is None else ", shard by shard where blocks are local"
    twin = "pallas" if requested == "pallas" else "triton"
    if not kernels.on_gpu() and jax.default_backend() == "cpu" and twin == "triton":
        return "at once, leaf by leaf: programs run on the CPU"
    reason = kernels.unavailable(twin) or (None if where else kernels.shared())
    return f"at once{where}" if reason is None else f"at once, without kernels: {reason}"


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
    large = is_large([g.shape for g in gradients], leaves)
    chosen = zip(gradients, parameters, leaves)
    names = [choose(requested, g.shape, leaf, g, p, large=large)[0] for g, p, leaf in chosen]
    entries = cpu.table(codebook) if "numba" in names else None
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
        if name == "numba":
            cut, vector = layout(g.shape, leaf), cpu.scalars(h, tail, factor)
            assert cut is not None
            assert entries is not None
            kept = p if tail.reads_parameter else None
            outputs[i], new[i] = cpu.step(g, leaf, codebook, entries, vector, cut, parameter=kept, apply=tail.apply)
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
