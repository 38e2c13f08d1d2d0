"""A step as XLA sees it: traced, compiled, its arguments named; errors that say what went wrong."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from gefen_jax import paths
from gefen_jax.accounting.tensors import shape_dtype

__all__ = ["Argument", "Program", "StepError", "compile_step"]

# First match wins; tried on "<argument name>/<path inside it>". Anything else keeps its argument's name.
CATEGORIES: Mapping[str, str] = {
    r"(^|/)(opt_?state|optimizer_?state|optimizer|opt)(/|$)": "optimizer state",
    r"(^|/)(param(eter)?s?|weights|model)(/|$)": "parameters",
    r"(^|/)(grad(ient)?s?|updates)(/|$)": "gradients",
    r"(^|/)(batch|data|inputs?|targets?|labels?|tokens|images?|x|y)(/|$)": "batch",
}


class StepError(ValueError):
    """A step that cannot be traced, lowered or compiled; the message says at which stage and what to try."""


@dataclass(frozen=True)
class Argument:
    """One array argument of a compiled step.

    Attributes:
      name: the function's parameter it belongs to.
      path: name and path inside the argument.
      category: "parameters", "optimizer state", ..., or the parameter's name.
      shape, dtype: as the step receives it.
      donated: the caller gives the buffer away; ``None`` if this cannot be told.
      sharding: as given or as compiled; ``None`` on one device.
      read: whether the compiled step reads it (JAX drops the others); ``None`` if this cannot be told.
    """

    name: str
    path: str
    category: str
    shape: tuple[int, ...]
    dtype: Any
    donated: bool | None
    sharding: Any
    read: bool | None


@dataclass(frozen=True)
class Program:
    """A compiled step: what `compile_step` returns.

    Attributes:
      name: name of the function.
      arguments: the array arguments, in order.
      jaxpr: the traced program (``None`` if the step only offers ``lower``).
      lowered, compiled: JAX's stages; ``compiled.as_text()`` is the optimized program.
      outputs: pytree of shapes that the step returns.
      platform: "cpu", "gpu", "tpu", or the name of the target it was compiled for.
      warnings: what JAX warned about unusable donated buffers.
    """

    name: str
    arguments: tuple[Argument, ...]
    jaxpr: Any
    lowered: Any
    compiled: Any
    outputs: Any
    platform: str
    warnings: tuple[str, ...] = field(default=())


def compile_step(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    categories: Mapping[str, str] | None = None,
    target: Any = None,
    **kwargs: Any,
) -> Program:
    """Trace, lower and compile a step for given arguments, without running it.

    Args:
      step: a function, or anything jitted (with its own donation and static arguments).
      *args: arrays or shapes (`jax.ShapeDtypeStruct`), as the step takes them.
      donate_argnums: which arguments a plain function gives away; not for a jitted one.
      static_argnums: which arguments of a plain function are static; not for a jitted one.
      categories: regular expression on "argument name/path" -> category, tried before the built-in ones.
      target: ``None`` for the default device, or a `gefen_jax.accounting.targets.Target` to compile for a GPU
        that this machine does not have.
      **kwargs: keyword arguments of the step.

    Returns:
      A `Program`.

    Raises:
      StepError: the step cannot be traced, lowered or compiled.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> program = compile_step(lambda params, x: params * x, jnp.ones(3), jnp.ones(3), donate_argnums=0)
      >>> [(a.path, a.category, a.donated) for a in program.arguments]
      [('params', 'parameters', True), ('x', 'batch', False)]
    """
    if not callable(step):
        raise StepError(f"step: found {type(step).__name__}, expected a function or a jitted function")
    name = getattr(step, "__name__", type(step).__name__)
    donate, static = _indices(donate_argnums), _indices(static_argnums)
    if hasattr(step, "lower"):
        if donate or static:
            raise StepError(
                f"{name} is jitted already: found donate_argnums or static_argnums here, expected them in the"
                " step's own jax.jit"
            )
        jitted: Any = step
    else:
        jitted = jax.jit(step, donate_argnums=donate, static_argnums=static)
    if target is not None:
        args, kwargs = target.place((args, kwargs))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced, lowered, compiled = _stages(name, jitted, args, kwargs, target)
    unusable = []
    for warning in caught:
        if "donated" in str(warning.message):
            unusable.append(str(warning.message).splitlines()[0])
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return Program(
        name=name,
        arguments=_arguments(step, args, kwargs, static, lowered, compiled, categories or {}),
        jaxpr=getattr(getattr(traced, "traced", traced), "jaxpr", None),  # nnx.jit wraps JAX's own stage
        lowered=lowered,
        compiled=compiled,
        outputs=getattr(compiled, "out_info", getattr(lowered, "out_info", None)),
        platform=jax.default_backend() if target is None else target.name,
        warnings=tuple(unusable),
    )


def _stages(name: str, jitted: Any, args: Any, kwargs: Any, target: Any) -> tuple[Any, Any, Any]:
    traced: Any = None
    stage, help_ = (
        "traced",
        (
            "pass the arguments exactly as the training loop does (arrays or jax.ShapeDtypeStruct); mark arguments"
            " that are no arrays as static; keep Python branches on values and host side effects out of the step"
        ),
    )
    try:
        with contextlib.nullcontext() if target is None else target.context():
            if hasattr(jitted, "trace"):
                traced = jitted.trace(*args, **kwargs)
            stage, help_ = "lowered", "see the message above"
            lowered = jitted.lower(*args, **kwargs) if traced is None else traced.lower()
            stage, help_ = "compiled", "see the message above"
            return traced, lowered, lowered.compile()
    except Exception as error:
        where = jax.default_backend() if target is None else target.name
        raise StepError(
            f"{name} cannot be {stage} for {where}: {type(error).__name__}: {error}\nWhat to do: {help_}."
        ) from error


def _arguments(
    step: Any,
    args: Any,
    kwargs: Any,
    static: tuple[int, ...],
    lowered: Any,
    compiled: Any,
    categories: Mapping[str, str],
) -> tuple[Argument, ...]:
    """Name the array arguments; take donation and sharding from the stages where they line up."""
    named = [
        (label, value)
        for index, (label, value) in enumerate(_labels(step, args, kwargs))
        if index not in static and index - len(args) not in static
    ]
    info = jax.tree.leaves(getattr(lowered, "args_info", ()), is_leaf=lambda x: hasattr(x, "donated"))
    flat = _flatten(named)
    if len(info) != len(flat):  # a jitted step's own static arguments: those are not arrays, or unhashable
        flat = _flatten([(label, value) for label, value in named if _is_traced(value, info)])
    aligned = len(info) == len(flat) and all(
        tuple(i.shape) == shape and i.dtype == dtype for i, (_, _, (shape, dtype), _) in zip(info, flat)
    )
    placed = jax.tree.leaves(getattr(compiled, "input_shardings", ()), is_leaf=lambda x: x is None)
    found = []
    for index, (label, path, (shape, dtype), value) in enumerate(flat):
        sharding = getattr(value, "sharding", None)
        read = placed[index] is not None if len(placed) == len(flat) else None
        if sharding is None and read:
            sharding = placed[index]
        donated = bool(info[index].donated) if aligned else None
        category = _category(path, label, categories)
        found.append(Argument(label, path, category, shape, dtype, donated, sharding, read))
    return tuple(found)


def _flatten(named: Sequence[tuple[str, Any]]) -> list[tuple[str, str, tuple[tuple[int, ...], Any], Any]]:
    flat = []
    for label, value in named:
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            inside = paths.name(path)
            full = f"{label}/{inside}" if inside else label
            try:
                flat.append((label, full, shape_dtype(leaf, full), leaf))
            except TypeError:
                continue  # a static argument of a jitted step
    return flat


def _is_traced(value: Any, info: Sequence[Any]) -> bool:
    """Whether an argument of a jitted step is dynamic: Python numbers are only if an argument of rank 0 is."""
    if isinstance(value, (bool, int, float, complex)):
        return any(tuple(i.shape) == () for i in info)
    return True


def _labels(step: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    try:
        bound = inspect.signature(step).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return [(f"argument {i}", value) for i, value in enumerate(args)] + list(kwargs.items())
    labels: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            labels += [(f"{name}{i}", item) for i, item in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            labels += list(value.items())
        else:
            labels.append((name, value))
    return labels


def _category(path: str, label: str, extra: Mapping[str, str]) -> str:
    for patterns in (extra, CATEGORIES):
        for pattern, category in patterns.items():
            if re.search(pattern, path):
                return category
    return label


def _indices(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
