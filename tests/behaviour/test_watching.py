"""`diagnose` tells what a step does to each leaf, and `advise` when to calibrate again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import apply, normal, same, snapshot, structured, train, tree

from gefen_jax import advise, calibrate, diagnose, gefen, to_adam_state

PARAMS = tree(0)
GRADS = [tree(seed) for seed in (1, 2)]
OPTIONS = {"default": {}, "four bits": {"bits": 4}, "block": {"second_moment": "block"}}


def momentum(state):
    """The stored first moment, decoded, by the way out to AdamW."""
    return to_adam_state(state, optax.adamw(1.0).init(PARAMS))[0].mu


def codes(packed, bits):
    packed = np.asarray(packed)
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4])


@pytest.mark.parametrize("which", OPTIONS)
def test_numbers_are_those_of_the_step_itself(which):
    """Against the update and the state that the step returns, in float64."""
    tx = gefen(1.0, weight_decay=0.0, **OPTIONS[which])
    _, before = train(tx, PARAMS, GRADS, calibrate(tx.init(PARAMS), structured(0)))
    grads = structured(3)
    found = jax.jit(diagnose)(grads, before)
    updates, after = jax.jit(tx.update)(grads, before, PARAMS)
    assert set(found.leaves) == {"dense/bias", "dense/kernel", "table"}
    old, new = momentum(before), momentum(after)
    for path, row in found.leaves.items():
        u, m, kept, g = updates, old, new, grads
        for key in path.split("/"):
            u, m, kept, g = u[key], m[key], kept[key], g[key]
        np.testing.assert_allclose(row.update_rms, np.sqrt(np.mean(np.float64(u) ** 2)), rtol=1e-5)
        if path == "dense/bias":
            assert (row.quantisation_error, row.vanished, row.saturation) == (0, 0, 0)
            continue
        m = 0.9 * np.float64(m) + 0.1 * np.float64(g)
        error = np.linalg.norm(m - kept) / np.linalg.norm(m)
        np.testing.assert_allclose(row.quantisation_error, error, rtol=1e-3)
        np.testing.assert_allclose(row.vanished, np.mean((np.asarray(kept) == 0) & (m != 0)), atol=1e-4)
        bits = OPTIONS[which].get("bits", 8)
        words = codes(after.mu["table"] if path == "table" else after.mu["dense"]["kernel"], bits)
        np.testing.assert_allclose(row.saturation, np.mean((words == 0) | (words == 2**bits - 1)), atol=1e-4)
    quantised = sum(np.size(g) for g in (grads["dense"]["kernel"], grads["table"]))
    assert int(found.counts.sum()) == quantised  # no momentum is exactly 0 here


def test_it_is_auxiliary_output_of_a_step_and_changes_nothing():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.apply_if_finite(gefen(1e-2), 3))

    @jax.jit
    def watched(params, opt_state, grads):
        found = diagnose(grads, opt_state)
        return *apply(tx, params, opt_state, grads), found

    state = tx.init(PARAMS)
    before = snapshot(state)
    *after, found = watched(PARAMS, state, GRADS[0])
    same(state, before)
    same(tuple(after), train(tx, PARAMS, GRADS[:1]))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    np.testing.assert_allclose(found.leaves["table"].update_rms, 1.0, rtol=0.05)  # a first step of Adam


def test_counts_go_on_beyond_the_whole_numbers_of_float32():
    """2^24 + 1 is 2^24 in float32: bins that many elements fall into would stop there."""
    grads = jnp.ones((2**16 + 2**4, 256))
    found = jax.jit(diagnose)(grads, gefen(1e-2).init(grads))
    assert float(found.counts[-1]) == float(found.counts.sum()) == grads.size > 2**24


def test_other_rules_are_refused_where_the_state_is_known():
    with pytest.raises(ValueError, match="diagnose: the state has rule 'reference', whose step it does not know"):
        diagnose(GRADS[0], gefen(1e-2, rule="reference").init(PARAMS))


def test_advice_follows_the_gradients():
    """A codebook learned from one kind of gradients does not fit another; calibrating again mends it."""
    flat = jax.tree.map(lambda x: x / (jnp.abs(x) + 0.3), tree(7))
    peaked = jax.tree.map(lambda x: x**5, tree(8))
    tx = gefen(1e-2, b1=0.0)
    state = calibrate(tx.init(PARAMS), flat)
    assert advise(diagnose(flat, state, b1=0.0)).startswith("the codebook fits: its squared error is 1.0")
    advice = advise(diagnose(peaked, state, b1=0.0))
    assert advice.startswith("calibrate again: the codebook's squared error is ")
    drift = float(advice.split(" is ")[1].split()[0])
    assert drift > 1.25
    again = calibrate(state, peaked)
    assert advise(diagnose(peaked, again, b1=0.0)).startswith("the codebook fits")


def test_advice_names_the_leaf_that_loses_most():
    rough = {"fine": normal(0, (64, 128)), "rough": normal(1, (64, 128)).at[:, 0].set(300.0)}
    state = gefen(1e-2, bits=4).init(rough)
    found = diagnose(rough, state)
    worst = max(found.leaves, key=lambda path: found.leaves[path].quantisation_error)
    assert f"{worst!r} loses {float(found.leaves[worst].quantisation_error):.1%} of its momentum" in advise(found)
    assert float(found.leaves["rough"].vanished) > 0.9  # beside one entry of 300 the others are stored as 0
    kept = gefen(1e-2, full_precision="").init(rough)
    assert advise(diagnose(rough, kept)) == "no momentum is quantised: there is nothing to calibrate"


def test_other_leaves_are_ignored_and_missing_ones_are_errors():
    hidden = optax.masked(gefen(1e-2), {"dense": True, "table": False}).init(PARAMS)
    assert set(diagnose(GRADS[0], hidden).leaves) == {"dense/bias", "dense/kernel"}
    with pytest.raises(ValueError, match="there is no gradient for 'table', which the optimizer state holds"):
        diagnose({"dense": GRADS[0]["dense"]}, gefen(1e-2).init(PARAMS))
    with pytest.raises(ValueError, match="there is no Gefen state"):
        diagnose(GRADS[0], optax.adamw(1e-2).init(PARAMS))


def test_advice_on_a_state_says_what_to_pass():
    with pytest.raises(
        TypeError, match=r"advise: expected what diagnose\(grads, opt_state\) returned, found GefenState"
    ):
        advise(gefen(1e-3).init(PARAMS))
