"""What the tests of `gefen_jax.partition` share: gradients with known scales, and surveys of them."""

import numpy as np

from gefen_jax import partition, tiling

RNG = np.random.default_rng


def survey(gradients, view=None, **options):
    """`partition.survey` with the shape rule's own structures; ``view`` None takes the default split."""
    gradients = gradients if isinstance(gradients, list) else [gradients]
    shape = gradients[0].shape
    split = tiling.default_split(shape) if view is None else view
    tile = tiling.momentum_tile(shape, 0 if split is None else split[0])
    default = ("tile", tile) if split is None else ("factored", *split)
    options = {"factored": split is not None} | options
    return partition.survey(gradients, tile=tile, default=default, view=split, **options)


def choice(gradients, view=None, **options):
    return partition.choose([survey(gradients, view, **options)])[0]


def normal(*shape, seed=0):
    return RNG(seed).normal(size=shape)


def scales(*shape, seed=1):
    """Positive numbers over about two orders of magnitude."""
    return np.exp(RNG((seed, 99)).normal(size=shape))  # another stream than that of `normal`
