"""Orbax: saved on eight devices, restored on any others to the bit; damage and wrong templates are errors."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from eight_cases import AUTO, EXPLICIT, LAYOUTS, assert_lies, close, placed, same, train, tree

from gefen_jax import calibrate, gefen, plan_from_state, state_sharding

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""When Orbax meets an error, its readers of the other arrays are cut short, and Python says so."""

PARAMS = tree(0)
GRADS = tree(1)
NEXT = tree(2)


def transformation(plan=None, **options):
    """In a chain, but without clipping, whose norm rounds differently on every mesh."""
    return optax.chain(optax.identity(), gefen(1e-2, weight_decay=0.1, plan=plan, **options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a calibrated run on 2 x 4 devices, with what was saved and the state after one more step."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    shardings = LAYOUTS["2x4"].shardings()
    tx, params = transformation(), placed(PARAMS, shardings)
    opt_state = calibrate(tx.init(params), placed(GRADS, shardings))
    params, opt_state, _ = train(tx, params, opt_state, [placed(GRADS, shardings)], shardings)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"params": params, "opt_state": opt_state})
    after = train(tx, params, opt_state, [placed(NEXT, shardings)], shardings)[:2]
    return folder, params, opt_state, after


def read_plan(folder):
    """The plan of a checkpoint: the shapes in its metadata, and the few bytes of ``format``."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def wanted(path, x):
        abstract = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        return abstract if jax.tree_util.keystr(path, simple=True).endswith("format") else ocp.PLACEHOLDER

    with ocp.PyTreeCheckpointer() as reader:
        shapes = reader.metadata(folder).item_metadata.tree
        item = jax.tree_util.tree_map_with_path(wanted, shapes)
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        restored = reader.restore(folder, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments))
    (words,) = [x for x in jax.tree.leaves(restored) if isinstance(x, jax.Array)]
    return plan_from_state(shapes, words)


def template(tx, shardings, params=PARAMS):
    """What a restored run looks like: shapes, dtypes, and where each array goes."""
    as_placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    abstract = jax.eval_shape(tx.init, params)
    return {
        "params": jax.tree.map(as_placed, params, shardings),
        "opt_state": jax.tree.map(as_placed, abstract, state_sharding(abstract, shardings)),
    }


def restore(folder, wanted):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, wanted)


FOUR = {"rows", "columns"}  # of these the mesh is also made of four devices and of one


def destinations():
    for name, kind in [("rows", AUTO), ("2x4", AUTO), ("4x2", EXPLICIT)]:
        yield f"{name} {kind.name}", LAYOUTS[name].shardings(kind)
    four = LAYOUTS["columns"]._replace(shape=(4,))
    yield "4 devices", four.shardings(AUTO, jax.devices()[4:])
    one = LAYOUTS["rows"]._replace(shape=(1,))
    yield "1 device", one.shardings(AUTO, jax.devices()[3:4])


DESTINATIONS = dict(destinations())


@pytest.mark.parametrize("destination", DESTINATIONS)
def test_restored_anywhere_to_the_bit(saved, destination):
    """Structure from the checkpoint itself, no gradients; the next step is that of the state moved there in memory."""
    folder, params, opt_state, (params_after, state_after) = saved
    shardings = DESTINATIONS[destination]
    tx = transformation(read_plan(folder))
    run = restore(folder, template(tx, shardings))
    same(run["params"], params)
    same(run["opt_state"], opt_state)
    assert_lies(run["params"], shardings)
    wanted = state_sharding(run["opt_state"], shardings)
    assert_lies(run["opt_state"], wanted)
    grads = placed(NEXT, shardings)
    found = train(tx, run["params"], run["opt_state"], [grads], shardings)[:2]
    moved = jax.device_put(opt_state, wanted)
    same(found, train(tx, jax.device_put(params, shardings), moved, [grads], shardings)[:2])
    codes, codes_there = (
        [x for x in jax.tree.leaves(tree.mu) if x.dtype == jnp.uint8] for tree in (found[1][1], state_after[1])
    )
    same(codes, codes_there)
    close(found[0], params_after, rtol=1e-6, atol=1e-7)
    if destination == "2x4 Auto":
        same(found, (params_after, state_after))


def test_the_plan_is_in_the_checkpoint(saved):
    folder, _, opt_state, _ = saved
    found, known = read_plan(folder), plan_from_state(opt_state)
    assert found.leaves == known.leaves
    assert (found.rule, found.bits, found.min_size, found.codec) == (
        known.rule,
        known.bits,
        known.min_size,
        known.codec,
    )
    assert found.codebook is None  # the state brings it
    assert {leaf.reason for leaf in found.leaves.values()} >= {"learned", "small"}
    with ocp.StandardCheckpointer() as checkpointer:
        shapes = checkpointer.metadata(folder).item_metadata.tree
    with pytest.raises(ValueError, match="restore the state's 'format' array"):
        plan_from_state(shapes)
    with pytest.raises(ValueError, match="the format describes 2 leaves, the state has 6"):
        plan_from_state(shapes, np.asarray(opt_state[1].format)[:4])


def test_a_state_saved_before_the_first_step(tmp_path):
    """Every array of a fresh state is one that a checkpoint accepts, and comes back where it was."""
    shardings = LAYOUTS["2x4"].shardings()
    tx = transformation(bits=4)
    params = placed(PARAMS, shardings)
    opt_state = tx.init(params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "fresh", {"params": params, "opt_state": opt_state})
    run = restore(tmp_path / "fresh", template(tx, shardings))
    same(run["opt_state"], opt_state)
    assert_lies(run["opt_state"], jax.tree.map(lambda x: x.sharding, opt_state))


def test_wrong_templates_are_refused(saved):
    folder, *_ = saved
    shardings = LAYOUTS["rows"].shardings()
    plan = read_plan(folder)
    other = PARAMS | {"embed": np.zeros((1280, 16), np.float32)}
    shapes = r"Requested shape: \(.*\) is not compatible with the stored shape: \(.*\)"
    wrong = {
        "not calibrated": (template(transformation(), shardings), shapes),
        "another model": (template(transformation(), shardings, other), shapes),
        "4 bits": (template(transformation(bits=4), shardings), shapes),
        "another optimizer": (template(optax.adamw(1e-3), shardings), "tree structures do not match"),
    }
    for name, (wanted, message) in wrong.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            restore(folder, wanted)
        assert re.search(message, str(caught.value)), name
    with pytest.raises(ValueError, match=r"'embed' has shape \(1280, 16\), the plan was made for \(640, 16\)"):
        transformation(plan).init(other)


def test_a_template_of_other_dtypes_is_seen_by_the_step(saved):
    """Orbax converts to the template's dtypes without a word; the optimizer does not accept the result."""
    folder, *_ = saved
    shardings = LAYOUTS["rows"].shardings()
    tx = transformation(read_plan(folder))
    wanted = template(tx, shardings)

    def cast(x):
        return x.update(dtype=jnp.bfloat16) if x.dtype == jnp.float32 and x.ndim else x

    wanted["opt_state"] = jax.tree.map(cast, wanted["opt_state"])
    run = restore(folder, wanted)
    grads = placed(GRADS, shardings)
    with pytest.raises(ValueError, match=r"the state's codebook is bfloat16\[256\], expected float32\[256\]"):
        tx.update(grads, run["opt_state"], run["params"])
    whole = restore(folder, template(tx, shardings))["opt_state"][1]
    half_cast = (run["opt_state"][0], run["opt_state"][1]._replace(codebook=whole.codebook))
    with pytest.raises(TypeError, match=r"'attention/bias' .*bfloat16"):
        tx.update(grads, half_cast, run["params"])


@pytest.mark.parametrize("damage", ["truncated data", "missing data", "truncated metadata", "missing metadata"])
def test_damage_is_an_error(saved, tmp_path, damage):
    folder, _, opt_state, _ = saved
    tx = transformation(plan_from_state(opt_state))
    shutil.copytree(folder, tmp_path / "damaged")
    data = max((tmp_path / "damaged").rglob("d/*"), key=lambda path: path.stat().st_size)
    path = data if damage.split()[1] == "data" else tmp_path / "damaged" / "_METADATA"
    if damage.startswith("truncated"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    before = jax.tree.map(np.asarray, opt_state)
    with pytest.raises(Exception, match=r"."):
        restore(tmp_path / "damaged", template(tx, LAYOUTS["rows"].shardings()))
    same(opt_state, before)
