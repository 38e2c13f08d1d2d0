"""The step of one leaf, or of one flat buffer, as a Pallas kernel; it also runs in interpret mode on any machine.

The same cut into tiles as in `source`, in `jax.numpy`. The nearest word is found by the rule itself (binary search
among the words, then a comparison of two distances). The factors of a factored second moment are made outside.

Pallas's Triton backend is deprecated by JAX; `_backend` is the only place that knows of it.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gefen_pallas.geometry import CELL, CHUNKS, COLUMN, FACTORED, FULL, ONCE, ROW, ROWS, STRIPS, Cut
from gefen_pallas.tree import Arrays

TINY = 1.1754944e-38
WARPS = 8


@functools.cache
def _backend() -> Any:
    """Pallas with its Triton backend, whose deprecation is announced by a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton

    return triton


def step(
    leaf: Arrays,
    cut: Cut,
    words: jax.Array,
    hyper: jax.Array,
    decay: int,
    *,
    reads: bool,
    apply: bool,
    companding: bool = False,
    mean: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """One step of one leaf in one launch.

    Args:
      leaf: its arrays; for a factored leaf ``nu`` and ``cross`` are the new ones, and are only read.
      cut: from `geometry.plan_leaf`.
      words: codebook.
      hyper: vector of hyper-parameters as in `tree.step`.
      decay: which of the weight decays it has.
      reads: whether the parameter is read.
      apply: whether the result is the new parameter instead of the update.
      companding: whether codes come from the closed form instead of the nearest word.
      mean: float32 (batch entries,), means of the new row factor of a factored leaf.
      interpret: run on any machine instead of compiling for a GPU.

    Returns:
      Update or new parameter, and the new (mu, scale, nu, cross).
    """
    from jax.experimental import pallas as pl

    target = leaf.parameter if apply else leaf.gradient
    factored = cut.kind.second == FACTORED and not cut.kind.exact
    changed = [target, leaf.mu] + ([] if cut.kind.exact else [leaf.scale]) + ([] if factored else [leaf.nu])
    read = [words, hyper, leaf.nu, leaf.cross] + ([mean] if factored else [])
    read += [leaf.gradient] if apply else ([leaf.parameter] if reads else [])
    operands = [jnp.reshape(x, -1) for x in [*read, *changed]]
    first = len(read)
    kernel = functools.partial(
        _kernel, cut=cut, decay=9 + decay, reads=reads, apply=apply, factored=factored, companding=companding
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        options = {} if interpret else {"compiler_params": _backend().CompilerParams(num_warps=WARPS, num_stages=1)}
        written = pl.pallas_call(
            kernel,
            grid=(cut.programs * cut.repeat,),
            in_specs=[anywhere] * len(operands),
            out_specs=[anywhere] * len(changed),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[first:]],
            input_output_aliases={first + i: i for i in range(len(changed))},
            interpret=interpret,
            name="gefen_leaf",
            **options,
        )(*operands)
    results = [jnp.reshape(x, old.shape) for x, old in zip(written, changed)]
    output, mu = results[:2]
    scale = leaf.scale if cut.kind.exact else results[2]
    return output, (mu, scale, leaf.nu if factored else results[-1], leaf.cross)


def _kernel(*refs: Any, cut: Cut, decay: int, reads: bool, apply: bool, factored: bool, companding: bool) -> None:
    """Split the references by role and run the body of the class."""
    from jax.experimental import pallas as pl

    words, hyper, nu_in, cross, *rest = refs
    mean = rest.pop(0) if factored else None
    other = rest.pop(0) if apply or reads else None
    count = len(rest) // 2
    old, new = rest[:count], rest[count:]
    gradient: Any = other if apply else old[0]
    parameter = old[0] if apply else other
    b1, w1, b2, w2, bc1, bc2, eps, rate, factor = (hyper[i] for i in range(9))
    load, store = _load, _store

    def finish(d: jax.Array, offset: jax.Array, mask: jax.Array) -> None:
        u, p = d, None
        if reads:
            p = load(parameter, offset, mask).astype(jnp.float32)
            u = u + hyper[decay] * p
        u = (-rate * u).astype(gradient.dtype)
        store(new[0], offset, mask, p + u.astype(jnp.float32) if apply else u)

    program = pl.program_id(0)
    kind = cut.kind
    if kind.exact:
        offset = program * kind.x + jnp.arange(kind.x)
        mask = offset < cut.cells
        g = load(gradient, offset, mask).astype(jnp.float32) * factor
        m = b1 * load(old[1], offset, mask) + w1 * g
        v = b2 * load(old[2], offset, mask) + w2 * (g * g)
        store(new[1], offset, mask, m)
        store(new[2], offset, mask, v)
        finish(m / ((jnp.sqrt(v / bc2) + eps) * bc1), offset, mask)
        return

    x = jnp.arange(kind.x)[:, None, None]
    y = jnp.arange(kind.y)[None, :, None]
    z = jnp.arange(kind.z)[None, None, :]
    a, b, width, across = cut.rows, cut.columns, cut.width, cut.across
    block = (0, 1) if kind.loop == STRIPS else ()

    def place(j: jax.Array) -> tuple[jax.Array, ...]:
        """Cell, its row and column among the cells, row and column inside it, and which of all exist."""
        yy, zz = y, z
        if kind.loop == STRIPS:
            strips = across // cut.strip_columns
            q = j * kind.x + x
            row = program // strips * cut.strip_rows + q // cut.strip_columns
            column = program % strips * cut.strip_columns + q % cut.strip_columns
            return row * across + column, row, column, yy, zz, q < cut.strip_rows * cut.strip_columns
        if kind.loop == ROWS:
            yy = j * kind.y + y
        elif kind.loop == CHUNKS:
            zz = j * kind.z + z
        cell = program * kind.x + x
        return cell, cell // across, cell % across, yy, zz, cell < cut.cells

    def gradient_at(j: jax.Array) -> tuple[Any, ...]:
        cell, row, column, yy, zz, here = place(j)
        offset = (row * a + yy) * width + column * b + zz
        mask = here & (yy < a) & (zz < b)
        g = load(gradient, offset, mask).astype(jnp.float32) * factor
        return cell, row, column, yy, zz, here, offset, mask, g

    def momentum(g: jax.Array, offset: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
        if kind.packed:
            byte = load(old[1], offset // 2, mask).astype(jnp.int32)
            code = jnp.where(offset % 2 == 0, byte & 15, byte >> 4)
        else:
            code = load(old[1], offset, mask).astype(jnp.int32)
        return jnp.where(mask, words[code] * (b1 * scale) + w1 * g, 0.0)

    def largest(m: jax.Array) -> jax.Array:
        most = jnp.max(jnp.abs(m), axis=2 if kind.row_scale else (1, 2), keepdims=True)
        return jnp.where(most < TINY, 0.0, most)

    def decayed(index: jax.Array, mask: jax.Array, squares: jax.Array) -> jax.Array:
        v = b2 * load(old[3], index, mask) + w2 * squares
        store(new[3], index, mask, v)
        return v

    def weight(v: jax.Array) -> jax.Array:
        return 1.0 / ((jnp.sqrt(v / bc2) + eps) * bc1)

    axes: tuple[int, ...] = {CELL: (1, 2), ROW: (2,), COLUMN: (1,)}.get(kind.second, ()) + block[:1]
    trips = 1
    ready: Any = None
    scale: Any = None
    old_scale: Any = None
    if kind.loop == STRIPS:
        trips = -(-cut.strip_rows * cut.strip_columns // kind.x)
    elif kind.loop == ROWS:
        trips = -(-a // kind.y)
    elif kind.loop == CHUNKS:
        trips = -(-b // kind.z)

    if kind.loop != ONCE:  # first the statistics of all that the program walks
        cell, *_, here = place(jnp.int32(0))
        if kind.loop != STRIPS:
            old_scale = load(old[2], cell, here)
        shape = [1 if i in axes else n for i, n in enumerate((kind.x, kind.y, kind.z))]

        def gather(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            squares, most = carry
            *_, offset, mask, g = gradient_at(j)
            squares = squares + jnp.sum(g * g, axis=axes, keepdims=True) if axes else squares
            if kind.loop != STRIPS:
                most = jnp.maximum(most, largest(momentum(g, offset, mask, old_scale)))
            return squares, most

        start = jnp.zeros(shape if axes else (1, 1, 1), jnp.float32), jnp.zeros((kind.x, 1, 1), jnp.float32)
        squares, most = lax.fori_loop(0, trips, gather, start)
        if kind.loop != STRIPS:
            scale = most
            store(new[2], cell, here, scale)
        if axes:
            size = (a if kind.second == COLUMN else a * b) * cut.strip_rows * cut.strip_columns
            if kind.loop == STRIPS and kind.second == CELL:
                index, valid = program + jnp.zeros((1, 1, 1), jnp.int32), jnp.ones((1, 1, 1), bool)
            elif kind.loop == STRIPS:
                strips = across // cut.strip_columns
                index, valid = program // strips * width + program % strips * b + z, z < b
            elif kind.second == CELL:
                index, valid = cell, here
            else:
                index, valid = cell * b + z, here & (z < b)
            ready = weight(decayed(index, valid, squares / size))

    def finish_tile(j: jax.Array, carry: None) -> None:
        cell, row, column, yy, zz, here, offset, mask, g = gradient_at(j)
        if scale is None:
            index, valid = (cell * a + y, here & (y < a)) if kind.row_scale else (cell, here)
            m = momentum(g, offset, mask, load(old[2], index, valid))
            most = largest(m)
            store(new[2], index, valid, most)
        else:
            m, most = momentum(g, offset, mask, old_scale), scale
        inverse = jnp.where(most > 0, 1.0 / jnp.where(most > 0, most, 1.0), 0.0)
        code = _compand(m * inverse, words) if companding else _nearest(m * inverse, words)
        if kind.packed:
            low, high = code.reshape(*code.shape[:2], -1, 2)[..., 0], code.reshape(*code.shape[:2], -1, 2)[..., 1]
            half = offset.reshape(*code.shape[:2], -1, 2)[..., 0] // 2
            store(new[1], half, mask.reshape(*code.shape[:2], -1, 2)[..., 0], low | high << 4)
        else:
            store(new[1], offset, mask, code)
        if ready is not None:
            d = m * ready
        elif kind.second == FULL:
            d = m * weight(decayed(offset, mask, g * g))
        elif kind.second == FACTORED:
            r = row * a + yy
            batch = r // cut.batch_rows
            valid = here & (yy < a)
            average = load(mean, batch, valid)
            ratio = load(cross, batch * width + column * b + zz, mask)
            ratio = jnp.where(average > 0, ratio / jnp.where(average > 0, average, 1.0), 0.0)
            ratio = jnp.where(jnp.isfinite(average), ratio, jnp.nan)
            root = jnp.sqrt(load(nu_in, r, valid) / bc2)
            d = m / ((root * jnp.sqrt(ratio) + eps) * bc1)
        else:
            squares = jnp.sum(g * g, axis=axes, keepdims=True)
            if kind.second == CELL:
                index, valid, size = cell, here, a * b
            elif kind.second == ROW:
                index, valid, size = cell * a + y, here & (y < a), b
            else:
                index, valid, size = cell * b + z, here & (z < b), a
            d = m * weight(decayed(index, valid, squares / size))
        finish(d, offset, mask)

    lax.fori_loop(0, trips, finish_tile, None) if trips > 1 else finish_tile(jnp.int32(0), None)


def _load(ref: Any, index: jax.Array, mask: jax.Array) -> jax.Array:
    index, mask = jnp.broadcast_arrays(index, mask)
    return _backend().load(ref.at[index], mask=mask, other=0)


def _store(ref: Any, index: jax.Array, mask: jax.Array, value: jax.Array) -> None:
    index, mask, value = jnp.broadcast_arrays(index, mask, value)
    _backend().store(ref.at[index], value.astype(ref.dtype), mask=mask)


def _nearest(y: jax.Array, words: Any) -> jax.Array:
    """Index of the nearest word; the lower one where both are equally near, and the first of two equal words."""
    count = words.shape[0]
    below = jnp.zeros(y.shape, jnp.int32)
    step = count // 2
    while step:
        below = jnp.where(words[below + (step - 1)] < y, below + step, below)
        step //= 2
    lower = jnp.maximum(below - 1, 0)
    code = jnp.where(jnp.abs(y - words[lower]) <= jnp.abs(y - words[below]), lower, below)
    before = jnp.maximum(code - 1, 0)
    return jnp.where(words[before] == words[code], before, code)


def _compand(y: jax.Array, words: Any) -> jax.Array:
    """The code of y among words in closed form."""
    middle = 63 / 127
    c = (middle / words[191] - 1) / (1 - middle)
    size = jnp.minimum(jnp.abs(y), 1.0)
    level = jnp.round(size * (1 + c) / (1 + c * size) * 127).astype(jnp.int32)
    return jnp.where(y > 0, 127 + level + (level > 0), 127 - level)
