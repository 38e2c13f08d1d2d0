"""Time and memory of the optimizer step on this machine, against optax.adamw in the same run.

Every contender is compiled as step(params, opt_state, gradients) -> (params, opt_state) with params and opt_state
donated in the order of the outputs. Steps alternate; ratios are taken pair by pair, and their median is shown. CPU
time is that of all threads of the process. Times of trace and compile are CPU seconds of one compilation; the first
contender with a compiled loop also compiles that, which happens once per process. Each size gets a process of its own:
in memory that another size has used before, optax.adamw was up to a third faster than in a fresh process.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import gefen
from gefen_jax.accounting.memory import compiled_memory
from gefen_jax.accounting.tensors import tree_bytes
from gefen_jax.lab import machine, models
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.language import GPTConfig
from gefen_jax.lab.results import Result, check_file, table, write

NAME = "bench step"
SIZES = {
    "1m": GPTConfig(vocab=256, context=128, layers=4, heads=4, width=128),
    "25m": GPTConfig(vocab=8192, context=1024, layers=12, heads=6, width=384),
    "124m": models.preset("gpt2-124m"),
}
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class Contender(NamedTuple):
    """An optimizer and the form of its step."""

    name: str
    init: Callable[[Any], Any]
    step: Step
    goals: tuple[float, float, float] | None = None  # CPU, wall, trace + compile: most, relative to adamw


class Compiled(NamedTuple):
    """A compiled contender, and what compiling it cost."""

    contender: Contender
    step: Any
    seconds: dict[str, float]
    temporaries: int
    state_bytes: int


def contenders() -> list[Contender]:
    """AdamW first, then Gefen's forms."""
    adamw = optax.adamw(1e-3)
    default, block = gefen(1e-3), gefen(1e-3, second_moment="block")
    companding = gefen(1e-3, second_moment="block", codec="companding")
    chunked, whole = (gefen(1e-3, implementation=name) for name in ("chunked", "jnp"))
    return [
        Contender("adamw", adamw.init, _update_form(adamw)),
        Contender("gefen apply", default.init, _apply_form(default), (1.2, 1.5, 8.0)),
        Contender("gefen update", default.init, _update_form(default)),
        Contender("gefen chunked apply", chunked.init, _apply_form(chunked)),
        Contender("gefen whole arrays", whole.init, _update_form(whole)),
        Contender("gefen block apply", block.init, _apply_form(block)),
        Contender("gefen block companding apply", companding.init, _apply_form(companding), (0.8, 1.3, 6.0)),
    ]


def _update_form(tx: optax.GradientTransformation) -> Step:
    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _apply_form(tx: Any) -> Step:
    return lambda params, opt_state, grads: tx.apply(grads, params, opt_state)


def compile_step(contender: Contender, shapes: Any) -> Compiled:
    """Compile one contender, with the CPU seconds that each phase took."""
    states = jax.eval_shape(contender.init, shapes)
    jitted = jax.jit(contender.step, donate_argnums=(0, 1))
    marks = [time.process_time()]
    traced = jitted.trace(shapes, states, shapes)
    marks.append(time.process_time())
    lowered = traced.lower()
    marks.append(time.process_time())
    compiled = lowered.compile()
    marks.append(time.process_time())
    phases = dict(zip(("trace", "lower", "compile"), np.diff(marks).tolist()))
    memory = compiled_memory(compiled)
    return Compiled(contender, compiled, phases, memory.temporaries, tree_bytes(states))


def random_tree(shapes: Any, seed: int) -> Any:
    """Gaussian arrays, each leaf at its own scale from 1e-4 to 1: like gradients, and never all alike."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(random.standard_normal(s.shape, np.float32) * 10 ** random.uniform(-4, 0)), shapes
    )


def measure(compiled: list[Compiled], shapes: Any, pairs: int) -> dict[str, np.ndarray]:
    """(wall, CPU) seconds of ``pairs`` alternating steps of each contender, float64 (pairs, 2) by name."""
    grads = random_tree(shapes, 0)
    states = {c.contender.name: (random_tree(shapes, 1), c.contender.init(shapes_to_zeros(shapes))) for c in compiled}
    times: dict[str, list[tuple[float, float]]] = {c.contender.name: [] for c in compiled}
    for turn in range(pairs + 2):
        for c in compiled:
            name = c.contender.name
            params, opt_state = states[name]
            start = time.perf_counter(), time.process_time()
            states[name] = jax.block_until_ready(c.step(params, opt_state, grads))
            end = time.perf_counter(), time.process_time()
            if turn >= 2:  # the first touch their pages
                times[name].append((end[0] - start[0], end[1] - start[1]))
    return {name: np.asarray(found) for name, found in times.items()}


def shapes_to_zeros(shapes: Any) -> Any:
    """A tree of zeros with these shapes."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def study(size: str, pairs: int) -> list[Result]:
    """All results at one size."""
    shapes = models.shapes(SIZES[size])
    count = models.count(shapes)
    compiled = [compile_step(contender, shapes) for contender in contenders()]
    times = measure(compiled, shapes, pairs)
    config = {
        "size": size,
        "parameters": count,
        "leaves": len(jax.tree.leaves(shapes)),
        "threads": machine.usable_cores(),
    }
    base, base_times = compiled[0], times[compiled[0].contender.name]
    results = []
    for c in compiled:
        name, goals = c.contender.name, c.contender.goals

        def add(metric: str, unit: str, samples: Any, name: str = name, **other: Any) -> None:
            results.append(Result.of(NAME, name, metric, unit, samples, **other))

        for column, metric in enumerate(("wall", "cpu")):
            found = times[name][:, column]
            add(f"{metric} time", "ns/param", found / count * 1e9, config=config)
            goal = {"goal": goals[1 - column]} if goals else {}
            ratios = found / base_times[:, column]
            add(f"{metric} ratio", "1", ratios, baseline=base.contender.name, config=config | goal)
        total, base_total = sum(c.seconds.values()), sum(base.seconds.values())
        goal = {"goal": goals[2]} if goals else {}
        add("trace + compile", "CPU s", total, config=config | {"phases": c.seconds})
        add("trace + compile ratio", "1", total / base_total, baseline=base.contender.name, config=config | goal)
        add("temporaries", "B/param", c.temporaries / count, config=config)
        add("state", "B/param", c.state_bytes / count, config=config)
    return results


def show(results: list[Result]) -> str:
    """The table of one size, and which goals were missed."""
    config = results[0].config
    metrics = list(dict.fromkeys(result.metric for result in results))
    subjects = list(dict.fromkeys(result.subject for result in results))
    cells = {(result.subject, result.metric): result for result in results}
    head = ["", *metrics]
    rows = [[subject, *(f"{cells[subject, metric].median:.3g}" for metric in metrics)] for subject in subjects]
    lines = [
        f"{config['parameters']:,} parameters in {config['leaves']} leaves, {config['threads']} threads, "
        f"{results[0].samples} alternating pairs, medians; ratios to {subjects[0]}",
        table(head, rows),
    ]
    for result in results:
        goal = result.config.get("goal")
        if goal is not None:
            verdict = "met" if result.median <= goal else "MISSED"
            lines.append(f"goal {result.subject}, {result.metric} <= {goal}: {result.median:.2f} {verdict}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="25m,124m", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--pairs", type=int, default=30, help="alternating steps of each contender (default 30)")
    parser.add_argument("--out", default="gefen-bench.jsonl", help="JSON-lines file to append to")


def run(args: argparse.Namespace) -> int:
    sizes = args.sizes.split(",")
    unknown = [size for size in sizes if size not in SIZES]
    if unknown:
        raise UsageError(f"unknown size {unknown[0]!r}; choose among: {', '.join(SIZES)}")
    if args.pairs < 1:
        raise UsageError(f"--pairs must be at least 1; found {args.pairs}")
    check_file(args.out)
    if len(sizes) > 1:
        command = [sys.executable, "-m", "gefen_jax", *NAME.split(), "--pairs", str(args.pairs), "--out", args.out]
        return max(subprocess.run([*command, "--sizes", size], check=False).returncode for size in sizes)
    for size in sizes:
        results = study(size, args.pairs)
        print(show(results) + "\n", flush=True)
        write(args.out, results)
    print(f"written to {args.out}")
    return 0
