"""What a step does besides taking time: launches, executor events, memory written in place, rounding."""

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gefen_jax import gefen, update
from gefen_jax.accounting import ProfilerError
from gefen_jax.lab.ladder_rungs import Climber, Optimizer, copied, prepare
from gefen_pallas import aot, schedule
from gefen_pallas.geometry import LeafShape, plan_leaf

DTYPES = ("float32", "bfloat16", "float16")
LIMITS = {"32,764 B": schedule.PARAMETER_BYTES, "4,352 B": schedule.OLD_PARAMETER_BYTES}
"""Parameter space of a kernel launch in CUDA: since PTX 8.1 (driver R530), and before."""


class Events(NamedTuple):
    """Of one step, from a profile.

    Attributes:
      programs: programs that executed something; None if the trace does not tell runs apart.
      events: operations that the executor ran: kernels on a GPU, thunks on a CPU, the inside of loops included.
    """

    programs: float | None
    events: float


def launches(climber: Climber) -> int | None:
    """Operations of the compiled programs that are launched, loops counted once; None for "eager"."""
    if not climber.programs:
        return None
    return sum(times * aot.launches(program.as_text()).total() for times, program in climber.programs)


def trace(climber: Climber, params: Any, grads: Any, steps: int = 2) -> Events:
    """Run steps under JAX's profiler and count.

    Raises:
      ProfilerError: there is no profiler, it is in use, or it recorded nothing.
    """
    reader = getattr(jax.profiler, "ProfileData", None)
    if reader is None:
        raise ProfilerError("this jax has no jax.profiler.ProfileData: launches are counted from programs only")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls are most of a trace, and none of what is counted
    params, opt_state = climber.step(copied(params), copied(climber.opt_state), grads)
    jax.block_until_ready((params, opt_state))
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                for _ in range(steps):
                    params, opt_state = jax.block_until_ready(climber.step(params, opt_state, grads))
        except RuntimeError as error:
            raise ProfilerError(f"JAX's profiler did not start or stop ({error}): is it in use?") from error
        files = list(Path(folder).rglob("*.xplane.pb"))
        runs, count = _executed(reader.from_file(str(files[0]))) if files else (set(), 0)
    if not count:
        raise ProfilerError("the profiler recorded no executor event; on a GPU it needs CUPTI and permission to use it")
    return Events(len(runs) / steps if runs else None, count / steps)


def _executed(data: Any) -> tuple[set[Any], int]:
    """Runs of programs, and operations in them, of a profile. Operations name the instruction that they are."""
    planes = [plane for plane in data.planes if plane.name.startswith("/device:")]
    runs: set[Any] = set()
    count = 0
    with warnings.catch_warnings():  # jax 0.12 reads statistics through a type whose definition Python warns of
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        for plane in planes or [plane for plane in data.planes if plane.name.startswith("/host:CPU")]:
            for line in plane.lines:
                for event in line.events:
                    found = dict(event.stats)
                    if "hlo_op" in found:
                        count += 1
                        if "run_id" in found:
                            runs.add((found.get("program_id"), found["run_id"]))
    return runs, count


def in_place(climber: Climber, params: Any, grads: Any) -> float:
    """Share of the bytes of new parameters and state that lie where old ones lay: buffers before and after a step."""
    params, opt_state = copied((params, climber.opt_state))
    before = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, opt_state))}
    new = jax.block_until_ready(climber.step(params, opt_state, grads))
    leaves = [leaf for leaf in jax.tree.leaves(new) if leaf.nbytes]
    kept = sum(leaf.nbytes for leaf in leaves if leaf.unsafe_buffer_pointer() in before)
    return kept / sum(leaf.nbytes for leaf in leaves)


def difference(optimizer: Optimizer, rung: str, dtype: str, params: Any, grads: Any, steps: int = 3) -> float | None:
    """How far fused arithmetic leads from unfused: parameters after a few steps of a rung, against the eager rung.

    Gradients have the parameters' dtype and magnitudes of 1/2 and more: smaller squares vanish in float16, where
    AdamW's eps of 1e-8 is 0 as well and the step would not be finite.

    Returns:
      The largest difference, relative to the largest change that the steps made; infinity if either is not finite;
      None where the optimizer has no such rung.
    """
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    grads = jax.tree.map(lambda g: (jnp.sign(g) / 2 + g / jnp.sqrt(jnp.mean(g * g))).astype(dtype), grads)
    ends = []
    for name in ("eager", rung):
        climber = prepare(optimizer, name, params, grads)
        if climber is None:
            return None
        end, opt_state = copied(params), climber.opt_state
        for _ in range(steps):
            end, opt_state = climber.step(end, opt_state, grads)
        ends.append([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(end)])
    starts = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(params)]
    apart = max(np.abs(a - b).max() for a, b in zip(*ends))
    moved = max(np.abs(a - start).max() for a, start in zip(ends[0], starts))
    return float(apart / moved) if np.isfinite(apart) and np.isfinite(moved) else float("inf")


def launch_groups(shapes: Any, parameter_bytes: int = schedule.PARAMETER_BYTES) -> Sequence[int]:
    """Tensors in each launch of Gefen's step, when a launch takes so many bytes of arguments.

    Args:
      shapes: parameters or their shapes.
      parameter_bytes: see `LIMITS`.

    Examples:
      >>> shapes = [jax.ShapeDtypeStruct((64, 128), "float32")] * 300
      >>> launch_groups(shapes), launch_groups(shapes, 4352)
      ([300], [88, 88, 88, 36])
    """
    leaves = jax.eval_shape(gefen(1e-3).init, shapes).leaves()
    cuts = []
    for p, leaf in zip(jax.tree.leaves(shapes), leaves):
        mu, scale, nu, cross = (tuple(x.shape) for x in leaf)
        dtype = jnp.dtype(p.dtype).name
        cut = plan_leaf(LeafShape(tuple(p.shape), mu, scale, nu, cross, update.is_exact(leaf.mu), dtype, dtype))
        if not isinstance(cut, str):
            cuts.append(cut)
    pointers = [schedule.pointers(cut, reads=True) for cut in cuts]
    groups = schedule.split([tuple(cut.kind) for cut in cuts], pointers, parameter_bytes=parameter_bytes)
    return [len(group) for group in groups]
