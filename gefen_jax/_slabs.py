"""Large arrays on their devices, taken piece by piece and in float64, for `on_device`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gefen_jax.tiling import Shape

SLAB = 1 << 24
"""Elements that one device takes at a time; its temporary memory is a few dozen bytes for each."""
_SMALLEST_NORMAL, _SMALLEST = 2.0**-126, 2.0**-149  # of float32

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_float64(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``function`` with 64-bit types switched on inside, whatever JAX is set to outside.

    Examples:
      >>> in_float64(lambda: jnp.ones(1).dtype.name)()
      'float64'
    """

    @functools.wraps(function)
    def inner(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return inner


def slabs(array: jax.Array, axes: Sequence[int], unit: Shape | None = None) -> Iterator[tuple[Shape, Shape]]:
    """Boxes that cover an array, as (first index, size) along each axis.

    They are cut along ``axes``, the first ones first, as far as `SLAB` elements per device demand. Axes that are
    sharded stay whole: each device then takes its own part.

    Args:
      array: on one or several devices.
      axes: that may be cut.
      unit: cuts are multiples of this, along each axis; None: 1.

    Examples:
      >>> list(slabs(jnp.ones((3, SLAB // 2 + 1), jnp.bfloat16), (0, 1)))
      [((0, 0), (1, 8388609)), ((1, 0), (1, 8388609)), ((2, 0), (1, 8388609))]
    """
    shape = array.shape
    local = array.sharding.shard_shape(shape)
    budget = SLAB * (array.size // max(math.prod(local), 1))
    sizes = list(shape)
    for axis in axes:
        if math.prod(sizes) <= budget:
            break
        if local[axis] == shape[axis]:
            step = 1 if unit is None else unit[axis]
            fitting = budget // (math.prod(sizes) // sizes[axis]) // step * step
            sizes[axis] = min(max(fitting, step), shape[axis])
    for starts in itertools.product(*(range(0, n, size) for n, size in zip(shape, sizes))):
        yield starts, tuple(min(size, n - start) for start, n, size in zip(starts, shape, sizes))


def take(array: jax.Array, starts: Shape, sizes: Shape) -> jax.Array:
    """A slab of an array; under jit, with static sizes."""
    for axis, size in enumerate(sizes):
        if size < array.shape[axis]:
            array = jax.lax.dynamic_slice_in_dim(array, starts[axis], size, axis)
    return array


@functools.partial(jax.jit, donate_argnums=0)
def place(whole: jax.Array, part: jax.Array, starts: Shape) -> jax.Array:
    """``whole`` with a slab of it replaced; in place."""
    return jax.lax.dynamic_update_slice(whole, part, starts)


def as_single(g: jax.Array) -> jax.Array:
    """The float32 nearest to each element, as float64; subnormal numbers too, which XLA takes for 0 on some devices.

    Examples:
      >>> in_float64(as_single)(jnp.array([1e-40, 0.1], jnp.float32)).tolist()
      [9.99994610111476e-41, 0.10000000149011612]
    """
    if g.dtype == jnp.float64:
        subnormal = jnp.round(g / _SMALLEST) * _SMALLEST
        return jnp.where(jnp.abs(g) < _SMALLEST_NORMAL, subnormal, g.astype(jnp.float32).astype(jnp.float64))
    g = g.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(g, jnp.uint32)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    subnormal = magnitude.astype(jnp.float64) * jnp.where(bits == magnitude, _SMALLEST, -_SMALLEST)
    return jnp.where(magnitude < 0x00800000, subnormal, g.astype(jnp.float64))


def to_host(x: jax.Array) -> np.ndarray:
    """A small array as NumPy's, also if it is spread over several processes."""
    if isinstance(x.sharding, NamedSharding) and not x.is_fully_replicated:
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
    return np.asarray(jax.device_get(x))
