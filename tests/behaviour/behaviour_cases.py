"""Trees, gradients and comparisons that the tests of behaviour share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

SHAPES = {"dense": {"bias": (192,), "kernel": (96, 192)}, "table": (640, 16)}
"""A kernel that is factored, an embedding, and a bias that stays exact Adam."""


def normal(seed, shape, dtype=np.float32, scale=1.0):
    """Gaussian numbers as a JAX array."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) * scale, dtype)


def tree(seed, shapes=SHAPES, dtype=np.float32, scale=1.0):
    """A tree of Gaussian arrays; ``shapes`` is a tree of tuples."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    arrays = [normal(seed * 1000 + i, shape, dtype, scale) for i, shape in enumerate(leaves)]
    return jax.tree.unflatten(treedef, arrays)


def structured(seed, shapes=SHAPES, dtype=np.float32):
    """Gradients with structure to learn: rows and columns of very different scales."""

    def shaped(path, g):
        rng = np.random.default_rng(seed + len(str(path)))
        for axis, size in enumerate(g.shape):
            if size > 1:
                scales = np.exp(rng.normal(0, 1.5, size)).astype(np.float32)
                g = g * scales.reshape([-1 if i == axis else 1 for i in range(g.ndim)])
        return g.astype(dtype)

    return jax.tree_util.tree_map_with_path(shaped, tree(seed, shapes))


def train(tx, params, gradients, opt_state=None):
    """Parameters and state after one jitted step for each tree of gradients."""
    opt_state = tx.init(params) if opt_state is None else opt_state
    step = step_of(tx)
    for g in gradients:
        params, opt_state = step(params, opt_state, g)
    return params, opt_state


@functools.lru_cache(maxsize=64)
def step_of(tx):
    """The jitted step (params, opt_state, grads) -> (params, opt_state); compiled once for each transformation."""
    return jax.jit(lambda params, opt_state, g: apply(tx, params, opt_state, g))


def apply(tx, params, opt_state, g, **extra):
    """One step."""
    updates, opt_state = tx.update(g, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state


def same(a, b):
    """Assert that two trees are equal in structure, dtypes and every bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), f"{jax.tree_util.keystr(path)} differs"


def close(a, b, rtol=1e-6, atol=0.0):
    """Assert that two trees are equal in structure and dtypes, and their values to a tolerance."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype, path
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol, atol, err_msg=str(path))


def snapshot(tree):
    """A copy of every array, to see later that nothing was changed."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def kinds(tree):
    """Shapes, dtypes and weak types of a tree of arrays or of `jax.eval_shape`'s results."""
    return jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype), bool(getattr(x, "weak_type", False))), tree)
