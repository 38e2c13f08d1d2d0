"""Writes tests/data/state_v1: states of this release, which later releases must read bit for bit.

    python tests/behaviour/store_state.py

One .npz for each case, without pickles: the arrays of the state by field and path (bfloat16 as bit patterns), the plan
as JSON text, and some elements of the updates and codes that the next step gave; parameters and gradients of that step
are in step.npz. Beside them the default case as Orbax saves it, as flax.serialization packs it and as pickle does. Once
a release has written them, they change only with `gefen_jax.state.VERSION`, into a folder of that name.
"""

import pathlib
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from behaviour_cases import structured, train, tree
from flax import serialization

from gefen_jax import calibrate, gefen, plan_from_state
from gefen_jax.state import VERSION

FOLDER = pathlib.Path(__file__).parents[1] / "data" / f"state_v{VERSION}"
SHAPES = {"layer": {"bias": (72,), "kernel": (64, 72)}, "stack": (2, 48, 48), "thin": (2, 2100), "empty": (0, 3)}
EVERY = 7
"""The updates' elements that are kept: one in so many."""
CASES = {
    "default": {},
    "uncalibrated": {},
    "four_bits": {"bits": 4},
    "block": {"second_moment": "block", "min_size": 0},
    "full": {"second_moment": "full"},
    "axes": {"axes": {"stack": (1, 1)}, "min_size": 0, "full_precision": "thin"},
    "companding": {"codec": "companding"},
    "reference": {"rule": "reference"},
    "reference_bfloat16": {"rule": "reference"},
}
RATE = 1e-2


def options(case, plan):
    """What the transformation of a case is built with, beside its plan."""
    return CASES[case] | {"plan": plan}


def run(case):
    """Transformation and state of a case in the middle of a run."""
    dtype = dtype_of(case)
    tx, params = gefen(RATE, **CASES[case]), tree(0, SHAPES, dtype=dtype)
    state = tx.init(params)
    if case != "uncalibrated":
        state = calibrate(state, structured(0, SHAPES, dtype=dtype))
    return tx, train(tx, params, [tree(seed, SHAPES, dtype=dtype) for seed in (1, 2, 3)], state)[1]


def dtype_of(case):
    """Dtype of a case's parameters."""
    return jnp.bfloat16 if case.endswith("bfloat16") else jnp.float32


def cast(tree, case):
    """The tree in the case's dtype."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype_of(case)), tree)


def flat(prefix, item):
    """Arrays of a tree by name, bfloat16 as bits."""
    named = jax.tree_util.tree_leaves_with_path(item)
    arrays = {prefix + jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in named}
    return {name: x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for name, x in arrays.items()}


def main():
    """Write all cases."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    params, grads = tree(5, SHAPES), tree(6, SHAPES)
    np.savez_compressed(FOLDER / "step.npz", **flat("params/", params), **flat("grads/", grads))
    for case in CASES:
        tx, state = run(case)
        updates, new = jax.jit(tx.update)(cast(grads, case), state, cast(params, case))
        some = {name: u.ravel()[::EVERY] for name, u in flat("next/", {"mu": new.mu, "updates": updates}).items()}
        plan = {"plan": np.asarray(plan_from_state(state).dumps())}
        np.savez_compressed(FOLDER / f"{case}.npz", **flat("state/", state._asdict()), **some, **plan)
    _, state = run("default")
    (FOLDER / "default.msgpack").write_bytes(serialization.to_bytes(state))
    (FOLDER / "default.pickle").write_bytes(pickle.dumps(jax.tree.map(np.asarray, state), protocol=4))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(FOLDER / "default.orbax", state)
    for marker in FOLDER.glob("default.orbax/commit_success.txt"):
        marker.write_text("Checkpoint commit was successful")  # Orbax names the folder in it


if __name__ == "__main__":
    main()
