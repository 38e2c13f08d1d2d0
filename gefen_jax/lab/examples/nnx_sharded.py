"""Flax NNX on several devices: parameters say how they are divided, and `nnx.Optimizer` follows.

The plan is learned before the optimizer is built, so that its state has its final shapes from the start; the run is
saved, and continues in a new model and optimizer made from the checkpoint alone.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from gefen_jax import explain, gefen, learn_plan, plan_from_state
from gefen_jax.lab.examples import counted, run
from gefen_jax.lab.sharded import bytes_on_one_device, data_mesh


class Network(nnx.Module):
    """Two layers, each divided along its wide axis."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        columns, rows = nnx.with_partitioning(init, (None, "data")), nnx.with_partitioning(init, ("data", None))
        self.up = nnx.Linear(64, width, kernel_init=columns, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(width, 64, kernel_init=rows, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def loss_of(model: Network, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - jnp.roll(x, 1, axis=1)) ** 2)


@nnx.jit
def train(model: Network, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def build(width, plan):
    model = Network(width, nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), gefen(3e-3, plan=plan))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=counted(1), default=8, help="default: %(default)s")
    parser.add_argument("--width", type=counted(64), default=1024, help="a multiple of --devices; default: %(default)s")
    parser.add_argument("--steps", type=counted(2), default=40, help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.width % args.devices:
        parser.error(f"--width {args.width} is not a multiple of --devices {args.devices}")

    batches = jax.random.normal(jax.random.key(1), (args.steps, 128, 64))
    half = args.steps // 2
    with jax.set_mesh(data_mesh(args.devices)):
        first = nnx.grad(loss_of)(Network(args.width, nnx.Rngs(0)), batches[0])
        model, optimizer = build(args.width, learn_plan(first))
        for x in batches[:half]:
            loss = train(model, optimizer, x)
        print(explain(optimizer.opt_state))
        print(f"{bytes_on_one_device(nnx.state(optimizer)):,} bytes of it on each of {args.devices} devices")
        print(f"step {half}: loss {loss:.4f}")

        with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
            saved = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
            checkpointer.save(Path(folder, "run"), saved)
            checkpointer.wait_until_finished()
            # Any other process: the plan is in the checkpoint's shapes and the few bytes of `format`.
            again, resumed = build(args.width, plan_from_state(optimizer.opt_state))
            template = {"model": nnx.state(again), "optimizer": nnx.state(resumed)}
            restored = checkpointer.restore(Path(folder, "run"), template)
        nnx.update(again, restored["model"])
        nnx.update(resumed, restored["optimizer"])
        for x in batches[half:]:
            loss = train(again, resumed, x)
        print(f"step {args.steps}: loss {loss:.4f}, after a save and a restore")
    return float(loss)


if __name__ == "__main__":
    run(main)
