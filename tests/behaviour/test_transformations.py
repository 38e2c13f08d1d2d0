"""JAX's transformations around a step: vmap, remat, accumulation, export, caches, guards."""

import contextlib
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import apply, close, normal, same, structured, train, tree

from gefen_jax import calibrate, gefen, learn_plan

TX = gefen(1e-2)
GRADS = [tree(seed) for seed in (1, 2)]


def test_vmap_over_seeds_equals_the_runs_one_by_one():
    plan = learn_plan(structured(0))
    tx = gefen(1e-2, plan=plan)
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    params = stack([tree(10), tree(20)])
    step = jax.jit(jax.vmap(lambda p, s, g: apply(tx, p, s, g)))
    moved, state = params, jax.vmap(tx.init)(params)
    for seed in (1, 2):
        moved, state = step(moved, state, stack([tree(seed), tree(seed + 5)]))
    for i, (start, offset) in enumerate([(10, 0), (20, 5)]):
        alone, alone_state = train(tx, tree(start), [tree(1 + offset), tree(2 + offset)])
        one = jax.tree.map(lambda x, i=i: x[i], (moved, state))
        close(one[0], alone, rtol=3e-7, atol=1e-8)
        same(one[1].mu, alone_state.mu)
        same(one[1].format, alone_state.format)


def test_vmap_over_a_stacked_axis_of_layers():
    """Scanned layers, each with its own optimizer: `vmap(init)` and `vmap(update)` equal the layers one by one."""
    layers = tree(3, {"kernel": (3, 96, 192), "scale": (3, 96)})
    grads = tree(4, {"kernel": (3, 96, 192), "scale": (3, 96)})
    updates, state = jax.jit(jax.vmap(TX.update))(grads, jax.vmap(TX.init)(layers), layers)
    for i in range(3):
        layer, g = jax.tree.map(lambda x, i=i: x[i], (layers, grads))
        alone, alone_state = jax.jit(TX.update)(g, TX.init(layer), layer)
        close(jax.tree.map(lambda x, i=i: x[i], updates), alone, rtol=3e-7, atol=1e-9)
        same(jax.tree.map(lambda x, i=i: x[i], state.mu), alone_state.mu)


def loss(params, batch):
    hidden = jnp.tanh(batch @ params["dense"]["kernel"] + params["dense"]["bias"])
    return jnp.mean(hidden[:, :160].reshape(-1, 10, 16) @ params["table"][:64].reshape(16, -1)[:, :16])


def test_remat_and_gradient_accumulation_in_a_scan():
    params, batches = tree(0), jnp.stack([tree(seed, (4, 96)) for seed in range(3)])

    def step(params, opt_state, f):
        def accumulate(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(f)(params, batch)), None

        total, _ = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), batches)
        return apply(TX, params, opt_state, jax.tree.map(lambda g: g / 3, total))

    plain = jax.jit(lambda p, s: step(p, s, loss))(params, TX.init(params))
    again = jax.jit(lambda p, s: step(p, s, jax.checkpoint(loss)))(params, TX.init(params))
    whole = jax.jit(
        lambda p, s: apply(TX, p, s, jax.grad(lambda p: jnp.mean(jax.vmap(lambda b: loss(p, b))(batches)))(p))
    )
    close(plain[0], again[0], rtol=1e-6, atol=1e-6)
    expected = whole(params, TX.init(params))[0]
    moved = [np.abs(np.asarray(a) - np.asarray(b)) > 1e-3 for a, b in zip(*map(jax.tree.leaves, (plain[0], expected)))]
    assert all(differs.mean() < 0.02 for differs in moved)  # the sign of a gradient near 0 may differ


def test_a_gradient_flows_through_an_update():
    """Meta-learning: the update is differentiable in the learning rate, codes and all."""
    params, grads = tree(0), GRADS[0]
    state = TX.init(params)

    def outcome(rate):
        updates, _ = gefen(rate, weight_decay=0.0).update(grads, state, params)
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    slope = jax.jit(jax.grad(outcome))(1e-2)
    np.testing.assert_allclose(slope, outcome_per_rate(grads, state, params), rtol=1e-5)


def outcome_per_rate(grads, state, params):
    updates, _ = jax.jit(gefen(1.0, weight_decay=0.0).update)(grads, state, params)
    return sum(float(jnp.sum(u)) for u in jax.tree.leaves(updates))


def test_a_train_step_can_be_exported_and_run_again():
    """Optax states are NamedTuples; `jax.export` stores leaves, so the step is exported over flat arrays."""
    params = tree(0)
    state = calibrate(TX.init(params), structured(0))
    leaves, treedef = jax.tree.flatten((params, state, GRADS[0]))

    def flat(*leaves):
        return jax.tree.leaves(apply(TX, *jax.tree.unflatten(treedef, leaves)))

    exported = jax.export.export(jax.jit(flat))(*leaves)
    assert "callback" not in exported.mlir_module()
    restored = jax.export.deserialize(exported.serialize())
    found = jax.tree.unflatten(jax.tree.structure((params, state)), restored.call(*leaves))
    same(found, train(TX, params, GRADS[:1], state))


def test_the_step_calls_no_host():
    params = tree(0)
    text = jax.jit(lambda p, s, g: apply(TX, p, s, g)).lower(params, TX.init(params), params).as_text()
    for word in ("callback", "infeed", "outfeed", "custom_call"):
        assert word not in text


@pytest.mark.parametrize(
    "rate", [1e-2, jnp.float32(1e-2), optax.linear_schedule(1e-2, 0, 10)], ids=["float", "array", "schedule"]
)
def test_no_transfer_to_or_from_the_host(rate):
    """Nothing reads a learning rate or the format inside the step (closed-over arrays are constants of the program)."""
    params = tree(0)
    tx = gefen(rate)
    state = tx.init(params)
    step = jax.jit(lambda p, s, g: apply(tx, p, s, g))
    step(params, state, params)
    with jax.transfer_guard("disallow"):
        moved, state = step(params, state, params)
        jax.block_until_ready(step(moved, state, params))


@pytest.mark.parametrize("which", ["default", "reference", "four bits"])
def test_state_bytes_are_donated(which):
    """No warning about unused buffers (warnings are errors here), and every byte of state and parameters is aliased."""
    tx = gefen(1e-2, **{"default": {}, "reference": {"rule": "reference"}, "four bits": {"bits": 4}}[which])
    params = tree(0)
    state = tx.init(params)
    compiled = jax.jit(lambda p, s, g: apply(tx, p, s, g), donate_argnums=(0, 1)).lower(params, state, params).compile()
    held = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    assert compiled.memory_analysis().alias_size_in_bytes >= held


def test_the_codebook_may_be_given_twice_while_the_state_is_donated():
    params = tree(0)
    state = TX.init(params)
    words = jnp.array(state.codebook)
    step = jax.jit(lambda s, p, g, words: (apply(TX, p, s, g), words.sum()), donate_argnums=0)
    (_, new), total = step(state, params, GRADS[0], words)
    assert float(total) == pytest.approx(float(words.sum()))
    same(new.codebook, words)


def test_remade_transformations_with_the_same_arguments_are_one_program():
    params = tree(0)
    programs = {
        jax.jit(lambda p, s, g, tx=tx: apply(tx, p, s, g)).lower(params, tx.init(params), params).as_text()
        for tx in (gefen(1e-2), gefen(1e-2))
    }
    assert len(programs) == 1


def test_eval_shape_of_init_touches_no_device_memory():
    """A tree of 2^33 elements: only shapes."""
    huge = {"w": jax.ShapeDtypeStruct((2**17, 2**16), jnp.bfloat16)}
    state = jax.eval_shape(TX.init, huge)
    assert state.mu["w"].shape == (2**17, 2**16)
    updates, new = jax.eval_shape(TX.update, huge, state, huge)
    assert updates["w"].shape == huge["w"].shape
    assert jax.tree.structure(new) == jax.tree.structure(state)


PROGRAM = """
    import sys, jax, jax.numpy as jnp, optax
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda name, **kw: events.append(name.split("/")[-1]))
    from gefen_jax import gefen
    params = {"kernel": jnp.ones((96, 192)), "bias": jnp.ones(192)}
    tx = gefen(optax.cosine_decay_schedule(1e-3, 100))
    state = tx.init(params)
    events.clear()
    jax.jit(tx.update)(params, state, params)
    print(events.count("cache_hits"), events.count("cache_misses"))
"""


def test_a_second_process_finds_the_step_in_the_compilation_cache(tmp_path):
    def run():
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        return tuple(map(int, done.stdout.split()))

    assert run() == (0, 1)
    assert run() == (1, 0)


@pytest.mark.parametrize(
    "options", [{}, {"rule": "reference"}, {"min_size": 0, "bits": 4}, {"codec": "companding"}], ids=str
)
def test_jaxs_strict_modes(options):
    """No implicit promotion of dtypes or ranks, no leaked tracer, no NaN: zero gradients divide 0 by 0 if unguarded."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(jax.numpy_dtype_promotion("strict"))
        modes.enter_context(jax.numpy_rank_promotion("raise"))
        modes.enter_context(jax.debug_nans(True))
        modes.enter_context(jax.checking_leaks())
        tx = gefen(optax.linear_schedule(1e-2, 0, 10), **options)
        params = {"w": normal(0, (64, 96)), "v": normal(1, (5,)), "large": normal(2, (320, 128))}
        state = tx.init(params)
        update = jax.jit(tx.update)
        for g in (jax.tree.map(jnp.zeros_like, params), params):
            updates, state = update(g, state, params)
        assert all(bool(jnp.isfinite(u).all()) for u in jax.tree.leaves(updates))
