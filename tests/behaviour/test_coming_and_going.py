"""A running AdamW continues as Gefen and a running Gefen as AdamW, in any wrapper, with nothing lost but rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import close, kinds, same, structured, train, tree

from gefen_jax import blocks, calibrate, from_adam_state, gefen, to_adam_state

PARAMS = tree(0)
GRADS = [structured(seed) for seed in (1, 2, 3)]
NEXT = [structured(4)]

OPTIONS = {
    "default": {},
    "four bits": {"bits": 4},
    "block": {"second_moment": "block"},
    "full": {"second_moment": "full"},
    "companding": {"codec": "companding"},
    "reference": {"rule": "reference"},
}
KEEP = {"dense": True, "table": False}
PARTS = {"dense": "quick", "table": "slow"}
WRAPPERS = {
    "bare": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e9), tx),
    "masked": lambda tx: optax.masked(tx, jax.tree.map(lambda _: True, PARAMS)),
    "partition": lambda tx: optax.partition({"quick": tx, "slow": tx}, PARTS),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "nested": lambda tx: optax.chain(optax.apply_if_finite(optax.chain(tx), 5)),
}


def running(tx, start=None):
    """Parameters and state after three steps."""
    return train(tx, PARAMS, GRADS, start)


def adam_of(opt_state):
    """The moments in an optimizer state."""
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_adam) if is_adam(node)]


def gap(codebook):
    """Half of the largest gap between two words: how far a momentum of 1 is moved at most."""
    return float(np.diff(np.asarray(codebook, np.float64)).max()) / 2


@pytest.mark.parametrize("which", OPTIONS)
def test_moments_are_those_of_adam_as_far_as_the_structure_holds_them(which):
    """Against NumPy: momentum within half a gap, statistics the means of their rows, columns and blocks."""
    _, adam = running(optax.adamw(1e-2))
    tx = gefen(1e-2, **OPTIONS[which])
    state = from_adam_state(adam, calibrate(tx.init(PARAMS), GRADS[0]))
    assert kinds(state) == kinds(calibrate(tx.init(PARAMS), GRADS[0]))
    assert int(state.count) == 3
    back = to_adam_state(state, optax.adamw(1e-2).init(PARAMS))
    assert int(back[0].count) == 3
    assert kinds(back) == kinds(adam)
    for name in ("kernel", "bias"):
        m, found = np.asarray(adam[0].mu["dense"][name]), np.asarray(back[0].mu["dense"][name])
        scale = state.mu_scale["dense"][name]
        if scale.shape == m.shape[:1] + (1,) and which != "reference":  # one block is one row
            np.testing.assert_array_equal(scale, np.abs(m).max(1, keepdims=True))
        assert np.abs(found - m).max() <= gap(state.codebook) * np.abs(m).max() * (1 + 1e-6)
    if which == "reference":
        return
    same(back[0].mu["dense"]["bias"], adam[0].mu["dense"]["bias"])  # exact Adam on both sides
    same(back[0].nu["dense"]["bias"], adam[0].nu["dense"]["bias"])
    v = np.asarray(adam[0].nu["dense"]["kernel"], np.float64)
    if which == "full":
        same(state.nu["dense"]["kernel"], adam[0].nu["dense"]["kernel"])
        same(back[0].nu, adam[0].nu)
    elif which == "default":
        rows, columns = v.mean(1, keepdims=True), v.mean(0, keepdims=True)
        np.testing.assert_allclose(state.nu["dense"]["kernel"], rows, rtol=2e-6)
        np.testing.assert_allclose(state.nu_cross["dense"]["kernel"], columns, rtol=2e-6)
        np.testing.assert_allclose(back[0].nu["dense"]["kernel"], rows * columns / v.mean(), rtol=5e-6)
    np.testing.assert_allclose(back[0].nu["dense"]["kernel"].mean(), v.mean(), rtol=1e-5)


def test_the_next_step_is_nearly_adams():
    """With a full second moment only the rounding of the momentum is between the two."""
    adamw, tx = optax.adamw(1e-2), gefen(1e-2, second_moment="full")
    params, adam = running(adamw)
    state = from_adam_state(adam, calibrate(tx.init(params), GRADS[0]))
    expected, _ = train(adamw, params, NEXT, adam)
    found, _ = train(tx, params, NEXT, state)
    for a, b, start in zip(*map(jax.tree.leaves, (found, expected, params))):
        assert np.linalg.norm(a - b) < 0.15 * np.linalg.norm(b - start)  # small entries beside large ones lose most
    fresh, _ = train(tx, params, NEXT, tx.init(params))  # without Adam's moments it is another step
    for a, b, start in zip(*map(jax.tree.leaves, (fresh, expected, params))):
        assert np.linalg.norm(a - b) > 0.3 * np.linalg.norm(b - start)


@pytest.mark.parametrize("which", OPTIONS)
def test_there_and_back_again_changes_no_code(which):
    tx = gefen(1e-2, **OPTIONS[which])
    _, state = running(tx, calibrate(tx.init(PARAMS), GRADS[0]))
    adam = to_adam_state(state, optax.adamw(1e-2).init(PARAMS))
    again = from_adam_state(adam, state)
    same((again.mu, again.count, again.format, again.codebook), (state.mu, state.count, state.format, state.codebook))
    close((again.mu_scale, again.nu, again.nu_cross), (state.mu_scale, state.nu, state.nu_cross), rtol=2e-6)


@pytest.mark.parametrize("outer", WRAPPERS)
def test_in_any_wrapper(outer):
    """Wrapped to bare, wrapped to wrapped, bare to wrapped: the same moments, and all else is left alone."""
    adamw, tx = (WRAPPERS[outer](make(1e-2)) for make in (optax.adamw, gefen))
    _, adam = running(adamw)
    bare = from_adam_state(adam, gefen(1e-2).init(PARAMS))
    state = from_adam_state(adam, tx.init(PARAMS))
    assert kinds(state) == kinds(tx.init(PARAMS))
    assert blocks(state) == blocks(bare)
    back, bare_back = (to_adam_state(x, optax.adamw(1e-2).init(PARAMS)) for x in (state, bare))
    same(back, bare_back)
    wrapped = to_adam_state(state, adamw.init(PARAMS))
    assert kinds(wrapped) == kinds(adam)
    assert {int(node.count) for node in adam_of(wrapped)} == {int(back[0].count)} == {3}
    for name in ("mu", "nu"):
        ours = {x.shape: x for node in adam_of(wrapped) for x in jax.tree.leaves(getattr(node, name))}
        same(ours, {x.shape: x for x in jax.tree.leaves(getattr(back[0], name))})
    exact = [x for node in adam_of(adam) for x in jax.tree.leaves(node.mu) if x.shape == (192,)]
    same(back[0].mu["dense"]["bias"], *exact)
    train(adamw, PARAMS, NEXT, wrapped)
    train(tx, PARAMS, NEXT, state)


def test_leaves_that_a_mask_hides_stay_hidden():
    adam = optax.masked(optax.adamw(1e-2), KEEP)
    _, running_adam = running(adam)
    tx = optax.masked(gefen(1e-2), KEEP)
    state = from_adam_state(running_adam, tx.init(PARAMS))
    assert set(blocks(state)) == {"dense/bias", "dense/kernel"}
    with pytest.raises(ValueError, match="the Adam state has no moments of 'table'"):
        from_adam_state(running_adam, gefen(1e-2).init(PARAMS))
    with pytest.raises(ValueError, match="the Gefen state has no moments of 'table'"):
        to_adam_state(state, optax.adamw(1e-2).init(PARAMS))


@pytest.mark.parametrize("injected", [False, True])
def test_schedules_go_on_where_they_were(injected):
    """The learning rate of step four, not of step one: schedules count in the optimizers and in the wrappers."""
    schedule = optax.piecewise_constant_schedule(1e-2, {3: 0.0})  # nothing moves from the fourth step on
    make = optax.inject_hyperparams if injected else lambda build: build
    adamw, tx = (make(build)(schedule, weight_decay=0.0) for build in (optax.adamw, gefen))
    params, adam = running(adamw)
    state = from_adam_state(adam, tx.init(params))
    same(train(tx, params, NEXT, state)[0], params)
    same(train(adamw, params, NEXT, to_adam_state(state, adamw.init(params)))[0], params)
    assert not np.array_equal(train(tx, params, NEXT, tx.init(params))[0]["table"], params["table"])


def test_dtypes_are_those_of_the_state_to_fill():
    _, adam = running(optax.adamw(1e-2, mu_dtype=jnp.bfloat16))
    state = from_adam_state(adam, gefen(1e-2).init(PARAMS))
    assert state.mu["dense"]["bias"].dtype == jnp.float32
    back = to_adam_state(state, optax.adamw(1e-2, mu_dtype=jnp.bfloat16).init(PARAMS))
    same(back[0].mu["dense"]["bias"], adam[0].mu["dense"]["bias"])
    assert {x.dtype for x in jax.tree.leaves(back[0].mu)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(back[0].nu)} == {jnp.dtype(jnp.float32)}


def test_both_states_can_be_donated_afterwards():
    adamw, tx = optax.adamw(1e-2), gefen(1e-2)
    params, adam = running(adamw)
    state = from_adam_state(adam, tx.init(params))
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((adam, state))]
    assert len(set(pointers)) == len(pointers)
    jax.block_until_ready(jax.jit(adamw.update, donate_argnums=1)(NEXT[0], adam, params))
    jax.block_until_ready(jax.jit(tx.update, donate_argnums=1)(NEXT[0], state, params))


def test_parameters_without_elements():
    params = {"none": jnp.zeros((0, 3)), "w": tree(1, (64, 96))}
    _, adam = optax.adamw(1e-2).update(params, optax.adamw(1e-2).init(params), params)
    state = from_adam_state(adam, gefen(1e-2).init(params))
    assert kinds(state) == kinds(gefen(1e-2).init(params))
    assert kinds(to_adam_state(state, optax.adamw(1e-2).init(params))) == kinds(adam)


@pytest.mark.parametrize(
    ("convert", "given", "message"),
    [
        (from_adam_state, (optax.sgd(1e-2), gefen(1e-2)), "no Adam state"),
        (from_adam_state, (optax.adamw(1e-2), optax.sgd(1e-2)), "no Gefen state in the state to fill"),
        (to_adam_state, (optax.adamw(1e-2), optax.adamw(1e-2)), "no Gefen state in the running state"),
        (to_adam_state, (gefen(1e-2), optax.sgd(1e-2)), "no Adam state"),
    ],
)
def test_states_of_other_optimizers_are_refused(convert, given, message):
    with pytest.raises(ValueError, match=message):
        convert(*(tx.init(PARAMS) for tx in given))


def test_moments_of_other_shapes_are_refused_by_name():
    other = PARAMS | {"table": tree(1, (320, 16))}
    message = r"the Adam moments of 'table' have shape \(320, 16\), Gefen's \(640, 16\)"
    with pytest.raises(ValueError, match=message):
        from_adam_state(optax.adamw(1e-2).init(other), gefen(1e-2).init(PARAMS))
    with pytest.raises(ValueError, match=message):
        to_adam_state(gefen(1e-2).init(PARAMS), optax.adamw(1e-2).init(other))
