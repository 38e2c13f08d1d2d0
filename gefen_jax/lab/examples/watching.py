"""Watching a run: what quantisation costs each leaf, and whether the codebook still fits.

Every --every steps `diagnose` is called inside the compiled step and its small arrays come back as auxiliary output;
`advise` reads them on the host. When it says so, `calibrate` learns the codebook again; the moments are kept.
"""

import argparse
import functools

import jax
import optax

from gefen_jax import advise, calibrate, diagnose, gefen
from gefen_jax.lab import models
from gefen_jax.lab.data import load_text
from gefen_jax.lab.examples import counted, run
from gefen_jax.lab.tasks import text_task


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-study", help="default: %(default)s")
    parser.add_argument("--steps", type=counted(1), default=60, help="default: %(default)s")
    parser.add_argument("--every", type=counted(1), default=20, help="steps between two looks; default: %(default)s")
    args = parser.parse_args(argv)

    task = text_task(models.preset(args.model), load_text("stdlib"))
    params = models.init(task.config, jax.random.key(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), gefen(2e-3, weight_decay=0.1))
    opt_state = tx.init(params)

    @functools.partial(jax.jit, static_argnames="watched", donate_argnums=(0, 1))
    def step(params, opt_state, batch, watched):
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        found = diagnose(grads, opt_state) if watched else None
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, found

    advice = []
    for count, batch in enumerate(task.batches(args.steps, 8, seed=0), 1):
        watched = count == 1 or count % args.every == 0
        params, opt_state, loss, found = step(params, opt_state, batch, watched)
        if not watched:
            continue
        print(f"step {count}: loss {loss:.4f}")
        worst = max(found.leaves, key=lambda path: found.leaves[path].quantisation_error)
        leaf = found.leaves[worst]
        print(f"  {worst} loses most: {leaf.quantisation_error:.2%} of its momentum, {leaf.vanished:.2%} stored as 0")
        advice.append(advise(found))
        print(f"  {advice[-1]}")
        if advice[-1].startswith("calibrate"):
            opt_state = calibrate(opt_state, jax.jit(jax.grad(task.loss))(params, batch))
            print("  calibrated")
    return advice


if __name__ == "__main__":
    run(main)
