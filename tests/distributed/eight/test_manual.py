"""Inside `jax.shard_map`: the same numbers as on one device, and an error where shards would be silently wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_cases import AUTO, EXPLICIT, LAYOUTS, close, collectives, placed, same, sums, train, tree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import diagnose, gefen, learn_plan, state_sharding

PARAMS = tree(0)
GRADIENTS = [tree(seed, scale=3.0**seed) for seed in (1, 2, 3)]
OPTIONS = {
    "factored": {},
    "factored, aligned": {"align": 8},
    "block, aligned": {"second_moment": "block", "align": 8},
    "4 bits, aligned": {"bits": 4, "align": 8},
}


@functools.cache
def made(option):
    """A transformation with a learned plan, and its run on one device."""
    tx = gefen(1e-2, weight_decay=0.1, plan=learn_plan(GRADIENTS[0], **OPTIONS[option]))
    params = jax.tree.map(jnp.asarray, PARAMS)
    return tx, *train(tx, params, tx.init(params), GRADIENTS)[:2]


def specs_of(shardings):
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def manual_step(tx, opt_state, shardings, **options):
    """One jitted step in which every device holds its shards alone, and the specs of parameters and state."""

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    specs, state_specs = specs_of(shardings), specs_of(state_sharding(opt_state, shardings))
    mesh = jax.tree.leaves(shardings)[0].mesh
    where = {"in_specs": (specs, state_specs, specs), "out_specs": (specs, state_specs)}
    return jax.jit(jax.shard_map(step, mesh=mesh, **(where | options)))


def run(tx, layout, kind=AUTO, **options):
    shardings = LAYOUTS[layout].shardings(kind)
    params = placed(PARAMS, shardings)
    opt_state = tx.init(params)
    step = manual_step(tx, opt_state, shardings, **options)
    for grads in GRADIENTS:
        params, opt_state = step(params, opt_state, placed(grads, shardings))
    assert step._cache_size() == 1
    return params, opt_state


def assert_alike(found, params, opt_state):
    same(found[1].mu, opt_state.mu)
    close(found[1], opt_state, rtol=2e-6)
    close(found[0], params, rtol=1e-6, atol=1e-7)


CASES = [
    ("data", AUTO, "factored"),
    ("columns", EXPLICIT, "factored"),
    ("2x4", AUTO, "factored, aligned"),
    ("columns", AUTO, "block, aligned"),
    ("4x2", EXPLICIT, "4 bits, aligned"),
]


@pytest.mark.parametrize(("layout", "kind", "option"), CASES, ids=[f"{a}-{k.name}-{o}" for a, k, o in CASES])
def test_three_steps_are_those_of_one_device(layout, kind, option):
    tx, *alone = made(option)
    assert_alike(run(tx, layout, kind), *alone)


@pytest.mark.parametrize("layout", ["rows", "2x4"])
def test_local_blocks_need_no_checking(layout):
    tx, *alone = made("block, aligned")
    assert_alike(run(tx, layout, check_vma=False), *alone)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_one_axis_manual_the_other_not(kind):
    tx, *alone = made("factored, aligned")
    shardings = LAYOUTS["2x4"].shardings(kind)
    params = placed(PARAMS, shardings)
    opt_state = tx.init(params)

    def only(sharding):
        return P(
            *("f" if "f" in (names if isinstance(names, tuple) else (names,)) else None for names in sharding.spec)
        )

    specs = jax.tree.map(only, shardings)
    state_specs = jax.tree.map(only, state_sharding(opt_state, shardings))
    where = {"in_specs": (specs, state_specs, specs), "out_specs": (specs, state_specs)}
    step = manual_step(tx, opt_state, shardings, axis_names={"f"}, **where)
    for grads in GRADIENTS:
        params, opt_state = step(params, opt_state, placed(grads, shardings))
    assert_alike((params, opt_state), *alone)


@pytest.mark.parametrize(
    ("option", "expected"), [("factored", sums(256, 1)), ("block, aligned", sums())], ids=["factored", "block"]
)
def test_only_statistics_travel(option, expected):
    """The kernel's rows on eight devices: the column factor and the mean of the row factor, or nothing."""
    sharding = LAYOUTS["rows"].shardings()["attention"]["kernel"]
    plan_of_one = learn_plan({"w": GRADIENTS[0]["attention"]["kernel"]}, **OPTIONS[option])
    tx = gefen(1e-2, plan=plan_of_one)
    params = {"w": jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=sharding)}
    opt_state = jax.eval_shape(tx.init, params)
    held = state_sharding(opt_state, {"w": sharding})
    given = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), opt_state, held)
    step = manual_step(tx, opt_state, {"w": sharding})
    assert collectives(step.lower(params, given, params).compile()) == expected


def test_fsdp_written_by_hand_trains_like_the_automatic_one():
    """Parameters gathered, gradients summed and scattered by hand: what a manual training program does."""
    shapes = {"in": (64, 128), "out": (128, 64)}
    params, x = tree(0, shapes, scale=0.1), tree(5, (64, 64))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    rows = NamedSharding(mesh, P("d"))
    tx = gefen(1e-2, plan=learn_plan(tree(1, shapes)))

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)

    def step(params, opt_state, x):
        whole = jax.tree.map(lambda p: jax.lax.all_gather(p, "d", tiled=True), params)
        grads = jax.grad(loss)(whole, x)
        grads = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "d", tiled=True) / 8, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def by_hand(params, opt_state, x):
        specs = specs_of(dict.fromkeys(shapes, rows)), specs_of(state_sharding(opt_state, rows))
        where = {"in_specs": (*specs, P("d")), "out_specs": specs}
        return jax.jit(jax.shard_map(step, mesh=mesh, **where))(params, opt_state, x)

    @jax.jit
    def automatic(params, opt_state, x):
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    there = jax.device_put(params, rows)
    found, found_state = by_hand(there, tx.init(there), jax.device_put(x, rows))
    expected, expected_state = automatic(params, tx.init(jax.tree.map(jnp.asarray, params)), x)
    close((found_state.nu, found_state.nu_cross), (expected_state.nu, expected_state.nu_cross), rtol=1e-5)
    close(found, expected, rtol=1e-5, atol=1e-6)
    for name in shapes:  # the sums of gradients round differently, so a code may move by one word
        moved = np.abs(np.int32(found_state.mu[name]) - np.int32(expected_state.mu[name]))
        assert moved.max() <= 1
        assert (moved > 0).mean() < 1e-3


# -------------------------------------------------------------------------------- what must not pass in silence


def test_gradients_that_were_not_averaged():
    params = {"w": tree(0, (64, 128))}
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    tx = gefen(1e-2)
    opt_state = tx.init(jax.tree.map(jnp.asarray, params))

    def step(params, opt_state, x, average):
        def loss(p):
            return jnp.mean((x @ p["w"]) ** 2)

        local = jax.tree.map(lambda p: jax.lax.pcast(p, "d", to="varying"), params)  # one copy on each device
        grads = jax.grad(loss)(local)
        grads = jax.lax.pmean(grads, "d") if average else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def mapped(average):
        return jax.shard_map(
            functools.partial(step, average=average), mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P()
        )

    x = tree(1, (16, 64))
    with pytest.raises(ValueError, match=r"gradient of 'w' differs over the mesh axes \['d'\].*jax.lax.pmean"):
        jax.jit(mapped(average=False))(params, opt_state, x)
    averaged, _ = jax.jit(mapped(average=True))(params, opt_state, x)
    grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    updates, _ = jax.jit(tx.update)(grads, opt_state, params)
    close(averaged, optax.apply_updates(params, updates), rtol=1e-5, atol=1e-6)


WIDE = {"deep": {"w": (64, 512)}}  # two momentum blocks in a row, eight shards of it


def wide_step(tx, **options):
    sharding = NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(AUTO,)), P(None, "d"))
    shardings = {"deep": {"w": sharding}}
    params = placed(tree(0, WIDE), shardings)
    opt_state = tx.init(params)
    return manual_step(tx, opt_state, shardings, **options)(params, opt_state, params)


def test_blocks_that_cross_shards():
    for plan in (None, learn_plan(tree(1, WIDE))):
        with pytest.raises(
            ValueError,
            match=r"inside shard_map the mu_scale of 'deep/w' has local shape \(64, 2\), not split over the mesh axes "
            r"\['d'\] as its gradient \(64, 64\) is: .*align=number of shards",
        ):
            wide_step(gefen(1e-2, plan=plan))
    wide_step(gefen(1e-2, plan=learn_plan(tree(1, WIDE), align=8)))  # as the error says


def test_statistics_that_span_shards_without_checking():
    """The plan knows the global shape, so what `check_vma=False` hides is still seen."""
    for plan in (learn_plan(tree(1, WIDE)), learn_plan(tree(1, WIDE), align=8)):
        assert plan.leaves["deep/w"].nu[0] == "factored"
        with pytest.raises(ValueError, match=r"gradient of 'deep/w' has shape \(64, 64\), the plan .*check_vma"):
            wide_step(gefen(1e-2, plan=plan), check_vma=False)
    wide_step(gefen(1e-2, plan=learn_plan(tree(1, WIDE), align=8, second_moment="block")), check_vma=False)


def test_diagnosis_of_shards():
    params = {"w": tree(0, (64, 128))}
    opt_state = gefen(1e-2).init(jax.tree.map(jnp.asarray, params))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    specs = specs_of(state_sharding(opt_state, {"w": NamedSharding(mesh, P("d"))}))
    with pytest.raises(ValueError, match=r"gradient of 'w' is a shard inside shard_map: call diagnose outside"):
        jax.jit(jax.shard_map(diagnose, mesh=mesh, in_specs=({"w": P("d")}, specs), out_specs=P()))(params, opt_state)
