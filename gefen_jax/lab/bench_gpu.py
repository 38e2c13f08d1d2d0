"""One run on a GPU: is every path right, and how fast is it against AdamW and against copying memory?

First correctness: every path takes two steps on fresh random data against float64; memory that the step may write is
filled with NaN before. Then time: donated steps in a row between two synchronisations, the median of several such
rows. Ratios are relative to the best of three donated forms of jitted `optax.adamw`; the roofline is the bandwidth of a
copy measured in the same run. Launches are counted in the compiled program and, on a GPU, in a profile.

XLA leaves custom calls out of CUDA graphs by default; --graphs sets the flag that takes them in. Without a GPU the
same script runs to its end in a small size, with the kernels interpreted: that proves the script, not the speed.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import gefen, moments
from gefen_jax.fused import clip_by_global_norm, fused_chain
from gefen_jax.lab import bench_memory, machine, models
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.results import Result, check_file, table, write
from gefen_jax.state import decisions, gefen_states, known_format

NAME = "bench gpu"
RATE, DECAY, B1, B2, EPS, NORM = 1e-3, 1e-4, 0.9, 0.999, 1e-8, 1.0
GRAPH_FLAG = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
SMALL = {"kernel": (64, 256), "thin": (96, 128), "bias": (256,), "heads": (3, 32, 64), "odd": (67, 95)}
MODELS = ("gpt2-124m", "llama3-1.5b")
WRONG = 2e-3
"""Largest tolerated difference of a parameter to float64, in units of the learning rate, beyond its own rounding."""


class Path_(NamedTuple):
    """One optimizer in one form: ``step(gradients, params, state) -> (params, state)``.

    ``reads`` says how often a step must read the gradient (1 or 2) to count its least traffic; 0: not counted.
    """

    name: str
    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], Any]
    reads: int = 0
    goal: float | None = None
    clips: bool = False
    donate: tuple[int, ...] = (1, 2)


def adamw_paths() -> list[Path_]:
    """The baseline: donated as usual, with the gradients donated too, and as one flat array."""
    adamw = optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY)
    flat = optax.flatten(adamw)
    return [
        Path_("adamw", adamw.init, _updating(adamw)),
        Path_("adamw, gradients donated", adamw.init, _updating(adamw), donate=(0, 1, 2)),
        Path_("adamw, flat", flat.init, _updating(flat)),
    ]


def gefen_paths(kernel: str, *, plain: bool) -> list[Path_]:
    """Gefen's forms; ``kernel`` is "triton", or "pallas" where kernels are interpreted."""

    def make(**arguments: Any) -> Any:
        return gefen(RATE, B1, B2, EPS, weight_decay=DECAY, **arguments)

    found = []
    for second, reads, goal in (("auto", 2, 0.75), ("block", 1, 0.6), ("full", 0, None)):
        tx = make(second_moment=second, implementation=kernel)
        found.append(Path_(f"gefen {second}, {kernel}, apply", tx.init, tx.apply, reads, goal))
    tx = make(implementation=kernel)
    chain = fused_chain(clip_by_global_norm(NORM), tx)
    found.append(Path_(f"gefen auto, {kernel}, update", tx.init, _updating(tx)))
    found.append(Path_(f"gefen auto, {kernel}, clip + apply", chain.init, chain.apply, clips=True))
    if plain:
        tx = make(implementation="jnp")
        found.append(Path_("gefen auto, jnp, apply", tx.init, tx.apply))
        if kernel == "triton":
            tx = make(implementation="pallas")
            found.append(Path_("gefen auto, pallas, apply", tx.init, tx.apply))
    return found


def _updating(tx: Any) -> Callable[[Any, Any, Any], Any]:
    def step(grads: Any, params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def least_bytes(path: Path_, width: int) -> int | None:
    """Bytes per parameter that a fused step cannot avoid: gradients, parameters in and out, codes in and out.

    Examples:
      >>> least_bytes(Path_("block", print, print, reads=1), 4)
      14
      >>> least_bytes(Path_("factored", print, print, reads=2), 2)
      10
    """
    return path.reads * width + 2 * width + 2 if path.reads else None


def random_tree(shapes: Any, seed: int) -> Any:
    """Gaussian arrays, each leaf at its own scale from 1 to 1e-3."""
    leaves = jax.tree.leaves(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [jax.random.normal(k, s.shape, s.dtype) * 10.0 ** -(i % 4) for i, (k, s) in enumerate(zip(keys, leaves))]
    return jax.tree.unflatten(jax.tree.structure(shapes), [x.astype(s.dtype) for x, s in zip(made, leaves)])


def check(path: Path_, shapes: Any) -> float:
    """Largest difference of new parameters to float64 over two steps, in units of the learning rate."""
    params = random_tree(shapes, 1)
    state, step = path.init(params), jax.jit(path.step)
    exact = [np.asarray(p).astype(np.float64) for p in jax.tree.leaves(params)]
    m = [np.zeros(p.shape) for p in exact]
    squares: list[Any] = []
    worst = 0.0
    for t in (1, 2):
        grads = random_tree(shapes, t + 1)
        poison = jax.block_until_ready(jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), (params, grads)))
        del poison  # its memory is free for the step's results
        params, state = step(grads, params, state)
        found = [np.asarray(p).astype(np.float64) for p in jax.tree.leaves(params)]
        g = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(grads)]
        if path.clips:
            norm = np.sqrt(sum((x * x).sum() for x in g))
            g = [x * min(1.0, NORM / norm) for x in g]
        (node,) = gefen_states(state)
        plans = list(decisions(node, known_format(node, NAME)).values())
        squares = squares or [(0.0, 0.0)] * len(g)
        for i, (leaf, plan, p) in enumerate(zip(node.leaves(), plans, jax.tree.leaves(params))):
            moment = B1 * m[i] + (1 - B1) * g[i]
            squares[i], v = _second(squares[i], g[i], leaf)
            d = moment / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
            new = exact[i] - RATE * (d + DECAY * exact[i])
            width = float(jnp.finfo(p.dtype).eps)
            rounded = 4 if path.clips else 1  # Optax rounds the clipped gradient, and its norm, to the gradient's dtype
            error = np.abs(found[i] - new) - width * np.abs(new) - rounded * RATE * np.abs(d) * width
            worst = max(worst, float(error.max()) / RATE if np.isfinite(error).all() else np.inf)
            exact[i] = found[i]
            m[i] = np.asarray(moments.decode_moments(leaf, plan, node.codebook)[0]).astype(np.float64)
    return worst


def _second(old: tuple[Any, Any], g: np.ndarray, leaf: Any) -> tuple[tuple[Any, Any], np.ndarray]:
    """New second-moment statistics of a leaf, float64, and the estimate of each element."""
    nu = B2 * old[0] + (1 - B2) * _means(g * g, leaf.nu.shape)
    if all(s == 1 for s in leaf.nu_cross.shape):
        return (nu, 0.0), _spread(nu, g.shape)
    cross = B2 * old[1] + (1 - B2) * _means(g * g, leaf.nu_cross.shape)
    rows = tuple(i for i in range(nu.ndim) if cross.shape[i] == 1 and nu.shape[i] > 1)
    return (nu, cross), nu * cross / nu.mean(rows, keepdims=True)


def _means(x: np.ndarray, stat: tuple[int, ...]) -> np.ndarray:
    split = [part for n, s in zip(x.shape, stat) for part in (s, n // s)]
    return x.reshape(split).mean(tuple(range(1, len(split), 2))).reshape(stat)


def _spread(stat: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis, n in enumerate(shape):
        stat = np.repeat(stat, n // stat.shape[axis], axis)
    return stat


def bandwidth(elements: int) -> float:
    """Bytes per second of copying float32: reading and writing counted."""
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    return 8 * elements / _seconds(step, lambda x: (x,), (jnp.zeros(elements, jnp.float32),), rows=5, steps=10)


class Timing(NamedTuple):
    """A path's step: seconds, launches and copies in the compiled program, launches in a profile (None: no GPU)."""

    seconds: float
    launches: int
    copies: int
    profiled: float | None
    compile: float


def measure(path: Path_, shapes: Any, rows: int, steps: int) -> Timing:
    """Compile and time one path."""
    from gefen_pallas import aot

    grads, params = random_tree(shapes, 0), random_tree(shapes, 1)
    state = path.init(params)
    start = time.perf_counter()
    compiled = jax.jit(path.step, donate_argnums=path.donate).lower(grads, params, state).compile()
    compiling = time.perf_counter() - start
    counted = aot.launches(compiled.as_text() or "")
    fresh = 0 in path.donate  # then every step needs gradients of its own

    def step(params: Any, state: Any) -> Any:
        return compiled(jax.tree.map(jnp.copy, grads) if fresh else grads, params, state)

    seconds = _seconds(step, lambda out: out, (params, state), rows, steps)
    if fresh:
        copying = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        seconds = max(seconds - _seconds(lambda x: copying(x), lambda out: (grads,), (grads,), rows, steps), 1e-9)
    params, state = random_tree(shapes, 1), path.init(random_tree(shapes, 1))
    profiled = _profile(step, params, state) if jax.default_backend() == "gpu" else None
    return Timing(seconds, sum(counted.values()), counted["copy"], profiled, compiling)


def _seconds(step: Callable[..., Any], again: Callable[[Any], tuple], arguments: tuple, rows: int, steps: int) -> float:
    """Median seconds of a step, over ``rows`` rows of ``steps`` steps; each consumes what the one before gave."""
    arguments = again(jax.block_until_ready(step(*arguments)))
    times = []
    for _ in range(rows):
        start = time.perf_counter()
        for _ in range(steps):
            arguments = again(step(*arguments))
        jax.block_until_ready(arguments)
        times.append((time.perf_counter() - start) / steps)
    return float(np.median(times))


def _profile(step: Callable[..., Any], params: Any, state: Any, steps: int = 3) -> float:
    """Kernels and copies per step on the device, from a profile."""
    params, state = jax.block_until_ready(step(params, state))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                params, state = step(params, state)
            jax.block_until_ready(params)
        files = list(Path(folder).rglob("*.xplane.pb"))
        events = 0
        for file in files:
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if plane.name.startswith("/device:GPU"):
                    events += sum(len(list(line.events)) for line in plane.lines if line.name.startswith("Stream"))
    return events / steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated presets (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=5, help="repetitions of each time (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps between synchronisations (default: %(default)s)")
    parser.add_argument("--graphs", action="store_true", help="let XLA put the kernels into CUDA graphs")
    parser.add_argument("--out", default="gefen-bench.jsonl", help="JSON-lines file to append to")


def run(args: argparse.Namespace) -> int:
    """The subcommand: 1 if a path is wrong."""
    if args.rows < 1 or args.steps < 1:
        raise UsageError(f"--rows and --steps must be at least 1; found {args.rows} and {args.steps}")
    for name in args.models.split(","):  # checked without a GPU too, where they are not run
        bench_memory.model_config(name)
    check_file(args.out)
    if args.graphs:  # read when the backend starts, which is below
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GRAPH_FLAG}".strip()
        print(f"XLA_FLAGS={os.environ['XLA_FLAGS']}")
    gpu = jax.default_backend() == "gpu"
    kernel = "triton" if gpu else "pallas"
    results: list[Result] = []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, commit {machine.commit()}")
    if not gpu:
        print("NO GPU: kernels are interpreted, sizes are small, and times say nothing about a GPU")
    wrong = _correctness(kernel, results)
    copied = bandwidth(2**28 if gpu else 2**20)
    print(f"\ncopy bandwidth: {copied / 1e9:.0f} GB/s")
    results.append(Result.of(NAME, "copy", "bandwidth", "B/s", copied))
    for model, shapes in _trees(args.models if gpu else "", gpu):
        for dtype in ("float32", "bfloat16"):
            typed = jax.tree.map(lambda s, dtype=dtype: jax.ShapeDtypeStruct(s.shape, dtype), shapes)
            rows, steps = (args.rows, args.steps) if gpu else (1, 1)
            _times(model, dtype, typed, kernel, copied, rows, steps, results)
    write(args.out, results)
    return int(wrong)


def _trees(models_asked: str, gpu: bool) -> list[tuple[str, Any]]:
    if not gpu:
        return [("small", {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SMALL.items()})]
    return [(name, models.shapes(bench_memory.model_config(name))) for name in models_asked.split(",")]


def _correctness(kernel: str, results: list[Result]) -> bool:
    head, lines, wrong = ["against float64", "float32", "bfloat16"], [], False
    for path in gefen_paths(kernel, plain=True):
        errors = []
        for dtype in ("float32", "bfloat16"):
            shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SMALL.items()}
            error = check(path, shapes)
            wrong |= not error < WRONG
            errors.append(f"{error:.1e}" + ("" if error < WRONG else " WRONG"))
            results.append(Result.of(NAME, path.name, "error", "learning rates", error, config={"dtype": dtype}))
        lines.append([path.name, *errors])
    print("largest difference of a parameter, in learning rates:")
    print(table(head, lines))
    return wrong


def _times(
    model: str, dtype: str, shapes: Any, kernel: str, copied: float, rows: int, steps: int, results: list[Result]
) -> None:
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    paths = [*adamw_paths(), *gefen_paths(kernel, plain=size < 5e8)]
    found = [(path, measure(path, shapes, rows, steps)) for path in paths]
    best = min(timing.seconds for path, timing in found if path.name.startswith("adamw"))
    lines = []
    for path, timing in found:
        least = least_bytes(path, jnp.dtype(dtype).itemsize)
        share = None if least is None or jax.default_backend() != "gpu" else least * size / timing.seconds / copied
        ratio = timing.seconds / best
        goal = (
            "" if path.goal is None or share is None else f" ({'<=' if ratio <= path.goal else 'NOT <='} {path.goal})"
        )
        cells = [f"{1e3 * timing.seconds:.3f}", f"{ratio:.2f}{goal}", "-" if share is None else f"{share:.0%}"]
        cells += [str(timing.launches), str(timing.copies)]
        cells += ["-" if timing.profiled is None else f"{timing.profiled:.0f}", f"{timing.compile:.1f}"]
        lines.append([path.name, *cells])
        config = {"model": model, "dtype": dtype, "parameters": size}
        numbers = {
            ("step time", "s"): timing.seconds,
            ("time ratio", "1"): ratio,
            ("share of copy bandwidth", "1"): share,
            ("launches", "1"): timing.launches,
            ("copies", "1"): timing.copies,
            ("profiled launches", "1"): timing.profiled,
            ("compile", "s"): timing.compile,
        }
        for (metric, unit), value in numbers.items():
            if value is not None:
                baseline = "best adamw" if metric == "time ratio" else None
                results.append(Result.of(NAME, path.name, metric, unit, value, baseline=baseline, config=config))
    print(f"\n{model}, {size:,} parameters, {dtype}")
    head = ["step", "ms", "/ best adamw", "of copy", "launches", "copies", "profiled", "compile s"]
    print(table(head, lines), flush=True)
