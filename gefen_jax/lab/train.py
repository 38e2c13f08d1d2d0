"""The training loop: one jitted, donated step, timed; or many steps in one dispatch.

    run = prepare(task, tx, params, first_batch)
    for event in fit(task, run, batches, steps=400, every=25): ...

`fit` yields after every dispatch, so that several optimizers can be trained in lockstep on the same batches
(equal conditions for the step times, and a comparison whenever it is stopped).
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax.accounting.memory import Memory, compiled_memory
from gefen_jax.accounting.tensors import tree_bytes
from gefen_jax.lab import models
from gefen_jax.lab.models import Config, Params
from gefen_jax.lab.tasks import Batch, Metrics, Task
from gefen_jax.placement import state_sharding

EVALUATION_BATCH = 32

Step = Callable[[Params, Any, Batch], tuple[Params, Any, jax.Array]]
"""(params, opt_state, batch) -> (params, opt_state, losses before each update)."""


class Run(NamedTuple):
    """A compiled step and where it stands. `params` and `opt_state` are donated to the next step."""

    step: Step
    params: Params
    opt_state: Any
    memory: Memory
    state_bytes: int
    compile_seconds: float
    chunk: int  # steps per dispatch


class Event(NamedTuple):
    """What one dispatch brought."""

    step: int  # steps taken so far; 0: the validation before the first
    losses: np.ndarray  # float32, (steps of this dispatch,): each before its update, nats
    seconds: float  # wall time of the dispatch; 0 at step 0
    validation: Metrics | None


def one_step(task: Task, tx: optax.GradientTransformation) -> Step:
    """A training step, to be jitted; the loss has shape (1,)."""

    def step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss[None]

    return step


def many_steps(task: Task, tx: optax.GradientTransformation) -> Step:
    """Training steps over the leading axis of stacked batches (`stack`), one loss each: a single dispatch."""
    step = one_step(task, tx)

    def body(carry: tuple[Params, Any], batch: Batch) -> tuple[tuple[Params, Any], jax.Array]:
        params, opt_state, loss = step(*carry, batch)
        return (params, opt_state), loss[0]

    def steps(params: Params, opt_state: Any, batches: Batch) -> tuple[Params, Any, jax.Array]:
        (params, opt_state), losses = jax.lax.scan(body, (params, opt_state), batches)
        return params, opt_state, losses

    return steps


def prepare(
    task: Task,
    tx: optax.GradientTransformation,
    params: Params,
    first: Batch,
    calibrate: Callable[[Any, Params], Any] | None = None,
    chunk: int = 1,
    shardings: Params | None = None,
) -> Run:
    """Initialise the optimizer and compile its training step.

    Args:
      task: gives the loss.
      tx: any Optax transformation.
      params: the start; copied, because the step donates its arguments.
      first: a batch; gives the shapes, and the gradients for `calibrate`.
      calibrate: maps (opt_state, first gradients) to the opt_state to start with; None: leave it.
      chunk: steps per dispatch. More than 1 runs them in one `lax.scan`: less overhead for small models.
      shardings: of the parameters on a mesh; the state then follows them. None: one device.
    """
    params = jax.tree.map(jnp.copy, params)
    opt_state = tx.init(params)
    if calibrate is not None:
        opt_state = calibrate(opt_state, jax.jit(jax.grad(task.loss))(params, first))

    batch = first if chunk == 1 else stack([first] * chunk)
    start = time.perf_counter()
    held = None
    if shardings is not None:
        state_shardings = state_sharding(opt_state, shardings)
        opt_state = jax.device_put(opt_state, state_shardings)
        held = (shardings, state_shardings, None)
    step = one_step(task, tx) if chunk == 1 else many_steps(task, tx)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=held)
    compiled = jitted.lower(params, opt_state, batch).compile()
    return Run(
        step=compiled,
        params=params,
        opt_state=opt_state,
        memory=compiled_memory(compiled),
        state_bytes=tree_bytes(opt_state),
        compile_seconds=time.perf_counter() - start,
        chunk=chunk,
    )


def fit(task: Task, run: Run, batches: Iterable[Batch], steps: int, every: int) -> Iterator[Event]:
    """Train for `steps` steps; validate before the first, after each `every` and after the last.

    Raises:
      ValueError: `steps` or `every` is not a multiple of the run's chunk, or there are too few batches.
    """
    if steps % run.chunk or every % run.chunk:
        raise ValueError(f"fit: steps {steps} and every {every} must be multiples of the chunk {run.chunk}")
    params, opt_state = run.params, run.opt_state
    evaluate = evaluator(task)
    yield Event(0, np.zeros(0, np.float32), 0.0, evaluate(params))
    supply = iter(batches)
    for done in range(run.chunk, steps + 1, run.chunk):
        group = list(itertools.islice(supply, run.chunk))
        if len(group) < run.chunk:
            raise ValueError(f"fit: the batches ended before step {done} of {steps}")
        batch = group[0] if run.chunk == 1 else stack(group)
        start = time.perf_counter()
        params, opt_state, losses = jax.block_until_ready(run.step(params, opt_state, batch))
        seconds = time.perf_counter() - start
        due = done % every == 0 or done == steps
        yield Event(done, np.asarray(losses), seconds, evaluate(params) if due else None)


def stack(batches: list[Batch]) -> Batch:
    """Batches stacked along a new leading axis."""
    return Batch(*(np.stack(part) for part in zip(*batches)))


def evaluator(task: Task) -> Callable[[Params], Metrics]:
    """A function from parameters to loss and accuracy on the task's fixed validation examples."""
    batches = [
        task.validation(task.validation_index[i : i + EVALUATION_BATCH])
        for i in range(0, len(task.validation_index), EVALUATION_BATCH)
    ]
    total = sum(batch.labels.size for batch in batches)

    def evaluate(params: Params) -> Metrics:
        weights = task.model(params)
        sums = [evaluate_batch(task.config, weights, batch) for batch in batches]
        loss, right = np.sum([np.asarray(part, np.float64) for part in sums], axis=0)
        return Metrics(float(loss) / total, float(right) / total)

    return evaluate


@functools.partial(jax.jit, static_argnums=0)
def evaluate_batch(config: Config, params: Params, batch: Batch) -> jax.Array:
    """(sum of the losses, number of right predictions), float32."""
    logits = models.logits(config, params, batch.inputs)
    labels = jnp.asarray(batch.labels, jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.stack([losses.sum(), (logits.argmax(-1) == labels).sum().astype(jnp.float32)])
