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
                placed = NamedSharding(placed.mesh, PartitionSpec(), memory_kind=placed.memory_kind)
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
    groups: dict[Any, list[int]] = {}
    for i, g in enumerate(columns[0]):
        groups.setdefault(_home(g), []).append(i)
    if len(groups) == 1 and explicit_sharding(columns[0][0]) is None or not groups:
        return step(*columns, shared)
    outputs, leaves = [None] * len(columns[0]), [None] * len(columns[0])
    for members in groups.values():
        part = tuple([column[i] for i in members] for column in columns)
        some, new = _on_one_mesh(step, part, shared, [like[i] for i in members])
        for i, output, leaf in zip(members, some, new):
            outputs[i], leaves[i] = output, leaf
    return outputs, leaves


def _home(g: Any) -> Any:
    """What the leaves of one group share: an explicit mesh, or the devices of a concrete array."""
    explicit = explicit_sharding(g)
    if explicit is not None:
        return explicit.mesh
    if isinstance(g, jax.Array) and not isinstance(g, jax.core.Tracer) and g.committed:
        return tuple(sorted(device.id for device in g.sharding.device_set))
    return None


def _on_one_mesh(step: Callable[..., Any], columns: tuple[list[Any], ...], shared: Any, like: list[Any]) -> Any:
    first = columns[0][0]
    if not isinstance(first, jax.core.Tracer) and isinstance(first.sharding, NamedSharding):
        everywhere = NamedSharding(first.sharding.mesh, PartitionSpec())
        shared = jax.tree.map(lambda x: jax.device_put(x, everywhere) if isinstance(x, jax.Array) else x, shared)
    if explicit_sharding(first) is None:
        return step(*columns, shared)
    outputs = [explicit_sharding(x) for x in like]
    states = [
        type(leaf)(*(fit_spec(x.shape, explicit_sharding(g)) for x in leaf))  # type: ignore[arg-type]
        for g, leaf in zip(columns[0], columns[2])
    ]
    flat, tree = jax.tree.flatten((columns, shared))
    arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]

    def inner(*values: Any) -> Any:
        filled = list(flat)
        for i, value in zip(arrays, values):
            filled[i] = value
        columns, shared = tree.unflatten(filled)
        return step(*columns, shared)

    return jax.sharding.auto_axes(inner, out_sharding=(outputs, states))(*(flat[i] for i in arrays))


def state_sharding(abstract_state: Any, param_shardings: Any, memory_kind: str | None = None) -> Any:
    """Shardings for an optimizer state, from those of the parameters.

    Works for any nesting of Optax wrappers and any optimizer: an array whose path ends with a parameter's path follows
    that parameter, without the mesh axes that do not divide its shape; everything else is replicated.

    Args:
      abstract_state: ``jax.eval_shape(tx.init, params)``, or a state.
      param_shardings: tree like the parameters, of `jax.sharding.NamedSharding`.
      memory_kind: such as "pinned_host", for all of the state; None leaves the parameters' own.

    Returns:
      A tree of `NamedSharding` with the structure of ``abstract_state``: for ``out_shardings``, `jax.device_put`, or a
      checkpoint's restore template.

    Raises:
      TypeError: if ``param_shardings`` holds anything but `NamedSharding`.

    Examples:
      >>> import optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = {"w": jnp.zeros((8, 4))}
      >>> wanted = state_sharding(
      ...     jax.eval_shape(optax.adam(1e-3).init, params), {"w": NamedSharding(mesh, PartitionSpec("data"))}
      ... )
      >>> wanted[0].mu["w"].spec[0], len(wanted[0].count.spec)
      ('data', 0)
    """
    is_leaf = lambda node: isinstance(node, jax.sharding.Sharding)  # noqa: E731
    named = jax.tree_util.tree_leaves_with_path(param_shardings, is_leaf=is_leaf)
    by_path: dict[tuple[str, ...], NamedSharding] = {}
    for path, sharding in named:
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"state_sharding: expected a NamedSharding for {jax.tree_util.keystr(path)}, found "
                f"{type(sharding).__name__}"
            )
        by_path[_keys(path)] = sharding
    if not by_path:
        raise ValueError("state_sharding: there are no parameter shardings")
    mesh = next(iter(by_path.values())).mesh

    def place(path: Any, leaf: Any) -> NamedSharding:
        keys = _keys(path)
        owner = next((by_path[keys[i:]] for i in range(len(keys) + 1) if keys[i:] in by_path), None)
        if owner is None or (keys and keys[-1] in ("count", "format", "codebook") and keys[-1:] not in by_path):
            kind = next(iter(by_path.values())).memory_kind
            sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        else:
            sharding = fit_spec(tuple(leaf.shape), owner)
        return sharding if memory_kind is None else sharding.with_memory_kind(memory_kind)

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def _keys(path: Any) -> tuple[str, ...]:
    """A key path as strings, without the ``value`` of boxes and variables."""
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return keys[:-1] if keys and keys[-1] == "value" else keys
