"""Parameter trees and gradients for the numerical tests."""

import jax
import jax.numpy as jnp
import numpy as np

from gefen_jax import blocks

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def mixed(shapes, dtypes=DTYPES):
    """Parameters of these shapes by name, in turn of each dtype."""
    rng = np.random.default_rng(1)
    return {f"p{i}": jnp.asarray(rng.normal(size=shape), dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)}


def gradient(shape, rng, dtype=np.float32, scale=1.0):
    """Gaussian numbers with lognormal scales by row and by column of the last two axes."""
    g = rng.normal(size=shape) * scale
    for axis in range(max(len(shape) - 2, 0), len(shape)):
        along = [1] * len(shape)
        along[axis] = shape[axis]
        g = g * np.exp(rng.normal(size=along))
    return jnp.asarray(g, dtype)


def gradients(params, seed, scale=1.0):
    """One gradient for each parameter, in its dtype."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: gradient(p.shape, rng, p.dtype, scale), params)


def leaves(state):
    """(path, decision, state of the leaf) of a Gefen state."""
    return [(path, leaf, part) for (path, leaf), part in zip(blocks(state).items(), state.leaves())]


def bits_of(x):
    """The bytes of an array: equal only for equal bits."""
    x = np.asarray(x)
    return x.shape, x.dtype, x.tobytes()


def same_bits(a, b):
    """Whether two trees are equal in structure and, bit for bit, in every array."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(bits_of(x) == bits_of(y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
