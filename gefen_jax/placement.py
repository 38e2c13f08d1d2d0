"""Where a whole optimizer state lives: its shardings, from those of the parameters."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gefen_jax import paths
from gefen_jax.sharding import fit_spec
from gefen_jax.state import is_gefen
from gefen_jax.update import Leaf


def state_sharding(abstract_state: Any, param_shardings: Any, memory_kind: str | None = None) -> Any:
    """Shardings for an optimizer state, from those of the parameters.

    Works for any nesting of Optax wrappers and any optimizer: an array whose path ends with a parameter's path follows
    that parameter, without the mesh axes that do not divide its shape; everything else is replicated.

    Args:
      abstract_state: ``jax.eval_shape(tx.init, params)``, or a state.
      param_shardings: tree like the parameters, of `jax.sharding.NamedSharding`; or one for all.
      memory_kind: such as "pinned_host", for all of the state; None leaves the parameters' own.

    Returns:
      A tree of `NamedSharding` with the structure of ``abstract_state``: for ``out_shardings``, `jax.device_put`, or a
      checkpoint's restore template.

    Raises:
      TypeError: if ``param_shardings`` holds anything but `NamedSharding`.
      ValueError: if it is empty or has no sharding for a parameter of a Gefen state.

    Examples:
      >>> import optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = {"w": jax.numpy.zeros((8, 4))}
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
                f"{type(sharding).__name__}; pass a tree like the parameters, or one sharding for all"
            )
        by_path[_keys(path)] = sharding
    if not by_path:
        raise ValueError(
            "state_sharding: there are no parameter shardings: pass a tree like the parameters, or one sharding for all"
        )
    some = next(iter(by_path.values()))
    everywhere = NamedSharding(some.mesh, PartitionSpec(), memory_kind=some.memory_kind)

    def of(sharding: NamedSharding) -> NamedSharding:
        return sharding if memory_kind is None else sharding.with_memory_kind(memory_kind)

    def owner(path: Any) -> NamedSharding | None:
        keys = _keys(path)
        return next((by_path[keys[i:]] for i in range(len(keys) + 1) if keys[i:] in by_path), None)

    def place(path: Any, leaf: Any) -> Any:
        if is_gefen(leaf):  # its own arrays may share their names with parameters
            own = {x: of(fit_spec(getattr(leaf, x).shape, everywhere)) for x in ("count", "format", "codebook")}
            trees = {name: jax.tree_util.tree_map_with_path(of_gefen, getattr(leaf, name)) for name in Leaf._fields}
            return leaf._replace(**own, **trees)  # type: ignore[arg-type]
        found = owner(path)
        return of(fit_spec(tuple(leaf.shape), everywhere if found is None else found))

    def of_gefen(path: Any, leaf: Any) -> NamedSharding:
        found = owner(path)
        if found is None:
            raise ValueError(
                f"state_sharding: there is no sharding for the parameter {paths.name(path)!r} of the state; there are "
                f"{', '.join(repr('/'.join(keys)) for keys in list(by_path)[:6])}"
            )
        return of(fit_spec(tuple(leaf.shape), found))

    return jax.tree_util.tree_map_with_path(place, abstract_state, is_leaf=is_gefen)


def _keys(path: Any) -> tuple[str, ...]:
    """A key path as strings, without the ``value`` of boxes and variables."""
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return keys[:-1] if keys and keys[-1] == "value" else keys
