"""Whether the gradients, parameters and state of one step belong together: by structure, shapes and dtypes alone.

So it is seen when the step is traced, and costs nothing when it runs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gefen_jax import paths, tiling
from gefen_jax.plan import LeafPlan, Options, Plan
from gefen_jax.sharding import varying
from gefen_jax.state import GefenState
from gefen_jax.update import Leaf, is_factored


def check_update(
    grads: Any, opt_state: GefenState, params: Any, options: Options, plan: Plan | None = None
) -> tuple[list[Leaf], Any]:
    """The state's leaves and the gradients' tree, once both and the parameters have been seen to match."""
    if not isinstance(opt_state, GefenState):
        raise TypeError(
            f"gefen: expected a GefenState, found {type(opt_state).__name__}: pass what tx.init(params) returned"
        )
    leaves = opt_state.leaves()
    _check_head(opt_state, len(leaves), options)
    named, tree = jax.tree_util.tree_flatten_with_path(grads)
    found = [paths.name(path) for path, _ in named]
    if tree != jax.tree.structure(opt_state.mu):  # type: ignore[operator]
        _compare("gradients", found, paths.names(opt_state.mu), "init saw")
    for path, (_, g), leaf in zip(found, named, leaves):
        _check_gradient(path, g, leaf, options.bits)
        _check_statistics(path, tuple(g.shape), leaf, options)
        _check_devices(path, g, leaf)
        check_manual(path, g, leaf, None if plan is None else plan.leaves.get(path))
    if params is not None:
        if jax.tree.structure(params) != tree:  # type: ignore[operator]
            _compare("parameters", paths.names(params), found, "the gradients have")
        for path, (_, g), p in zip(found, named, jax.tree.leaves(params)):
            if jnp.shape(p) != jnp.shape(g):
                raise ValueError(
                    f"gefen: parameter {path!r} has shape {jnp.shape(p)}, its gradient {jnp.shape(g)}: pass the "
                    "parameters that the gradients were taken for"
                )
    return leaves, tree


def _check_head(opt_state: GefenState, leaves: int, options: Options) -> None:
    """What can be seen of a state's common arrays inside jit: shapes and dtypes."""
    expected = {
        "count": ((), np.int32),
        "format": ((2 + leaves,), np.uint32),
        "codebook": ((2**options.bits,), np.float32),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(opt_state, name)
        if jnp.shape(array) != shape or array.dtype != dtype:
            raise ValueError(
                f"gefen: the state's {name} is {array.dtype}{list(jnp.shape(array))}, expected "
                f"{np.dtype(dtype)}{list(shape)} for {options.bits} bits and {leaves} leaves: it belongs to another "
                "optimizer, or was cast or partly replaced; build the transformation as it was, or start from "
                "tx.init(params)"
            )


def _compare(what: str, found: list[str], expected: list[str], who: str) -> None:
    if found == expected:
        return
    missing = [path for path in expected if path not in found]
    extra = [path for path in found if path not in expected]
    if missing:
        raise ValueError(
            f"gefen: the {what} have no leaf {missing[0]!r} (None, or another tree), which {who}: pass zeros "
            "for a parameter without gradient, or leave it out with optax.masked"
        )
    if extra:
        raise ValueError(f"gefen: the {what} have a leaf {extra[0]!r} beyond those that {who}")
    raise ValueError(f"gefen: the {what} have their leaves in another order than {who}")


def _check_gradient(path: str, g: Any, leaf: Leaf, bits: int) -> None:
    dtype = getattr(g, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"gefen: the gradient of {path!r} must be a real floating-point array; found "
            f"{dtype if dtype is not None else type(g).__name__}"
        )
    shape, kept = tuple(g.shape), tuple(leaf.mu.shape)
    if 0 in shape and kept == (1,) * len(shape):
        return
    axis = tiling.packed_axis(shape) if bits == 4 and leaf.mu.dtype == jnp.uint8 else None
    if kept != tuple(size // 2 if i == axis else size for i, size in enumerate(shape)):
        raise ValueError(
            f"gefen: the gradient of {path!r} has shape {shape}, the state was made for {kept}"
            f"{' (packed)' if axis is not None else ''}: was the state restored for another model?"
        )
    if leaf.mu.dtype not in (jnp.uint8, jnp.float32):
        raise TypeError(
            f"gefen: the first moment of {path!r} has dtype {leaf.mu.dtype}, expected uint8 codes or float32: "
            "the state was cast; restore it with the dtypes it was saved with"
        )


def _check_statistics(path: str, shape: tuple[int, ...], leaf: Leaf, options: Options) -> None:
    """Refuse statistics that do not belong to a first moment of this shape, or that were cast."""
    if 0 in shape:
        return
    scale, nu, cross = (tuple(x.shape) for x in leaf[1:])
    ones = (1,) * len(shape)
    if leaf.mu.dtype == jnp.float32:
        fits = (scale, nu, cross) == (ones, shape, ones)
    elif cross != ones:
        axes = zip(shape, nu, cross)
        fits = len(nu) == len(cross) == len(shape) and all((n, c) in ((s, s), (s, 1), (1, s)) for s, n, c in axes)
        fits = fits and tiling.is_tiling(shape, scale)
    else:
        fits = all(tiling.is_tiling(shape, stat) or tiling.is_flat(shape, stat) for stat in (scale, nu))
    if not fits:
        raise ValueError(
            f"gefen: the state of {path!r} is not one of a parameter of shape {shape}: mu {leaf.mu.dtype}, "
            f"mu_scale {scale}, nu {nu}, nu_cross {cross}; it was cast or partly replaced: restore the whole state "
            "with the shapes and dtypes it was saved with, or start from tx.init(params)"
        )
    kept = {x.dtype for x in leaf[1:]}
    cast = kept != {np.dtype(np.float32)}
    if options.rule == "reference":
        cast = leaf.nu.dtype != leaf.mu_scale.dtype or not jnp.issubdtype(leaf.nu.dtype, jnp.floating)
    if cast:
        raise TypeError(
            f"gefen: the statistics of {path!r} are {', '.join(sorted(map(str, kept)))}, expected float32: the "
            "state was cast; restore it with the dtypes it was saved with"
        )


def _check_devices(path: str, g: Any, leaf: Leaf) -> None:
    """Refuse a state that lies elsewhere than its gradient; inside jit JAX has done so itself."""
    arrays = [x for x in (g, leaf.mu) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    homes = [x.sharding.device_set for x in arrays if x.committed]
    if len(homes) == 2 and homes[0] != homes[1]:
        raise ValueError(
            f"gefen: the state of {path!r} lies on other devices ({len(homes[1])} of them) than its gradient "
            f"({len(homes[0])}): move it with jax.device_put(opt_state, state_sharding(opt_state, param_shardings))"
        )


def check_manual(path: str, g: Any, leaf: Leaf, planned: LeafPlan | None) -> None:
    """Refuse what would be silently wrong inside `jax.shard_map`: gradients not averaged, blocks that cross shards.

    Local shapes alone do not show how a tile was cut, so leaves with several blocks that are not split like their
    gradient need the plan's global shape. So does all of it without varying-axes checking (``check_vma=False``), where
    nothing can be seen but that the gradient is smaller than planned.
    """
    axes = varying(g)
    if not axes:
        if planned is not None and 0 not in g.shape and tuple(g.shape) != planned.shape:
            _check_unseen(path, tuple(g.shape), leaf, planned)
        return
    loose = axes - varying(leaf.mu)
    if loose:
        raise ValueError(
            f"gefen: inside shard_map the gradient of {path!r} differs over the mesh axes {sorted(loose)}, on "
            "which its state does not: average it first, with jax.lax.pmean"
        )
    statistics = {"mu_scale": leaf.mu_scale}
    if not is_factored(leaf):
        statistics["nu"] = leaf.nu
    for what, stat in statistics.items():
        crossed = axes - varying(stat)
        if not crossed or all(size == 1 for size in stat.shape):
            continue
        if planned is None or not _splits_evenly(tuple(g.shape), tuple(stat.shape), planned, what):
            raise ValueError(
                f"gefen: inside shard_map the {what} of {path!r} has local shape {stat.shape}, not split over "
                f"the mesh axes {sorted(crossed)} as its gradient {tuple(g.shape)} is: its blocks may cross shards; "
                "build with gefen(..., plan=learn_plan(..., align=number of shards)) and split the state as "
                "state_sharding says"
            )


def _check_unseen(path: str, shape: tuple[int, ...], leaf: Leaf, planned: LeafPlan) -> None:
    """Refuse statistics that span a shard where it cannot be seen over which mesh axes to reduce them."""
    for what, stat, whole in zip(leaf._fields[1:], leaf[1:], planned.statistics()):
        if (what == "nu_cross" and planned.nu[0] != "factored") or (what == "mu_scale" and planned.exact):
            continue
        sizes = zip(shape, planned.shape, stat.shape, whole)
        if not all(local == size or kept * size == of * local for local, size, kept, of in sizes):
            raise ValueError(
                f"gefen: the gradient of {path!r} has shape {shape}, the plan was made for {planned.shape}, and "
                f"its {what} {tuple(stat.shape)} spans several shards: inside shard_map leave check_vma at its default "
                'True, or keep blocks local with learn_plan(..., second_moment="block", align=number of shards); '
                "elsewhere learn a plan for this model"
            )


def _splits_evenly(shape: tuple[int, ...], stat: tuple[int, ...], planned: LeafPlan, what: str) -> bool:
    """Whether a local statistic is the global one, cut where the parameter is cut, or whole where a block spans it."""
    scale, nu, _ = planned.statistics()
    whole = scale if what == "mu_scale" else nu
    return len(shape) == len(planned.shape) and all(
        kept == of if local == size else of == 1 or kept * size == of * local
        for local, size, kept, of in zip(shape, planned.shape, stat, whole)
    )
