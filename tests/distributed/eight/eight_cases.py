"""Meshes, layouts, trees and comparisons that the tests on eight devices share."""

import re
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import state_sharding

SHAPES = {
    "attention": {"kernel": (128, 256), "bias": (64,)},
    "embed": (640, 16),
    "layers": (4, 64, 64),
    "odd": (83, 59),
    "gain": (),
}
"""A factored kernel, a bias that stays exact Adam, an embedding, scanned layers, primes, and a scalar."""

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


class Layout(NamedTuple):
    """A mesh and where the tree of `SHAPES` lies on it."""

    shape: tuple
    names: tuple
    specs: dict

    def mesh(self, kind=AUTO, devices=None):
        return jax.make_mesh(self.shape, self.names, axis_types=(kind,) * len(self.shape), devices=devices)

    def shardings(self, kind=AUTO, devices=None):
        """Shardings of the tree, spelled as JAX spells those of results: full rank on explicit meshes."""
        mesh = self.mesh(kind, devices)

        def full(spec, shape):
            missing = len(shape) - len(spec) if kind == EXPLICIT else 0
            return NamedSharding(mesh, P(*spec, *(None,) * missing))

        return jax.tree.map(full, self.specs, SHAPES, is_leaf=lambda x: isinstance(x, P))


def _specs(kernel, bias, embed, layers):
    return {
        "attention": {"kernel": kernel, "bias": bias},
        "embed": embed,
        "layers": layers,
        "odd": P(),
        "gain": P(),
    }


LAYOUTS = {
    "data": Layout((8,), ("d",), _specs(P(), P(), P(), P())),
    "rows": Layout((8,), ("d",), _specs(P("d"), P("d"), P("d"), P(None, "d"))),
    "columns": Layout((8,), ("d",), _specs(P(None, "d"), P("d"), P(None, "d"), P(None, None, "d"))),
    "2x4": Layout((2, 4), ("f", "t"), _specs(P("f", "t"), P(("f", "t")), P("t", "f"), P(None, "f", "t"))),
    "4x2": Layout((4, 2), ("f", "t"), _specs(P("t", "f"), P("f"), P(("f", "t")), P("f", None, "t"))),
}


def tree(seed, shapes=SHAPES, scale=1.0):
    """A tree of Gaussian float32 NumPy arrays, rows and columns of different scales."""
    rng = np.random.default_rng(seed)

    def one(shape):
        x = rng.standard_normal(shape, np.float32)
        for axis, size in enumerate(shape):
            x = x * np.exp(np.random.default_rng(size).normal(0, 1, size)).reshape(
                (-1,) + (1,) * (len(shape) - 1 - axis)
            )
        return np.asarray(scale * x, np.float32)

    return jax.tree.map(one, shapes, is_leaf=lambda x: isinstance(x, tuple))


def placed(arrays, shardings):
    """A tree of arrays on a mesh."""
    return jax.tree.map(jax.device_put, arrays, shardings)


def train(tx, params, opt_state, gradients, shardings=None):
    """(parameters, state, number of compilations) after one jitted step for each tree of gradients."""

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    out = None if shardings is None else (shardings, state_sharding(opt_state, shardings))
    jitted = jax.jit(step, out_shardings=out)
    for grads in gradients:
        params, opt_state = jitted(params, opt_state, grads)
    return params, opt_state, jitted._cache_size()


def same(a, b):
    """Assert that two trees hold equal bits, wherever they are."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), f"{jax.tree_util.keystr(path)}: {(x != y).sum()} of {x.size} differ"


def close(a, b, rtol, atol=0.0):
    """Assert that two trees are equal to a tolerance, wherever they are."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype, path
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol, atol, err_msg=str(path))


def assert_lies(arrays, shardings):
    """Assert that every array of a tree lies as the tree of shardings says."""
    for (path, x), sharding in zip(jax.tree_util.tree_leaves_with_path(arrays), jax.tree.leaves(shardings)):
        assert x.committed, path
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (path, x.sharding, sharding)


def bytes_on_one_device(arrays):
    """Bytes of a tree on the device that holds most of it."""
    held = {}
    for x in jax.tree.leaves(arrays):
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast|ragged-all-to-all"
COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?\S+ = (.*?) ({KINDS})(?:-start)?\(", re.MULTILINE)


def collectives(compiled):
    """[(operation, type, elements)] of a compiled program, sorted; one entry for each array of a combined one."""
    found = []
    for types, operation in COLLECTIVE.findall(compiled.as_text()):
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", types):
            elements = 1
            for size in sizes.split(","):
                elements *= int(size or 1)
            found.append((operation, dtype, elements))
    return sorted(found)


def sums(*sizes):
    """All-reductions of that many float32 numbers each."""
    return sorted(("all-reduce", "f32", size) for size in sizes)
