"""The whole step at once: `apply`, `fused_chain`, and a clipping whose factor enters the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gefen_jax import kernels


class ClipByGlobalNorm(optax.GradientTransformation):
    """What `clip_by_global_norm` returns: Optax's transformation, and the factor by which it multiplies.

    Attributes:
      max_norm: the largest norm that is left alone.
    """

    max_norm: float | jax.Array


def clip_by_global_norm(max_norm: float | jax.Array) -> ClipByGlobalNorm:
    """`optax.clip_by_global_norm`, which `fused_chain` can make part of the step.

    In ``fused_chain(clip_by_global_norm(1.0), gefen(...)).apply`` the norm is one launch on a GPU, and no clipped
    gradient is ever written: the step multiplies what it reads. Elsewhere it is Optax's own.

    Args:
      max_norm: the largest Euclidean norm, of all gradients together, that is left alone; a number or an array ().

    Returns:
      An `optax.GradientTransformation` without state.

    Examples:
      >>> tx = clip_by_global_norm(1.0)
      >>> tx.update([jnp.array([3.0, 4.0])], tx.init(None))[0][0].tolist()
      [0.6..., 0.8...]
    """
    clip = optax.clip_by_global_norm(max_norm)
    built = ClipByGlobalNorm(clip.init, clip.update)
    built.max_norm = max_norm
    return built


def global_norm(grads: Any) -> jax.Array:
    """The Euclidean norm of all gradients together, float32 (): one launch on a GPU, `optax.tree.norm` elsewhere.

    Examples:
      >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
      5.0
    """
    leaves = jax.tree.leaves(grads)
    if not leaves or not all(map(_has_norm_kernel, leaves)) or _no_kernels():
        return jnp.asarray(optax.tree.norm(grads), jnp.float32)
    from gefen_pallas import compiled, tree

    return tree.norm(compiled.Compiled(), leaves)


def _has_norm_kernel(g: Any) -> bool:
    from gefen_pallas.geometry import DTYPES, LIMIT

    return jnp.dtype(g.dtype).name in DTYPES and 0 < g.size <= LIMIT


def _no_kernels() -> bool:
    return (kernels.unavailable("triton") or kernels.shared()) is not None


def fused_chain(*transformations: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optax.chain` whose last member is `gefen`, with an ``apply`` that does the whole step.

    ``apply(grads, params, opt_state) -> (params, opt_state)`` equals `update` followed by `optax.apply_updates`.
    On a GPU everything from gradients to new parameters is one parameter-sized launch (two with factored second
    moments) after what stands before; `clip_by_global_norm` of this module, directly before `gefen`, adds only the
    launch that reads the norm.

    Args:
      *transformations: any Optax transformations, then what `gefen` returned.

    Returns:
      An Optax transformation with the attribute ``apply``.

    Raises:
      TypeError: if the last transformation has no ``apply``.

    Examples:
      >>> from gefen_jax import gefen
      >>> tx = fused_chain(clip_by_global_norm(1.0), gefen(0.1, weight_decay=0.0))
      >>> params = jnp.zeros(2)
      >>> params, opt_state = tx.apply(jnp.array([2.0, -2.0]), params, tx.init(params))
      >>> params.round(3).tolist()
      [-0.1..., 0.1...]
    """
    if not transformations or getattr(transformations[-1], "apply", None) is None:
        last = type(transformations[-1]).__name__ if transformations else "nothing"
        raise TypeError(
            f"fused_chain: the last transformation must be what gefen(...) returned; found {last}. A wrapper around it "
            "drops its apply: put the wrapper's members into fused_chain one by one"
        )
    chain = optax.chain(*transformations)
    *before, last = transformations
    clip = before.pop() if before and isinstance(before[-1], ClipByGlobalNorm) else None

    def apply(grads: Any, params: Any, opt_state: Any, **extra: Any) -> tuple[Any, Any]:
        *states, last_state = opt_state
        for i, transformation in enumerate(before):
            update = optax.with_extra_args_support(transformation).update
            grads, states[i] = update(grads, states[i], params, **extra)
        factor = None
        if clip is not None and _no_kernels():
            grads, states[-1] = clip.update(grads, states[-1], params)
        elif clip is not None:
            norm = global_norm(grads)
            factor = jnp.where(norm < clip.max_norm, 1.0, clip.max_norm / norm)
        params, last_state = last.apply(grads, params, last_state, factor=factor)
        return params, (*states, last_state)

    built = FusedChain(chain.init, chain.update)
    built.apply = apply
    built.implementation, built.shardings = getattr(last, "implementation", "auto"), getattr(last, "shardings", None)
    return built


class FusedChain(optax.GradientTransformationExtraArgs):
    """What `fused_chain` returns: (init, update), ``apply``, and what its `gefen` was built with."""

    apply: Any
    implementation: str
    shardings: Any


def apply(tx: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any, **extra: Any) -> tuple[Any, Any]:
    """One whole step with any Optax transformation: ``(params, opt_state)``.

    What `gefen` and `fused_chain` return has its own ``apply`` and does it at once; anything else (`optax.chain`,
    `optax.MultiSteps`, ... drop it) takes `update` and `optax.apply_updates`. `explain` says which. Donate ``params``
    and ``opt_state``: results come in the order of the arguments they are written over.

    Args:
      tx: any Optax transformation.
      grads: tree of gradients, of the parameters' shapes.
      params: tree of parameters.
      opt_state: what ``tx.init(params)`` or the step before returned.
      **extra: keywords of ``tx.update``, such as the loss; transformations that do not read them ignore them.

    Returns:
      New parameters, with the dtypes of the old, and the new state.

    Raises:
      ValueError, TypeError: as ``tx.update``, for trees that do not belong together.

    Examples:
      >>> tx = optax.sgd(1.0)
      >>> params, _ = apply(tx, jnp.array(1.0), jnp.array(3.0), tx.init(None))
      >>> float(params)
      2.0
    """
    own = getattr(tx, "apply", None)
    if own is not None:
        return own(grads, params, opt_state, **extra)
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state
