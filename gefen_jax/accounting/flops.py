"""Floating-point operations of a function, counted by walking its jaxpr.

Matrix multiplications and convolutions are counted exactly (two per multiply-add; a convolution's products
with padding and with the holes of dilation are not counted, so that both halves of its backward pass cost
what the forward pass costs). Everything else counts one per element that it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend import core

from gefen_jax.accounting.report import Formatter, Report, Row, format_count, format_percent, format_plain

__all__ = ["Flops", "count_flops", "jaxpr_flops", "xla_flops"]

KINDS = ("matmul", "convolution", "elementwise", "reduction", "transcendental")

_TRANSCENDENTAL = frozenset(
    """acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2
    expm1 igamma igammac lgamma log log1p logistic polygamma pow regularized_incomplete_beta rsqrt sin sinh sqrt tan
    tanh zeta""".split()  # noqa: SIM905
)
_ELEMENTWISE = frozenset(
    """abs add add_any and ceil clamp conj cumlogsumexp cummax cummin cumprod cumsum div eq eq_to floor ge gt imag
    integer_pow is_finite le le_to lt lt_to max min mul ne neg nextafter not one_minus_square or real
    reduce_precision rem round select_n sign square sub xor""".split()  # noqa: SIM905
)
_REDUCTION = frozenset(
    [
        "argmax",
        "argmin",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_prod",
        "reduce_sum",
        "reduce_xor",
    ]
)
_SCATTER = frozenset({"scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-max", "scatter-min"})
_WINDOW = frozenset({"reduce_window_max", "reduce_window_min", "reduce_window_sum"})
# Programs inside a primitive that describe one element's arithmetic, not work to be done once.
_SCALAR_PROGRAMS = _SCATTER | _WINDOW | {"reduce", "reduce_window", "scatter", "select_and_scatter", "sort"}
_KERNELS = frozenset(
    {"ffi_call", "pure_callback", "io_callback", "triton_kernel_call", "mosaic_gpu", "tpu_custom_call", "gefen_step"}
)


@dataclass(frozen=True)
class Flops(Report):
    """FLOPs of one call of a function. Made by `count_flops`.

    Attributes:
      name: name of the function.
      counts: (kind, operation, dtype) -> (times executed, FLOPs in all); ``kind`` is one of "matmul",
        "convolution", "elementwise", "reduction", "transcendental"; ``dtype`` is the first operand's.
      remarks: what could not be counted exactly.
      largest: how many operations the printed table lists.
    """

    name: str
    counts: Mapping[tuple[str, str, str], tuple[int, int]]
    remarks: tuple[str, ...] = ()
    largest: int = 12

    columns: ClassVar[Mapping[str, Formatter]] = {
        "kind": format_plain,
        "operation": format_plain,
        "dtype": format_plain,
        "times": lambda n: f"{n:,}",
        "FLOPs": format_count,
        "share": format_percent,
    }

    @property
    def title(self) -> str:
        return f"FLOPs of {self.name}, counted from its jaxpr"

    def of(self, *kinds: str) -> int:
        """FLOPs of these kinds."""
        return sum(flops for (kind, _, _), (_, flops) in self.counts.items() if kind in kinds)

    @property
    def matmul(self) -> int:
        """FLOPs of matrix multiplications."""
        return self.of("matmul")

    @property
    def convolution(self) -> int:
        """FLOPs of convolutions."""
        return self.of("convolution")

    @property
    def model(self) -> int:
        """FLOPs of matrix multiplications and convolutions: what MFU counts."""
        return self.of("matmul", "convolution")

    @property
    def dtype(self) -> str | None:
        """Dtype in which most of the model's FLOPs are computed; ``None`` if there are none."""
        sums: dict[str, int] = {}
        for (kind, _, dtype), (_, flops) in self.counts.items():
            if kind in ("matmul", "convolution"):
                sums[dtype] = sums.get(dtype, 0) + flops
        return max(sums, key=lambda dtype: sums[dtype]) if sums else None

    @property
    def transcendental(self) -> int:
        """Evaluations of exp, log, tanh, sqrt and the like; XLA counts these apart, and so is `total`."""
        return self.of("transcendental")

    @property
    def total(self) -> int:
        """All FLOPs but transcendental functions, the sum that XLA calls "flops"."""
        return self.of("matmul", "convolution", "elementwise", "reduction")

    @property
    def rows(self) -> list[Row]:
        everything = self.total + self.transcendental
        rows = [
            {
                "kind": kind,
                "operation": what,
                "dtype": dtype,
                "times": times,
                "FLOPs": n,
                "share": n / everything if everything else None,
            }
            for (kind, what, dtype), (times, n) in self.counts.items()
        ]
        return sorted(rows, key=lambda row: (-int(row["FLOPs"] or 0), str(row["operation"])))

    def printed_rows(self) -> list[Row]:
        return self.rows[: self.largest]

    @property
    def notes(self) -> tuple[str, ...]:
        parts = ", ".join(f"{kind} {format_count(self.of(kind))}" for kind in KINDS if self.of(kind))
        hidden = len(self.counts) - self.largest
        more = (f"{hidden} smaller operations are not listed",) if hidden > 0 else ()
        return (f"total {format_count(self.total)}: {parts or 'nothing'}", *more, *self.remarks)


def count_flops(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Flops:
    """Trace a function and count its FLOPs. Nothing is compiled or run.

    ``scan`` counts its body times its length, ``cond`` its most expensive branch, ``while`` its body once (with
    a remark), ``shard_map`` its body on every device. Recomputation by ``jax.checkpoint`` is counted where it
    happens, in the backward pass. Kernels count what their cost estimate says.

    Args:
      function: any traceable function, jitted or not.
      *args: arrays or shapes; ``**kwargs`` likewise.

    Returns:
      A `Flops`: ``total``, ``matmul``, ``convolution``, ``model``, and every operation with its shapes.

    Raises:
      TypeError, ValueError: as JAX raises them where the function cannot be traced.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> flops = count_flops(lambda a, b: a @ b + 1, jnp.ones((3, 5)), jnp.ones((5, 7)))
      >>> flops.matmul, flops.total
      (210, 231)
    """
    name = getattr(function, "__name__", type(function).__name__)
    return jaxpr_flops(jax.make_jaxpr(function)(*args, **kwargs), name)


def jaxpr_flops(jaxpr: Any, name: str = "jaxpr") -> Flops:
    """`count_flops` of a jaxpr (closed or open)."""
    counts: dict[tuple[str, str, str], list[int]] = {}
    remarks: dict[str, None] = {}
    _walk(getattr(jaxpr, "jaxpr", jaxpr), 1, counts, remarks)
    return Flops(name, {key: (times, flops) for key, (times, flops) in counts.items()}, tuple(remarks))


def xla_flops(lowered_or_compiled: Any) -> float | None:
    """XLA's own count, to set beside ours; ``None`` where the backend gives none.

    XLA counts the body of a loop once and custom kernels as nothing (unless they bring an estimate), so for
    programs with ``scan`` it is too low by design.
    """
    analysis = lowered_or_compiled.cost_analysis()
    if isinstance(analysis, (list, tuple)):
        analysis = analysis[0] if analysis else None
    flops = None if analysis is None else analysis.get("flops")
    return None if flops is None or flops < 0 else float(flops)


def _walk(jaxpr: Any, times: int, counts: dict[Any, list[int]], remarks: dict[str, None]) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "scan":
            _walk(eqn.params["jaxpr"].jaxpr, times * int(eqn.params["length"]), counts, remarks)
        elif name == "while":
            remarks["a while loop whose number of turns is not known was counted as one turn"] = None
            for key in ("cond_jaxpr", "body_jaxpr"):
                _walk(eqn.params[key].jaxpr, times, counts, remarks)
        elif name == "cond":
            _walk_branches(eqn.params["branches"], times, counts, remarks)
        elif name == "shard_map":
            mesh, axes = eqn.params["mesh"], eqn.params.get("manual_axes")
            copies = math.prod(size for axis, size in mesh.shape.items() if axes is None or axis in axes)
            _walk(_open(eqn.params["jaxpr"]), times * copies, counts, remarks)
        elif name == "pallas_call":
            _count_pallas(eqn, times, counts, remarks)
        elif name in _KERNELS:
            remarks[f"{name}: a kernel that does not say what it costs was counted as nothing"] = None
        else:
            inner = [] if name in _SCALAR_PROGRAMS else list(_programs(eqn))
            if inner:
                for program in inner:
                    _walk(program, times, counts, remarks)
            else:
                _count(eqn, times, counts)


def _walk_branches(branches: Any, times: int, counts: dict[Any, list[int]], remarks: dict[str, None]) -> None:
    costs: list[dict[Any, list[int]]] = []
    for branch in branches:
        costs.append({})
        _walk(branch.jaxpr, times, costs[-1], remarks)
    totals = [sum(flops for _, flops in cost.values()) for cost in costs]
    if len(set(totals)) > 1:
        remarks["a cond was counted with its most expensive branch"] = None
    for key, (executed, flops) in costs[totals.index(max(totals))].items():
        _add(counts, key, executed, flops)


def _count_pallas(eqn: Any, times: int, counts: dict[Any, list[int]], remarks: dict[str, None]) -> None:
    estimate = eqn.params.get("cost_estimate")
    label = str(eqn.params.get("name") or "kernel")
    if estimate is None:
        remarks[f"pallas_call {label}: without a cost_estimate it was counted as nothing"] = None
        return
    _add(counts, ("elementwise", f"pallas_call {label}", ""), times, times * int(estimate.flops))
    _add(counts, ("transcendental", f"pallas_call {label}", ""), times, times * int(estimate.transcendentals))


def _programs(eqn: Any) -> Iterator[Any]:
    """The jaxprs that a call-like primitive runs once: jit, checkpoint, custom_jvp, custom_vjp and the like."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (core.ClosedJaxpr, core.Jaxpr)):
                yield _open(item)


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _add(counts: dict[Any, list[int]], key: tuple[str, str, str], times: int, flops: int) -> None:
    if flops:
        entry = counts.setdefault(key, [0, 0])
        entry[0] += times
        entry[1] += flops


def _count(eqn: Any, times: int, counts: dict[Any, list[int]]) -> None:
    name = eqn.primitive.name
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        kind, flops = "matmul", _dot(eqn) if name == "dot_general" else _ragged(eqn)
    elif name == "conv_general_dilated":
        kind, flops = "convolution", _convolution(eqn)
    elif name in _TRANSCENDENTAL:
        kind, flops = "transcendental", _elements(eqn.outvars[0])
    elif not _floating(eqn):
        return
    elif name in _ELEMENTWISE:
        kind, flops = "elementwise", _elements(eqn.outvars[0]) * _multiplications(eqn)
    elif name in _REDUCTION:
        kind, flops = "reduction", _elements(eqn.invars[0]) - _elements(eqn.outvars[0])
    elif name in _WINDOW:
        window = math.prod(eqn.params["window_dimensions"]) - 1
        kind, flops = "reduction", _elements(eqn.outvars[0]) * window
    elif name in _SCATTER:
        kind, flops = "elementwise", _elements(eqn.invars[2])
    elif name in ("psum", "psum_invariant", "pmax", "pmin", "reduce_scatter"):
        kind, flops = "reduction", sum(_elements(var) for var in eqn.invars)
    else:
        return
    shapes = " x ".join(_shape(var) for var in eqn.invars if getattr(var.aval, "shape", None) is not None)
    detail = f"{name} {shapes}" if kind in ("matmul", "convolution") else name
    _add(counts, (kind, detail, str(eqn.invars[0].aval.dtype)), times, times * flops)


def _dot(eqn: Any) -> int:
    """2 x batch x rows x columns x contracted."""
    (contract, _), _ = eqn.params["dimension_numbers"]
    inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contract)
    return 2 * _elements(eqn.outvars[0]) * inner


def _ragged(eqn: Any) -> int:
    """Rows of the left side times one group's matrix: (m, k) x (groups, k, n)."""
    return 2 * _elements(eqn.invars[0]) * int(eqn.invars[1].aval.shape[-1])


def _convolution(eqn: Any) -> int:
    """2 x output batch and channels x input channels of a group x pairs (output, kernel) that meet real input."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    image, kernel, output = (v.aval.shape for v in (eqn.invars[0], eqn.invars[1], eqn.outvars[0]))
    flops = 2 * output[numbers.out_spec[0]] * output[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    spatial = zip(
        numbers.lhs_spec[2:],
        numbers.rhs_spec[2:],
        numbers.out_spec[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    for left, right, out, stride, (low, _), hole, spread in spatial:
        flops *= valid_pairs(image[left], kernel[right], output[out], stride, low, hole, spread)
    return flops


def valid_pairs(size: int, kernel: int, output: int, stride: int, low: int, hole: int, spread: int) -> int:
    """Pairs (output position, kernel position) of one axis that multiply an element of the image.

    Position ``o * stride + k * spread - low`` of the padded, dilated image is real if it lies in
    [0, (size - 1) * hole] and is a multiple of ``hole``.

    Examples:
      >>> valid_pairs(8, 3, 8, 1, 1, 1, 1)  # three taps, "same" padding: the two ends lose one each
      22
    """
    taps = range(-low, -low + kernel * spread, spread)
    last = (size - 1) * hole
    pairs = 0
    for tap in taps:
        # positions tap + o * stride for o in range(output); count those in [0, last] that hole divides
        pairs += sum(1 for p in range(tap, tap + output * stride, stride) if 0 <= p <= last and p % hole == 0)
    return pairs


def _multiplications(eqn: Any) -> int:
    if eqn.primitive.name != "integer_pow":
        return 1
    power = abs(int(eqn.params["y"]))
    return max(1, power.bit_length() - 1 + power.bit_count() - 1) + (eqn.params["y"] < 0)


def _floating(eqn: Any) -> bool:
    def inexact(var: Any) -> bool:
        dtype = getattr(var.aval, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)

    return any(inexact(var) for var in (*eqn.invars, *eqn.outvars))


def _elements(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _shape(var: Any) -> str:
    return "(" + ", ".join(map(str, var.aval.shape)) + ")"
