"""The step as a compiled program: scan, vmap, traces, donation, callbacks, and types that never change."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import DTYPES, gradients, mixed, same_bits

from gefen_jax import gefen, learn_plan

SHAPES = [(64, 128), (3, 128, 128), (7, 5), (300, 128), (), (0, 3)]
OPTIONS = [{}, {"bits": 4, "min_size": 0}, {"second_moment": "block"}, {"codec": "companding"}]


def stacked(params, steps):
    trees = [gradients(params, seed) for seed in range(steps)]
    return trees, jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


@pytest.mark.parametrize(("way", "implementation"), [("update", "jnp"), ("update", "chunked"), ("apply", "chunked")])
def test_a_scan_is_the_loop_with_one_trace(way, implementation):
    """Ten steps under a schedule: the state bit for bit, parameters to one ulp a step (XLA may contract p + u), and
    the loop is traced once."""
    params = mixed(SHAPES, [jnp.float32])
    tx = gefen(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1, implementation=implementation)
    traces = 0

    def step(carry, g):
        nonlocal traces
        traces += 1
        p, s = carry
        if way == "apply":
            return tx.apply(g, p, s), None
        u, s = tx.update(g, s, p)
        return (optax.apply_updates(p, u), s), None

    loop = jax.jit(step)
    trees, all_of_them = stacked(params, 10)
    carry = start = (params, tx.init(params))
    for g in trees:
        carry, _ = loop(carry, g)
    assert traces == 1
    p, state = jax.jit(lambda c: jax.lax.scan(step, c, all_of_them)[0])(start)
    assert same_bits(state, carry[1])
    for name, one in p.items():
        np.testing.assert_allclose(np.asarray(one), np.asarray(carry[0][name]), rtol=0, atol=10 * 2.0**-22)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_vmap_over_seeds_is_separate_runs(options):
    """Three models at once, with `init` and steps under vmap: states to rounding, codes but for those between words."""
    singles = [mixed([(64, 128), (3, 32, 64), (7, 5)], [jnp.float32]) for _ in range(3)]
    grads = [gradients(singles[0], seed, scale=10.0**seed) for seed in range(3)]
    many = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)
    tx = gefen(1e-2, implementation="jnp", **options)

    def run(g, p):
        def step(carry, _):
            p, state = carry
            u, state = tx.update(g, state, p)
            return (optax.apply_updates(p, u), state), None

        return jax.lax.scan(step, (p, tx.init(p)), length=3)[0]

    together = jax.jit(jax.vmap(run))(many, jax.tree.map(lambda *xs: jnp.stack(xs), *singles))
    alone = jax.jit(run)
    for i, (g, p) in enumerate(zip(grads, singles)):
        one, each = alone(g, p), jax.tree.map(lambda x, i=i: x[i], together)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == jax.tree.map(lambda x: (x.shape, x.dtype), each)
        for a, b in zip(*map(jax.tree.leaves, (one, each))):
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype == np.uint8:
                assert np.mean(a != b) <= 1e-3
            else:
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "implementation"), [({}, "jnp"), *((options, "chunked") for options in OPTIONS[:3])], ids=str
)
def test_everything_donated_is_reused(options, implementation):
    """All bytes of parameters and state are aliased in the compiled step, by update and by apply, without a warning."""
    params = mixed(SHAPES[:-1])
    tx = gefen(1e-3, implementation=implementation, **options)
    state = tx.init(params)
    size = sum(x.nbytes for x in jax.tree.leaves((params, state)))

    def by_update(g, p, s):
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (by_update, tx.apply):
            compiled = jax.jit(step, donate_argnums=(1, 2)).lower(gradients(params, 0), params, state).compile()
            kept = compiled.memory_analysis().alias_size_in_bytes
            assert kept >= size, (step, kept, size)


def primitives(jaxpr):
    """Names of all primitives, in inner programs too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


@pytest.mark.parametrize("options", [{}, {"rule": "reference"}, {"bits": 4, "second_moment": "full"}], ids=str)
def test_the_step_never_calls_the_host(options):
    """Nor draws random numbers, nor prints; a state learned from gradients is stepped by the same program."""
    params = mixed(SHAPES[:2], [jnp.float32])
    for plan in (None, learn_plan(gradients(params, 0), **options)):
        tx = gefen(optax.constant_schedule(1e-3), plan=plan, **options)
        state = tx.init(params)
        for step, args in ((tx.update, (params, state, params)), (tx.apply, (params, params, state))):
            names = set(primitives(jax.make_jaxpr(step)(*args).jaxpr))
            assert {"mul", "add"} <= names
            assert not [name for name in names if any(word in name for word in ("callback", "random", "print", "host"))]


@pytest.mark.parametrize("options", [*OPTIONS, {"rule": "reference"}, {"second_moment": "full"}], ids=str)
def test_types_never_change(options):
    """Shapes, dtypes and weak types: `init` under eval_shape, in earnest, and after a step; outputs are as inputs."""
    params = mixed(SHAPES[:-1] if options.get("rule") else SHAPES, DTYPES)

    def kinds(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype.name, getattr(x, "weak_type", False)), tree)

    tx = gefen(1e-3, **options)
    state = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    assert kinds(abstract) == kinds(state)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    updates, after = jax.eval_shape(tx.update, params, state, params)
    moved, other = jax.eval_shape(tx.apply, params, params, state)
    assert kinds(after) == kinds(other) == kinds(state)
    assert kinds(moved) == kinds(params)
    assert jax.tree.map(lambda u: u.shape, updates) == jax.tree.map(lambda p: p.shape, params)
    wanted = [np.float32 if options.get("rule") else p.dtype for p in jax.tree.leaves(params)]
    assert [u.dtype for u in jax.tree.leaves(updates)] == wanted


def test_a_run_that_stops_and_goes_on_is_the_same_run():
    """A state through the host and back, between steps, bit for bit."""
    params = mixed(SHAPES)
    tx = gefen(1e-3)
    apply = jax.jit(tx.apply)
    trees, _ = stacked(params, 4)
    p, s = q, r = params, tx.init(params)
    for g in trees:
        p, s = apply(g, p, s)
        q, r = jax.tree.map(lambda x: jnp.asarray(np.array(x)), apply(g, q, r))
    assert same_bits((p, s), (q, r))


def test_a_step_with_a_bad_gradient_is_taken_back_whole():
    """Under `optax.apply_if_finite`: after one infinite gradient, all but its counters is as before, and goes on."""
    params = mixed(SHAPES[:3])
    tx = optax.apply_if_finite(gefen(1e-3, weight_decay=0.0), 5)
    update = jax.jit(tx.update)
    good = gradients(params, 0)
    bad = {**good, "p1": good["p1"].at[1, 2, 3].set(jnp.inf)}
    _, one = update(good, tx.init(params), params)
    u, two = update(bad, one, params)
    assert same_bits(two.inner_state, one.inner_state)
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(u))
    (u, three), (v, four) = update(good, two, params), update(good, one, params)
    assert same_bits((u, three.inner_state), (v, four.inner_state))
