"""Training one cell of the study: the step is compiled once per optimizer and task, and serves all rates and seeds.

The learning rate is an argument of the compiled step; a structure that was learned from other gradients may have
other shapes, and then has its own. Initial parameters and batches are functions of task and seed alone.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gefen_jax.accounting.memory import Memory, compiled_memory
from gefen_jax.accounting.tensors import tree_bytes
from gefen_jax.lab import machine, models, quality_tasks, quality_variants
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.optimizers import build_choice
from gefen_jax.lab.quality_cells import Cell, Key
from gefen_jax.lab.quality_tasks import Loaded
from gefen_jax.lab.train import evaluator, many_steps, stack
from gefen_jax.tiling import largest_divisor

DISPATCH = 50  # steps in one dispatch, at most
VALIDATIONS = 4  # in a run
COMPILED = 32  # steps kept, at most: rule "reference" learns a new structure from every seed

Progress = Callable[[int], None]
"""Called with the number of steps done."""


class Compiled(NamedTuple):
    step: Any
    memory: Memory
    seconds: float


class Runner:
    """Trains cells on tasks that it keeps, with steps that it keeps."""

    def __init__(self, data: str | None = None) -> None:
        """``data`` replaces the tasks' default data."""
        self.data = data
        self.environment = machine.environment()
        self._compiled: dict[Any, Compiled] = {}
        self.task = functools.cache(self._task)
        self.evaluate = functools.cache(lambda name: evaluator(self.task(name).task))
        self.gradients = functools.cache(lambda name: jax.jit(jax.grad(self.task(name).task.loss)))

    def _task(self, name: str) -> Loaded:
        chosen = quality_tasks.choose(name)
        return chosen.load(self.data or chosen.data)

    def check(self, key: Key) -> None:
        """Raise a `UsageError` if the optimizer cannot take the task's parameters; costs no training."""
        shapes = jax.eval_shape(self.task(key.task).task.init, jax.random.key(0))
        try:
            jax.eval_shape(self._tx(key, key.rate).init, shapes)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{key.optimizer} cannot train {key.task}: {error}") from error

    def run(self, key: Key, purpose: str, progress: Progress = lambda done: None) -> Cell:
        """Train one cell."""
        task, choice = self.task(key.task).task, quality_variants.choose(key.optimizer)
        params = task.init(jax.random.key(key.seed))
        jax.block_until_ready(task.model(params))  # the model beneath adapters is trained when it is first asked for
        count = models.count(params)
        batches = list(task.batches(key.steps, key.batch, key.seed))
        opt_state = self._tx(key, key.rate).init(params)
        if choice.prepare is not None:
            grads = [self.gradients(key.task)(params, batch) for batch in batches[: choice.batches]]
            opt_state = choice.prepare(opt_state, grads if choice.batches > 1 else grads[0])
        state_bytes = tree_bytes(opt_state)

        chunk = largest_divisor(key.steps, DISPATCH)
        rate = jnp.float32(key.rate)
        before = len(self._compiled)
        compiled = self._compile(key, params, opt_state, stack(batches[:chunk]), rate)
        fresh = len(self._compiled) > before
        due = {_dispatch_before(key.steps * (i + 1) // VALIDATIONS, chunk) for i in range(VALIDATIONS)} - {0}
        training, validation, wall, cpu = [], [], [], []
        untrained = math.nan
        for done in range(chunk, key.steps + 1, chunk):
            batch = stack(batches[done - chunk : done])
            marks = time.perf_counter(), time.process_time()
            params, opt_state, losses = jax.block_until_ready(compiled.step(params, opt_state, batch, rate))
            wall.append((time.perf_counter() - marks[0]) / chunk)
            cpu.append((time.process_time() - marks[1]) / chunk)
            if done == chunk:
                untrained = float(losses[0])
            training.append((done, float(np.mean(losses))))
            if done in due:
                metrics = self.evaluate(key.task)(params)
                validation.append((done, metrics.loss))
            progress(done)
        return Cell(
            **key._asdict(),
            purpose=purpose,
            loss=metrics.loss,
            accuracy=metrics.accuracy,
            validation=validation,
            training=training,
            diverged=not (all(math.isfinite(loss) for _, loss in training) and metrics.loss <= untrained),
            parameters=count,
            state_bytes=state_bytes,
            peak_bytes=compiled.memory.peak,
            step_seconds=float(np.median(wall[1:] or wall)),
            step_cpu_seconds=float(np.median(cpu[1:] or cpu)),
            compile_seconds=compiled.seconds if fresh else 0.0,
            environment=self.environment,
            time=time.time(),
        )

    def _tx(self, key: Key, rate: Any) -> Any:
        choice, config = quality_variants.choose(key.optimizer), self.task(key.task).task.config
        return build_choice(choice, config, rate, key.steps, weight_decay=key.weight_decay, b2=key.b2)

    def _compile(self, key: Key, *arguments: Any) -> Compiled:
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(arguments))
        name = key._replace(rate=0.0, seed=0), shapes
        if name not in self._compiled:
            task = self.task(key.task).task

            def steps(params: Any, opt_state: Any, batches: Any, rate: jax.Array) -> Any:
                return many_steps(task, self._tx(key, rate))(params, opt_state, batches)

            start = time.perf_counter()
            compiled = jax.jit(steps, donate_argnums=(0, 1)).lower(*arguments).compile()
            if len(self._compiled) >= COMPILED:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[name] = Compiled(compiled, compiled_memory(compiled), time.perf_counter() - start)
        return self._compiled[name]


def _dispatch_before(step: int, chunk: int) -> int:
    return step - step % chunk
