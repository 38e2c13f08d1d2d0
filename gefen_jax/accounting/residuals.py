"""Activations: what a loss keeps between its forward and its backward pass, read from the traced program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.extend import core, source_info_util

from gefen_jax.accounting.report import Formatter, Report, Row, format_bytes, format_percent, format_plain
from gefen_jax.accounting.tensors import physical_bytes

__all__ = ["Residual", "Residuals", "residuals"]


@dataclass(frozen=True)
class Residual:
    """One array that the backward pass reads.

    Attributes:
      kind: "activation" (computed in the forward pass), "argument" (a parameter or an input: no extra memory) or
        "constant".
      shape, dtype: of the array; arrays stacked by a scan have its length as first axis.
      bytes: its size.
      operation: the primitive that computes it.
      where: file and line of the user's code, as far as known.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    operation: str
    where: str


@dataclass(frozen=True)
class Residuals(Report):
    """All arrays kept for the backward pass. Made by `residuals`."""

    name: str
    kept: tuple[Residual, ...]
    largest: int = 12

    columns: ClassVar[Mapping[str, Formatter]] = {
        "operation": format_plain,
        "arrays": format_plain,
        "shape": format_plain,
        "dtype": format_plain,
        "bytes": format_bytes,
        "share": format_percent,
        "where": format_plain,
    }

    @property
    def title(self) -> str:
        return f"Kept by {self.name} for its backward pass: {format_bytes(self.bytes)} of activations"

    @property
    def bytes(self) -> int:
        """Bytes of the activations; arguments that the backward pass reads again are not counted."""
        return sum(item.bytes for item in self.kept if item.kind == "activation")

    @property
    def argument_bytes(self) -> int:
        """Bytes of parameters and inputs that the backward pass reads again."""
        return sum(item.bytes for item in self.kept if item.kind == "argument")

    @property
    def rows(self) -> list[Row]:
        groups: dict[tuple[Any, ...], int] = {}
        for item in self.kept:
            if item.kind == "activation":
                key = (item.operation, item.shape, item.dtype, item.where, item.bytes)
                groups[key] = groups.get(key, 0) + 1
        rows = [
            {
                "operation": operation,
                "arrays": count,
                "shape": shape,
                "dtype": dtype,
                "bytes": count * size,
                "share": count * size / self.bytes if self.bytes else None,
                "where": where,
            }
            for (operation, shape, dtype, where, size), count in groups.items()
        ]
        return sorted(rows, key=lambda row: -int(row["bytes"] or 0))

    def printed_rows(self) -> list[Row]:
        return self.rows[: self.largest]

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"parameters and inputs that are read again: {format_bytes(self.argument_bytes)} (no extra memory)",
            "as traced, before XLA: a compiler that fuses and recomputes cheap operations may keep less",
        )


def residuals(loss: Callable[..., Any], params: Any, *args: Any, has_aux: bool = False, **kwargs: Any) -> Residuals:
    """List the arrays that ``jax.vjp`` of a loss keeps. Nothing is compiled or run.

    Args:
      loss: ``loss(params, *args, **kwargs)``, a scalar, or (scalar, anything) with ``has_aux``.
      params: the pytree that is differentiated, arrays or shapes.
      *args: the other arguments, arrays or shapes.
      has_aux: whether the loss returns something beside the scalar.
      **kwargs: keyword arguments of the loss.

    Returns:
      A `Residuals`: ``bytes`` of the activations, and every array with the operation and line that makes it.

    Examples:
      >>> import jax.numpy as jnp
      >>> kept = residuals(lambda w, x: jnp.sum(jnp.sin(x @ w)), jnp.ones((3, 5)), jnp.ones((2, 3)))
      >>> kept.bytes, kept.argument_bytes  # cos(x @ w), of shape (2, 5); x again
      (40, 24)
    """
    inner = getattr(loss, "func", loss)  # of a functools.partial
    name = str(getattr(inner, "__name__", type(inner).__name__))

    def backward(params: Any, args: Any, kwargs: Any) -> Any:
        def value(params: Any) -> Any:
            out = loss(params, *args, **kwargs)
            return out[0] if has_aux else out

        return jax.vjp(value, params)[1]

    jaxpr = jax.make_jaxpr(backward)(params, args, kwargs).jaxpr
    kept = tuple(_describe(jaxpr, var) for var in jaxpr.outvars if not isinstance(var, core.Literal))
    return Residuals(name, kept)


def _describe(jaxpr: Any, var: Any) -> Residual:
    operation, where = "constant", ""
    kind = "constant"
    source = _origin(jaxpr, var)
    if source == "argument":
        kind, operation = "argument", "argument"
    elif source is not None:
        kind = "activation"
        operation = source.primitive.name
        where = _short(source_info_util.summarize(source.source_info))
    shape = tuple(var.aval.shape)
    return Residual(kind, shape, str(var.aval.dtype), physical_bytes(shape, var.aval.dtype), operation, where)


def _short(where: str) -> str:
    """A source line with the last two parts of its file's path only."""
    place, _, function = where.partition(" ")
    return " ".join(["/".join(place.split("/")[-2:]), function]).strip()


def _origin(jaxpr: Any, var: Any) -> Any:
    """The equation that computes a variable, inside nested programs too; "argument"; or ``None``: a constant."""
    if var in jaxpr.invars:
        return "argument"
    for eqn in reversed(jaxpr.eqns):
        if var not in eqn.outvars:
            continue
        inner = _single_program(eqn)
        if inner is None or len(inner.outvars) != len(eqn.outvars):
            return eqn
        result = inner.outvars[eqn.outvars.index(var)]
        if isinstance(result, core.Literal):
            return eqn
        if result in inner.invars and eqn.primitive.name != "scan" and len(inner.invars) == len(eqn.invars):
            outer = eqn.invars[inner.invars.index(result)]
            return eqn if isinstance(outer, core.Literal) else _origin(jaxpr, outer)
        found = _origin(inner, result)
        return eqn if found in (None, "argument") else found
    return None


def _single_program(eqn: Any) -> Any:
    """The program of a call-like equation or the body of a scan."""
    for key in ("jaxpr", "call_jaxpr"):
        if key in eqn.params:
            program = eqn.params[key]
            return getattr(program, "jaxpr", program)
    return None
