"""The step of one leaf as one compiled loop on a CPU: a twin of `update`, called by XLA as a foreign function.

XLA's loops over chunks (`chunks`) run one after another, and look codes up element by element. The loop of
`_cpu_kernel` uses vectors and writes in place, and XLA runs the loops of several leaves at the same time. It is
compiled by Numba when the first program with such a leaf is lowered, once per process.

The call is a JAX primitive of its own, so that whatever cannot hold a foreign function gets the loop over chunks
instead: exported programs, other platforms, `jax.vmap` and derivatives.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gefen_jax import chunks, quantization, update
from gefen_jax.update import Codebook, Hyper, Leaf, Scalar, Tail

LEAST_TREE = 1 << 22
"""Elements from which a tree's steps repay the seconds that compiling the loop takes."""
NARROWEST = 16
"""Fewest consecutive elements of a block for which the loop is worth its own cost."""
TARGET = "gefen_jax_step"
_JUMP, _PLACE = 8, 9  # bits of an entry of the table: the code below, whether two words follow, the threshold
_BIN = 19  # bits of a place in a bin: [-1, 1] are 2^12 bins of 2^-30 times 2^19


def why_not(
    shape: tuple[int, ...], leaf: Leaf, plan: chunks.Layout, gradient: Any = jnp.float32, parameter: Any = jnp.float32
) -> str | None:
    """Why there is no compiled loop for a leaf that can be cut into chunks; None if there is one.

    Examples:
      >>> leaf = Leaf(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((768, 3072), (768, 12), (768, 1), (1, 3072))))
      >>> why_not((768, 3072), leaf, chunks.layout((768, 3072), *(x.shape for x in leaf[1:])), jnp.bfloat16)
      'gradients are bfloat16, and it takes float32'
    """
    for what, dtype in (("gradients", gradient), ("parameters", parameter)):
        if jnp.dtype(dtype) != jnp.float32:
            return f"{what} are {jnp.dtype(dtype).name}, and it takes float32"
    (height, width), factored = plan.shape, update.is_factored(leaf)
    run, cells = width // plan.scale[1], 1 if factored else width // plan.nu[1]
    if run < NARROWEST or 1 < cells < NARROWEST:
        few = min(n for n in (run, cells) if n > 1 or n == run)
        return f"its blocks hold {few} consecutive elements, and it wants {NARROWEST}"
    if cells == 1 and not factored and height // plan.nu[0] % (height // plan.scale[0]):
        return "blocks of its momentum reach over several of its second moment"
    if leaf.mu.size != math.prod(shape) and run % 2:
        return "its blocks hold an odd number of 4-bit codes"
    if factored and plan.scale[0] % plan.cross[0]:
        return "its blocks reach over several matrices of the stack"
    if getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()):
        return "inside jax.shard_map"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set, and it is compiled by Numba"
    return None


def table(codebook: Codebook) -> jax.Array:
    """What the loop finds codes by: uint32[4097], or uint32[1] for a companding codebook.

    An entry stands for a bin of [-1, 1], the last for 1: the code below its decision threshold, whether two words
    follow on it, and the threshold's place in the bin in units of 2^-30. It decides as `quantization.encode` does, but
    for numbers within 2^-30 of a threshold.
    """
    if isinstance(codebook.table, quantization.Companding):
        return jax.lax.bitcast_convert_type(codebook.table.c.reshape(1), jnp.uint32)
    limits = (jnp.clip(quantization.thresholds(codebook.words), -1, 1) * 2**30).astype(jnp.int32)
    bins, places = (limits >> _BIN) + quantization.BINS // 2, (limits & ((1 << _BIN) - 1)).astype(jnp.uint32)
    inside = jnp.zeros(quantization.BINS + 1, jnp.uint32).at[bins].add(1)
    below = jnp.cumsum(inside, dtype=jnp.uint32) - inside
    place = jnp.full(inside.shape, (1 << _BIN) - 1, jnp.uint32).at[bins].min(places)
    return below | ((inside > 1).astype(jnp.uint32) << _JUMP) | (place << _PLACE)


def scalars(h: Hyper, tail: Tail, factor: Scalar | None) -> jax.Array:
    """The step's scalars in one float32 vector."""
    rate = -1.0 if tail.learning_rate is None else tail.learning_rate
    decay = 0.0 if tail.learning_rate is None else tail.decay
    values = [h.b1, h.w1, h.b2, h.w2, h.bc1, h.bc2, h.eps, rate, 1.0 if factor is None else factor, decay, tail.apply]
    return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])


def step(
    g: jax.Array,
    leaf: Leaf,
    codebook: Codebook,
    entries: jax.Array,
    vector: jax.Array,
    plan: chunks.Layout,
    *,
    parameter: jax.Array | None,
    apply: bool,
) -> tuple[jax.Array, Leaf]:
    """`update.leaf_update` and `update.finish` of one leaf.

    Args:
      g: float32 gradient; an update is written over it.
      leaf: state of the leaf; written over.
      codebook: the words.
      entries: from `table`.
      vector: from `scalars`.
      plan: from `chunks.layout`.
      parameter: float32, if it is read; a new parameter is written over it.
      apply: whether the result is the new parameter.

    Returns:
      The update or the new parameter, and the new state.
    """
    height = plan.shape[0]
    shapes = plan.shape, (height, leaf.mu.size // height), plan.scale, plan.nu, plan.cross
    matrices = [x.reshape(shape) for x, shape in zip((g, *leaf), shapes)]
    p = jnp.zeros((1, 1), jnp.float32) if parameter is None else parameter.reshape(plan.shape)
    companding = isinstance(codebook.table, quantization.Companding)
    out, *state = _step.bind(*matrices, p, codebook.words, entries, vector, apply=apply, companding=companding)
    return out.reshape(g.shape), Leaf(*(new.reshape(old.shape) for new, old in zip(state, leaf)))


def _in_chunks(*arrays: Any, apply: bool, companding: bool) -> list[jax.Array]:
    """The same step by `chunks`, with the arguments and results of the primitive."""
    g, codes, scale, nu, cross, p, words, _, h = arrays
    stack = cross.shape[0] if cross.shape[1] > 1 else 1

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(stack, x.shape[0] // stack, x.shape[1])

    leaf = Leaf(split(codes), split(scale), split(nu), cross.reshape(stack, 1, cross.shape[1]))
    packed = 2 if codes.size != g.size else None
    plan = chunks.layout(split(g).shape, leaf.mu_scale.shape, leaf.nu.shape, leaf.nu_cross.shape, packed)
    assert plan is not None
    book = update.codebook(jax.lax.stop_gradient(words), "companding" if companding else "table")
    tail = Tail(h[7], h[9] if p.size == g.size else 0.0, apply)
    parameter = split(p) if p.size == g.size else None
    hyper = Hyper(h[0], h[2], h[1], h[3], h[4], h[5], h[6])
    out, new = chunks.chunked_update(split(g) * h[8], leaf, book, hyper, plan, tail, parameter)
    return [x.reshape(old.shape) for x, old in zip((out, *new), arrays[:5])]


_step = Primitive("gefen_step")
_step.multiple_results = True


@functools.cache
def _alone(**options: bool) -> Any:
    """A program of one call: compiled once per kind and shapes."""
    return jax.jit(functools.partial(_step.bind, **options))


@_step.def_impl
def _run(*arrays: Any, **options: bool) -> list[jax.Array]:
    # JAX looks for what made a NaN by evaluating again without jit, which ends here: without the check, not for ever.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        return _alone(**options)(*arrays)


@_step.def_abstract_eval
def _shapes(g: Any, codes: Any, scale: Any, nu: Any, cross: Any, *others: Any, **options: bool) -> list[Any]:
    return [g, codes, scale, nu, cross]


def _derivative(values: Any, tangents: Any, **options: bool) -> Any:
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(functools.partial(_in_chunks, **options), tuple(values), tangents)


def _batched(arrays: Any, axes: Any, **options: bool) -> Any:
    out = jax.vmap(functools.partial(_in_chunks, **options), in_axes=tuple(axes))(*arrays)
    return out, [0] * len(out)


_registering = threading.Lock()


def register() -> None:
    """Compile the loop and tell XLA its name, once per process; lowering a program does it.

    Programs that are loaded without being lowered here (`jax.experimental.serialize_executable`) need it before.
    """
    with _registering:
        _registered()


@functools.cache
def _registered() -> Any:
    from gefen_jax import _cpu_kernel

    compiled = _cpu_kernel.handler()
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(compiled.ctypes), platform="cpu")
    return compiled  # XLA keeps its address: it must stay alive


_plainly = mlir.lower_fun(_in_chunks, multiple_results=True)


def _lower(context: Any, *arrays: Any, apply: bool, companding: bool) -> Any:
    if context.module_context.lowering_parameters.for_export:  # a program that travels cannot call this process
        return _plainly(context, *arrays, apply=apply, companding=companding)
    register()
    aliases = {5 if apply else 0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    return jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)(context, *arrays)


ad.primitive_jvps[_step] = _derivative
batching.primitive_batchers[_step] = _batched
mlir.register_lowering(_step, _plainly)
mlir.register_lowering(_step, _lower, platform="cpu")
