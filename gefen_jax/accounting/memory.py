"""Memory of a compiled step: XLA's analysis with its gap made good, split by category, donation checked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gefen_jax import paths
from gefen_jax.accounting.program import Argument, Program, compile_step
from gefen_jax.accounting.report import Formatter, Report, Row, format_bytes, format_percent, format_plain
from gefen_jax.accounting.tensors import live_bytes, shape_dtype, shard_bytes

__all__ = ["Memory", "StepMemory", "compiled_memory", "live_after", "step_memory"]

# XLA returns a tuple of outputs through a table of pointers, which it counts as output bytes.
POINTER_BYTES = 8


@dataclass(frozen=True)
class Memory:
    """Bytes of one compiled program on one device, as XLA reports them.

    Attributes:
      arguments: bytes of the arguments that the program reads (unused ones are dropped by JAX).
      outputs: bytes of the results, with a table of 8 bytes a result where there are several.
      aliased: bytes of results that are written over donated arguments.
      temporaries: largest sum of temporaries: activations, gradients, work space.
      code: bytes of generated code.
      host: the same four for memory on the host (arguments, outputs, aliased, temporaries).
      xla_peak: XLA's own peak field; ``None`` where it has none. On some backends it leaves temporaries out,
        which is why `peak` is computed.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: tuple[int, int, int, int]
    xla_peak: int | None

    @property
    def peak(self) -> int:
        """arguments + outputs - aliased + temporaries: what the device must hold."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def host_peak(self) -> int:
        """The same sum for memory on the host."""
        arguments, outputs, aliased, temporaries = self.host
        return arguments + outputs - aliased + temporaries


def compiled_memory(compiled: Any) -> Memory:
    """Read XLA's memory analysis of a compiled function.

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns.

    Returns:
      A `Memory`, for one device.

    Raises:
      ValueError: the backend offers no memory analysis.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> memory = compiled_memory(jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(256)).compile())
      >>> memory.arguments, memory.outputs, memory.aliased, memory.peak
      (1024, 1024, 1024, 1024)
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("memory_analysis() of the compiled step returned None: this backend does not offer it")
    peak = getattr(stats, "peak_memory_in_bytes", None)
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=(
            stats.host_argument_size_in_bytes,
            stats.host_output_size_in_bytes,
            stats.host_alias_size_in_bytes,
            stats.host_temp_size_in_bytes,
        ),
        xla_peak=None if peak is None else int(peak),
    )


@dataclass(frozen=True)
class StepMemory(Report):
    """Memory of a step by category, per device. Made by `step_memory`.

    The rows add up to ``memory.peak``.
    """

    program: Program
    memory: Memory
    categories: Mapping[str, tuple[int, int, int | None]]
    output_bytes: int
    output_count: int

    columns: ClassVar[Mapping[str, Formatter]] = {
        "what": format_plain,
        "leaves": format_plain,
        "bytes": format_bytes,
        "donated": format_bytes,
        "share": format_percent,
    }

    @property
    def title(self) -> str:
        return f"Memory of {self.program.name}, compiled for {self.program.platform}, per device"

    @property
    def argument_bytes(self) -> int:
        """Bytes of all arguments that were passed, from their shapes (host memory included)."""
        return sum(nbytes for _, nbytes, _ in self.categories.values())

    @property
    def unused_bytes(self) -> int:
        """Bytes of arguments that were passed but that the compiled step never reads, so that JAX drops them."""
        known = all(argument.read is not None for argument in self.program.arguments)
        if not known:
            return self.argument_bytes - self.memory.arguments - self.memory.host[0]
        return sum(_argument_bytes(argument) for argument in self.program.arguments if not argument.read)

    @property
    def unexplained_bytes(self) -> int:
        """What XLA counts as arguments beyond the shapes of those it reads; 0 unless a layout is padded."""
        return self.memory.arguments + self.memory.host[0] - (self.argument_bytes - self.unused_bytes)

    @property
    def donated_bytes(self) -> int | None:
        """Bytes of donated arguments; ``None`` if donation cannot be read from this kind of step."""
        parts = [donated for _, _, donated in self.categories.values()]
        return None if any(part is None for part in parts) else sum(part or 0 for part in parts)

    @property
    def live_bytes(self) -> int:
        """Bytes alive on one device after the step, from XLA's figures: arguments not written over, and outputs.

        Compare with `live_after`, which measures.
        """
        table = POINTER_BYTES * self.output_count if self.output_count > 1 else 0
        arguments = self.memory.arguments + self.memory.host[0] + self.unused_bytes
        outputs = self.memory.outputs + self.memory.host[1] - table
        return arguments + outputs - self.memory.aliased - self.memory.host[2]

    @property
    def devices(self) -> int:
        """Number of devices that share the step."""
        return max((a.sharding.num_devices for a in self.program.arguments if a.sharding is not None), default=1)

    @property
    def new_output_bytes(self) -> int:
        """Bytes of outputs that reuse no argument's buffer."""
        return self.memory.outputs - self.memory.aliased

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = [
            {"what": category, "leaves": leaves, "bytes": nbytes, "donated": donated}
            for category, (leaves, nbytes, donated) in self.categories.items()
        ]
        if self.unused_bytes:
            rows.append({"what": "arguments never read (dropped)", "bytes": -self.unused_bytes})
        if self.unexplained_bytes:
            rows.append({"what": "padding of arguments", "bytes": self.unexplained_bytes})
        if self.memory.host[0]:
            rows.append({"what": "arguments in host memory", "bytes": -self.memory.host[0]})
        rows.append({"what": "outputs in new memory", "bytes": self.new_output_bytes})
        rows.append({"what": "temporaries", "bytes": self.memory.temporaries})
        peak = self.memory.peak
        for row in rows:
            row.setdefault("leaves", None)
            row.setdefault("donated", None)
            row["share"] = row["bytes"] / peak if peak else None
        rows.append({"what": "peak", "leaves": None, "bytes": peak, "donated": None, "share": 1.0})
        return rows

    @property
    def notes(self) -> tuple[str, ...]:
        memory = self.memory
        notes = [
            f"peak = arguments {format_bytes(memory.arguments)} + outputs {format_bytes(memory.outputs)}"
            f" - aliased {format_bytes(memory.aliased)} + temporaries {format_bytes(memory.temporaries)};"
            f" XLA's own peak field: {format_bytes(memory.xla_peak)}"
        ]
        donated = self.donated_bytes
        if donated is None:
            notes.append("donation: this kind of step does not say which arguments it donates")
        elif donated > memory.aliased + memory.host[2]:
            notes.append(
                f"donation: {format_bytes(donated)} donated, only"
                f" {format_bytes(memory.aliased + memory.host[2])} reused: an output of the same shape and dtype is"
                " missing"
            )
        elif donated == 0 and self.new_output_bytes > memory.outputs // 2 > 1024:
            notes.append("donation: nothing is donated, so old and new parameters and state exist together")
        else:
            notes.append(f"donation: {format_bytes(donated)} donated and reused")
        if memory.host_peak:
            notes.append(f"host memory: {format_bytes(memory.host_peak)}")
        return tuple(notes) + self.program.warnings


def step_memory(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    categories: Mapping[str, str] | None = None,
    target: Any = None,
    **kwargs: Any,
) -> StepMemory:
    """Compile a step and split its memory by category. The step is not run.

    Args:
      step: a function or a jitted function, e.g. ``train_step(params, opt_state, batch)``.
      *args: its arguments, arrays or shapes.
      donate_argnums, static_argnums: for plain functions, as in `jax.jit`.
      categories: regular expression on "argument name/path" -> category. Without it the names ``params``,
        ``opt_state``, ``grads``, ``batch`` and the like are understood, also inside a train-state object.
      target: compile for a GPU that is not there, see `gefen_jax.accounting.targets`.
      **kwargs: keyword arguments of the step.

    Returns:
      A `StepMemory`. Its ``argument_bytes`` come from shapes, its ``memory`` from XLA; the two agree exactly
      but for arguments that the step never reads, which are shown.

    Raises:
      StepError: the step cannot be traced or compiled.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> report = step_memory(lambda params, x: params - x, jnp.ones(512), jnp.ones(512), donate_argnums=0)
      >>> report.argument_bytes == report.memory.arguments, report.donated_bytes, report.memory.aliased
      (True, 2048, 2048)
    """
    program = compile_step(
        step,
        *args,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        categories=categories,
        target=target,
        **kwargs,
    )
    return program_memory(program)


def live_after(step: Callable[..., Any], *args: Any) -> int:
    """Run a jitted step on copies of its arguments and measure what is alive afterwards because of it.

    Args:
      step: a jitted function.
      *args: real arrays; they stay as they are.

    Returns:
      Bytes on all devices, by `jax.live_arrays`: the copies that were not written over, and the outputs. Equals
      ``StepMemory.live_bytes * StepMemory.devices``.
    """
    gc.collect()
    before = live_bytes()
    copies = jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, args)
    outputs = jax.block_until_ready(step(*copies))
    after = live_bytes()
    del outputs
    return after - before


def program_memory(program: Program) -> StepMemory:
    """`step_memory` of a step that is compiled already."""
    categories: dict[str, tuple[int, int, int | None]] = {}
    for argument in program.arguments:
        leaves, nbytes, donated = categories.get(argument.category, (0, 0, 0))
        size = _argument_bytes(argument)
        unknown = donated is None or argument.donated is None
        categories[argument.category] = (
            leaves + 1,
            nbytes + size,
            None if unknown else (donated or 0) + (size if argument.donated else 0),
        )
    outputs = jax.tree_util.tree_flatten_with_path(program.outputs)[0]
    sizes = [
        shard_bytes(*shape_dtype(leaf, paths.name(path)), getattr(leaf, "sharding", None), paths.name(path))
        for path, leaf in outputs
    ]
    return StepMemory(program, compiled_memory(program.compiled), categories, sum(sizes), len(sizes))


def _argument_bytes(argument: Argument) -> int:
    return shard_bytes(argument.shape, argument.dtype, argument.sharding, argument.path)
