"""A training step in its phases: forward, backward, update, apply. Each compiled on its own, and the whole.

XLA reports one total for a whole step, so the phases are separate programs here: the sum of their work is that of
the step, their temporaries are what each needs alone. Inside one program XLA overlaps and fuses them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gefen_jax.accounting.flops import jaxpr_flops
from gefen_jax.accounting.memory import Memory, compiled_memory
from gefen_jax.accounting.program import compile_step
from gefen_jax.accounting.report import (
    Formatter,
    Report,
    Row,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)
from gefen_jax.accounting.tensors import tree_bytes
from gefen_jax.accounting.timing import measure

__all__ = ["Phase", "Phases", "phases", "update_temporaries"]


@dataclass(frozen=True)
class Phase:
    """One phase, compiled alone.

    Attributes:
      name: "forward", "forward + backward", "update", "apply" or "whole step".
      memory: XLA's analysis.
      resident: bytes that exist during the phase without being its arguments (the optimizer state during the
        backward pass, the batch during the update).
      flops: counted from the jaxpr, transcendental functions not included.
      seconds: median measured time; ``None`` if not run.
    """

    name: str
    memory: Memory
    resident: int
    flops: int
    seconds: float | None = None

    @property
    def peak(self) -> int:
        """Bytes on the device while the phase runs."""
        return self.memory.peak + self.resident


@dataclass(frozen=True)
class Phases(Report):
    """The phases of a training step. Made by `phases`."""

    phases: tuple[Phase, ...]
    whole: Phase
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    batch_bytes: int
    platform: str

    columns: ClassVar[Mapping[str, Formatter]] = {
        "phase": str,
        "arguments": format_bytes,
        "new outputs": format_bytes,
        "temporaries": format_bytes,
        "resident": format_bytes,
        "peak": format_bytes,
        "FLOPs": format_count,
        "time": format_seconds,
        "share of time": format_percent,
    }

    @property
    def title(self) -> str:
        return f"Phases of a training step, compiled for {self.platform}, each on its own"

    @property
    def rows(self) -> list[Row]:
        whole = self.whole.seconds
        return [
            {
                "phase": phase.name,
                "arguments": phase.memory.arguments,
                "new outputs": phase.memory.outputs - phase.memory.aliased,
                "temporaries": phase.memory.temporaries,
                "resident": phase.resident,
                "peak": phase.peak,
                "FLOPs": phase.flops,
                "time": phase.seconds,
                "share of time": phase.seconds / whole if phase.seconds is not None and whole else None,
            }
            for phase in (*self.phases, self.whole)
        ]

    def phase(self, name: str) -> Phase:
        """A phase by its name."""
        for phase in (*self.phases, self.whole):
            if phase.name == name:
                return phase
        raise KeyError(f"no phase {name!r}; there are: {', '.join(p.name for p in (*self.phases, self.whole))}")

    @property
    def optimizer_seconds(self) -> float | None:
        """Measured time of update and apply together."""
        parts = [self.phase(name).seconds for name in ("update", "apply")]
        return None if any(part is None for part in parts) else sum(part or 0.0 for part in parts)

    @property
    def optimizer_traffic(self) -> int:
        """Bytes that update and apply must move at least: gradients, parameters and state in; the last two out."""
        return self.gradient_bytes + 2 * self.parameter_bytes + 2 * self.state_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        worst = max(self.phases, key=lambda phase: phase.peak)
        return (
            "each phase is a program of its own: XLA gives one total for the whole step, where phases overlap",
            f"highest phase: {worst.name}, {format_bytes(worst.peak)}; whole step {format_bytes(self.whole.peak)}",
            f"the optimizer must move at least {format_bytes(self.optimizer_traffic)} a step",
        )


def phases(
    loss: Callable[..., Any],
    optimizer: Any,
    params: Any,
    opt_state: Any,
    *batch: Any,
    has_aux: bool = False,
    target: Any = None,
    run: bool = False,
    repeats: int = 10,
) -> Phases:
    """Compile forward, backward, update and apply separately, and the whole step beside them.

    Args:
      loss: ``loss(params, *batch)``, a scalar, or (scalar, anything) with ``has_aux``.
      optimizer: an Optax transformation: anything with ``update(grads, state, params)``.
      params, opt_state: arrays or shapes.
      *batch: the other arguments of the loss, arrays or shapes.
      has_aux: whether the loss returns something beside the scalar.
      target: compile for a GPU that is not there, see `gefen_jax.accounting.targets`.
      run: also measure the times; needs real arrays.
      repeats: runs per phase.

    Returns:
      A `Phases`.

    Raises:
      StepError: a phase cannot be traced or compiled.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer, params = optax.sgd(0.1), {"w": jnp.ones((8, 4))}
      >>> loss = lambda params, x: jnp.sum((x @ params["w"]) ** 2)
      >>> report = phases(loss, optimizer, params, optimizer.init(params), jnp.ones((2, 8)))
      >>> [phase.name for phase in report.phases]
      ['forward', 'forward + backward', 'update', 'apply']
    """
    grads = params  # gradients have the parameters' shapes and dtypes
    value_and_grad = jax.value_and_grad(loss, has_aux=has_aux)

    def forward(params: Any, *batch: Any) -> Any:
        return loss(params, *batch)

    def backward(params: Any, *batch: Any) -> Any:
        return value_and_grad(params, *batch)

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        return optimizer.update(grads, opt_state, params)

    def apply(params: Any, updates: Any) -> Any:
        return _apply(params, updates)

    def whole_step(params: Any, opt_state: Any, *batch: Any) -> Any:
        value, grads = value_and_grad(params, *batch)
        updates, opt_state = update(grads, opt_state, params)
        return apply(params, updates), opt_state, value

    updates = jax.eval_shape(update, grads, opt_state, params)[0]
    if run:
        updates = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), updates)
    state_bytes, batch_bytes = tree_bytes(opt_state), tree_bytes(batch)
    plans: list[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...], int]] = [
        ("forward", forward, (params, *batch), (), state_bytes),
        ("forward + backward", backward, (params, *batch), (), state_bytes),
        ("update", update, (grads, opt_state, params), (0, 1), batch_bytes),
        ("apply", apply, (params, updates), (0,), batch_bytes + state_bytes),
        ("whole step", whole_step, (params, opt_state, *batch), (0, 1), 0),
    ]
    found, platform = [], ""
    for name, function, args, donate, resident in plans:
        program = compile_step(function, *args, donate_argnums=donate, target=target)
        platform = program.platform
        phase = Phase(name, compiled_memory(program.compiled), resident, jaxpr_flops(program.jaxpr, name).total)
        if run:
            timing = measure(jax.jit(function, donate_argnums=donate), *args, repeats=repeats)
            phase = dataclasses.replace(phase, seconds=timing.median)
        found.append(phase)
    return Phases(
        phases=tuple(found[:-1]),
        whole=found[-1],
        parameter_bytes=tree_bytes(params),
        gradient_bytes=tree_bytes(grads),
        state_bytes=state_bytes,
        batch_bytes=batch_bytes,
        platform=platform,
    )


def update_temporaries(optimizer: Any, params: Any, target: Any = None) -> int:
    """Work space in bytes of ``optimizer.update``, compiled with gradients and state donated.

    The updates take the place of the gradients, as in a training step, so this is what the optimizer needs beyond
    parameters, gradients and state.

    Args:
      optimizer: an Optax transformation.
      params: arrays or shapes.
      target: compile for a GPU that is not there.

    Examples:
      >>> import jax, optax
      >>> update_temporaries(optax.adamw(0.1), {"w": jax.ShapeDtypeStruct((256, 128), "float32")}) < 1024
      True
    """

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        return optimizer.update(grads, opt_state, params)

    opt_state = jax.eval_shape(optimizer.init, params)
    program = compile_step(update, params, opt_state, params, donate_argnums=(0, 1), target=target)
    return compiled_memory(program.compiled).temporaries


def _apply(params: Any, updates: Any) -> Any:
    """Parameters plus updates, in the parameters' dtype."""
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
