"""One optimizer step on the rungs that the field climbed: from a program per operation to one fused program.

Six rungs (eager, per tensor, tree-wise, whole step, flat buffer, fused), four sizes of one model with the same number
of tensors, from launch-bound to bandwidth-bound. For each: programs that Python dispatches, operations launched
(counted from compiled programs and, independently, from a profile), time per step, share of parameters and state that
is written in place. Then: the optimizer's share of a train step, what fusing changes in the numbers, and how many
launches a kernel with limited arguments needs for real models.

gefen-jax bench ladder                                  AdamW and Gefen
gefen-jax bench ladder --optimizer lion,gefen --sizes 6x16,6x64
JAX_PLATFORMS=cpu gefen-jax bench ladder --target h100  also count what a GPU would launch (needs the CUDA plugin)
"""

import argparse
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import gefen
from gefen_jax.accounting import ProfilerError, compiled_memory
from gefen_jax.lab import bench_launches, ladder_counts, ladder_plots, machine, models
from gefen_jax.lab.bench_step import random_tree
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.ladder_rungs import (
    RATE,
    RUNGS,
    Climber,
    Optimizer,
    Step,
    climbers,
    copied,
    find,
    one_program,
    transformation,
)
from gefen_jax.lab.language import GPTConfig
from gefen_jax.lab.results import Result, check_file, table, write
from gefen_pallas import aot

NAME = "bench ladder"
DEFAULT_SIZES, FAST_SIZES = "6x16,6x64,6x192,6x512", "2x16,2x64"
LEAST = 2e-3  # seconds that a rung runs in one turn; steps shorter than that are repeated
WARM = 2  # turns before the measured ones
GRADIENT = "gradient"
REAL = ("gpt2-124m", "llama3-1.5b", "qwen3-1.7b")
CONTEXT, HEADS = 64, 4


def model_of(size: str) -> GPTConfig:
    """The model of a size, LAYERSxWIDTH: a GPT over bytes.

    >>> model_of("6x64").layers, model_of("6x64").width
    (6, 64)
    """
    match = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,4})", size)
    if match is None or int(match[2]) % HEADS:
        raise UsageError(f"--sizes: found {size!r}, expected LAYERSxWIDTH with a multiple of {HEADS}, such as 6x64")
    return GPTConfig(vocab=256, context=CONTEXT, layers=int(match[1]), heads=HEADS, width=int(match[2]))


def gradient_program(config: GPTConfig, params: Any, batch: int) -> Callable[[Any], Any]:
    """The compiled forward and backward pass over ``batch`` rows of random tokens."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (batch, CONTEXT + 1)), jnp.uint8)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = models.logits(config, params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()

    program = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
    return lambda params: program(params, tokens)


def measure(
    steps: Mapping[Any, Climber], gradient: Callable[[Any], Any], params: Any, grads: Any, turns: int
) -> dict[Any, np.ndarray]:
    """Seconds per step of each climber, and of "gradient": turn by turn, all of them in every turn."""
    states = {key: (copied(params), climber.opt_state) for key, climber in steps.items()}
    repeats = dict.fromkeys([GRADIENT, *steps], 1)
    times: dict[Any, list[float]] = {key: [] for key in repeats}
    for turn in range(WARM + turns):
        for key in repeats:
            start = time.perf_counter()
            for _ in range(repeats[key]):
                if key == GRADIENT:
                    jax.block_until_ready(gradient(params))
                else:
                    states[key] = jax.block_until_ready(steps[key].step(*states[key], grads))
            seconds = (time.perf_counter() - start) / repeats[key]
            if turn >= WARM:
                times[key].append(seconds)
            else:
                repeats[key] = min(20, math.ceil(LEAST / seconds))
    return {key: np.asarray(found) for key, found in times.items()}


def climb(optimizers: Sequence[Optimizer], size: str, turns: int, batch: int) -> tuple[list[Result], list[str]]:
    """All numbers of some optimizers at one size, measured in turns; and what could not be counted."""
    config = model_of(size)
    shapes = models.shapes(config)
    params, grads = random_tree(shapes, 1), random_tree(shapes, 0)
    count = models.count(shapes)
    results: list[Result] = []
    remarks = [optimizer.why for optimizer in optimizers if optimizer.fused is None]
    common = {
        "size": size,
        "parameters": count,
        "tensors": len(jax.tree.leaves(shapes)),
        "threads": machine.usable_cores(),
    }

    def add(key: tuple[str, str], metric: str, unit: str, samples: Any, **config: Any) -> None:
        config = {"optimizer": key[0], "rung": key[1]} | common | config
        results.append(Result.of(NAME, " ".join(key), metric, unit, samples, config=config))

    steps = {(o.name, climber.rung): climber for o in optimizers for climber in climbers(o, params, grads)}
    for key, climber in steps.items():
        launches = ladder_counts.launches(climber)
        if launches is not None:
            add(key, "launches", "1/step", launches)
            temporary = sum(compiled_memory(program).temporaries for _, program in climber.programs)
            add(key, "temporaries", "B/param", temporary / count)
        try:
            found = ladder_counts.trace(climber, params, grads)
        except ProfilerError as error:
            remarks.append(f"no executor events of {key[1]}: {error}")
        else:
            add(key, "events", "1/step", found.events)
            if found.programs is not None:
                add(key, "programs", "1/step", found.programs)
        add(key, "in place", "1", ladder_counts.in_place(climber, params, grads))
    times = measure(steps, gradient_program(config, params, batch), params, grads, turns)
    for key in steps:
        add(key, "time", "ms/step", 1e3 * times[key])
    for optimizer in optimizers:
        best = optimizer.name, "whole step" if optimizer.fused is None else "fused"
        share = times[best] / (times[best] + times[GRADIENT])
        add(best, "share of a train step", "1", share, tokens=batch * CONTEXT)
    return results, list(dict.fromkeys(remarks))


def differences(optimizer: Optimizer, size: str) -> list[Result]:
    """What fusing changes in the numbers, per dtype."""
    shapes = models.shapes(model_of(size))
    params, grads = random_tree(shapes, 1), random_tree(shapes, 0)
    found = []
    for rung in ("whole step", "fused"):
        for dtype in ladder_counts.DTYPES:
            value = ladder_counts.difference(optimizer, rung, dtype, params, grads)
            if value is not None:
                config = {"optimizer": optimizer.name, "size": size, "rung": rung, "dtype": dtype}
                subject = f"{optimizer.name} {rung} {dtype}"
                found.append(Result.of(NAME, subject, "difference from eager", "1", value, config=config))
    return found


def on_target(optimizer: Optimizer, size: str, target: str) -> list[Result]:
    """What each rung would launch on a GPU, compiled for it without one."""
    shapes = models.shapes(model_of(size))
    how = {"eager": "eager", "per tensor": "leaf"}
    found = []
    for rung in RUNGS:
        tx = transformation(optimizer, rung)
        if tx is None or rung == "tree-wise":  # the whole step's, and one more per tensor for apply_updates
            continue
        if rung == "fused":
            tx = gefen(RATE, implementation="triton")
        step = _gradients_first(one_program(tx, rung))
        row = bench_launches.count(bench_launches.Form(rung, step, tx.init, how.get(rung, "tree")), shapes, target)
        config = {"optimizer": optimizer.name, "size": size, "rung": rung, "target": target}
        total = row.large + (row.small or 0)
        found.append(Result.of(NAME, f"{optimizer.name} {rung}", "launches on a GPU", "1/step", total, config=config))
    return found


def _gradients_first(step: Step) -> Callable[[Any, Any, Any], Any]:
    return lambda grads, params, opt_state: step(params, opt_state, grads)


def check_target(target: str) -> None:
    """Raise a `UsageError` unless programs for this GPU can be compiled here."""
    if target not in aot.TARGETS:
        raise UsageError(f"--target: unknown {target!r}; choose among: {', '.join(aot.TARGETS)}")
    reason = aot.unavailable()
    if reason is not None:
        raise UsageError(f"--target: {reason}")


def launch_table(names: Sequence[str]) -> str:
    """How many launches real models need under a launch's argument limit."""
    rows = []
    for name in names:
        shapes = models.shapes(models.preset(name))
        groups = [ladder_counts.launch_groups(shapes, limit) for limit in ladder_counts.LIMITS.values()]
        cells = [f"{len(group)} ({'+'.join(map(str, group))})" for group in groups]
        rows.append([name, str(len(jax.tree.leaves(shapes))), *cells])
    return table(["one fused step", "tensors", *(f"launches at {limit}" for limit in ladder_counts.LIMITS)], rows)


COLUMNS = {
    "programs": ("programs", ".0f"),
    "launches": ("launches", ".0f"),
    "events": ("executor events", ".0f"),
    "in place": ("in place", ".0%"),
    "temporaries": ("temp B/param", ".3f"),
    "time": ("ms/step", ".3g"),
}


def show(results: Sequence[Result], name: str) -> str:
    """The table of one optimizer at one size."""
    results = [r for r in results if r.config["optimizer"] == name]
    config = results[0].config
    cells = {(r.config["rung"], r.metric): r for r in results}
    rungs = [rung for rung in RUNGS if (rung, "time") in cells]
    slowest = cells[rungs[0], "time"].median
    rows = []
    for rung in rungs:
        found = [cells.get((rung, metric)) for metric in COLUMNS]
        values = [format(r.median, form) if r else "-" for r, (_, form) in zip(found, COLUMNS.values())]
        rows.append([rung, *values, f"{slowest / cells[rung, 'time'].median:.1f}x"])
    share = next(r for r in results if r.metric == "share of a train step")
    head = [name, *(column for column, _ in COLUMNS.values()), "speed"]
    return (
        f"{config['size']}: {config['parameters']:,} parameters in {config['tensors']} tensors, {config['threads']} "
        f"threads\n{table(head, rows)}\n{share.config['rung']}: {share.median:.0%} of a train step of "
        f"{share.config['tokens']} tokens"
    )


def show_rest(results: Sequence[Result], metric: str, title: str) -> str:
    """A table of results with one metric: rungs down, dtypes or optimizers across."""
    chosen = [r for r in results if r.metric == metric]
    columns = list(dict.fromkeys(r.config.get("dtype", r.config["optimizer"]) for r in chosen))
    rows: dict[str, dict[str, str]] = {}
    for r in chosen:
        label = f"{r.config['optimizer']} {r.config['rung']}" if "dtype" in r.config else r.config["rung"]
        rows.setdefault(label, {})[r.config.get("dtype", r.config["optimizer"])] = f"{r.median:.3g}"
    return table([title, *columns], [[name, *(row.get(c, "-") for c in columns)] for name, row in rows.items()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--optimizer", default="adamw,gefen", help="comma-separated names (default: %(default)s)")
    parser.add_argument("--sizes", help=f"LAYERSxWIDTH, comma-separated (default: {DEFAULT_SIZES})")
    parser.add_argument("--turns", type=int, help="measured turns (default: 12)")
    parser.add_argument("--fast", action="store_true", help=f"three turns of sizes {FAST_SIZES}")
    parser.add_argument("--target", help="also count launches on this absent GPU: a100, h100, h200, b200")
    parser.add_argument("--out", default="gefen-ladder.jsonl", help="JSON-lines file to append to")
    parser.add_argument("--plot", type=Path, default=Path("gefen-ladder.png"), help="PNG file (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    sizes = (args.sizes or (FAST_SIZES if args.fast else DEFAULT_SIZES)).split(",")
    for size in sizes:
        model_of(size)  # wrong sizes are found before anything runs
    turns = args.turns if args.turns is not None else 3 if args.fast else 12
    if turns < 1:
        raise UsageError(f"--turns must be at least 1; found {turns}")
    optimizers = [find(name.replace("-", "_")) for name in args.optimizer.split(",")]
    if args.target:
        check_target(args.target)
    check_file(args.out)
    check_file(args.plot, "--plot")
    results: list[Result] = []
    remarks: dict[str, None] = {}
    for size in sizes:
        found, missing = climb(optimizers, size, turns, batch=1 if args.fast else 4)
        results += found
        remarks |= dict.fromkeys(missing)
        for optimizer in optimizers:
            print(show(found, optimizer.name) + "\n", flush=True)
    for optimizer in optimizers:
        results += differences(optimizer, sizes[0])
    print(show_rest(results, "difference from eager", "difference from eager, of the change") + "\n")
    if args.target:
        results += [result for optimizer in optimizers for result in on_target(optimizer, sizes[0], args.target)]
        print(show_rest(results, "launches on a GPU", f"launches on {args.target}, {sizes[0]}") + "\n")
    print(launch_table(REAL[:1] if args.fast else REAL) + "\n")
    for remark in remarks:
        print(remark)
    write(args.out, results)
    ladder_plots.draw(results, args.plot)
    print(f"written to {args.out}; plot: {args.plot}")
    return 0
