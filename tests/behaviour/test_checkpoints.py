"""Saving and coming back, in one process and the next: Orbax, flax.serialization, pickle, arrays; damaged files."""

import functools
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from behaviour_cases import same, snapshot, structured, train, tree
from flax import nnx, serialization
from test_flax_loops import net, nnx_grads, nnx_step

from gefen_jax import calibrate, explain, gefen, learn_plan, plan_from_state

OPTIONS = {
    "default": {},
    "four bits": {"bits": 4},
    "block": {"second_moment": "block", "min_size": 0},
    "reference": {"rule": "reference"},
}
GRADS = [tree(seed) for seed in (1, 2)]


def build(plan=None, **options):
    return optax.chain(optax.clip_by_global_norm(1.0), gefen(optax.linear_schedule(1e-2, 0, 9), plan=plan, **options))


@functools.cache
def running(which="default"):
    """Transformation, parameters and calibrated state in the middle of a run."""
    tx = build(**OPTIONS[which])
    params = tree(0)
    return tx, *train(tx, params, GRADS[:1], calibrate(tx.init(params), structured(0)))


def save(path, item):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, item)


def restore(path, target):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def abstract(item):
    """The target of a restore: shapes, dtypes and this device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), item)


def metadata(path):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.metadata(path).item_metadata.tree


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a run, with what was saved."""
    tx, params, state = running()
    save(tmp_path / "run", {"params": params, "opt_state": state})
    return tmp_path / "run", tx, params, state


class TestOrbax:
    """`StandardCheckpointer`, one device."""

    @pytest.mark.parametrize("which", OPTIONS)
    def test_comes_back_bit_for_bit(self, tmp_path, which):
        _, params, state = running(which)
        save(tmp_path / "run", {"params": params, "opt_state": state})
        planned = build(plan=plan_from_state(state))
        target = abstract({"params": params, "opt_state": jax.eval_shape(planned.init, params)})
        found = restore(tmp_path / "run", target)
        same(found, {"params": params, "opt_state": state})
        assert type(found["opt_state"][1]) is type(state[1])

    def test_needs_no_template_but_metadata_and_format(self, checkpoint):
        path, _, params, state = checkpoint
        item = {"opt_state": [None, {"format": 0}]}
        as_numpy = jax.tree.map(lambda _: orbax.checkpoint.RestoreArgs(restore_type=np.ndarray), item)
        request = orbax.checkpoint.args.PyTreeRestore(item, restore_args=as_numpy, partial_restore=True)
        with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
            words = checkpointer.restore(path, args=request)["opt_state"][1]["format"]
        plan = plan_from_state(metadata(path), words)
        assert plan.codebook is None
        assert plan.leaves == plan_from_state(state).leaves
        target = abstract({"params": params, "opt_state": jax.eval_shape(build(plan=plan).init, params)})
        same(restore(path, target), {"params": params, "opt_state": state})

    def test_without_a_target_the_dicts_still_have_the_plan(self, checkpoint):
        path, tx, params, state = checkpoint
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(path)
        assert plan_from_state(found["opt_state"]) == plan_from_state(state)
        with pytest.raises(TypeError, match=r"expected a GefenState, found dict: pass what tx.init\(params\) returned"):
            tx.update(params, tuple(found["opt_state"]), params)

    def test_a_template_of_another_plan_is_refused(self, checkpoint):
        path, _, params, _ = checkpoint
        target = abstract({"params": params, "opt_state": jax.eval_shape(build().init, params)})
        with pytest.raises(ValueError, match=r"shape"):
            restore(path, target)

    @pytest.mark.parametrize("change", ["renamed", "missing", "added"])
    def test_a_template_of_another_tree_is_refused(self, checkpoint, change):
        path, _, params, _ = checkpoint
        other = {"dense": params["dense"]} if change == "missing" else dict(params)
        if change == "renamed":
            other["tables"] = other.pop("table")
        elif change == "added":
            other["more"] = jnp.zeros(3)
        target = abstract({"params": other, "opt_state": jax.eval_shape(build().init, other)})
        with pytest.raises(ValueError, match=r"structure|keys|shape|[Mm]ismatch"):
            restore(path, target)

    def test_a_damaged_checkpoint_is_refused_and_the_run_goes_on(self, checkpoint):
        path, tx, params, state = checkpoint
        largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        before = snapshot((params, state))
        target = abstract(
            {"params": params, "opt_state": jax.eval_shape(build(plan=plan_from_state(state)).init, params)}
        )
        with pytest.raises(Exception, match=r"DATA_LOSS|OUT_OF_RANGE|FAILED_PRECONDITION|ead|orrupt"):
            restore(path, target)
        same((params, state), before)
        train(tx, params, GRADS[1:], state)

    def test_boxed_and_nnx_states_have_the_same_plan(self, tmp_path):
        model = net()
        optimizer = nnx.Optimizer(model, build(), wrt=nnx.Param)
        optimizer.opt_state = calibrate(optimizer.opt_state, nnx_grads(model))
        plan = plan_from_state(optimizer.opt_state)
        state = nnx.state(optimizer)
        words = np.asarray(state["opt_state"][1]["format"][...])
        for name, item in (("state", state), ("pure", nnx.to_pure_dict(state))):
            save(tmp_path / name, item)
            assert plan_from_state(metadata(tmp_path / name), words).leaves == plan.leaves
        again = net()
        resumed = nnx.Optimizer(again, build(plan=plan), wrt=nnx.Param)
        nnx.update(resumed, restore(tmp_path / "state", abstract(nnx.state(resumed))))
        nnx_step(model, optimizer)
        nnx_step(again, resumed)
        same(nnx.state(model), nnx.state(again))


RESUME = """
    import pathlib, sys, jax, orbax.checkpoint
    sys.path.insert(0, sys.argv[1])
    import test_checkpoints as t
    from gefen_jax import plan_from_state
    path = pathlib.Path(sys.argv[2])
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path)
    plan = plan_from_state(found["opt_state"])
    tx = t.build(plan=plan)
    params = jax.eval_shape(lambda: t.tree(0))
    item = t.restore(path, t.abstract({"params": params, "opt_state": jax.eval_shape(tx.init, params)}))
    moved, state = t.train(tx, item["params"], t.GRADS[1:], item["opt_state"])
    t.save(path.parent / "later", {"params": moved, "opt_state": state})
"""


def test_a_fresh_process_continues_bit_for_bit_without_the_first_gradients(checkpoint):
    path, tx, params, state = checkpoint
    command = [sys.executable, "-c", textwrap.dedent(RESUME), str(pathlib.Path(__file__).parent), str(path)]
    subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    expected, expected_state = train(tx, params, GRADS[1:], state)
    target = abstract({"params": expected, "opt_state": expected_state})
    same(restore(path.parent / "later", target), {"params": expected, "opt_state": expected_state})


class TestFlaxSerialization:
    """`to_bytes` and `from_bytes`: shapes of the file win, and the state's shapes are its structure."""

    @pytest.mark.parametrize("which", OPTIONS)
    def test_comes_back_bit_for_bit_and_steps_on(self, which):
        tx, params, state = running(which)
        found = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
        same(found, state)
        same(train(tx, params, GRADS[1:], found), train(tx, params, GRADS[1:], state))

    def test_restored_numpy_arrays_can_be_explained_and_calibrated(self):
        tx, params, state = running()
        found = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
        assert isinstance(found[1].codebook, np.ndarray)
        assert str(explain(found)) == str(explain(state))
        other = learn_plan(structured(7))
        same(calibrate(found, other), calibrate(state, other))
        same(calibrate(found, plan_from_state(state)), state)

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
    def test_a_truncated_file_is_refused(self, share):
        tx, params, state = running()
        data = serialization.to_bytes(state)
        target = tx.init(params)
        before = snapshot(target)
        with pytest.raises(ValueError, match="Unpack failed: incomplete input"):
            serialization.from_bytes(target, data[: int(len(data) * share)])
        same(target, before)

    def test_a_template_of_a_larger_tree_is_refused(self):
        _, params, state = running()
        larger = build().init(params | {"more": jnp.zeros(3)})
        with pytest.raises(ValueError, match=r"keys .*more"):
            serialization.from_bytes(larger, serialization.to_bytes(state))

    def test_a_template_of_a_smaller_tree_is_refused_by_the_step(self):
        """Flax leaves out what the template lacks; the state's format still describes all of it."""
        tx, params, state = running()
        smaller = {"dense": params["dense"]}
        found = serialization.from_bytes(tx.init(smaller), serialization.to_bytes(state))
        with pytest.raises(ValueError, match=r"state's format is uint32\[5\], expected uint32\[4\]"):
            train(tx, smaller, [{"dense": GRADS[1]["dense"]}], found)
        with pytest.raises(ValueError, match="format describes 3 leaves, and there are 2"):
            explain(found)

    def test_a_state_of_another_width_or_tree_is_refused_by_the_step(self):
        """Flax takes whatever shapes the file has: the step then sees that they are not its own."""
        tx, params, _ = running()
        _, _, four = running("four bits")
        found = serialization.from_bytes(tx.init(params), serialization.to_bytes(four))
        with pytest.raises(ValueError, match=r"codebook is float32\[16\], expected float32\[256\]"):
            train(tx, params, GRADS[1:], found)
        other = tree(0) | {"table": tree(0)["table"].T}
        found = serialization.from_bytes(tx.init(params), serialization.to_bytes(build().init(other)))
        with pytest.raises(ValueError, match=r"gradient of 'table' has shape \(640, 16\), the state was made for"):
            train(tx, params, GRADS[1:], found)


class TestPickle:
    """pickle."""

    def test_comes_back_bit_for_bit_and_steps_on(self):
        tx, params, state = running()
        found = pickle.loads(pickle.dumps(state))
        same(found, state)
        same(train(tx, params, GRADS[1:], found), train(tx, params, GRADS[1:], state))

    def test_plans_can_be_pickled(self):
        plan = learn_plan(structured(0))
        assert pickle.loads(pickle.dumps(plan)) == plan

    def test_a_truncated_file_is_refused(self):
        data = pickle.dumps(running()[2])
        with pytest.raises((pickle.UnpicklingError, EOFError)):
            pickle.loads(data[: len(data) // 2])


def test_leaves_through_numpy_and_lists_step_on():
    tx, params, state = running()
    leaves, treedef = jax.tree.flatten(state)
    copies = [np.array(leaf) for leaf in leaves]
    same(train(tx, params, GRADS[1:], treedef.unflatten(copies)), train(tx, params, GRADS[1:], state))


def test_leaves_in_another_order_or_number_are_refused():
    tx, params, state = running()
    leaves, treedef = jax.tree.flatten(state)
    with pytest.raises(ValueError, match=r"state's count is .*, expected int32\[\]"):
        train(tx, params, GRADS[1:], treedef.unflatten(leaves[::-1]))
    with pytest.raises(ValueError, match="leaves"):
        treedef.unflatten(leaves[:-1])
