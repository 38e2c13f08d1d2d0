"""A running AdamW continues as Gefen in the middle of a run, and as AdamW again: the way in and the way out.

Losses go on as if nothing had happened. Optimizers in wrappers (here a chain with clipping and a schedule) are found
wherever they are; the schedule goes on at the step that the run has reached.
"""

import argparse

import jax
import optax

from gefen_jax import calibrate, from_adam_state, gefen, to_adam_state
from gefen_jax.lab import models
from gefen_jax.lab.data import load_text
from gefen_jax.lab.examples import counted, run
from gefen_jax.lab.sharded import bytes_on_one_device
from gefen_jax.lab.tasks import text_task


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-study", help="default: %(default)s")
    parser.add_argument("--steps", type=counted(3), default=60, help="default: %(default)s")
    args = parser.parse_args(argv)

    task = text_task(models.preset(args.model), load_text("stdlib"))
    params = models.init(task.config, jax.random.key(0))
    batches = list(task.batches(args.steps, 8, seed=0))
    third = args.steps // 3
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, third // 2, args.steps)

    def chain(optimizer):
        return optax.chain(optax.clip_by_global_norm(1.0), optimizer(schedule, weight_decay=0.1))

    adamw, tx = chain(optax.adamw), chain(gefen)

    adam_state = adamw.init(params)
    params, adam_state, before = train(task, adamw, params, adam_state, batches[:third])
    print(f"AdamW, {bytes_on_one_device(adam_state):,} bytes of state: loss {before:.4f} after step {third}")

    # In: structure and codebook from the gradients at hand, moments and step count from AdamW.
    grads = jax.jit(jax.grad(task.loss))(params, batches[third])
    opt_state = from_adam_state(adam_state, calibrate(tx.init(params), grads))
    params, opt_state, during = train(task, tx, params, opt_state, batches[third : 2 * third])
    print(f"Gefen, {bytes_on_one_device(opt_state):,} bytes of state: loss {during:.4f} after step {2 * third}")

    # Out.
    adam_state = to_adam_state(opt_state, adamw.init(params))
    params, adam_state, after = train(task, adamw, params, adam_state, batches[2 * third :])
    print(f"AdamW again: loss {after:.4f} after step {args.steps}")
    assert int(optax.tree.get(adam_state[1][0], "count")) == args.steps
    return before, during, after


def train(task, tx, params, opt_state, batches):
    """Parameters, state and the mean loss over the last third of these batches."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    recent = losses[-max(1, len(losses) // 3) :]
    return params, opt_state, sum(recent) / len(recent)


if __name__ == "__main__":
    run(main)
