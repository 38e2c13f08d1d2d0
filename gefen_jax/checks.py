"""Bad input, seen at the first moment it can be: what was found, where, what was expected, what to do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import paths
from gefen_jax.plan import (
    BITS,
    RULES,
    SECOND_MOMENTS,
    FullPrecision,
    LeafPlan,
    Options,
    Plan,
    check_choice,
    check_min_size,
)
from gefen_jax.state import GefenState
from gefen_jax.update import Leaf


def check_scalar(
    name: str, value: Any, *, low: float | None = None, above: float | None = None, below: float | None = None
) -> None:
    """Refuse a concrete number outside its range. Arrays are left alone: reading them would wait for a device."""
    if isinstance(value, jax.Array):
        return
    number = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        hint = "; for a schedule use optax.inject_hyperparams" if callable(value) else ""
        raise TypeError(f"{name} must be a real number or a scalar array; found {value!r}{hint}")
    number = float(number)
    fine = math.isfinite(number)
    fine = fine and (low is None or number >= low) and (above is None or number > above)
    fine = fine and (below is None or number < below)
    if above is not None and np.float32(number) < np.finfo(np.float32).tiny:
        fine = False
    if not fine:
        limits = [f">= {low}" if low is not None else "", f"> {above} in float32" if above is not None else ""]
        limits.append(f"< {below}" if below is not None else "")
        raise ValueError(f"{name} must be finite and {' and '.join(filter(None, limits))}; found {value!r}")


def check_rate(name: str, value: Any) -> None:
    """Refuse a learning rate that is neither a number >= 0, nor a scalar array, nor a schedule."""
    if not callable(value):
        check_scalar(name, value, low=0)


def check_mask(mask: Any) -> None:
    """Refuse a mask that is a scalar array: what `optax.inject_hyperparams` makes of a function."""
    if isinstance(mask, jax.Array | np.ndarray) and mask.ndim == 0:
        raise TypeError(
            "mask is a scalar array. optax.inject_hyperparams calls every function as a schedule: pass "
            "static_args=('mask', 'full_precision') to it, or give the mask as a tree of booleans"
        )


def broadcast_mask(mask: Any, params: Any) -> list[Any]:
    """One boolean for each leaf of ``params``; the mask may be a prefix of it, or a function that makes one."""
    if _is_function(mask):
        mask = mask(params)
    try:
        spread = jax.tree.map(lambda keep, part: [keep] * len(jax.tree.leaves(part)), mask, params)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"mask does not fit the parameters: expected a tree of booleans with their structure (or a prefix of "
            f"it), found {jax.tree.structure(mask)}: {error}"
        ) from error
    kept = [keep for group in jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, list)) for keep in group]
    for keep in kept:
        if not (isinstance(keep, bool | np.bool_) or getattr(keep, "dtype", np.dtype(int)) == np.dtype(bool)):
            raise TypeError(f"mask must hold booleans; found {keep!r}")
    return kept


def _is_function(mask: Any) -> bool:
    """Whether a mask is a function; a module that happens to be callable has leaves that are not."""
    leaves = jax.tree.leaves(mask)
    return bool(leaves) and all(callable(leaf) for leaf in leaves)


def check_options(options: Options) -> None:
    """Refuse structural arguments that mean nothing or exclude each other."""
    check_choice("rule", options.rule, RULES)
    check_choice("second_moment", options.second_moment, SECOND_MOMENTS)
    check_choice("bits", options.bits, BITS)
    check_min_size(options.min_size)
    check_full_precision(options.full_precision)
    if options.axes is not None and not isinstance(options.axes, Mapping):
        raise TypeError(f"axes must map paths to (batch axes, row axes); found {options.axes!r}")
    if isinstance(options.align, bool) or not isinstance(options.align, int) or options.align < 1:
        raise ValueError(f"align must be a whole number of devices >= 1; found {options.align!r}")
    if options.rule != "reference":
        return
    fixed = {"second_moment": "auto", "bits": 8, "min_size": 0, "align": 1}
    wrong = {name: getattr(options, name) for name, value in fixed.items() if getattr(options, name) != value}
    if wrong or options.axes:
        given = ", ".join([f"{name}={value!r}" for name, value in wrong.items()] + ["axes"] * bool(options.axes))
        raise ValueError(f"rule 'reference' is the original method, which has no {given}: leave it out")


def check_full_precision(value: FullPrecision) -> None:
    """Refuse a ``full_precision`` that is no regular expression and no function."""
    import re

    if value is None or callable(value):
        return
    if not isinstance(value, str):
        hint = ""
        if hasattr(value, "shape"):
            hint = "; optax.inject_hyperparams calls functions as schedules: add 'full_precision' to its static_args"
        raise TypeError(f"full_precision must be a regular expression or a function; found {value!r}{hint}")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"full_precision {value!r} is no regular expression: {error}") from error


def check_plan(plan: Any) -> None:
    """Refuse anything but a `Plan`."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must come from learn_plan, Plan.load or plan_from_state; found {type(plan).__name__}")


def check_agreement(
    plan: Plan, given: Mapping[str, Any], full_precision: FullPrecision, axes: Mapping[str, Any] | None
) -> None:
    """Refuse structural arguments that contradict the plan."""
    for name, value in given.items():
        if getattr(plan, name) != value:
            raise ValueError(
                f"{name}={value!r} contradicts the plan, which was made with {name}={getattr(plan, name)!r}: leave it "
                "out, or learn a plan with it"
            )
    check_full_precision(full_precision)
    wanted = Options(full_precision=full_precision)
    for path, leaf in plan.leaves.items():
        asked = wanted.keeps_full_precision(path, jax.ShapeDtypeStruct(leaf.shape, jnp.float32))
        if asked and not leaf.exact:
            raise ValueError(
                f"full_precision asks for exact Adam in {path!r}, which the plan quantises: leave it out, or pass it "
                "to learn_plan"
            )
    for path, declared in (axes or {}).items():
        planned_axes = plan.leaves[path].axes if path in plan.leaves else None
        if planned_axes != tuple(declared):
            raise ValueError(f"axes[{path!r}]={declared!r} contradicts the plan, which has {planned_axes!r}")


def check_parameters(named: list[tuple[str, Any]]) -> None:
    """Refuse parameters that are not arrays of real floating-point numbers."""
    for path, leaf in named:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape"):
            raise TypeError(f"parameter {path!r} must be an array; found {type(leaf).__name__}: use jnp.asarray")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"parameter {path!r} has dtype {dtype}; Gefen trains real floating-point parameters: leave it out "
                "with optax.masked or optax.partition"
            )


def check_gradients(columns: list[list[tuple[str, Any]]]) -> None:
    """Refuse gradients to learn from that are no real floating-point arrays, traced, or differ in shape."""
    for column in columns:
        for (path, g), (_, first) in zip(column, columns[0]):
            if isinstance(g, jax.core.Tracer | jax.ShapeDtypeStruct):
                raise TypeError(
                    f"the gradient of {path!r} has no values here ({type(g).__name__}): learn_plan and calibrate run "
                    "outside jit, on gradients that have been computed"
                )
            dtype = getattr(g, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                found = dtype if dtype is not None else type(g).__name__
                raise TypeError(f"the gradient of {path!r} must be a real floating-point array; found {found}")
            if tuple(g.shape) != tuple(first.shape):
                raise ValueError(f"the gradients of {path!r} differ in shape: {tuple(first.shape)}, {tuple(g.shape)}")


def check_covers(plan: Plan, params: Any, named: list[tuple[str, Any]]) -> None:
    """Refuse a plan for another tree. Paths under a masked node, and placeholder trees, may be missing."""
    known = {path for path, _ in named}
    extra = [path for path in plan.leaves if path not in known]
    if not named or not extra:
        return
    masked = [
        path
        for path, node in _nodes(params, lambda node: isinstance(node, optax.MaskedNode))
        if isinstance(node, optax.MaskedNode)
    ]
    for path in extra:
        if not any(path == hidden or path.startswith(hidden + "/") or hidden == "" for hidden in masked):
            missing = [name for name in known if name not in plan.leaves]
            hint = f"; {missing[0]!r} is not in the plan: was the tree renamed or flattened?" if missing else ""
            raise ValueError(
                f"the plan has a leaf {path!r} that the parameters lack: it was made for another tree{hint}"
            )


def _nodes(tree: Any, is_leaf: Any) -> list[tuple[str, Any]]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(paths.name(path), node) for path, node in found]


def planned(plan: Plan, path: str, leaf: Any) -> LeafPlan:
    """The plan's decision for a parameter of this path and shape."""
    if path not in plan.leaves:
        raise ValueError(
            f"parameter {path!r} is not in the plan: learn the plan from gradients of the same tree (calibrate does "
            "it for the tree in use)"
        )
    decision = plan.leaves[path]
    if decision.shape != tuple(leaf.shape):
        raise ValueError(
            f"parameter {path!r} has shape {tuple(leaf.shape)}, the plan was made for {decision.shape}: learn a plan "
            "for this model"
        )
    return decision


def check_axes_exist(options: Options, params: Any, known: list[str]) -> None:
    """Refuse declared axes of a leaf that does not exist."""
    if not known or not options.axes:
        return
    masked = _nodes(params, lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(node, optax.MaskedNode) for _, node in masked):
        return
    for path in options.axes:
        if path not in known:
            raise ValueError(f"axes names {path!r}, which is no parameter; there are {', '.join(map(repr, known[:6]))}")


def check_update(grads: Any, opt_state: GefenState, params: Any) -> tuple[list[Leaf], Any]:
    """The state's leaves and the gradients' tree, once both and the parameters have been seen to match."""
    if not isinstance(opt_state, GefenState):
        raise TypeError(f"gefen.update: expected a GefenState, found {type(opt_state).__name__}")
    leaves = opt_state.leaves()
    named, tree = jax.tree_util.tree_flatten_with_path(grads)
    found = [paths.name(path) for path, _ in named]
    if tree != jax.tree.structure(opt_state.mu):
        _compare("gradients", found, paths.names(opt_state.mu), "init saw")
    for path, (_, g), leaf in zip(found, named, leaves):
        _check_gradient(path, g, leaf)
    if params is not None:
        if jax.tree.structure(params) != tree:
            _compare("parameters", paths.names(params), found, "the gradients have")
        for path, (_, g), p in zip(found, named, jax.tree.leaves(params)):
            if jnp.shape(p) != jnp.shape(g):
                raise ValueError(
                    f"gefen.update: parameter {path!r} has shape {jnp.shape(p)}, its gradient {jnp.shape(g)}"
                )
    return leaves, tree


def _compare(what: str, found: list[str], expected: list[str], who: str) -> None:
    if found == expected:
        return
    missing = [path for path in expected if path not in found]
    extra = [path for path in found if path not in expected]
    if missing:
        raise ValueError(
            f"gefen.update: the {what} have no leaf {missing[0]!r} (None, or another tree), which {who}: pass zeros "
            "for a parameter without gradient, or leave it out with optax.masked"
        )
    if extra:
        raise ValueError(f"gefen.update: the {what} have a leaf {extra[0]!r} beyond those that {who}")
    raise ValueError(f"gefen.update: the {what} have their leaves in another order than {who}")


def _check_gradient(path: str, g: Any, leaf: Leaf) -> None:
    dtype = getattr(g, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"gefen.update: the gradient of {path!r} must be a real floating-point array; found "
            f"{dtype if dtype is not None else type(g).__name__}"
        )
    shape, kept = tuple(g.shape), tuple(leaf.mu.shape)
    if 0 in shape and kept == (1,) * len(shape):
        return
    differing = [axis for axis, (a, b) in enumerate(zip(shape, kept)) if a != b]
    packed = len(differing) == 1 and shape[differing[0]] == 2 * kept[differing[0]] and leaf.mu.dtype == jnp.uint8
    if len(shape) != len(kept) or (differing and not packed):
        raise ValueError(
            f"gefen.update: the gradient of {path!r} has shape {shape}, the state was made for {kept}: was the state "
            "restored for another model?"
        )
    if leaf.mu.dtype not in (jnp.uint8, jnp.float32):
        raise TypeError(
            f"gefen.update: the first moment of {path!r} has dtype {leaf.mu.dtype}, expected uint8 codes or float32: "
            "the state was cast; restore it with the dtypes it was saved with"
        )
