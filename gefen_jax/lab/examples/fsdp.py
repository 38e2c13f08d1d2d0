"""Fully sharded training: parameters, gradients and optimizer state divided among all devices, with checkpoints.

A run on --devices devices is saved, restored on half of them, and goes on there as if nothing had happened.
"""

import argparse
import functools
import tempfile
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from gefen_jax import gefen, learn_plan, plan_from_state, state_sharding
from gefen_jax.lab import models
from gefen_jax.lab.data import load_text
from gefen_jax.lab.examples import counted, run
from gefen_jax.lab.sharded import bytes_on_one_device, data_mesh, fsdp
from gefen_jax.lab.tasks import text_task


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-study", help="default: %(default)s")
    parser.add_argument("--devices", type=counted(2), default=8, help="default: %(default)s")
    parser.add_argument("--steps", type=counted(2), default=20, help="default: %(default)s")
    args = parser.parse_args(argv)

    mesh = data_mesh(args.devices)
    task = text_task(models.preset(args.model), load_text("stdlib"))
    params = models.init(task.config, jax.random.key(0))
    shardings = fsdp(params, mesh)
    params = jax.device_put(params, shardings)
    batches = [shared_out(batch, mesh) for batch in task.batches(args.steps, 2 * args.devices, seed=0)]

    # Structure and codebook from the first gradients, whole ones: the same plan on any number of devices.
    plan = learn_plan(jax.jit(jax.grad(task.loss))(params, batches[0]))
    tx = optimizer(plan)
    opt_state = tx.init(params)  # placed like the parameters
    step = training_step(task, tx, shardings, opt_state)
    half = args.steps // 2
    for batch in batches[:half]:
        params, opt_state, loss = step(params, opt_state, batch)
    print(f"step {half}: loss {loss:.4f} on {args.devices} devices")
    print(f"optimizer state: {bytes_on_one_device(opt_state):,} bytes on each device, AdamW's", end=" ")
    print(f"{bytes_on_one_device(optax.adamw(1e-3).init(params)):,}")

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder, "run"), {"params": params, "opt_state": opt_state})
        checkpointer.wait_until_finished()
        mesh = data_mesh(args.devices // 2)
        shardings = fsdp(params, mesh)
        wanted = template(params, plan_from_state(opt_state), shardings)  # or Plan.load(a file beside the checkpoint)
        run = checkpointer.restore(Path(folder, "run"), wanted)

    step = training_step(task, tx, shardings, run["opt_state"])
    for continued in batches[half:]:
        batch = shared_out(continued, mesh)
        run["params"], run["opt_state"], loss = step(run["params"], run["opt_state"], batch)
    print(f"step {args.steps}: loss {loss:.4f} on {args.devices // 2} devices")
    return float(loss)


def optimizer(plan):
    return optax.chain(optax.clip_by_global_norm(1.0), gefen(2e-3, weight_decay=0.1, plan=plan))


def shared_out(batch, mesh):
    """A batch with its examples divided among the devices."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def training_step(task, tx, shardings, opt_state):
    """One compiled step in place. XLA inserts the communication; `out_shardings` pins where results lie."""
    loss_sharding = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    out = (shardings, state_sharding(opt_state, shardings), loss_sharding)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=out)
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def template(params, plan, shardings):
    """What a checkpoint restores into: shapes, dtypes, and where each array goes. No memory is used."""
    abstract = jax.eval_shape(lambda p: {"params": p, "opt_state": optimizer(plan).init(p)}, params)
    placed = {"params": shardings, "opt_state": state_sharding(abstract["opt_state"], shardings)}
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed)


if __name__ == "__main__":
    run(main)
