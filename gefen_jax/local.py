"""Kernels under sharding: leaves whose blocks lie inside shards are stepped shard by shard, in `jax.shard_map`.

A kernel knows nothing of meshes, and XLA would gather a sharded array for it. Where the sharding of a leaf is known
(stated by the user, part of its type on an explicit mesh, or that of a concrete array) and no block crosses shards,
every device steps its own part, and nothing is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gefen_jax import kernels, paths, update
from gefen_jax.sharding import by_mesh, explicit_sharding, fit_spec
from gefen_jax.update import Leaf

Stated = NamedSharding | dict[str, NamedSharding] | None
"""One sharding for all parameters, or one by path; None if the user said nothing."""


def stated(shardings: Any) -> Stated:
    """The argument ``shardings`` of `gefen`, checked.

    Raises:
      TypeError: it holds anything but `jax.sharding.NamedSharding`.

    Examples:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> list(stated({"w": NamedSharding(mesh, PartitionSpec("data"))}))
      ['w']
    """
    if shardings is None or isinstance(shardings, NamedSharding):
        return shardings
    named = jax.tree_util.tree_leaves_with_path(shardings, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))
    for path, found in named:
        if not isinstance(found, NamedSharding):
            raise TypeError(
                f"shardings: expected a jax.sharding.NamedSharding for {paths.name(path)!r}, found "
                f"{type(found).__name__}; pass a tree like the parameters, or one sharding for all"
            )
    return {paths.name(path): found for path, found in named}


def of(shardings: Stated, path: str) -> NamedSharding | None:
    """The stated sharding of one leaf.

    Raises:
      ValueError: shardings were stated, but not of this leaf.
    """
    if shardings is None or isinstance(shardings, NamedSharding):
        return shardings
    if path not in shardings:
        raise ValueError(
            f"shardings: there is none for parameter {path!r}; there are {', '.join(map(repr, shardings))}"
        )
    return shardings[path]


def home(shardings: Stated, path: str, leaf: Leaf, gradient: Any = None, parameter: Any = None) -> NamedSharding | None:
    """Where a leaf lives, if that is known and more than one device.

    Raises:
      ValueError: an array is known to lie elsewhere than stated.
    """
    if getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()):
        return None  # inside shard_map arrays are local already
    said, seen = of(shardings, path), _known(leaf.mu if gradient is None else gradient)
    if said is not None and seen is not None and not _same(said, seen, len(leaf.nu.shape)):
        raise ValueError(
            f"shardings: parameter {path!r} was said to be placed as {said.spec} on {dict(said.mesh.shape)}, but is "
            f"placed as {seen.spec} on {dict(seen.mesh.shape)}"
        )
    found = said if seen is None else seen
    if found is None or found.mesh.size == 1:
        return None
    arrays = [x for x in (gradient, parameter, *leaf) if x is not None]
    places = [(fit_spec(x.shape, found), _known(x)) for x in arrays]
    if any(place is not None and not _same(fitted, place, len(leaf.nu.shape)) for fitted, place in places):
        return None
    return found


def _known(x: Any) -> NamedSharding | None:
    if not isinstance(x, jax.Array):
        return None
    if isinstance(x, jax.core.Tracer):
        return explicit_sharding(x)
    return x.sharding if isinstance(x.sharding, NamedSharding) else None


def _same(a: NamedSharding, b: NamedSharding, rank: int) -> bool:
    return dict(a.mesh.shape) == dict(b.mesh.shape) and _axes(a, rank) == _axes(b, rank)


def _axes(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
    """Mesh axes that divide each array axis."""
    entries = [e if isinstance(e, tuple) else () if e is None else (e,) for e in sharding.spec]
    return [tuple(name for name in entry if sharding.mesh.shape[name] > 1) for entry in entries] + [()] * (
        rank - len(entries)
    )


def why_not(shape: tuple[int, ...], leaf: Leaf, home: NamedSharding, *dtypes: Any) -> str | None:
    """Why a leaf cannot be stepped shard by shard in kernels; None if it can.

    Args:
      shape: the parameter's.
      leaf: its state: arrays or only their shapes and dtypes.
      home: where it lives.
      *dtypes: of the gradient and of the parameter.
    """
    wanted = _axes(home, len(shape))

    def crossing(array: tuple[int, ...]) -> int | None:
        """The first axis that does not divide as the parameter's does."""
        kept = _axes(fit_spec(array, home), len(shape))
        return next((i for i, (k, w) in enumerate(zip(kept, wanted)) if k != w), None)

    def shards(axis: int) -> int:
        return math.prod(home.mesh.shape[name] for name in wanted[axis])

    axis = crossing(shape)
    if axis is not None:
        return f"axis {axis} of {shape[axis]} elements does not divide into {shards(axis)} equal shards"
    statistics = {"second moment": leaf.nu}
    if not update.is_exact(leaf.mu):
        statistics = {"first moment": leaf.mu_scale} | statistics
        if (axis := crossing(leaf.mu.shape)) is not None:
            return f"two codes that share a byte lie in different shards along axis {axis}"
    if update.is_factored(leaf):
        if any(crossing(x.shape) is not None for x in (leaf.nu, leaf.nu_cross)):
            return "its row or column factors are sums over several devices"
        del statistics["second moment"]
    for name, x in statistics.items():
        axis = crossing(x.shape)
        if axis is not None:
            return (
                f"blocks of its {name} cross shards along axis {axis} ({x.shape[axis]} blocks, {shards(axis)} shards; "
                f"a plan learned with align={shards(axis)} avoids it)"
            )
    own, *state = (
        tuple(n // math.prod(home.mesh.shape[name] for name in names) for n, names in zip(array, axes))
        for array, axes in ((x, _axes(fit_spec(x, home), len(x))) for x in (shape, *(x.shape for x in leaf)))
    )
    local = Leaf(*(jax.ShapeDtypeStruct(part, x.dtype) for part, x in zip(state, leaf)))  # type: ignore[arg-type]
    return kernels.why_not(own, local, *dtypes)


def by_shard(
    step: Callable[..., tuple[list[Any], list[Leaf]]],
    columns: tuple[list[Any], list[Any], list[Leaf], list[Any]],
    shared: Any,
    *,
    like: list[Any],
    homes: Sequence[NamedSharding | None],
) -> tuple[list[Any], list[Leaf]]:
    """``step(*columns, shared)``: shard by shard for leaves that have a home, as `by_mesh` does it for the others.

    Args:
      step: from columns (gradients, parameters or None, leaves, scalars or anything) and ``shared`` to (outputs, new
        leaves); outputs have their gradients' shapes.
      columns: lists of equal length.
      shared: what all leaves need; its arrays are scalars or small, and every device gets all of them.
      like: arrays whose placement the outputs of the others take.
      homes: where the leaves live whose blocks are local; None for the others.
    """
    groups: dict[Any, list[int]] = {}
    for i, home in enumerate(homes):
        groups.setdefault(None if home is None else home.mesh, []).append(i)
    if set(groups) <= {None}:
        return by_mesh(step, columns, shared, like=like)
    outputs: list[Any] = [None] * len(homes)
    leaves: list[Any] = [None] * len(homes)
    for mesh, members in groups.items():
        part = tuple([column[i] for i in members] for column in columns)
        if mesh is None:
            found = by_mesh(step, part, shared, like=[like[i] for i in members])
        else:
            found = _mapped(step, part, shared, [home for i in members if (home := homes[i]) is not None])
        for i, output, leaf in zip(members, *found):
            outputs[i], leaves[i] = output, leaf
    return outputs, leaves


def _mapped(step: Callable[..., Any], columns: Any, shared: Any, homes: list[NamedSharding]) -> Any:
    """The step of leaves on one mesh, each device on its own shards."""
    gradients, parameters, leaves, rest = columns
    everywhere = PartitionSpec()
    own = [home.spec for home in homes]
    of_parameters = [None if p is None else spec for p, spec in zip(parameters, own)]
    of_leaves = [Leaf(*(fit_spec(x.shape, home).spec for x in leaf)) for leaf, home in zip(leaves, homes)]  # type: ignore[arg-type]
    others = jax.tree.map(lambda _: everywhere, (rest, shared))
    specs = jax.tree.leaves((own, of_parameters, of_leaves, others))
    flat, tree = jax.tree.flatten((gradients, parameters, leaves, (rest, shared)))
    arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]

    def inner(*values: Any) -> Any:
        filled = list(flat)
        for i, value in zip(arrays, values):
            filled[i] = value
        gradients, parameters, leaves, (rest, shared) = jax.tree.unflatten(tree, filled)
        return step(gradients, parameters, leaves, rest, shared)

    # Kernels have no rule for varying axes, and need none: no block crosses shards.
    run = jax.shard_map(
        inner,
        mesh=homes[0].mesh,
        in_specs=tuple(specs[i] for i in arrays),
        out_specs=(own, of_leaves),
        check_vma=False,
    )
    return run(*(flat[i] for i in arrays))
