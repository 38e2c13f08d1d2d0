"""Training on several hosts that survives the loss of one: start the same command everywhere, and again after a crash.

On two hosts, or here in two terminals (the host of process 0 is the coordinator):

    python -m gefen_jax.lab.examples.many_hosts --coordinator localhost:4567 --hosts 2 --host 0 --checkpoints run
    python -m gefen_jax.lab.examples.many_hosts --coordinator localhost:4567 --hosts 2 --host 1 --checkpoints run

Kill one at any moment, end the other, start both again: they continue from the last checkpoint, and the result is that
of the uninterrupted run, to the bit. Nothing but the checkpoint is needed: the plan is read from it.
"""

import argparse
import functools
import itertools
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gefen_jax import gefen, learn_plan, plan_from_state, state_sharding
from gefen_jax.lab import models
from gefen_jax.lab.data import load_text
from gefen_jax.lab.examples import counted, run
from gefen_jax.lab.sharded import fsdp
from gefen_jax.lab.tasks import text_task


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", required=True, metavar="ADDRESS:PORT")
    parser.add_argument("--hosts", type=counted(1), required=True)
    parser.add_argument("--host", type=counted(0), required=True, help="0 is the coordinator")
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all hosts see")
    parser.add_argument("--every", type=counted(1), default=10, help="steps between two checkpoints")
    parser.add_argument("--model", default="gpt-study", help="default: %(default)s")
    parser.add_argument("--steps", type=counted(0), default=60)
    args = parser.parse_args(argv)

    jax.distributed.initialize(args.coordinator, args.hosts, args.host)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    task = text_task(models.preset(args.model), load_text("stdlib"))
    params = models.init(task.config, jax.random.key(0))
    shardings = fsdp(params, mesh)
    params = jax.device_put(params, shardings)
    batches = task.batches(args.steps, 2 * jax.device_count(), seed=0)  # the same on every host

    def shared_out(batch):
        return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))

    handler = ocp.PyTreeCheckpointHandler()
    with ocp.CheckpointManager(args.checkpoints.absolute(), item_handlers=handler) as checkpoints:
        done = checkpoints.latest_step()
        if done is None:
            first = shared_out(next(task.batches(1, 2 * jax.device_count(), seed=0)))
            grads = jax.jit(jax.grad(task.loss), out_shardings=shardings)(params, first)
            tx = optimizer(learn_plan(grads))  # all hosts must call it; host 0 decides
            opt_state = tx.init(params)
            checkpoints.save(0, args=ocp.args.PyTreeSave({"params": params, "opt_state": opt_state}))
            done = 0
        else:
            tx = optimizer(plan_of(checkpoints, done, mesh))
            run = restore(checkpoints, done, tx, params, shardings)
            params, opt_state = run["params"], run["opt_state"]
            print(f"continuing at step {done}", flush=True)

        everywhere = NamedSharding(mesh, PartitionSpec())
        out = (shardings, state_sharding(opt_state, shardings), everywhere)

        @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=out)
        def train(params, opt_state, batch):
            loss, grads = jax.value_and_grad(task.loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        for step, batch in enumerate(itertools.islice(batches, done, None), done + 1):
            params, opt_state, loss = train(params, opt_state, shared_out(batch))
            print(f"step {step}: loss {loss:.6f}", flush=True)
            if step % args.every == 0 or step == args.steps:
                checkpoints.save(step, args=ocp.args.PyTreeSave({"params": params, "opt_state": opt_state}))
    jax.distributed.shutdown()


def optimizer(plan):
    return optax.chain(optax.clip_by_global_norm(1.0), gefen(2e-3, weight_decay=0.1, plan=plan))


def plan_of(checkpoints, step, mesh):
    """The plan of a checkpoint: the shapes in its metadata, and the few bytes of ``format``, read first."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = checkpoints.item_metadata(step).tree

    def wanted(path, x):
        is_format = jax.tree_util.keystr(path, simple=True).endswith("format")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) if is_format else ocp.PLACEHOLDER

    (words,) = (
        x
        for x in jax.tree.leaves(read(checkpoints, step, jax.tree_util.tree_map_with_path(wanted, shapes)))
        if x is not ocp.PLACEHOLDER
    )
    return plan_from_state(shapes, words)


def restore(checkpoints, step, tx, params, shardings):
    """Parameters and optimizer state, each array where it belongs."""
    abstract = jax.eval_shape(lambda p: {"params": p, "opt_state": tx.init(p)}, params)
    placed = {"params": shardings, "opt_state": state_sharding(abstract["opt_state"], shardings)}
    template = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed)
    return read(checkpoints, step, template)


def read(checkpoints, step, template):
    arguments = ocp.checkpoint_utils.construct_restore_args(template)
    return checkpoints.restore(step, args=ocp.args.PyTreeRestore(template, restore_args=arguments))


if __name__ == "__main__":
    run(main)
