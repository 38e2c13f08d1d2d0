"""What fits: the largest microbatch per device for each optimizer, layout and precision, from shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gefen_jax import paths
from gefen_jax.accounting.activations import Activations
from gefen_jax.accounting.devices import Device
from gefen_jax.accounting.phases import update_temporaries
from gefen_jax.accounting.report import Formatter, Report, Row, format_bytes, format_percent, format_plain
from gefen_jax.accounting.tensors import physical_bytes, tree_bytes

__all__ = ["LAYOUTS", "PRECISIONS", "Budget", "Fits", "Precision", "what_fits"]


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training run: of the stored parameters (and their gradients), and of the computation."""

    name: str
    parameters: Any
    compute: Any


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision("fp32", jnp.float32, jnp.float32),
        "bf16 + fp32 master": Precision("bf16 + fp32 master", jnp.float32, jnp.bfloat16),
        "bf16": Precision("bf16", jnp.bfloat16, jnp.bfloat16),
    }
)

LAYOUTS = ("replicated", "fsdp", "offload", "fsdp+offload")


@dataclass(frozen=True)
class Budget:
    """Bytes on one device for one choice of optimizer, layout and precision.

    Attributes:
      optimizer, layout, precision: the choice.
      parameters, gradients, state: what lives through the whole step.
      compute_copy: parameters cast to the dtype of the computation, kept for the backward pass.
      gathered: full weights and gradients of the layers in flight (fsdp), state of the leaves in flight (offload).
      update_temporaries: work space of the optimizer; exists when the activations do not.
      host: bytes of state in the host's memory per device.
      activations: of the microbatch.
      accumulate: gradients of earlier microbatches exist during the backward pass.
    """

    optimizer: str
    layout: str
    precision: str
    parameters: int
    gradients: int
    state: int
    compute_copy: int
    gathered: int
    update_temporaries: int
    host: int
    activations: Activations
    accumulate: bool = True

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the microbatch (gradients only if they are accumulated)."""
        always = self.parameters + self.state + self.compute_copy + self.gathered
        return always + (self.gradients if self.accumulate else 0)

    def peak(self, microbatch: int) -> int:
        """Bytes on the device at the worst moment of a step with this many sequences."""
        kept = self.activations.bytes(microbatch)
        backward = kept if self.accumulate else max(kept, self.gradients)
        update = self.update_temporaries + (0 if self.accumulate else self.gradients)
        return self.fixed + math.ceil(max(backward, update))

    def largest(self, memory: int, limit: int = 1 << 20) -> int:
        """Largest microbatch whose peak is at most ``memory`` bytes; 0 if not even one sequence fits."""
        if self.peak(1) > memory:
            return 0
        low, high = 1, 2
        while high <= limit and self.peak(high) <= memory:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle) <= memory else (low, middle)
        return low


@dataclass(frozen=True)
class Fits(Report):
    """Largest microbatches. Made by `what_fits`."""

    budgets: tuple[Budget, ...]
    name: str
    memory: int
    usable: float
    mesh: Mapping[str, int]
    remarks: tuple[str, ...] = field(default=())

    columns: ClassVar[Mapping[str, Formatter]] = {
        "optimizer": str,
        "layout": str,
        "precision": str,
        "parameters": format_bytes,
        "gradients": format_bytes,
        "state": format_bytes,
        "other": format_bytes,
        "host": format_bytes,
        "per sequence": format_bytes,
        "microbatch": format_plain,
        "peak": format_bytes,
    }

    @property
    def title(self) -> str:
        axes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"What fits: {self.name}, {axes}, {format_bytes(self.memory)} a device"

    @property
    def available(self) -> int:
        """Bytes that a program may use."""
        return int(self.memory * self.usable)

    def find(self, optimizer: str, layout: str, precision: str) -> Budget:
        """The budget of one choice."""
        for budget in self.budgets:
            if (budget.optimizer, budget.layout, budget.precision) == (optimizer, layout, precision):
                return budget
        raise KeyError(f"no budget for {optimizer!r}, {layout!r}, {precision!r}")

    def microbatch(self, optimizer: str, layout: str, precision: str) -> int:
        """The largest microbatch of one choice."""
        return self.find(optimizer, layout, precision).largest(self.available)

    @property
    def advice(self) -> str:
        """One paragraph about the first budget: what fills the device, and what one change of each kind would give."""
        base = self.budgets[0]
        size = base.largest(self.available)
        kept = math.ceil(base.activations.bytes(max(size, 1)))
        parts = {
            "parameters": base.parameters,
            "gradients": base.gradients,
            "optimizer state": base.state,
            "activations": kept,
            "copies and layers in flight": base.compute_copy + base.gathered,
        }
        listed = ", ".join(
            f"{what} {format_percent(n / sum(parts.values()))}"
            for what, n in sorted(parts.items(), key=lambda part: -part[1])
            if n
        )
        text = f"{base.optimizer}, {base.layout}, {base.precision}: microbatch {size}; of its peak {listed}."
        gains = []
        for field_name in ("optimizer", "layout", "precision"):
            others = [b for b in self.budgets if self._differs_only_in(base, b, field_name)]
            best = max(others, key=lambda b: (b.largest(self.available), -b.peak(1)), default=None)
            if best is not None and best.peak(1) < base.peak(1):
                saved = format_bytes(base.peak(1) - best.peak(1))
                gains.append(
                    f"{field_name} {getattr(best, field_name)}: {best.largest(self.available)} (saves {saved})"
                )
        if gains:
            text += f" Changing one thing, the microbatch becomes with {'; with '.join(gains)}."
        if kept > sum(parts.values()) / 2 and size:
            text += " Activations dominate: recomputing layers (jax.checkpoint) or fused attention would help most."
        return text

    @staticmethod
    def _differs_only_in(base: Budget, other: Budget, name: str) -> bool:
        return getattr(base, name) != getattr(other, name) and all(
            getattr(base, key) == getattr(other, key) for key in ("optimizer", "layout", "precision") if key != name
        )

    @property
    def rows(self) -> list[Row]:
        rows = []
        for budget in self.budgets:
            microbatch = budget.largest(self.available)
            rows.append(
                {
                    "optimizer": budget.optimizer,
                    "layout": budget.layout,
                    "precision": budget.precision,
                    "parameters": budget.parameters,
                    "gradients": budget.gradients,
                    "state": budget.state,
                    "other": budget.compute_copy + budget.gathered,
                    "update temporaries": budget.update_temporaries,
                    "host": budget.host,
                    "per sequence": budget.activations.bytes(2) - budget.activations.bytes(1),
                    "microbatch": microbatch,
                    "peak": budget.peak(max(microbatch, 1)),
                }
            )
        return rows

    @property
    def notes(self) -> tuple[str, ...]:
        sources = dict.fromkeys(budget.activations.source for budget in self.budgets)
        return (
            f"usable: {100 * self.usable:.0f} % of the memory, {format_bytes(self.available)} (JAX takes 75 % of a GPU"
            " unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise); a microbatch of 0 does not fit: its peak is that"
            " of 1",
            *(f"activations: {source}" for source in sources),
            *self.remarks,
            f"Advice: {self.advice}",
        )


def what_fits(
    params: Any,
    optimizers: Mapping[str, Any],
    activations: Activations | Callable[[Precision], Activations],
    *,
    memory: int | Device,
    mesh: int | Mapping[str, int] = 1,
    layouts: Sequence[str] = LAYOUTS,
    precisions: Sequence[str | Precision] = tuple(PRECISIONS),
    usable: float = 0.9,
    accumulate: bool = True,
    remat: bool = False,
    compile_update: bool = False,
    name: str = "model",
) -> Fits:
    """Find the largest microbatch per device for every optimizer, layout and precision.

    The state's bytes are those of ``jax.eval_shape(optimizer.init, params)``. "replicated": every device holds all.
    "fsdp": parameters, gradients and state are split over the mesh, each leaf along its longest axis that the
    number of devices divides (a leaf without one is replicated); two layers' weights and one layer's gradients exist
    whole. "offload": the state stays in host memory, two leaves of it at a time on the device.

    Args:
      params: the parameters, arrays or shapes; floating leaves are counted in the precision's dtype.
      optimizers: name -> Optax transformation.
      activations: bytes that the backward pass keeps (see `gefen_jax.accounting.activations`), for the given
        computation, or a function of the `Precision`.
      memory: bytes of one device, or a `Device`.
      mesh: number of devices, or axis name -> size; an axis named "fsdp" is the one that shards, else all do.
      layouts: which of `LAYOUTS`.
      precisions: names of `PRECISIONS` or `Precision` objects.
      usable: share of the memory that a program may use.
      accumulate: gradients are accumulated over microbatches, so that they exist beside all activations. Without it
        XLA reuses the activations' memory for gradients as the backward pass goes.
      remat: layers are recomputed; then copies in the computation's dtype do not outlive their layer.
      compile_update: compile every optimizer's update for these shapes to learn its work space (seconds each).
      name: for the title.

    Returns:
      A `Fits`.

    Raises:
      ValueError: unknown layout or precision, or ``usable`` outside (0, 1].

    Examples:
      >>> import jax, optax
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
      >>> fits = what_fits(params, {"adamw": optax.adamw(1e-3), "lion": optax.lion(1e-3)}, Activations(2**20),
      ...                  memory=24 * 2**20, usable=1.0, layouts=["replicated"], precisions=["fp32"])
      >>> [(row["optimizer"], row["microbatch"]) for row in fits.rows]  # 16 and 12 MiB are taken
      [('adamw', 7), ('lion', 11)]
    """
    if not 0 < usable <= 1:
        raise ValueError(f"usable: found {usable}, expected a share above 0 and at most 1")
    for layout in layouts:
        if layout not in LAYOUTS:
            raise ValueError(f"layouts: found {layout!r}, expected some of {', '.join(map(repr, LAYOUTS))}")
    axes = {"devices": mesh} if isinstance(mesh, int) else dict(mesh)
    shards = axes.get("fsdp", math.prod(axes.values()))
    budgets = []
    for wanted in precisions:
        precision = _precision(wanted)
        kept = activations(precision) if callable(activations) else activations
        shapes = _cast(params, precision.parameters)
        for optimizer, transformation in optimizers.items():
            state = jax.eval_shape(transformation.init, shapes)
            work = update_temporaries(transformation, shapes) if compile_update else 0
            for layout in layouts:
                n = shards if layout.startswith("fsdp") else 1
                offload = layout.endswith("offload")
                budgets.append(
                    Budget(
                        optimizer=optimizer,
                        layout=layout,
                        precision=precision.name,
                        parameters=sharded_bytes(shapes, n),
                        gradients=sharded_bytes(shapes, n),
                        state=0 if offload else sharded_bytes(state, n),
                        compute_copy=_compute_copy(shapes, precision, n, remat),
                        gathered=_gathered(shapes, precision, n) + (_in_flight(state, n) if offload else 0),
                        update_temporaries=work // n,
                        host=sharded_bytes(state, n) if offload else 0,
                        activations=kept,
                        accumulate=accumulate,
                    )
                )
    total = memory.memory if isinstance(memory, Device) else int(memory)
    remarks = [
        "gradients are accumulated: they exist beside the activations"
        if accumulate
        else "gradients are not accumulated: they take the place of activations as the backward pass goes"
    ]
    if not compile_update:
        remarks.append("the optimizer's own work space is taken to be below the activations' (compile_update checks)")
    return Fits(tuple(budgets), name, total, usable, MappingProxyType(axes), tuple(remarks))


def sharded_bytes(tree: Any, shards: int) -> int:
    """Bytes per device when every leaf is split along its longest axis that ``shards`` divides.

    Examples:
      >>> import jax
      >>> sharded_bytes([jax.ShapeDtypeStruct((8, 6), "float32"), jax.ShapeDtypeStruct((3,), "float32")], 4)
      60
    """
    total = 0
    for leaf in jax.tree.leaves(tree):
        parts = shards if any(size and size % shards == 0 for size in leaf.shape) else 1
        total += -(-physical_bytes(leaf.shape, leaf.dtype) // parts)
    return total


def layer_bytes(tree: Any) -> int:
    """Bytes of the largest layer: leaves whose paths agree up to the first part with a digit are one layer."""
    groups: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = paths.name(path).split("/")
        cut = next((i for i, part in enumerate(parts) if re.search(r"\d", part)), len(parts) - 1)
        group = "/".join(parts[: cut + 1])
        groups[group] = groups.get(group, 0) + physical_bytes(leaf.shape, leaf.dtype)
    return max(groups.values(), default=0)


def _precision(wanted: str | Precision) -> Precision:
    if isinstance(wanted, Precision):
        return wanted
    if wanted not in PRECISIONS:
        raise ValueError(f"precisions: found {wanted!r}, expected some of {', '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[wanted]


def _cast(params: Any, dtype: Any) -> Any:
    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, dtype if floating else leaf.dtype)

    return jax.tree.map(one, params)


def _compute_copy(shapes: Any, precision: Precision, shards: int, remat: bool) -> int:
    """Casts that XLA keeps from the forward to the backward pass; under fsdp they are gathered anew instead."""
    if jnp.dtype(precision.parameters) == jnp.dtype(precision.compute) or shards > 1:
        return 0
    copies = _cast(shapes, precision.compute)
    return layer_bytes(copies) if remat else tree_bytes(copies)


def _gathered(shapes: Any, precision: Precision, shards: int) -> int:
    """Two layers' weights (one used, one on its way) and one layer's gradients, whole, under fsdp."""
    if shards == 1:
        return 0
    return 2 * layer_bytes(_cast(shapes, precision.compute)) + layer_bytes(shapes)


def _in_flight(state: Any, shards: int) -> int:
    """State of the two largest leaves: one being updated, one on its way."""
    sizes = sorted((sharded_bytes(leaf, shards) for leaf in jax.tree.leaves(state)), reverse=True)
    return 2 * sum(sizes[:2])
