"""Where statistics live: reductions that know manual meshes, and placement of fresh state.

Under automatic and explicit meshes XLA inserts the small reductions that a block crossing shards needs. Inside
`jax.shard_map` arrays are local, and a statistic that is not split over a mesh axis on which the gradient is must be
reduced over that axis here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[int, ...]


def varying(x: Any) -> frozenset[str]:
    """Names of the manual mesh axes over which ``x`` is known to differ; empty outside `jax.shard_map`."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(kind.varying) if kind is not None else frozenset()


def mean_over(x: jax.Array, axes: Axes, *, like: jax.Array) -> jax.Array:
    """Mean of ``x`` over array axes (kept as 1) and over the manual mesh axes on which ``like`` does not vary."""
    mean = jnp.mean(x, axes, keepdims=True) if axes else x
    names = tuple(sorted(varying(x) - varying(like)))
    return jax.lax.pmean(mean, names) if names else mean


def max_over(x: jax.Array, axes: Axes, *, like: jax.Array) -> jax.Array:
    """Maximum of ``x``, reduced as in `mean_over`."""
    maximum = jnp.max(x, axes, keepdims=True) if axes else x
    names = tuple(sorted(varying(x) - varying(like)))
    return jax.lax.pmax(maximum, names) if names else maximum


def fit_spec(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """``sharding`` without the mesh axes that do not divide ``shape``: how a statistic follows its parameter.

    Examples:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> fit_spec((4, 1), NamedSharding(mesh, PartitionSpec(None, "data"))).spec[1]
      'data'
    """
    mesh = sharding.mesh
    spec = tuple(sharding.spec)[: len(shape)]
    spec += (None,) * (len(shape) - len(spec))

    def divides(size: int, names: Any) -> bool:
        if names is None or names is PartitionSpec.UNCONSTRAINED:
            return False
        names = names if isinstance(names, tuple) else (names,)
        return size % math.prod(mesh.shape[name] for name in names) == 0

    fitted = PartitionSpec(*(names if divides(size, names) else None for size, names in zip(shape, spec)))
    return NamedSharding(mesh, fitted, memory_kind=sharding.memory_kind)


def fresh(shape: tuple[int, ...], dtype: Any, fill: Any, *, like: Any) -> jax.Array:
    """A new array of state, placed like the parameter it belongs to as far as its shape allows."""
    if isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer) and like.committed:
        placed = like.sharding
        if isinstance(placed, NamedSharding):
            placed = fit_spec(shape, placed)
        return jnp.full(shape, fill, dtype, device=placed)
    return jnp.full(shape, fill, dtype)


def replicated(parameters: list[Any]) -> Callable[[Any], jax.Array]:
    """A function that places a small array where all of ``parameters`` can use it."""
    for p in parameters:
        if isinstance(p, jax.Array) and not isinstance(p, jax.core.Tracer) and p.committed:
            placed = p.sharding
            if isinstance(placed, NamedSharding):
                placed = NamedSharding(placed.mesh, PartitionSpec(), memory_kind=placed.memory_kind)
            return lambda x: jnp.asarray(x, device=placed)
    return jnp.asarray
