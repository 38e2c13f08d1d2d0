"""States that an earlier release wrote (tests/data/state_v1) are read bit for bit, mean the same and step on."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from behaviour_cases import same
from flax import serialization
from store_state import CASES, EVERY, FOLDER, RATE, SHAPES, cast, dtype_of, flat, options

from gefen_jax import Plan, blocks, calibrate, explain, gefen, plan_from_state
from gefen_jax.state import VERSION, GefenState

EACH = pytest.mark.parametrize("case", CASES)


def stored(case):
    with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as file:
        return dict(file)


def rebuild(arrays, prefix, like):
    """The tree ``like`` with its arrays from the file; bits become bfloat16 where ``like`` has it."""
    named, treedef = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for path, x in named:
        array = arrays[prefix + jax.tree_util.keystr(path, simple=True, separator="/")]
        leaves.append(jnp.asarray(array.view(jnp.bfloat16) if x.dtype == jnp.bfloat16 else array))
        assert leaves[-1].dtype == x.dtype
    return jax.tree.unflatten(treedef, leaves)


def loaded(case):
    """(transformation, parameters, gradients, state) of a stored case, from its plan and arrays."""
    arrays, step = stored(case), stored("step")
    wide, shapes = (
        jax.tree.map(lambda s, d=d: jax.ShapeDtypeStruct(s, d), SHAPES, is_leaf=lambda s: isinstance(s, tuple))
        for d in (jnp.float32, dtype_of(case))
    )
    tx = gefen(RATE, **options(case, Plan.loads(str(arrays["plan"]))))
    template = jax.eval_shape(tx.init, shapes)
    state = GefenState(**rebuild(arrays, "state/", template._asdict()))
    return tx, cast(rebuild(step, "params/", wide), case), cast(rebuild(step, "grads/", wide), case), state


def test_the_folder_is_that_of_this_version():
    assert FOLDER.name == f"state_v{VERSION}"
    assert sorted(path.stem for path in FOLDER.glob("*.npz")) == sorted([*CASES, "step"])


@EACH
def test_the_plan_is_read_from_the_state(case):
    """Structure, rule, bits, codec, reasons and codebook: the state's own words and shapes still say what they said."""
    _, _, _, state = loaded(case)
    plan = Plan.loads(str(stored(case)["plan"]))
    assert plan_from_state(state) == plan
    assert blocks(state) == plan.leaves
    same(calibrate(state, plan), state)
    assert explain(state).count == 3


@EACH
def test_a_planned_init_has_the_stored_structure(case):
    tx, params, _, state = loaded(case)
    fresh = tx.init(params)
    assert jax.tree.structure(fresh) == jax.tree.structure(state)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(fresh), jax.tree.leaves(state)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
    same((fresh.format, fresh.codebook), (state.format, state.codebook))


@EACH
def test_the_next_step_is_that_of_the_release_that_wrote_it(case):
    """Under rule "reference" an update is the difference of two parameters, so it has their rounding."""
    tx, params, grads, state = loaded(case)
    updates, new = jax.jit(tx.update)(grads, state, params)
    assert int(new.count) == 4
    arrays = stored(case)
    for name, found in flat("next/", {"mu": new.mu, "updates": updates}).items():
        found, expected = found.ravel()[::EVERY], arrays[name]
        assert found.dtype == expected.dtype
        if found.dtype == np.uint8:  # a momentum between two words may be rounded to either
            assert np.mean(found != expected) < 2e-3
        else:
            rounding = 3e-7 if case.startswith("reference") else 1e-9
            np.testing.assert_allclose(found, expected, rtol=3e-6, atol=rounding)


def test_the_forms_of_flax_pickle_and_orbax():
    tx, params, _, state = loaded("default")
    same(serialization.from_bytes(tx.init(params), (FOLDER / "default.msgpack").read_bytes()), state)
    same(pickle.loads((FOLDER / "default.pickle").read_bytes()), state)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        same(checkpointer.restore(FOLDER / "default.orbax", target), state)
