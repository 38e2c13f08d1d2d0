"""What the compiled step sends between devices: nothing where blocks are local, else statistics alone.

Each case compiles one step and reads XLA's program: the operation, type and shape of every collective in it.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from eight_cases import AUTO, EXPLICIT, collectives, sums, tree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import gefen, learn_plan, state_sharding

MESHES = {"8": ((8,), ("d",)), "2x4": ((2, 4), ("f", "t"))}


def mesh_of(name, kind=AUTO):
    shape, names = MESHES[name]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def compiled_step(tx, shape, mesh, spec, *, apply=False):
    """The compiled step of one parameter, all arrays placed by its sharding."""
    sharding = NamedSharding(mesh, spec)
    abstract = jax.eval_shape(tx.init, jax.ShapeDtypeStruct(shape, jnp.float32))
    as_placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    opt_state = jax.tree.map(as_placed, abstract, state_sharding(abstract, sharding))
    p = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    if apply:
        return jax.jit(tx.apply).lower(p, p, opt_state).compile()
    return jax.jit(tx.update).lower(p, opt_state, p).compile()


def test_the_reader_sees_what_there_is():
    """A replicated copy of a sharded array is one all-gather of all of it, a sum to one number an all-reduction."""
    sharding = NamedSharding(mesh_of("8"), P("d"))
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=sharding)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, P())).lower(x).compile()
    assert collectives(gather) == [("all-gather", "f32", 1024)]
    both = jax.jit(lambda x: (jnp.sum(x), jnp.max(x, 0))).lower(x).compile()
    assert collectives(both) == sums(1, 16)


KERNEL, LAYERS, EMBED = (128, 256), (4, 64, 64), (640, 16)
CASES = {
    # One row of the kernel is one momentum block; rows and columns are its second moment.
    "data parallel": (KERNEL, "8", P(), {}, sums()),
    "FSDP, rows": (KERNEL, "8", P("d"), {}, sums(256, 1)),  # the column factor, and the mean of the row factor
    "FSDP, columns": (KERNEL, "8", P(None, "d"), {}, sums(128, 128)),  # the row factor, and each row's maximum
    "FSDP x tensor parallel": (KERNEL, "2x4", P("f", "t"), {}, sums(64, 64, 64, 1)),  # all of these, on 64 x 64 shards
    "4 bits, rows": (KERNEL, "8", P("d"), {"bits": 4}, sums(256, 1)),
    # Two momentum blocks a row, each on four devices: their maxima are reduced there, and all devices keep all of them.
    "4 bits, columns": (KERNEL, "8", P(None, "d"), {"bits": 4}, [("all-gather", "f32", 256), *sums(128, 128)]),
    "companding": (KERNEL, "8", P("d"), {"codec": "companding"}, sums(256, 1)),
    "one mean per column, rows": (KERNEL, "8", P("d"), {"second_moment": "block"}, sums(256)),
    "one mean per column, columns": (KERNEL, "8", P(None, "d"), {"second_moment": "block"}, sums(128)),
    "full second moment, rows": (KERNEL, "8", P("d"), {"second_moment": "full"}, sums()),
    "full second moment, columns": (KERNEL, "8", P(None, "d"), {"second_moment": "full"}, sums(128)),
    "exact Adam": (KERNEL, "2x4", P("f", "t"), {"full_precision": ""}, sums()),
    "scanned layers": (LAYERS, "8", P(None, "d"), {}, sums(64, 1)),
    "layers over devices": (LAYERS, "2x4", P("t", "f"), {}, sums(64, 64, 1, 1)),  # over one mesh axis after the other
    "embedding, rows": (EMBED, "8", P("d"), {}, sums()),  # blocks of 8 rows, 80 rows a device
    "embedding, columns": (EMBED, "8", P(None, "d"), {}, sums(80, 80)),
}


@pytest.mark.parametrize("name", CASES)
def test_only_statistics_travel(name):
    shape, mesh, spec, options, expected = CASES[name]
    assert collectives(compiled_step(gefen(1e-3, **options), shape, mesh_of(mesh), spec)) == expected


@pytest.mark.parametrize("name", ["FSDP, columns", "FSDP x tensor parallel", "embedding, rows"])
def test_explicit_meshes_send_the_same(name):
    shape, mesh, spec, options, expected = CASES[name]
    assert collectives(compiled_step(gefen(1e-3, **options), shape, mesh_of(mesh, EXPLICIT), spec)) == expected


def test_apply_sends_the_same():
    shape, mesh, spec, options, expected = CASES["FSDP x tensor parallel"]
    assert collectives(compiled_step(gefen(1e-3, **options), shape, mesh_of(mesh), spec, apply=True)) == expected


@pytest.mark.parametrize("second_moment", ["block", "auto"])
@pytest.mark.parametrize(("mesh", "spec"), [("8", P("d")), ("8", P(None, "d")), ("2x4", P("f", "t"))])
def test_aligned_blocks_are_local_on_any_axis(mesh, spec, second_moment):
    """``align`` is at least the number of devices along any axis; factors still cross shards, blocks do not."""
    plan = learn_plan(tree(0, KERNEL), second_moment=second_moment, align=8)
    found = collectives(compiled_step(gefen(1e-3, plan=plan), KERNEL, mesh_of(mesh), spec))
    if second_moment == "block":
        assert plan.leaves[""].nu[0] == "tile"
        assert found == sums()
    else:
        assert plan.leaves[""].nu[0] == "factored"
        expected = {("d",): sums(256, 1), (None, "d"): sums(128), ("f", "t"): sums(64, 64, 1)}
        assert found == expected[tuple(spec)]


# -------------------------------------------------------------------------------- whole training steps


def training_step(tx, zero1=False):
    """The compiled step of two dense layers under FSDP (or ZeRO-1: parameters replicated, state sharded)."""
    mesh = mesh_of("8")
    rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    shapes = {"in": (128, 512), "bias": (512,), "out": (512, 128)}

    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["in"] + params["bias"]) @ params["out"]) ** 2)

    def step(params, opt_state, x):
        grads = jax.grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    as_placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    bare = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    abstract = jax.eval_shape(tx.init, bare)
    held = dict.fromkeys(shapes, everywhere if zero1 else rows)
    state_held = state_sharding(abstract, dict.fromkeys(shapes, rows))
    params = jax.tree.map(as_placed, bare, held)
    opt_state = jax.tree.map(as_placed, abstract, state_held)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=rows)
    return collectives(jax.jit(step, out_shardings=(held, state_held)).lower(params, opt_state, x).compile())


def beyond(found, plain):
    """The entries of a sorted list that another does not have."""
    rest = list(found)
    for entry in plain:
        rest.remove(entry)
    return rest


def test_fsdp_sends_what_sgd_sends_and_statistics():
    plain = training_step(optax.sgd(1e-3))
    assert sum(elements for _, _, elements in plain) >= 2 * 128 * 512  # parameters are gathered
    assert training_step(optax.adamw(1e-3)) == plain
    grads = {name: tree(i, shape) for i, (name, shape) in enumerate({"in": (128, 512), "out": (512, 128)}.items())}
    plan = learn_plan(grads | {"bias": tree(2, (512,))}, second_moment="block", align=8)
    assert training_step(gefen(1e-3, plan=plan)) == plain
    extra = beyond(training_step(gefen(1e-3)), plain)
    assert extra == sums(512, 1, 128, 1)  # column factors and means of row factors of the two kernels


def test_zero1_gathers_updates_once_as_adam_does():
    plain = [entry for entry in training_step(optax.adamw(1e-3), zero1=True) if entry[0] == "all-gather"]
    found = training_step(gefen(1e-3), zero1=True)
    assert [entry for entry in found if entry[0] == "all-gather"] == plain
    assert {dtype for _, dtype, _ in found} == {"f32"}  # codes stay where they are
