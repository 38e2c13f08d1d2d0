"""Bad input, seen at the first moment it can be: what was found, where, what was expected, what to do."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import paths, tiling
from gefen_jax.choices import BITS, CODECS, RULES, SECOND_MOMENTS, check_choice, check_codec, check_min_size
from gefen_jax.plan import FullPrecision, LeafPlan, Options, Plan
from gefen_jax.reasons import EMPTY


def check_scalar(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    wide: bool = False,
) -> None:
    """Refuse a number outside its range in float32, and an array that is no real scalar.

    The values of arrays are left alone: reading them would wait for a device. ``wide`` refuses arrays of 16-bit floats.
    """
    if isinstance(value, jax.Array):
        _check_scalar_array(name, value, wide)
        return
    number = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        hint = "; for a schedule use optax.inject_hyperparams" if callable(value) else ""
        raise TypeError(f"{name} must be a real number or a scalar array; found {value!r}{hint}")
    number = float(number)
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(number)
    fine = bool(np.isfinite(single)) and (low is None or number >= low) and (below is None or single < below)
    fine = fine and (above is None or (number > above and single >= np.finfo(np.float32).tiny))
    if not fine:
        limits = [f">= {low}" if low is not None else "", f"> {above}" if above is not None else ""]
        limits.append(f"< {below}" if below is not None else "")
        limits = ["finite", *filter(None, limits)]
        raise ValueError(f"{name} must be {' and '.join(limits)} in float32; found {value!r}")


def _check_scalar_array(name: str, value: jax.Array, wide: bool) -> None:
    real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if value.shape != () or not real:
        raise TypeError(
            f"{name} must be a real number or a scalar array; found an array of shape {value.shape} and dtype "
            f"{value.dtype}"
        )
    if wide and value.dtype.itemsize < 4:
        raise TypeError(
            f"{name} arrives in {value.dtype}, which rounds 0.999 to 1 (bfloat16) or 1e-8 to 0 (float16). "
            "optax.inject_hyperparams casts hyper-parameters to the parameters' dtype: pass "
            "hyperparam_dtype=jnp.float32 to it"
        )


def check_rate(name: str, value: Any) -> None:
    """Refuse a learning rate that is neither a number >= 0, nor a scalar array, nor a schedule."""
    if not callable(value):
        check_scalar(name, value, low=0)


def check_mask(mask: Any) -> None:
    """Refuse a mask that is a scalar: what `optax.inject_hyperparams` makes of a function."""
    if isinstance(mask, bool | np.bool_) or getattr(mask, "shape", None) == ():
        raise TypeError(
            "mask is a scalar. optax.inject_hyperparams calls every function as a schedule: pass "
            "static_args=('mask', 'full_precision') to it, or give the mask as a tree of booleans"
        )


def broadcast_mask(mask: Any, params: Any) -> list[Any]:
    """One boolean for each leaf of ``params``; the mask may be a prefix of it, or a function that makes one."""
    if _is_function(mask):
        mask = mask(params)
    kept: list[Any] = []
    try:
        jax.tree.map(lambda keep, part: kept.extend([keep] * len(jax.tree.leaves(part))), mask, params)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"mask does not fit the parameters: expected a tree of booleans with their structure (or a prefix of "
            f"it), found {jax.tree.structure(mask)}: {error}"
        ) from error
    for keep in kept:
        if not (isinstance(keep, bool | np.bool_) or getattr(keep, "dtype", np.dtype(int)) == np.dtype(bool)):
            raise TypeError(f"mask must hold booleans; found {keep!r}")
    return kept


def _is_function(mask: Any) -> bool:
    """Whether a mask is a function; a module that happens to be callable has leaves that are not."""
    leaves = jax.tree.leaves(mask)
    return bool(leaves) and all(callable(leaf) for leaf in leaves)


CHOICES: dict[str, tuple[Any, ...]] = {
    "rule": RULES,
    "second_moment": SECOND_MOMENTS,
    "bits": BITS,
    "codec": CODECS,
}


def _check_each(given: Mapping[str, Any], full_precision: Any, axes: Any) -> None:
    """Refuse structural arguments that mean nothing, each by itself."""
    for name, value in given.items():
        if name in CHOICES:
            check_choice(name, value, CHOICES[name])
        else:
            check_min_size(value)
    check_full_precision(full_precision)
    if axes is not None and not isinstance(axes, Mapping):
        raise TypeError(f"axes must map paths to (batch axes, row axes); found {axes!r}")


def check_options(options: Options) -> None:
    """Refuse structural arguments that mean nothing or exclude each other."""
    names = ("rule", "second_moment", "bits", "min_size", "codec")
    _check_each({name: getattr(options, name) for name in names}, options.full_precision, options.axes)
    check_codec(options.codec, options.bits, options.rule)
    if isinstance(options.align, bool) or not isinstance(options.align, int) or options.align < 1:
        raise ValueError(f"align must be a whole number of devices >= 1; found {options.align!r}")
    if options.rule != "reference":
        return
    fixed = {"second_moment": "auto", "bits": 8, "min_size": 0, "align": 1, "full_precision": None}
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
    """Refuse structural arguments that mean nothing or contradict the plan."""
    _check_each(given, full_precision, axes)
    for name, value in given.items():
        if getattr(plan, name) != value:
            raise ValueError(
                f"{name}={value!r} contradicts the plan, which was made with {name}={getattr(plan, name)!r}: leave it "
                "out, or learn a plan with it"
            )
    wanted = Options(full_precision=full_precision)
    for path, leaf in plan.leaves.items():
        asked = wanted.keeps_full_precision(path, jax.ShapeDtypeStruct(leaf.shape, jnp.float32))
        if asked and not leaf.exact:
            raise ValueError(
                f"full_precision asks for exact Adam in {path!r}, which the plan quantises: leave it out, or pass it "
                "to learn_plan"
            )
    for path, declared in (axes or {}).items():
        found = plan.leaves.get(path)
        if found is None or tiling.check_axes(path, found.shape, declared) != found.axes:
            has = "no such leaf" if found is None else f"{found.axes!r}"
            raise ValueError(
                f"axes[{path!r}]={declared!r} contradicts the plan, which has {has}: leave it out, or learn a plan "
                "with it"
            )


def check_parameters(named: list[tuple[str, Any]]) -> None:
    """Refuse parameters that are not arrays of real floating-point numbers, or that share a path."""
    check_paths_differ([path for path, _ in named])
    for path, leaf in named:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape"):
            raise TypeError(f"parameter {path!r} must be an array; found {type(leaf).__name__}: use jnp.asarray")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"parameter {path!r} has dtype {dtype}; Gefen trains real floating-point parameters: leave it out "
                "with optax.masked or optax.partition"
            )


def check_paths_differ(names: list[str]) -> None:
    """Refuse a tree in which two leaves have the same path, such as {"a/b": .., "a": {"b": ..}}."""
    if len(set(names)) < len(names):
        path = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two leaves have the path {path!r}, by which plans and explain tell them apart: rename one (a key that "
            "holds '/' reads like a level of the tree)"
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
                hint = "; to pass one tree that is itself a list, put it into a list" if path == "" else ""
                raise ValueError(
                    f"the gradients of {path!r} differ in shape: {tuple(first.shape)} and {tuple(g.shape)}; a list "
                    f"holds gradients of the same parameters from different batches{hint}"
                )


def check_covers(plan: Plan, params: Any, named: list[tuple[str, Any]]) -> None:
    """Refuse a plan for another tree. Paths under a masked node, and placeholder trees, may be missing."""
    known = {path for path, _ in named}
    extra = [path for path in plan.leaves if path not in known]
    if not named or not extra:
        return
    masked = masked_paths(params)
    for path in extra:
        if not is_under(path, masked):
            missing = [name for name in known if name not in plan.leaves]
            hint = f"; {missing[0]!r} is not in the plan: was the tree renamed or flattened?" if missing else ""
            raise ValueError(
                f"the plan has a leaf {path!r} that the parameters lack: it was made for another tree{hint}"
            )


def masked_paths(tree: Any) -> list[str]:
    """Paths of the nodes that `optax.masked` and `optax.partition` put in place of parameters."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return [paths.name(path) for path, node in nodes if isinstance(node, optax.MaskedNode)]


def is_under(path: str, nodes: list[str]) -> bool:
    """Whether a leaf's path lies under one of these nodes."""
    return any(node == "" or path == node or path.startswith(node + "/") for node in nodes)


def planned(plan: Plan, path: str, leaf: Any) -> LeafPlan:
    """The plan's decision for a parameter of this path and shape."""
    if path not in plan.leaves:
        raise ValueError(
            f"parameter {path!r} is not in the plan: learn the plan from gradients of the same tree (calibrate does "
            "it for the tree in use)"
        )
    decision = plan.leaves[path]
    shape = tuple(leaf.shape)
    if decision.reason == EMPTY and 0 in shape and len(shape) == len(decision.shape):
        return dataclasses.replace(decision, shape=shape)  # a state keeps the rank alone
    if decision.shape != shape:
        raise ValueError(
            f"parameter {path!r} has shape {tuple(leaf.shape)}, the plan was made for {decision.shape}: learn a plan "
            "for this model"
        )
    return decision


def check_axes_exist(options: Options, params: Any, known: list[str]) -> None:
    """Refuse declared axes of a leaf that does not exist."""
    if not known or not options.axes:
        return
    masked = masked_paths(params)
    for path in options.axes:
        if path not in known and not is_under(path, masked):
            raise ValueError(f"axes names {path!r}, which is no parameter; there are {', '.join(map(repr, known[:6]))}")
