"""How optimizers with compressed state have failed their users elsewhere: the numbers."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import apply, normal, same, structured, train, tree

from gefen_jax import blocks, calibrate, explain, gefen, learn_plan, plan_from_state
from gefen_jax.moments import decode_moments
from gefen_jax.reasons import NON_FINITE, ZERO

SIZES = pytest.mark.parametrize("min_size", [None, 0], ids=["default", "min_size=0"])


def scanned(tx, params, opt_state, gradient_of, steps):
    """Parameters and state after so many steps in one program; ``gradient_of(step)`` makes the gradients."""

    def body(carry, step):
        return apply(tx, *carry, gradient_of(step)), None

    return jax.jit(lambda *carry: jax.lax.scan(body, carry, jnp.arange(steps))[0])(params, opt_state)


def noise(params, step):
    """Fresh Gaussian gradients for every step."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), len(leaves))
    return treedef.unflatten([jax.random.normal(k, p.shape).astype(p.dtype) for k, p in zip(keys, leaves)])


@SIZES
def test_weights_without_gradient_stay_where_they_are(min_size):
    """Dead columns, rows, entries of a vector and unused rows of a table: bit for bit, for 200 steps at two scales."""
    alive = {
        "columns": jnp.arange(128) % 16 != 0,
        "rows": (jnp.arange(64) % 4 != 1)[:, None],
        "vector": jnp.arange(5000) % 3 != 0,
        "table": (jnp.arange(512) % 2 == 0)[:, None],
        "scattered": jnp.asarray(np.random.default_rng(0).random((128, 96)) < 0.7),
    }
    shapes = {"columns": (64, 128), "rows": (64, 128), "vector": (5000,), "table": (512, 64), "scattered": (128, 96)}
    params = {"small": tree(0, shapes), "usual": tree(1, shapes)}
    tx = gefen(1e-3, weight_decay=0.0, min_size=min_size)

    def gradient_of(step):
        scale = {"small": 1e-3, "usual": 1.0}
        g = noise(params, step)
        return {k: jax.tree.map(lambda g, keep, k=k: jnp.where(keep, scale[k] * g, 0.0), g[k], alive) for k in g}

    moved, _ = scanned(tx, params, tx.init(params), gradient_of, 200)
    for scale in params:
        for name, keep in alive.items():
            still = ~np.broadcast_to(keep, shapes[name])
            before, after = np.asarray(params[scale][name]), np.asarray(moved[scale][name])
            np.testing.assert_array_equal(after[still], before[still])
            assert (after != before)[~still].mean() > 0.99


@SIZES
def test_gradients_of_zero_change_nothing(min_size):
    """0 / 0 where eps underflows, or residue divided by it."""
    shapes = {"a": (4,), "b": (3, 5), "c": (64, 80)}
    params = {
        str(d): tree(0, shapes, dtype=d) for d in (np.dtype("float16"), jnp.dtype("bfloat16"), np.dtype("float32"))
    }
    tx = gefen(1e-3, weight_decay=0.0, min_size=min_size)
    zeros = jax.tree.map(jnp.zeros_like, params)
    moved, state = train(tx, params, [zeros] * 3)
    same(moved, params)
    assert not any(np.any(x) for x in jax.tree.leaves((state.nu, state.mu_scale)))
    same(state.mu, tx.init(params).mu)


@SIZES
def test_a_first_gradient_of_zero_does_not_decide_the_run(min_size):
    """Warm-up, frozen layers, LoRA's zero start: after 50 steps the way is that of a run without that step."""
    params = tree(0)
    tx = gefen(1e-3, weight_decay=0.0, min_size=min_size)
    zero = jax.tree.map(jnp.zeros_like, params)
    _, waited = train(tx, params, [zero])
    run = lambda state: scanned(tx, params, state, lambda t: noise(params, t), 50)[0]  # noqa: E731
    late, usual = run(waited), run(tx.init(params))
    for a, b, p in zip(*map(jax.tree.leaves, (late, usual, params))):
        assert cosine(a - p, b - p) > 0.99


def cosine(a, b):
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    return a @ b / np.sqrt((a @ a) * (b @ b))


BAD_FIRST = {
    "zero": jnp.zeros_like,
    "constant": jnp.ones_like,
    "infinite": lambda g: g.at[3, 3].set(jnp.inf),
    "NaN": lambda g: g.at[5].set(jnp.nan),
    "one element": lambda g: jnp.zeros_like(g).at[0, 0].set(1.0),
    "one row": lambda g: jnp.zeros_like(g).at[7].set(1.0),
    "tiny": lambda g: g * 1e-30,
    "huge": lambda g: g * 1e30,
}


def test_an_odd_first_gradient_never_decides_the_run_badly():
    """Calibrated with it, beside usual leaves, a leaf goes the way of exact Adam as a usual one does."""
    params = tree(0, dict.fromkeys([*BAD_FIRST, "usual"], (96, 128)))
    tx, adam = gefen(1e-3, weight_decay=0.0), optax.adam(1e-3)
    first = noise(params, 99)
    first |= {how: change(first[how]) for how, change in BAD_FIRST.items()}
    state = calibrate(tx.init(params), first)
    assert [blocks(state)[how].reason for how in ("zero", "infinite", "NaN")] == [ZERO, NON_FINITE, NON_FINITE]
    found, _ = scanned(tx, params, state, lambda t: noise(params, t), 50)
    exact, _ = scanned(adam, params, adam.init(params), lambda t: noise(params, t), 50)
    for name in params:
        assert cosine(found[name] - params[name], exact[name] - params[name]) > 0.97, name


GRADIENTS = {
    "Gaussian": lambda rng: rng.standard_normal((96, 128)),
    "heavy tails": lambda rng: rng.standard_t(2.5, (96, 128)),
    "low rank": lambda rng: rng.standard_normal((96, 2)) @ rng.standard_normal((2, 128)),
    "rows of scales": lambda rng: np.exp(rng.normal(0, 2, (96, 1))) * rng.standard_normal((96, 128)),
}


@SIZES
def test_updates_have_the_size_of_adams(min_size):
    rng = np.random.default_rng(0)
    gradients = [{kind: jnp.asarray(make(rng), jnp.float32) for kind, make in GRADIENTS.items()} for _ in range(12)]
    params = {kind: normal(0, (96, 128)) for kind in GRADIENTS}
    sizes = []
    for tx in (gefen(1e-3, weight_decay=0.0, min_size=min_size), optax.adam(1e-3)):
        before, state = train(tx, params, gradients[:-1])
        after, _ = train(tx, before, gradients[-1:], state)
        sizes.append({kind: float(jnp.sqrt(jnp.mean((after[kind] - before[kind]) ** 2))) for kind in params})
    for kind in params:
        assert 0.6 < sizes[0][kind] / sizes[1][kind] < 1.6, kind


def test_a_matrix_like_the_identity_can_be_kept_from_being_factored():
    """Row and column factors cannot express a diagonal: its entries move by the root of the matrix's side more than
    in Adam, where the whole update is then as large as a dense one."""
    params, grads = {"w": normal(0, (96, 96))}, {"w": jnp.eye(96)}
    rate = 1e-3
    moved, _ = train(gefen(rate, weight_decay=0.0), params, [grads])
    update = np.asarray(moved["w"] - params["w"])
    assert np.sqrt(np.mean(update**2)) < 1.01 * rate
    assert not np.any(update[~np.eye(96, dtype=bool)])
    for options in ({"full_precision": "w"}, {"second_moment": "full"}):
        exact, _ = train(gefen(rate, weight_decay=0.0, **options), params, [grads])
        np.testing.assert_allclose(np.abs(np.diag(exact["w"] - params["w"])), rate, rtol=1e-3)


def test_the_first_step_goes_against_the_gradient_and_leaves_it_alone():
    params = jax.tree.map(np.asarray, tree(0))
    grads = jax.tree.map(np.asarray, structured(1))
    copies = jax.tree.map(np.copy, grads)
    updates, _ = jax.jit(gefen(1e-3, weight_decay=0.0).update)(grads, gefen(1e-3).init(params), params)
    for u, g in zip(*map(jax.tree.leaves, (updates, grads))):
        assert np.array_equal(np.sign(u), -np.sign(g))
    same(grads, copies)


def test_a_new_codebook_moves_momentum_by_half_a_gap_at_most():
    params = tree(0)
    tx = gefen(1e-3)
    _, state = train(tx, params, [tree(seed) for seed in (1, 2, 3)])
    plan = learn_plan(structured(5))
    new = calibrate(state, plan)
    assert int(new.count) == 3
    for (path, old), leaf, now in zip(blocks(state).items(), state.leaves(), new.leaves()):
        m, v = decode_moments(leaf, old, state.codebook)
        after, w = decode_moments(now, plan.leaves[path], new.codebook)
        gap = float(np.max(np.diff(np.asarray(plan.codebook))))
        assert float(jnp.max(jnp.abs(after - m))) <= 0.5 * gap * float(jnp.max(jnp.abs(m))) * 1.0001
        np.testing.assert_allclose(float(jnp.mean(w)), float(jnp.mean(v)), rtol=1e-4)


def test_codebooks_are_sorted_symmetric_and_have_a_zero():
    """Whatever they were learned from."""
    plans = [plan_from_state(gefen(1e-3, bits=bits).init(tree(0))) for bits in (8, 4)]
    for how in (lambda g: g, jnp.sign, lambda g: g**9, lambda g: jnp.where(jnp.abs(g) > 2, g, 0.0)):
        plans += [learn_plan(jax.tree.map(how, tree(1)), bits=bits) for bits in (8, 4)]
    for plan in plans:
        words = plan.codebook
        half = words.size // 2
        assert words.size == 2**plan.bits
        assert np.all(np.diff(words) >= 0)
        assert (words[0], words[-1], words[half - 1]) == (-1, 1, 0)
        if plan.bits == 8:
            np.testing.assert_array_equal(words, -words[::-1])
            assert words[half] == 0
        else:
            assert np.count_nonzero(words == 0) == 1


def test_arguments_have_the_names_and_defaults_of_adamw():
    """A default that differs, such as that of weight decay, reads as a worse optimizer."""
    ours, adamw = (inspect.signature(f).parameters for f in (gefen, optax.adamw))
    for name in ("learning_rate", "b1", "b2", "eps", "weight_decay", "mask"):
        assert ours[name].default == adamw[name].default, name
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(adamw)[: len(positional)]


def test_a_gradient_in_another_order_of_memory_teaches_what_its_copy_teaches():
    base = np.asarray(structured(0)["dense"]["kernel"])
    view, misread = base.T, base.reshape(base.T.shape)
    for rule in ("gefen", "reference"):
        plans = [learn_plan({"w": g}, rule=rule) for g in (view, view.copy(), misread)]
        assert plans[0] == plans[1] != plans[2]


def test_accumulation_costs_what_optax_takes_and_no_more():
    """`MultiSteps` adds a full buffer of gradients: the state's bytes are still Gefen's plus that buffer."""
    params = tree(0)
    inner, outer = gefen(1e-3).init(params), optax.MultiSteps(gefen(1e-3), 4).init(params)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(part)) for part in (outer, inner, params)]
    assert explain(outer).bytes == explain(inner).bytes
    assert sizes[0] - sizes[1] - sizes[2] <= 64
