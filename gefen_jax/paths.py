"""Parameter trees by path: how leaves are named, and how statistics sit in a tree whose leaves are boxed.

Flax boxes a parameter together with metadata that describe its axes (`nn.Partitioned`, `nnx.Variable`). A
statistic has other axes, so it must not inherit them: it is kept as a bare array where the box was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey, KeyPath

Tree = Any


def name(path: KeyPath) -> str:
    """A leaf's path as text, the same for boxed, unboxed and NNX trees.

    Examples:
      >>> tree = {"layers": [{"kernel": 1.0}]}
      >>> [name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
      ['layers/0/kernel']
    """
    if path and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the order of `jax.tree.leaves`."""
    return [(name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def names(tree: Tree) -> list[str]:
    """Paths of all leaves, in the order of `jax.tree.leaves`."""
    return [path for path, _ in named_leaves(tree)]


def single(box: Any) -> Any:
    """The one array in a box (an `nnx.Variable`), or the array itself.

    Examples:
      >>> single([3]), single(3)
      (3, 3)
    """
    (array,) = jax.tree.leaves(box)
    return array


def unflatten_bare(tree: Tree, leaves: Sequence[Any]) -> Tree:
    """``tree`` with its leaves replaced and the boxes around single leaves dropped.

    Examples:
      >>> unflatten_bare({"a": 0, "b": [0]}, ["x", "y"])
      {'a': 'x', 'b': ['y']}
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_single_box)
    remaining = iter(leaves)
    bare = [next(remaining) if jax.tree.leaves(node) else node for node in nodes]
    return jax.tree.unflatten(treedef, bare)


def _is_single_box(node: Any) -> bool:
    return isinstance(node, _box_types()) and len(jax.tree.leaves(node)) == 1


def _box_types() -> tuple[type, ...]:
    """Flax's box types, if the program has imported Flax; the core does not depend on it."""
    types: list[type] = []
    meta = sys.modules.get("flax.core.meta")
    if meta is not None:
        types.append(meta.AxisMetadata)
    variables = sys.modules.get("flax.nnx.variablelib")
    if variables is not None:
        types.append(variables.Variable)
    return tuple(types)
