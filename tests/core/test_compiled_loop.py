"""The compiled loop for CPUs: a twin of the step over whole arrays, and where the loop over chunks takes its place."""

import dataclasses
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import gradients, mixed, same_bits
from twins import check_twin

from gefen_jax import explain, gefen, implementation, learn_plan

VARIANTS = [
    ({}, [(64, 1024), (4, 128, 128), (3, 3, 64, 64), (2, 5, 64, 128), (49, 1000)]),
    ({"bits": 4}, [(64, 1024), (4, 128, 128), (49, 1008), (49152,)]),
    ({"second_moment": "block"}, [(64, 1024), (4, 128, 128), (40000,), (1, 65536)]),
    ({"second_moment": "block", "bits": 4}, [(1, 65536), (12, 64, 96)]),
    ({"second_moment": "full"}, [(64, 1024), (97, 512), (40000,)]),
    ({"codec": "companding"}, [(64, 1024), (36, 1024)]),
    ({"second_moment": "block", "codec": "companding"}, [(64, 1024), (40000,)]),
]
LARGE = {"w": (2048, 2048), "v": (64, 1024), "b": (300,)}


def tree(seed, shapes=None):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, (shapes or LARGE).items())}


def implementations(tx, params):
    return {row.path: row.implementation for row in explain(tx.init(params), params, tx=tx).rows}


@pytest.mark.parametrize(("options", "shapes"), VARIANTS, ids=[str(options) for options, _ in VARIANTS])
def test_the_loop_is_the_whole(options, shapes):
    check_twin("numba", options, mixed(shapes, [jnp.float32]), slack=1.5e-6)


@pytest.mark.parametrize("structure", [("tile", (1, 32)), ("tile", (8, 32)), ("tile", (64, 1)), ("tile", (1, 1))])
@pytest.mark.parametrize("momentum", [(1, 64), (8, 32)])
def test_tiles_of_all_kinds(momentum, structure):
    """Blocks of one row and of several, of the momentum and of the second moment."""
    params = tree(0, {"w": (256, 512)})
    leaf = dataclasses.replace(learn_plan(params).leaves["w"], mu=("tile", momentum), nu=structure)
    plan = dataclasses.replace(learn_plan(params), leaves={"w": leaf})
    whole, loop = (gefen(0.1, plan=plan, implementation=i) for i in ("jnp", "numba"))
    if (momentum, structure) == ((8, 32), ("tile", (1, 1))):
        because = explain(loop.init(params), params, tx=loop).rows[0].because
        assert because == "no compiled loop: blocks of its momentum reach over several of its second moment"
        return
    assert implementations(loop, params) == {"w": "numba"}
    results = [jax.jit(tx.apply)(tree(1, {"w": (256, 512)}), params, tx.init(params)) for tx in (whole, loop)]
    for one, other in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"second_moment": "block", "weight_decay": 0.0}], ids=str)
def test_apply_is_update_and_apply_updates(options):
    """State bit for bit; parameters to rounding, for the loop never rounds the update."""
    params = tree(0)
    tx = gefen(0.125, implementation="numba", **options)
    state = tx.init(params)
    update, apply = jax.jit(tx.update), jax.jit(tx.apply)
    for seed in range(3):
        g = gradients(params, seed)
        updates, expected = update(g, state, params)
        moved, state = apply(g, params, state)
        assert same_bits(state, expected)
        for name, p in optax.apply_updates(params, updates).items():
            np.testing.assert_allclose(np.asarray(moved[name]), np.asarray(p), rtol=2.0**-22, atol=2.0**-22)
        params = moved


@pytest.mark.parametrize("scale", [1e-36, 1e-32, 1e-20, 1e15])
@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"codec": "companding"}], ids=str)
def test_momentum_of_any_scale_gets_the_codes_of_the_whole(options, scale):
    """Blocks are coded relative to their maxima, down to the smallest normal numbers."""
    params = {"w": (64, 1024)}
    grads = jax.tree.map(lambda g: scale * g, tree(1, params))
    codes = []
    for name in ("jnp", "numba"):
        tx = gefen(1e-2, weight_decay=0.0, implementation=name, **options)
        _, state = jax.jit(tx.update)(grads, tx.init(tree(0, params)))
        codes.append(np.asarray(state.mu["w"]))
    assert np.mean(codes[0] != codes[1]) <= 1e-4


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4, 1e15])
@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"second_moment": "full"}, {"codec": "companding"}], ids=str)
def test_dead_coordinates_never_move(options, scale):
    params, start = tree(0, {"w": (64, 1024)}), tree(0, {"w": (64, 1024)})
    dead = np.zeros((64, 1024), bool)
    dead[::16], dead[:, ::7] = True, True
    tx = gefen(1e-2, weight_decay=0.0, implementation="numba", **options)
    state, step = tx.init(params), jax.jit(tx.apply)
    for seed in range(30):
        g = jnp.where(dead, 0, scale * tree(seed, {"w": (64, 1024)})["w"])
        params, state = step({"w": g}, params, state)
    moved = np.asarray(params["w"]) != np.asarray(start["w"])
    assert not moved[dead].any()
    assert moved[~dead].mean() > 0.99


def test_a_factor_multiplies_before_squaring():
    """Gradients whose squares overflow unless they are clipped first."""
    params, grads = tree(0, {"w": (64, 1024)}), jax.tree.map(lambda g: 1e25 * g, tree(1, {"w": (64, 1024)}))
    tx = gefen(1e-2, implementation="numba")
    found, state = jax.jit(lambda g, p, s: tx.apply(g, p, s, factor=jnp.float32(1e-25)))(grads, params, tx.init(params))
    expected, _ = tx.apply(tree(1, {"w": (64, 1024)}), params, tx.init(params))
    np.testing.assert_allclose(np.asarray(found["w"]), np.asarray(expected["w"]), rtol=0, atol=1e-6)
    assert np.isfinite(state.nu["w"]).all()


def test_large_trees_take_the_loop_by_themselves():
    """And only on one CPU device, where it repays compiling: `explain` says for each leaf what runs and why."""
    tx, small = gefen(1e-2), {"v": (64, 1024), "b": (300,)}
    assert implementations(tx, tree(0, small)) == {"b": "jnp", "v": "chunked"}
    rows = {row.path: row for row in explain(tx.init(tree(0, small)), tx=tx).rows}
    assert rows["v"].because.endswith("less than 4,194,304 elements do not repay a compiled loop")
    assert implementations(tx, tree(0)) == {"b": "jnp", "v": "numba", "w": "numba"}
    text = jax.jit(tx.apply).lower(tree(0), tree(0), tx.init(tree(0))).as_text()
    assert text.count("gefen_jax_step") == 2


def test_what_has_no_loop_runs_in_chunks_and_says_so():
    params = {"w": jnp.ones((2048, 2048), jnp.bfloat16), "n": jnp.ones((400_000, 6))}
    rows = {row.path: row for row in explain(gefen(1e-2, min_size=0).init(params), params, implementation="numba").rows}
    assert rows["w"].implementation == rows["n"].implementation == "chunked"
    assert rows["w"].because == "no compiled loop: parameters are bfloat16, and it takes float32"
    assert rows["n"].because.startswith("no compiled loop: its blocks hold")


def test_without_a_compiler_there_is_no_loop(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    params = tree(0, {"w": (64, 1024)})
    tx = gefen(1e-2, implementation="numba")
    row = explain(tx.init(params), params, tx=tx).rows[0]
    assert (row.implementation, row.because.split(",")[0]) == ("chunked", "no compiled loop: NUMBA_DISABLE_JIT is set")
    assert "gefen_jax_step" not in jax.jit(tx.apply).lower(params, params, tx.init(params)).as_text()


def test_all_is_donated_and_traced_once():
    tx = gefen(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1)
    params = tree(0)
    state = tx.init(params)
    size, traces = sum(x.nbytes for x in jax.tree.leaves((params, state))), 0

    def step(grads, params, state):
        nonlocal traces
        traces += 1
        return tx.apply(grads, params, state)

    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(params, params, state).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes <= 0.1 * sum(p.size for p in params.values())
    loop = jax.jit(step)
    expected = params, state
    for seed in range(3):
        expected = loop(tree(seed), *expected)
    assert traces == 1  # the compiled program above was traced for it
    many = jax.tree.map(lambda *xs: jnp.stack(xs), *map(tree, range(3)))
    found = jax.jit(lambda c: jax.lax.scan(lambda c, g: (tx.apply(g, *c), None), c, many)[0])((params, state))
    assert same_bits(found[1], expected[1])


def test_vmap_derivatives_and_exported_programs_take_chunks():
    """Results of the loop to rounding, from programs that do not call it."""
    shapes = {"w": (64, 1024)}
    tx, params, grads = gefen(1e-2, weight_decay=0.0, implementation="numba"), tree(0, shapes), tree(1, shapes)
    state = tx.init(params)
    expected = np.asarray(jax.jit(tx.update)(grads, state, params)[0]["w"])

    def rate_of(rate):
        return gefen(rate, weight_decay=0.0, implementation="numba").update(grads, state, params)[0]["w"].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(rate_of))(1e-2), expected.sum() / 1e-2, rtol=1e-3)
    many = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
    mapped = jax.jit(jax.vmap(tx.update, in_axes=(0, None, None)))(many, state, params)[0]["w"]
    np.testing.assert_allclose(np.asarray(mapped[0]), expected, rtol=1e-5, atol=1e-8)

    leaves, treedef = jax.tree.flatten((grads, state, params))
    exported = jax.export.export(jax.jit(lambda *x: jax.tree.leaves(tx.update(*jax.tree.unflatten(treedef, x)))))(
        *leaves
    )
    assert implementation.cpu.TARGET not in exported.mlir_module()
    restored = jax.export.deserialize(exported.serialize()).call(*leaves)
    np.testing.assert_allclose(np.asarray(restored[0]), expected, rtol=1e-5, atol=1e-8)


def test_one_step_without_jit():
    shapes = {"w": (64, 1024)}
    tx, params = gefen(1e-2, implementation="numba"), tree(0, shapes)
    jitted = jax.jit(tx.apply)(tree(1, shapes), params, tx.init(params))
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            eager = tx.apply(tree(1, shapes), params, tx.init(params))
        for one, other in zip(*map(jax.tree.leaves, (eager, jitted))):
            np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=1e-6, atol=1e-7)


def test_a_second_eager_step_compiles_nothing(monkeypatch):
    shapes, lowered = {"w": (64, 1024)}, []
    tx, params = gefen(1e-2, implementation="numba"), tree(0, {"w": (64, 1024)})
    state = tx.init(params)
    tx.apply(tree(1, shapes), params, state)
    monkeypatch.setattr(implementation.cpu, "register", lambda: lowered.append(1))
    tx.apply(tree(2, shapes), params, state)
    assert not lowered


def test_threads_register_the_loop_once(monkeypatch):
    """XLA refuses a second function of the same name."""
    calls = []

    @functools.cache
    def slow():
        calls.append(1)
        time.sleep(0.05)

    monkeypatch.setattr(implementation.cpu, "_registered", slow)
    threads = [threading.Thread(target=implementation.cpu.register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_debug_nans_names_the_step_that_made_one():
    params, grads = tree(0, {"w": (64, 1024)}), tree(1, {"w": (64, 1024)})
    bad = {"w": grads["w"].at[3, 700].set(jnp.nan)}
    tx = gefen(1e-2, implementation="numba")
    state = tx.init(params)
    with jax.debug_nans(True):
        jax.jit(tx.apply)(grads, params, state)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.jit(tx.apply)(bad, params, state)


@pytest.mark.parametrize("rate", [np.inf, np.nan, 0.0])
@pytest.mark.parametrize("way", ["update", "apply"])
def test_no_decay_never_reads_the_parameter(way, rate):
    """Whatever rate a schedule gives: the update may have been given no parameter, and 0 times infinity is NaN."""
    params, grads = tree(0, {"w": (64, 1024)}), tree(1, {"w": (64, 1024)})
    params["w"] = params["w"].at[3, 3].set(np.inf)

    def result(which):
        tx = gefen(lambda count: jnp.float32(rate), weight_decay=0.0, implementation=which)
        state = tx.init(params)
        if way == "apply":
            return jax.jit(tx.apply)(grads, params, state)[0]["w"]
        return jax.jit(tx.update)(grads, state)[0]["w"]

    np.testing.assert_array_equal(result("numba"), result("jnp"))
