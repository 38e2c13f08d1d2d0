"""Optimizer state in host memory between steps: it comes to the device for the update alone.

Worth it where the last gigabytes of device memory decide, and cheap with Gefen: an eighth of what AdamW would move.
The printed times are those of this machine; on a processor host and device share one memory, so they show the cost of
the copies alone.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import optax

from gefen_jax import gefen, learn_plan, state_sharding
from gefen_jax.lab import models
from gefen_jax.lab.data import load_text
from gefen_jax.lab.examples import counted, run
from gefen_jax.lab.sharded import bytes_on_one_device, data_mesh, fsdp
from gefen_jax.lab.tasks import text_task


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-study", help="default: %(default)s")
    parser.add_argument("--devices", type=counted(1), default=1, help="default: %(default)s")
    parser.add_argument("--steps", type=counted(2), default=20, help="default: %(default)s")
    args = parser.parse_args(argv)

    mesh = data_mesh(args.devices)
    task = text_task(models.preset(args.model), load_text("stdlib"))
    params = models.init(task.config, jax.random.key(0))
    shardings = fsdp(params, mesh)
    params = jax.device_put(params, shardings)
    batches = list(task.batches(args.steps, 8, seed=0))
    grads = jax.jit(jax.grad(task.loss))(params, batches[0])

    optimizers = {
        "AdamW": optax.adamw(2e-3, weight_decay=0.1),
        "Gefen": gefen(2e-3, weight_decay=0.1, plan=learn_plan(grads)),
    }
    losses = {}
    for name, tx in optimizers.items():
        for memory in ("device", "pinned_host"):
            held = state_sharding(jax.eval_shape(tx.init, params), shardings, memory)
            opt_state = jax.device_put(tx.init(params), held)
            step = training_step(task, tx, shardings, held)
            losses[name, memory], seconds = train(step, jax.tree.map(jnp.copy, params), opt_state, batches)
            print(f"{name}, state in {memory} memory: loss {losses[name, memory]:.4f}, {1000 * seconds:.1f} ms a step")
        print(f"{name}: {bytes_on_one_device(tx.init(params)):,} bytes to each device and back in every step")
    return losses


def training_step(task, tx, shardings, state_shardings):
    """One compiled step in place, for a state that lives where its shardings say: on the device or on the host."""
    on_host = jax.tree.leaves(state_shardings)[0].memory_kind == "pinned_host"

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(shardings, state_shardings, None))
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        if on_host:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        updates, opt_state = tx.update(grads, opt_state, params)
        if on_host:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Host)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def train(step, params, opt_state, batches):
    """The last loss, and the median time of a step without the first (which compiles)."""
    times = []
    for batch in batches:
        begun = time.perf_counter()
        params, opt_state, loss = jax.block_until_ready(step(params, opt_state, batch))
        times.append(time.perf_counter() - begun)
    return float(loss), statistics.median(times[1:])


if __name__ == "__main__":
    run(main)
