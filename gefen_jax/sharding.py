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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

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

    It is spelled as the results of a jitted step will be, so that the second step is not compiled again: of full rank
    on explicit meshes, without trailing Nones on automatic ones.

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

    fitted = [names if divides(size, names) else None for size, names in zip(shape, spec)]
    while fitted and fitted[-1] is None and AxisType.Explicit not in mesh.axis_types:
        fitted.pop()
    return NamedSharding(mesh, PartitionSpec(*fitted), memory_kind=sharding.memory_kind)


def fresh(shape: tuple[int, ...], dtype: Any, fill: Any, *, like: Any) -> jax.Array:
    """A new array of state, placed like the parameter it belongs to as far as its shape allows."""
    if isinstance(like, jax.core.Tracer):
        explicit = explicit_sharding(like)
        if explicit is not None:
            return jnp.full(shape, fill, dtype, out_sharding=fit_spec(shape, explicit))
    elif isinstance(like, jax.Array) and like.committed:
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
                everywhere = NamedSharding(placed.mesh, PartitionSpec(), memory_kind=placed.memory_kind)
                return lambda x: jnp.asarray(x, device=fit_spec(x.shape, everywhere))
            return lambda x: jnp.asarray(x, device=placed)
    return jnp.asarray


def explicit_sharding(x: Any) -> NamedSharding | None:
    """The sharding in x's type, if x lives on a mesh with explicit axes (the default of `jax.make_mesh`)."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def by_mesh(
    step: Callable[..., tuple[list[Any], list[Any]]], columns: tuple[list[Any], ...], shared: Any, *, like: list[Any]
) -> Any:
    """``step(*columns, shared)``, run so that leaves on explicit meshes can use operations without a sharding rule.

    Gathers, tables and reshapes have no rule for explicit axes, so the step runs in automatic mode and gives its
    results back with the shardings that belong to them: an output is placed like its gradient or parameter, state as
    `fit_spec` says. Leaves on different meshes are stepped separately.

    Args:
      step: from columns (gradients, parameters or None, leaves, anything) and ``shared`` to (outputs, new leaves).
      columns: lists of equal length.
      shared: what all leaves need.
      like: arrays whose placement the outputs take.

    Returns:
      (outputs, new leaves), in the order of the columns.
    """
    found = [explicit_sharding(g) or explicit_sharding(leaf.mu) for g, leaf in zip(columns[0], columns[2])]
    some = next((home for home in found if home is not None), None)
    # Arrays that are nowhere go where the others are.
    homes = [] if some is None else [home or NamedSharding(some.mesh, PartitionSpec()) for home in found]
    groups: dict[Any, list[int]] = {}
    for i, (g, leaf) in enumerate(zip(columns[0], columns[2])):
        groups.setdefault((homes[i].mesh if homes else None, _devices(g) or _devices(leaf.mu)), []).append(i)
    if len(groups) <= 1 and some is None:
        return step(*columns, shared)
    outputs, leaves = [None] * len(columns[0]), [None] * len(columns[0])
    for members in groups.values():
        part = tuple([column[i] for i in members] for column in columns)
        here = _at(shared, [part[0][0], part[2][0].mu])
        if not homes:
            some_outputs, new = step(*part, here)
        else:
            placed = [explicit_sharding(like[i]) or homes[i] for i in members]
            states = [type(leaf)(*(fit_spec(x.shape, homes[i]) for x in leaf)) for i, leaf in zip(members, part[2])]
            some_outputs, new = automatic(step, *part, here, out_sharding=(placed, states))
        for i, output, leaf in zip(members, some_outputs, new):
            outputs[i], leaves[i] = output, leaf
    return outputs, leaves


def _devices(x: Any) -> Any:
    """The devices that a concrete array is bound to."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
        return frozenset(x.sharding.device_set)
    return None


def _at(tree: Any, arrays: list[Any]) -> Any:
    """The concrete arrays of ``tree`` on the mesh that concrete ``arrays`` are bound to."""
    bound = next((x for x in arrays if _devices(x) is not None), None)
    if bound is None or not isinstance(bound.sharding, NamedSharding):
        return tree
    everywhere = NamedSharding(bound.sharding.mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, everywhere) if isinstance(x, jax.Array) else x, tree)


def automatic(function: Callable[..., Any], *arguments: Any, out_sharding: Any = None) -> Any:
    """``function(*arguments)``, in automatic mode if any of the arrays in them lies on an explicit mesh.

    Args:
      function: from trees of arrays (and anything else) to a tree of arrays.
      *arguments: its arguments.
      out_sharding: of the results, or a prefix of their tree; None: replicated.
    """
    flat, tree = jax.tree.flatten(arguments)
    arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]
    first = next((flat[i] for i in arrays if explicit_sharding(flat[i]) is not None), None)
    if first is None:
        return function(*arguments)

    def inner(*values: Any) -> Any:
        filled = list(flat)
        for i, value in zip(arrays, values):
            filled[i] = value
        return function(*jax.tree.unflatten(tree, filled))

    values = [flat[i] for i in arrays]
    if not isinstance(first, jax.core.Tracer):
        everywhere = NamedSharding(first.sharding.mesh, PartitionSpec())
        values = [x if isinstance(x, jax.core.Tracer) or x.committed else jax.device_put(x, everywhere) for x in values]
    mesh = explicit_sharding(first).mesh  # type: ignore[union-attr]
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
    if out_sharding is None:
        out_sharding = NamedSharding(mesh, PartitionSpec())
    return jax.sharding.auto_axes(inner, axes=axes, out_sharding=out_sharding)(*values)
