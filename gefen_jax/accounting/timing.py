"""Measured time of a step, and what it means: MFU, share of the memory bandwidth, busy time from a profile."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gefen_jax.accounting.devices import Device
from gefen_jax.accounting.report import (
    Formatter,
    Report,
    Row,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)

__all__ = ["Profile", "ProfilerError", "Timing", "Utilization", "measure", "profile", "utilization"]


class ProfilerError(RuntimeError):
    """No profile could be taken or read here; the message says why."""


@dataclass(frozen=True)
class Timing:
    """Wall-clock times of single blocked calls, in seconds.

    Attributes:
      seconds: every measured call.
      compile_seconds: the first call, which compiles.
    """

    seconds: tuple[float, ...]
    compile_seconds: float

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def p20(self) -> float:
        return float(np.percentile(self.seconds, 20))

    @property
    def p80(self) -> float:
        return float(np.percentile(self.seconds, 80))


def measure(step: Callable[..., Any], *args: Any, repeats: int = 10, **kwargs: Any) -> Timing:
    """Time a jitted step on real arrays, one blocked call after another.

    Every call gets fresh copies of the array arguments, made before its clock starts, so that steps that donate
    their arguments can be repeated; copies need the memory of one more set of arguments.

    Args:
      step: a jitted function.
      *args: its arguments; real arrays.
      repeats: measured calls, at least 1, after one that compiles and one that warms up.
      **kwargs: keyword arguments of the step.

    Returns:
      A `Timing`.

    Raises:
      TypeError: an argument is a shape only: there is nothing to run on.
      ValueError: ``repeats`` is below 1.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> timing = measure(jax.jit(lambda x: x + 1), jnp.ones(10), repeats=3)
      >>> len(timing.seconds), timing.p20 <= timing.median <= timing.p80
      (3, True)
    """
    if repeats < 1:
        raise ValueError(f"repeats: found {repeats}, expected at least 1")
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"measure: found a shape {leaf.shape} among the arguments, expected real arrays to run the step on"
            )
    times = []
    for _ in range(repeats + 2):
        fresh, fresh_kwargs = jax.block_until_ready(jax.tree.map(_copy, (args, kwargs)))
        start = time.perf_counter()
        jax.block_until_ready(step(*fresh, **fresh_kwargs))
        times.append(time.perf_counter() - start)
    return Timing(tuple(times[2:]), times[0])


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


@dataclass(frozen=True)
class Utilization(Report):
    """How much of a device a step uses. Made by `utilization`."""

    seconds: float
    model_flops: int
    hardware_flops: int | None
    device: Device
    dtype: str
    devices: int
    optimizer_bytes: int | None
    optimizer_seconds: float | None

    columns: ClassVar[Mapping[str, Formatter]] = {"what": str, "value": str, "of the peak": format_percent}

    @property
    def title(self) -> str:
        count = f"{self.devices} x " if self.devices > 1 else ""
        return f"Utilization of {count}{self.device.name} ({self.device.source}), {self.dtype}"

    @property
    def peak(self) -> float:
        """Peak FLOP/s of all devices together."""
        return self.device.peak(self.dtype) * self.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs / (time x peak), recomputation not counted."""
        return self.model_flops / self.seconds / self.peak

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: the same with recomputed FLOPs counted; ``None`` if not known."""
        return None if self.hardware_flops is None else self.hardware_flops / self.seconds / self.peak

    @property
    def bandwidth_use(self) -> float | None:
        """Share of the memory bandwidth that the optimizer reaches with its least traffic; ``None`` if not known."""
        if self.optimizer_bytes is None or not self.optimizer_seconds:
            return None
        return self.optimizer_bytes / self.optimizer_seconds / (self.device.bandwidth * self.devices)

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = [
            {"what": "step time", "value": format_seconds(self.seconds), "seconds": self.seconds},
            {
                "what": "model FLOPs (MFU)",
                "value": f"{format_count(self.model_flops / self.seconds)}FLOP/s",
                "FLOPs": self.model_flops,
                "of the peak": self.mfu,
            },
        ]
        if self.hardware_flops is not None:
            rate = f"{format_count(self.hardware_flops / self.seconds)}FLOP/s"
            rows.append(
                {
                    "what": "executed FLOPs (HFU)",
                    "value": rate,
                    "FLOPs": self.hardware_flops,
                    "of the peak": self.hfu,
                }
            )
        if self.optimizer_seconds is not None and self.optimizer_bytes is not None:
            rows.append(
                {
                    "what": "optimizer (bandwidth)",
                    "value": f"{format_bytes(self.optimizer_bytes / self.optimizer_seconds)}/s",
                    "bytes": self.optimizer_bytes,
                    "seconds": self.optimizer_seconds,
                    "of the peak": self.bandwidth_use,
                }
            )
        return rows

    @property
    def notes(self) -> tuple[str, ...]:
        measured = self.device.name == "cpu" and (self.mfu > 1 or (self.bandwidth_use or 0) > 1)
        disturbed = ("above 100 %: the CPU's peak was measured while other programs ran",) if measured else ()
        return (
            *disturbed,
            f"peak: {format_count(self.peak)}FLOP/s, {format_bytes(self.device.bandwidth * self.devices)}/s",
            "times of single blocked calls include the time to launch; MFU counts matrix products and convolutions",
        )


def utilization(
    seconds: float,
    model_flops: int,
    device: Device,
    dtype: Any = jnp.float32,
    *,
    devices: int = 1,
    hardware_flops: int | None = None,
    optimizer_bytes: int | None = None,
    optimizer_seconds: float | None = None,
) -> Utilization:
    """Set a measured time against the peak of a device.

    Args:
      seconds: time of one step.
      model_flops: FLOPs of the model's matrix products and convolutions in it, without recomputation.
      device: from `gefen_jax.accounting.devices`.
      dtype: dtype of the matrix products.
      devices: how many devices share the step.
      hardware_flops: the same with recomputation.
      optimizer_bytes, optimizer_seconds: least traffic and time of the optimizer's part.

    Raises:
      ValueError: ``seconds`` is not positive, or the device has no figure for the dtype.

    Examples:
      >>> from gefen_jax.accounting.devices import DEVICES
      >>> round(utilization(0.5, 247e12, DEVICES["h100"], "bfloat16").mfu, 3)
      0.499
    """
    if not seconds > 0:
        raise ValueError(f"seconds: found {seconds}, expected a positive time")
    device.peak(dtype)
    return Utilization(
        seconds=seconds,
        model_flops=int(model_flops),
        hardware_flops=hardware_flops,
        device=device,
        dtype=jnp.dtype(dtype).name,
        devices=devices,
        optimizer_bytes=optimizer_bytes,
        optimizer_seconds=optimizer_seconds,
    )


@dataclass(frozen=True)
class Profile(Report):
    """Events of profiled steps. Made by `profile`."""

    steps: int
    events: tuple[tuple[str, int, float], ...]
    span_seconds: float
    largest: int = 12

    columns: ClassVar[Mapping[str, Formatter]] = {
        "event": str,
        "per step": lambda x: f"{x:g}",
        "time per step": format_seconds,
    }

    @property
    def title(self) -> str:
        return f"Profile of {self.steps} steps: executor events"

    @property
    def events_per_step(self) -> float:
        """Launches (on a GPU) or executed operations (on a CPU) per step."""
        return sum(count for _, count, _ in self.events) / self.steps

    @property
    def rows(self) -> list[Row]:
        rows = [
            {"event": name, "per step": count / self.steps, "time per step": seconds / self.steps}
            for name, count, seconds in self.events
        ]
        return sorted(rows, key=lambda row: -float(row["time per step"] or 0))

    def printed_rows(self) -> list[Row]:
        return self.rows[: self.largest]

    @property
    def notes(self) -> tuple[str, ...]:
        busy = sum(seconds for _, _, seconds in self.events)
        return (
            f"{self.events_per_step:g} events per step; {format_seconds(busy / self.steps)} of events per step,"
            f" summed over threads or streams, in {format_seconds(self.span_seconds / self.steps)}",
        )


def profile(step: Callable[..., Any], *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
    """Run a jitted step under JAX's profiler and sum its executor events by name.

    Args:
      step: a jitted function; ``*args``, ``**kwargs``: real arrays, copied for every step as in `measure`.
      steps: profiled steps.

    Returns:
      A `Profile`.

    Raises:
      ProfilerError: JAX's profiler is missing, is already in use, or recorded no executor event.
    """
    reader = getattr(jax.profiler, "ProfileData", None)
    if reader is None:
        raise ProfilerError("profile: this jax has no jax.profiler.ProfileData; use measure() for times instead")
    copies = [jax.block_until_ready(jax.tree.map(_copy, (args, kwargs))) for _ in range(steps + 1)]
    jax.block_until_ready(step(*copies[0][0], **copies[0][1]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder):
                start = time.perf_counter()
                for fresh, fresh_kwargs in copies[1:]:
                    jax.block_until_ready(step(*fresh, **fresh_kwargs))
                span = time.perf_counter() - start
        except RuntimeError as error:
            raise ProfilerError(
                f"profile: JAX's profiler did not start or stop ({error}); is another profile being taken?"
            ) from error
        files = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        events = _events(reader.from_file(files[0])) if files else {}
    if not events:
        raise ProfilerError(
            "profile: the profiler recorded no executor event; on a GPU this happens without CUPTI or without"
            " permission to use it. measure() still gives times"
        )
    return Profile(steps, tuple((name, count, ns * 1e-9) for name, (count, ns) in events.items()), span)


def _events(data: Any) -> dict[str, tuple[int, float]]:
    """Executor events: all on a device's plane; on the CPU those of XLA's own threads."""
    planes = [plane for plane in data.planes if plane.name.startswith("/device:")]
    lines = [line for plane in planes for line in plane.lines if "Stream" in line.name or "XLA Ops" in line.name]
    if not lines:
        host = [plane for plane in data.planes if plane.name.startswith("/host:CPU")]
        lines = [line for plane in host for line in plane.lines if line.name.startswith("tf_XLA")]
    found: dict[str, tuple[int, float]] = {}
    for line in lines:
        for event in line.events:
            if not _bookkeeping(event.name):
                count, total = found.get(event.name, (0, 0.0))
                found[event.name] = (count + 1, total + event.duration_ns)
    return found


def _bookkeeping(name: str) -> bool:
    """Events of the CPU runtime's thread pool that are no operation of the program."""
    return "::" in name or name.startswith(("end: ", "ThreadpoolListener", "Wait", "ThunkExecutor"))
