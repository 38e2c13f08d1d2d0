"""How well codebooks fit momentum, and for how long: squared errors on the momentum of an AdamW run.

At some steps of a run the histogram of AdamW's own first moment is taken in the blocks that would quantise it. Every
family of codebooks is learned from the first gradient, as calibration does, and its squared error is compared with
that of the words learned from the very momentum: 1 means that nothing can be gained by calibrating again.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from gefen_jax import learn_plan
from gefen_jax.codebook import mse
from gefen_jax.lab import quality_tasks
from gefen_jax.lab.optimizers import build
from gefen_jax.lab.quality_cells import CODEBOOKS, lines
from gefen_jax.lab.quality_codebooks import FAMILIES, learned
from gefen_jax.lab.results import Result
from gefen_jax.lab.tasks import Task
from gefen_jax.lab.train import many_steps, stack

CountsOf = Callable[[int], dict[int, np.ndarray]]

METRIC = "squared error ratio"
SHARES = (0.025, 0.1, 0.25, 0.5, 1.0)  # of the run, at which momentum is looked at


def momentum_counts(task: Task, tx: optax.GradientTransformation, batch: int, steps: int) -> CountsOf:
    """A function of the seed: histograms by step, int64[4096]; step 0 is the first gradient's."""
    ends = sorted({max(1, round(share * steps)) for share in SHARES})
    chunk = math.gcd(*ends)
    step, gradient = jax.jit(many_steps(task, tx)), jax.jit(jax.grad(task.loss))

    def counts_of(seed: int) -> dict[int, np.ndarray]:
        batches = list(task.batches(steps, batch, seed))
        params = task.init(jax.random.key(seed))
        opt_state = tx.init(params)
        found = {0: _counts(gradient(params, batches[0]))}
        for end in range(chunk, steps + 1, chunk):
            params, opt_state, _ = step(params, opt_state, stack(batches[end - chunk : end]))
            if end in ends:
                found[end] = _counts(_adam(opt_state).mu)
        return found

    return counts_of


def _counts(tree: Any) -> np.ndarray:
    counts = learn_plan(tree).counts
    assert counts is not None  # some gradient is not 0
    return counts


def _adam(opt_state: Any) -> optax.ScaleByAdamState:
    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return next(node for node in jax.tree.leaves(opt_state, is_leaf=is_adam) if is_adam(node))


def study(
    task: str,
    *,
    rate: float,
    seeds: Iterable[int],
    steps: int,
    data: str | None = None,
    progress: Callable[[int], None] = lambda seed: None,
) -> list[Result]:
    """One result per family, number of bits and step; samples are seeds."""
    chosen = quality_tasks.choose(task)
    loaded = chosen.load(data or chosen.data).task
    counts_of = momentum_counts(loaded, build("adamw", loaded.config, rate, steps), chosen.batch, steps)
    ratios: dict[tuple[str, int, int], list[float]] = {}
    for seed in seeds:
        counts = counts_of(seed)
        for bits in (8, 4):
            for family, words_of in FAMILIES.items():
                words = words_of(counts[0], bits)
                for step, seen in counts.items():
                    ratio = mse(seen, words) / mse(seen, learned(seen, bits))
                    ratios.setdefault((family, bits, step), []).append(ratio)
        progress(seed)
    config = {"task": task, "rate": rate, "steps": steps}
    return [
        Result.of(
            CODEBOOKS, family, METRIC, "1", found, baseline="relearned", config=config | {"bits": bits, "step": step}
        )
        for (family, bits, step), found in ratios.items()
    ]


def read(paths: Iterable[str | Path]) -> list[Result]:
    """The results in JSON-lines files; other lines are passed over. Raises `UsageError`."""
    names = {field.name for field in dataclasses.fields(Result)}
    return [
        Result(**{name: value for name, value in line.items() if name in names})
        for _, line in lines(paths)
        if line.get("benchmark") == CODEBOOKS
    ]


def tables(results: Iterable[Result]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, rows) per task and number of bits: families by steps."""
    groups: dict[tuple[str, int], dict[str, dict[int, Result]]] = {}
    for result in results:
        group = groups.setdefault((result.config["task"], result.config["bits"]), {})
        group.setdefault(result.subject, {})[result.config["step"]] = result
    found = []
    for (task, bits), families in groups.items():
        steps = sorted({step for by_step in families.values() for step in by_step})
        head = ["learned from the first gradient", *("gradient" if step == 0 else f"step {step}" for step in steps)]
        rows = [
            [family, *(f"{by_step[step].median:.3f}" if step in by_step else "" for step in steps)]
            for family, by_step in families.items()
        ]
        found.append((f"{task}, {bits} bits", head, rows))
    return found
