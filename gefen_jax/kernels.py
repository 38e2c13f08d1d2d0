"""The kernels of `gefen_pallas` as twins of `update`: what they need of a step, and what they cannot run.

Nothing here is imported before a kernel is asked for.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gefen_jax import quantization, update
from gefen_jax.sharding import varying
from gefen_jax.update import Codebook, Hyper, Leaf, Scalar, Tail


def on_gpu() -> bool:
    """Whether programs are compiled for an NVIDIA GPU: the default backend, or the target of deviceless compilation."""
    target = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if target is not None:
        return "nvidia" in str(getattr(target, "device_kind", "")).lower()
    return jax.default_backend() == "gpu" and "rocm" not in jax.devices()[0].client.platform_version.lower()


def unavailable(name: str) -> str | None:
    """Why the kernels called ``name`` cannot run in this process at all; None if they can."""
    if name == "pallas":
        return None
    from gefen_pallas import compiled

    reason = compiled.unavailable()
    if reason is None and not on_gpu():
        return f"Triton kernels need an NVIDIA GPU, and programs run on {jax.default_backend()} here"
    return reason


def shared(name: str = "triton", leaf: Leaf | None = None, gradient: Any = None) -> str | None:
    """Why a kernel would see only part of what belongs together: it knows nothing of meshes. None if it sees all.

    Inside `jax.shard_map` arrays are local, and a kernel runs on them if every statistic is as local as the gradient.
    """
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if jax.device_count() > 1 and not manual and not _alone(gradient):
        return "several devices, and its sharding is not known: state it with gefen(shardings=...)"
    if leaf is None or gradient is None:
        return None
    statistics = [leaf.nu] if update.is_exact(leaf.mu) else [leaf.mu_scale, leaf.nu]
    statistics += [leaf.nu_cross] if update.is_factored(leaf) else []
    if any(varying(gradient) - varying(statistic) for statistic in statistics):
        return "its statistics are shared between devices"
    if name == "pallas" and varying(gradient):
        return "Pallas needs check_vma=False in jax.shard_map"
    return None


def _alone(x: Any) -> bool:
    """Whether a concrete array lies on one device."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and len(x.sharding.device_set) == 1


def why_not(
    shape: tuple[int, ...], leaf: Leaf, gradient: Any = jnp.float32, parameter: Any = jnp.float32
) -> str | None:
    """Why there is no kernel for a leaf (arrays, or only shapes and dtypes); None if there is one."""
    found = _cut(shape, leaf, gradient, parameter)
    return found if isinstance(found, str) else None


def _cut(shape: tuple[int, ...], leaf: Leaf, gradient: Any, parameter: Any) -> Any:
    from gefen_pallas.geometry import LeafShape, plan_leaf

    mu, scale, nu, cross = (tuple(x.shape) for x in leaf)
    names = jnp.dtype(gradient).name, jnp.dtype(parameter).name
    return plan_leaf(LeafShape(tuple(shape), mu, scale, nu, cross, update.is_exact(leaf.mu), *names))


def step(
    name: str,
    gradients: list[jax.Array],
    parameters: list[jax.Array | None],
    leaves: list[Leaf],
    codebook: Codebook,
    h: Hyper,
    tails: list[Tail],
    factor: Scalar,
) -> tuple[list[jax.Array], list[Leaf]]:
    """One step of all leaves in kernels ``name``: "triton" (the whole tree at once) or "pallas" (leaf by leaf).

    Under `jax.vmap` it is `update.leaf_update` instead.
    """
    vector, decays = hyper_vector(h, tails, factor)
    reads = any(tail.reads_parameter for tail in tails)
    apply = tails[0].apply
    companding = isinstance(codebook.table, quantization.Companding)
    run = functools.partial(_kernels, name, decays=decays, reads=reads, apply=apply, companding=companding)
    plain = functools.partial(_plain, decays=decays, apply=apply, companding=companding)

    @jax.custom_batching.custom_vmap
    def twin(*arguments: Any) -> Any:
        return run(*arguments)

    @twin.def_vmap
    def _(size: int, batched: Any, *arguments: Any) -> Any:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
        out = jax.vmap(plain, in_axes=tuple(axes), axis_size=size)(*arguments)
        return out, jax.tree.map(lambda _: True, out)

    kept = parameters if reads else [None] * len(parameters)
    return twin(gradients, kept, leaves, codebook.words, vector)


def hyper_vector(h: Hyper, tails: list[Tail], factor: Scalar) -> tuple[jax.Array, tuple[int, ...]]:
    """The scalars of a step in one float32 vector, and which of its weight decays each leaf has.

    Equal numbers, and the same traced scalar, are one entry.
    """
    rate = tails[0].learning_rate
    values: dict[Any, Scalar] = {}
    decays = []
    for tail in tails:
        decay = 0.0 if rate is None else tail.decay
        key = decay if isinstance(decay, float | int) else ("traced", id(decay))
        values.setdefault(key, decay)
        decays.append(list(values).index(key))
    head = [h.b1, h.w1, h.b2, h.w2, h.bc1, h.bc2, h.eps, -1.0 if rate is None else rate, factor]
    scalars = [jnp.asarray(x, jnp.float32) for x in [*head, *values.values()]]
    return jnp.stack(scalars), tuple(decays)


def _kernels(
    name: str,
    gradients: list[jax.Array],
    parameters: list[jax.Array | None],
    leaves: list[Leaf],
    words: jax.Array,
    vector: jax.Array,
    *,
    decays: tuple[int, ...],
    reads: bool,
    apply: bool,
    companding: bool,
) -> tuple[list[jax.Array], list[Leaf]]:
    from gefen_pallas import compiled, tree
    from gefen_pallas import leaf as pallas

    arrays = [tree.Arrays(g, p, *leaf) for g, p, leaf in zip(gradients, parameters, leaves)]
    cuts = [
        _cut(g.shape, leaf, g.dtype, g.dtype if p is None else p.dtype)
        for g, p, leaf in zip(gradients, parameters, leaves)
    ]
    if name == "triton":
        outputs, states = tree.step(
            compiled.Compiled(), arrays, cuts, words, vector, decays, reads=reads, apply=apply, companding=companding
        )
        return outputs, [Leaf(*new) for new in states]
    h = _hyper(vector)
    outputs = []
    state: list[Leaf] = []
    for g, array, leaf, cut, decay in zip(gradients, arrays, leaves, cuts, decays):
        mean = None
        if tree.is_factored(cut):
            nu, cross = update.second_moment(g.astype(jnp.float32) * vector[8], leaf, h)
            mean = jnp.mean(nu, update.reduced(nu.shape, cross.shape)).reshape(-1)
            array = array._replace(nu=nu, cross=cross)
        output, new = pallas.step(
            array,
            cut,
            words,
            vector,
            decay,
            reads=reads,
            apply=apply,
            companding=companding,
            mean=mean,
            interpret=not on_gpu(),
        )
        outputs.append(output)
        state.append(Leaf(*new))
    return outputs, state


def _plain(
    gradients: list[jax.Array],
    parameters: list[jax.Array | None],
    leaves: list[Leaf],
    words: jax.Array,
    vector: jax.Array,
    *,
    decays: tuple[int, ...],
    apply: bool,
    companding: bool,
) -> tuple[list[jax.Array], list[Leaf]]:
    """The same step by the oracle."""
    book, h = update.codebook(words, "companding" if companding else "table"), _hyper(vector)
    outputs, new = [], []
    for g, p, leaf, decay in zip(gradients, parameters, leaves, decays):
        d, leaf = update.leaf_update(g.astype(jnp.float32) * vector[8], leaf, book, h)
        tail = update.Tail(vector[7], 0.0 if p is None else vector[9 + decay], apply)
        outputs.append(update.finish(d, p, tail, g.dtype))
        new.append(leaf)
    return outputs, new


def _hyper(vector: jax.Array) -> Hyper:
    b1, w1, b2, w2, bc1, bc2, eps = (vector[i] for i in range(7))
    return Hyper(b1, b2, w1, w2, bc1, bc2, eps)
