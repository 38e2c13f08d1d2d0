"""The kernels behind the optimizer: `implementation=`, `apply`, `fused_chain`, and what says which path runs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gefen_pallas.compiled
from gefen_jax import explain, gefen, implementation, kernels, scale_by_gefen
from gefen_jax.fused import apply, clip_by_global_norm, fused_chain, global_norm
from gefen_jax.implementation import how
from gefen_jax.update import Leaf

SHAPES = {"kernel": (64, 128), "bias": (40,), "heads": (3, 32, 64), "scale": ()}


def tree(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items())}


def train(step, opt_state, params, steps=2):
    for seed in range(steps):
        params, opt_state = step(tree(seed + 1), params, opt_state)
    return params, opt_state


def updating(tx):
    def step(grads, params, opt_state):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step)


def equal(a, b, atol=3e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=atol), a, b)


@pytest.mark.parametrize("second", ["auto", "block", "full"])
def test_kernels_train_like_the_plain_step(second):
    """Schedule, mask and weight decay included; codes may differ at a threshold, which two steps hardly show."""
    rate = optax.linear_schedule(1e-2, 1e-3, 4)
    mask = {name: len(shape) > 1 for name, shape in SHAPES.items()}
    made = [
        gefen(rate, weight_decay=0.1, mask=mask, second_moment=second, implementation=name)
        for name in ("jnp", "pallas")
    ]
    plain = train(updating(made[0]), made[0].init(tree(0)), tree(0))
    kernel = train(updating(made[1]), made[1].init(tree(0)), tree(0))
    fused = train(jax.jit(made[1].apply), made[1].init(tree(0)), tree(0))
    equal(plain[0], kernel[0])
    equal(plain[0], fused[0])
    for field in ("mu_scale", "nu", "nu_cross"):
        equal(getattr(plain[1], field), getattr(kernel[1], field))
        equal(getattr(plain[1], field), getattr(fused[1], field))
    for a, b in zip(jax.tree.leaves(plain[1].mu), jax.tree.leaves(fused[1].mu)):
        assert (np.asarray(a) != np.asarray(b)).mean() < 2e-3 or a.dtype == jnp.float32


def test_scaling_alone_needs_no_parameters():
    plain, kernel = (scale_by_gefen(implementation=name) for name in ("jnp", "pallas"))
    expected, _ = plain.update(tree(1), plain.init(tree(0)))
    found, _ = jax.jit(kernel.update)(tree(1), kernel.init(tree(0)))
    equal(expected, found)


def test_traced_hyperparameters_and_masks():
    make = optax.inject_hyperparams(gefen, static_args=("mask", "full_precision", "implementation"))
    states = []
    for name in ("jnp", "pallas"):
        tx = make(learning_rate=1e-2, weight_decay=0.3, implementation=name)
        states.append(train(updating(tx), tx.init(tree(0)), tree(0), 1)[0])
    equal(*states)


def test_vmap_takes_the_plain_step():
    stack = lambda x: jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), x)  # noqa: E731
    results = []
    for name in ("jnp", "pallas"):
        tx = gefen(1e-2, implementation=name)
        step = jax.jit(jax.vmap(lambda g, p, s, tx=tx: tx.apply(g, p, s)))
        results.append(step(stack(tree(1)), stack(tree(0)), jax.vmap(tx.init)(stack(tree(0))))[0])
    equal(*results)


def test_one_chain_is_optax_chain():
    """Clipping inside the step, whatever comes before it, against the same transformations in Optax's chain."""
    parts = [optax.add_noise(1e-3, 0.5, 0), optax.clip_by_global_norm(0.5), gefen(1e-2, weight_decay=0.1)]
    ours = fused_chain(parts[0], clip_by_global_norm(0.5), parts[2])
    chain = optax.chain(*parts)
    expected = train(updating(chain), chain.init(tree(0)), tree(0))
    found = train(jax.jit(ours.apply), ours.init(tree(0)), tree(0))
    equal(expected[0], found[0])
    again = train(updating(ours), ours.init(tree(0)), tree(0))
    equal(expected[0], again[0])
    assert jax.tree.structure(expected[1]) == jax.tree.structure(found[1])


@pytest.mark.parametrize("name", ["jnp", "chunked", "pallas"])
def test_a_factor_is_the_scaled_gradient(name):
    tx = gefen(1e-2, implementation=name)
    half = jax.tree.map(lambda g: g * 0.5, tree(1))
    expected, _ = tx.apply(half, tree(0), tx.init(tree(0)))
    found, _ = tx.apply(tree(1), tree(0), tx.init(tree(0)), factor=jnp.float32(0.5))
    equal(expected, found)


def test_apply_takes_any_transformation():
    for tx in (gefen(1e-2), optax.chain(gefen(1e-2)), optax.MultiSteps(gefen(1e-2), 1), fused_chain(gefen(1e-2))):
        params, _ = apply(tx, tree(1), tree(0), tx.init(tree(0)))
        expected, _ = train(updating(gefen(1e-2)), gefen(1e-2).init(tree(0)), tree(0), 1)
        equal(params, expected)
    assert "no apply of its own" in how(optax.chain(gefen(1e-2)))
    assert how(gefen(1e-2)).startswith("at once")


def test_apply_leaves_to_others_what_it_does_not_need():
    """Such as the loss, which some transformations read: `update` takes it too."""
    for tx in (gefen(1e-2), optax.chain(gefen(1e-2)), fused_chain(optax.add_noise(1e-3, 0.5, 0), gefen(1e-2))):
        expected, _ = apply(tx, tree(1), tree(0), tx.init(tree(0)))
        found, _ = apply(tx, tree(1), tree(0), tx.init(tree(0)), value=jnp.float32(2.0))
        equal(found, expected)


def test_a_chain_must_end_in_gefen():
    with pytest.raises(TypeError, match="found GradientTransformation"):
        fused_chain(gefen(1e-2), optax.scale(2.0))
    with pytest.raises(TypeError, match="found nothing"):
        fused_chain()


def test_apply_writes_over_parameters_and_state():
    """Donated in the order of the results, nothing parameter-sized is left over."""
    tx = gefen(1e-2)
    compiled = jax.jit(tx.apply, donate_argnums=(1, 2)).lower(tree(1), tree(0), tx.init(tree(0))).compile()
    memory = compiled.memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves((tree(0), tx.init(tree(0)))))
    assert memory.alias_size_in_bytes > 0.9 * size


def test_global_norm():
    exact = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in tree(1).values()))
    assert abs(float(global_norm(tree(1))) / exact - 1) < 1e-6


def test_explain_says_which_path_and_why():
    params = {"kernel": jnp.zeros((64, 128)), "odd": jnp.zeros((64, 66), jnp.float32), "bias": jnp.zeros(40)}
    rows = {row.path: row for row in explain(gefen(1e-3).init(params), implementation="pallas").rows}
    assert rows["kernel"].implementation == rows["bias"].implementation == "pallas"
    leaf = Leaf(
        *(jnp.zeros(s, d) for s, d in [((768,) * 2, jnp.uint8), ((768, 3), "f4"), ((1, 12), "f4"), ((1, 1), "f4")])
    )
    name, why = implementation.choose("pallas", (768, 768), leaf)
    assert name == "jnp"
    assert "do not nest" in why


def test_explain_says_how_apply_steps_a_transformation():
    """Of what `gefen` returned it knows the implementation too; a wrapper drops both, and is told so."""
    params = {"kernel": jnp.zeros((64, 128))}
    for tx, name, step in (
        (gefen(1e-3, implementation="pallas"), "pallas", "at once"),
        (fused_chain(optax.add_noise(1e-3, 0.5, 0), gefen(1e-3, implementation="pallas")), "pallas", "at once"),
        (gefen(1e-3, implementation="jnp"), "jnp", "at once, without kernels: implementation='jnp' was asked for"),
        (optax.chain(gefen(1e-3, implementation="pallas")), "jnp", "update, then optax.apply_updates: Gradient"),
    ):
        found = explain(tx.init(params), params, tx=tx)
        assert found.rows[0].implementation == name
        assert found.step.startswith(step)
        assert f"apply: {found.step}" in str(found)
    assert found.step.endswith("has no apply of its own")
    assert explain(tx.init(params)).step is None


def test_a_leaf_without_a_kernel_takes_the_plain_step():
    """4-bit codes that share bytes along the first axis: the other leaves still run in kernels."""
    params = {"kernel": jnp.ones((64, 128)), "odd": jnp.ones((64, 65))}
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1), p.shape), params)
    results = []
    for name in ("jnp", "pallas"):
        tx = gefen(1e-2, bits=4, implementation=name)
        results.append(jax.jit(tx.apply)(grads, params, tx.init(params))[0])
    equal(*results)
    rows = {row.path: row.implementation for row in explain(tx.init(params), params, implementation="pallas").rows}
    assert rows == {"kernel": "pallas", "odd": "jnp"}


def test_triton_without_a_gpu_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(gefen_pallas.compiled, "unavailable", lambda: None)
    tx = gefen(1e-2, implementation="triton")
    with pytest.raises(ValueError, match="need an NVIDIA GPU"):
        tx.update(tree(1), tx.init(tree(0)), tree(0))
    monkeypatch.setattr(gefen_pallas.compiled, "unavailable", lambda: "jax-triton is not installed")
    with pytest.raises(ValueError, match="jax-triton is not installed"):
        gefen(1e-2, implementation="triton")


def test_nothing_of_the_kernels_is_imported_before_it_is_needed():
    import subprocess

    code = (
        "import sys, jax.numpy as jnp, gefen_jax\n"
        "tx = gefen_jax.gefen(1e-3)\n"
        "tx.apply(jnp.ones((64, 128)), jnp.ones((64, 128)), tx.init(jnp.ones((64, 128))))\n"
        "assert not {'triton', 'jax_triton', 'jax.experimental.pallas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_equal_weight_decays_are_one_number():
    from gefen_jax.update import Tail, hyper

    traced = jnp.float32(0.3)
    tails = [Tail(jnp.float32(1.0), decay, True) for decay in (0.1, 0.0, 0.1, traced, traced)]
    vector, which = kernels.hyper_vector(hyper(0.9, 0.999, 1e-8, jnp.int32(1)), tails, 1.0)
    assert which == (0, 1, 0, 2, 2)
    np.testing.assert_allclose(vector[9:], [0.1, 0.0, 0.3], rtol=1e-6)
