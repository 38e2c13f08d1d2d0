"""Everything about one training step in one call: bytes by category, phases, FLOPs, time and MFU, advice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from gefen_jax.accounting.advice import advise
from gefen_jax.accounting.devices import Device, find_device, local_device
from gefen_jax.accounting.flops import Flops, count_flops, jaxpr_flops, xla_flops
from gefen_jax.accounting.memory import StepMemory, live_after, program_memory
from gefen_jax.accounting.phases import Phases, phases
from gefen_jax.accounting.program import Program, StepError, compile_step
from gefen_jax.accounting.report import Formatter, Report, Row, format_bytes, format_count
from gefen_jax.accounting.residuals import Residuals, residuals
from gefen_jax.accounting.tensors import live_bytes, tree_bytes
from gefen_jax.accounting.timing import Profile, ProfilerError, Utilization, measure, profile, utilization

__all__ = ["Account", "account"]


@dataclass(frozen=True)
class Account(Report):
    """The account of a step. Made by `account`.

    Attributes:
      memory: by category, from the compiled step.
      activations: what the backward pass keeps; ``None`` without ``loss``.
      phases: ``None`` without ``loss`` and ``optimizer``.
      flops: from the jaxpr; ``None`` if the step cannot be traced to one.
      xla_flops: XLA's own count.
      utilization: ``None`` unless the step was run.
      profile: executor events; ``None`` unless the step was profiled.
      live_after: bytes alive on all devices because of one step, measured; ``None`` unless the step was run.
      remarks: what could not be done, and why.
      alternatives: optimizer -> bytes of its state.
      live: bytes alive on the devices when the account was made, the step's arguments included.
    """

    memory: StepMemory
    activations: Residuals | None
    phases: Phases | None
    flops: Flops | None
    xla_flops: float | None
    utilization: Utilization | None
    profile: Profile | None
    alternatives: Mapping[str, int]
    live: int
    live_after: int | None = None
    remarks: tuple[str, ...] = ()

    columns: ClassVar[Mapping[str, Formatter]] = {"what": str, "value": str}

    @property
    def title(self) -> str:
        return f"Account of {self.memory.program.name}, compiled for {self.memory.program.platform}"

    @property
    def parts(self) -> dict[str, int]:
        """Category -> bytes at the peak; with a loss, the temporaries are split into activations and the rest."""
        parts = {row["what"]: int(row["bytes"]) for row in self.memory.rows if row["what"] != "peak"}
        if self._split:
            assert self.activations is not None
            parts["activations"] = self.activations.bytes
            parts["temporaries"] -= self.activations.bytes
        return parts

    @property
    def _split(self) -> bool:
        """Whether the traced activations can lie inside XLA's temporaries."""
        return self.activations is not None and 0 < self.activations.bytes <= self.memory.memory.temporaries

    @property
    def undonated(self) -> int:
        """Bytes of parameters and optimizer state that are neither donated nor read-only: they exist twice."""
        wanted = ("parameters", "optimizer state")
        candidates = sum(
            nbytes - (donated or 0)
            for category, (_, nbytes, donated) in self.memory.categories.items()
            if category in wanted and donated is not None
        )
        return min(candidates, self.memory.new_output_bytes)

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = [
            {"what": name, "value": format_bytes(size), "bytes": size}
            for name, size in (*self.parts.items(), ("peak", self.memory.memory.peak))
        ]
        if self.flops is not None:
            rows.append({"what": "FLOPs", "value": format_count(self.flops.total), "FLOPs": self.flops.total})
        if self.xla_flops is not None:
            value = format_count(self.xla_flops)
            rows.append({"what": "FLOPs, XLA's count (loops once)", "value": value, "FLOPs": self.xla_flops})
        if self.live_after is not None:
            value = format_bytes(self.live_after)
            rows.append({"what": "alive after one step, measured", "value": value, "bytes": self.live_after})
            expected = self.memory.live_bytes * self.memory.devices
            rows.append({"what": "alive after one step, from XLA", "value": format_bytes(expected), "bytes": expected})
        rows.append({"what": "alive on the devices now", "value": format_bytes(self.live), "bytes": self.live})
        return rows

    @property
    def advice(self) -> str:
        """One paragraph: what dominates and what would help most."""
        used = self.utilization
        return advise(
            self.parts,
            self.memory.memory.peak,
            undonated=self.undonated,
            alternatives=self.alternatives,
            events_per_step=None if self.profile is None else self.profile.events_per_step,
            seconds=None if used is None else used.seconds,
            mfu=None if used is None else used.mfu,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        notes = list(self.remarks)
        if self.activations is not None and self.activations.bytes and not self._split:
            notes.append(
                f"the traced activations ({format_bytes(self.activations.bytes)}) exceed XLA's temporaries: it"
                " recomputes some, or keeps them in the memory of outputs that are not yet written"
            )
        return (*notes, f"Advice: {self.advice}")

    @property
    def sections(self) -> tuple[Report, ...]:
        found = (self.memory, self.activations, self.phases, self.flops, self.utilization, self.profile)
        return tuple(section for section in found if section is not None)


def account(
    step: Callable[..., Any],
    *args: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    alternatives: Mapping[str, Any] | None = None,
    has_aux: bool = False,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    categories: Mapping[str, str] | None = None,
    target: Any = None,
    run: bool = False,
    device: str | Device | None = None,
    dtype: Any = None,
    repeats: int = 10,
    profile_steps: int = 3,
) -> Account:
    """Account for a training step: two added lines in a training script.

    Args:
      step: the training step, jitted or not, e.g. ``train_step(params, opt_state, batch)``.
      *args: its arguments: arrays, or shapes if it is not to be run.
      loss: ``loss(params, *batch)``, if activations and phases are wanted.
      optimizer: the Optax transformation, if phases are wanted.
      alternatives: name -> Optax transformation: their states are compared in the advice.
      has_aux: whether the loss returns (scalar, anything).
      donate_argnums, static_argnums: for a step that is not jitted.
      categories: regular expression on "argument name/path" -> category (see `step_memory`).
      target: compile for a GPU that is not there (see `make_target`).
      run: also run the step, on copies of the arguments, and compute MFU.
      device: whose peaks MFU divides by; ``None`` is the local one (a CPU is measured).
      dtype: dtype of the matrix products; ``None`` is read off the traced step.
      repeats: measured runs.
      profile_steps: with ``run``, steps to profile for the number of launches; 0 means none. Where no profile can be
        taken, the account says so.

    Returns:
      An `Account`. ``print`` it, show it in a notebook, or take ``memory``, ``flops``, ``to_json()``.

    Raises:
      StepError: the step cannot be traced or compiled, or its arguments cannot be told apart for the phases.
      ValueError: unknown device, or ``run`` together with ``target``.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer, params = optax.adamw(1e-3), {"w": jnp.ones((64, 32))}
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> def train_step(params, opt_state, batch):
      ...     updates, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> report = account(train_step, params, optimizer.init(params), jnp.ones((8, 64)), donate_argnums=(0, 1))
      >>> report.memory.categories["optimizer state"][1]
      16388
    """
    if device is not None:
        device = find_device(device)
    if run and target is not None:
        raise ValueError(f"run=True: found target {target.name}, expected none: a step cannot run on an absent device")
    program = compile_step(
        step,
        *args,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        categories=categories,
        target=target,
    )
    flops = None if program.jaxpr is None else jaxpr_flops(program.jaxpr, program.name)
    kept = split = None
    if loss is not None:
        params, opt_state, batch = _training_arguments(program, step, args, optimizer is not None)
        kept = residuals(loss, params, *batch, has_aux=has_aux)
        if optimizer is not None:
            split = phases(
                loss, optimizer, params, opt_state, *batch, has_aux=has_aux, target=target, run=run, repeats=repeats
            )
    memory = program_memory(program)
    used = events = alive = None
    remarks = []
    if run:
        jitted = step
        if not hasattr(step, "lower"):
            jitted = jax.jit(step, static_argnums=static_argnums, donate_argnums=donate_argnums)
        seconds = measure(jitted, *args, repeats=repeats).median
        executed = 0 if flops is None else flops.model
        model = executed
        if loss is not None:
            # Backward costs twice the forward: counted from the forward, so that recomputation is left out; less
            # where the first layer needs no gradient of its input.
            model = min(3 * count_flops(loss, params, *batch).model, executed or sys.maxsize)
        used = utilization(
            seconds,
            model,
            local_device() if device is None else device,
            dtype or (flops.dtype if flops is not None else None) or "float32",
            devices=memory.devices,
            hardware_flops=executed or None,
            optimizer_bytes=None if split is None else split.optimizer_traffic,
            optimizer_seconds=None if split is None else split.optimizer_seconds,
        )
        alive = live_after(jitted, *args)
        if profile_steps:
            try:
                events = profile(jitted, *args, steps=profile_steps)
            except ProfilerError as error:
                remarks.append(str(error))
    states: dict[str, int] = {}
    if alternatives:
        params = _training_arguments(program, step, args, False)[0]
        states = {name: tree_bytes(jax.eval_shape(tx.init, params)) for name, tx in alternatives.items()}
    return Account(
        memory=memory,
        activations=kept,
        phases=split,
        flops=flops,
        xla_flops=xla_flops(program.lowered) or xla_flops(program.compiled),
        utilization=used,
        profile=events,
        alternatives=states,
        live=live_bytes(),
        live_after=alive,
        remarks=tuple(remarks),
    )


def _training_arguments(
    program: Program, step: Callable[..., Any], args: Sequence[Any], needs_state: bool
) -> tuple[Any, Any, list[Any]]:
    """Tell parameters, optimizer state and batch among the step's arguments, by the categories of their leaves."""
    by_name: dict[str, set[str]] = {}
    for argument in program.arguments:
        by_name.setdefault(argument.name, set()).add(argument.category)
    names = list(by_name)
    if len(names) != len(args):
        raise StepError(
            f"{program.name}: cannot tell its {len(args)} arguments apart (found arrays in {names}); call phases() and"
            " residuals() with parameters, state and batch instead"
        )
    found: dict[str, Any] = {}
    batch: list[Any] = []
    for name, value in zip(names, args, strict=True):
        category = next(iter(by_name[name])) if len(by_name[name]) == 1 else "mixed"
        if category in ("parameters", "optimizer state") and category not in found:
            found[category] = value
        elif category == "mixed" and hasattr(value, "params") and hasattr(value, "opt_state"):
            found |= {"parameters": value.params, "optimizer state": value.opt_state}  # a train state
        else:
            batch.append(value)
    missing = [
        category for category in ("parameters", *(["optimizer state"] if needs_state else [])) if category not in found
    ]
    if missing:
        raise StepError(
            f"{program.name}: no argument holds the {' and the '.join(missing)} alone (found {names}); name it params"
            " or opt_state, or pass categories={'<argument>': 'parameters'}"
        )
    return found["parameters"], found.get("optimizer state"), batch
