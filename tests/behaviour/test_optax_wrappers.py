"""Gefen inside every Optax wrapper: what the wrapper promises holds, and `calibrate` reaches through it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import apply, close, same, snapshot, step_of, structured, train, tree

from gefen_jax import blocks, calibrate, explain, gefen, learn_plan, plan_from_state

GRADS = [tree(seed) for seed in (1, 2, 3)]
PARTS = {"dense": "quick", "table": "slow"}
KEEP = {"dense": True, "table": False}


@pytest.fixture(scope="module")
def plan():
    return learn_plan(structured(0))


def everything(params):
    """A mask that hides nothing."""
    return jax.tree.map(lambda p: True, params)


WRAPPERS = {
    "bare": lambda **kw: gefen(1e-2, **kw),
    "chain": lambda **kw: optax.chain(optax.clip_by_global_norm(1.0), gefen(1e-2, **kw), optax.scale(0.5)),
    "masked": lambda **kw: optax.masked(gefen(1e-2, **kw), KEEP),
    "nested masked": lambda **kw: optax.masked(optax.masked(gefen(1e-2, **kw), everything), KEEP),
    "partition": lambda **kw: optax.partition({"quick": gefen(1e-2, **kw), "slow": gefen(1e-3, **kw)}, PARTS),
    "with another": lambda **kw: optax.partition({"quick": gefen(1e-2, **kw), "slow": optax.sgd(1e-3)}, PARTS),
    "MultiSteps": lambda **kw: optax.MultiSteps(gefen(1e-2, **kw), 2),
    "MultiSteps, skipping": lambda **kw: optax.MultiSteps(
        gefen(1e-2, **kw), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "apply_if_finite": lambda **kw: optax.apply_if_finite(gefen(1e-2, **kw), 5),
    "conditionally_transform": lambda **kw: optax.conditionally_transform(gefen(1e-2, **kw), lambda step: step < 2),
    "conditionally_mask": lambda **kw: optax.conditionally_mask(gefen(1e-2, **kw), lambda step: step < 2),
    "inject_hyperparams": lambda **kw: optax.inject_hyperparams(gefen)(1e-2, **kw),
    "schedule_free": lambda **kw: optax.contrib.schedule_free(gefen(1e-2, b1=0.0, **kw), 1e-2, b1=0.9),
    "reduce_on_plateau": lambda **kw: optax.chain(gefen(1e-2, **kw), optax.contrib.reduce_on_plateau(patience=1)),
    "freeze": lambda **kw: optax.selective_transform(gefen(1e-2, **kw), freeze_mask={"dense": False, "table": True}),
    "extra args": lambda **kw: optax.with_extra_args_support(gefen(1e-2, **kw)),
    "named chain": lambda **kw: optax.named_chain(("clip", optax.clip(1.0)), ("gefen", gefen(1e-2, **kw))),
}  # fmt: skip


def step_with_value(tx):
    """A step that passes the loss on, as `reduce_on_plateau` needs it."""
    extra = {"value": jnp.float32(1.0)}
    return jax.jit(lambda p, s, g: apply(tx, p, s, g, **extra) if takes_extra(tx) else apply(tx, p, s, g))


def takes_extra(tx):
    return isinstance(tx, optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize("which", WRAPPERS)
def test_planned_and_calibrated_are_the_same_run(which, plan):
    """A plan before init, or the same plan applied to the state of any nesting after it: bit for bit one run."""
    build, params = WRAPPERS[which], tree(0)
    planned, bare = build(plan=plan), build()
    state = planned.init(params)
    calibrated = calibrate(bare.init(params), plan)
    same(calibrated, state)
    step = step_with_value(bare)
    moved, now = params, calibrated
    for g in GRADS:
        moved, now = step(moved, now, g)
    assert step._cache_size() == 1
    assert jax.tree.map(lambda x: (x.shape, x.dtype), now) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(moved))
    assert not np.array_equal(moved["dense"]["kernel"], params["dense"]["kernel"])
    assert explain(now).codebook == "256 words, learned"
    held = plan_from_state(now).leaves
    assert held == {path: plan.leaves[path] for path in held}
    assert "dense/kernel" in held


class TestMasked:
    """Leaves that the optimizer never sees."""

    @pytest.mark.parametrize("which", ["masked", "nested masked", "freeze", "with another"])
    def test_hold_no_state(self, which):
        opt_state = WRAPPERS[which]().init(tree(0))
        assert set(blocks(opt_state)) == {"dense/bias", "dense/kernel"}
        assert explain(opt_state).parameters == 192 + 96 * 192

    def test_leave_the_rest_as_without_them(self):
        params = tree(0)
        masked, state = train(WRAPPERS["masked"](), params, GRADS[:2])
        alone, alone_state = train(gefen(1e-2), {"dense": params["dense"]}, [{"dense": g["dense"]} for g in GRADS[:2]])
        same(masked["dense"], alone["dense"])
        same(state.inner_state.mu["dense"], alone_state.mu["dense"])

    def test_two_groups_share_one_plan(self, plan):
        params = tree(0)
        together, state = train(WRAPPERS["partition"](plan=plan), params, GRADS[:2])
        quick, _ = train(gefen(1e-2, plan=plan), params, GRADS[:2])
        slow, _ = train(gefen(1e-3, plan=plan), params, GRADS[:2])
        same(together, {"dense": quick["dense"], "table": slow["table"]})
        assert plan_from_state(state) == plan

    def test_reset_of_one_leaf_of_a_partition(self):
        """A leaf that is given new parameters gets new state, and the others keep theirs."""
        tx, params = WRAPPERS["partition"](), tree(0)
        moved, state = train(tx, params, GRADS[:2])
        fresh = tx.init(params)
        reset = jax.tree_util.tree_map_with_path(
            lambda path, old, new: new if "kernel" in jax.tree_util.keystr(path) else old, state, fresh
        )
        moved["dense"]["kernel"] = params["dense"]["kernel"]
        after, _ = train(tx, moved, GRADS[2:], reset)
        untouched, _ = train(tx, moved, GRADS[2:], state)
        same(after["table"], untouched["table"])
        same(after["dense"]["bias"], untouched["dense"]["bias"])
        assert blocks(reset) == blocks(state)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_multi_steps_equals_one_step_on_the_mean(dtype):
    params = tree(0, dtype=jnp.bfloat16)
    grads = [tree(seed, dtype=dtype) for seed in range(1, 9)]
    accumulating = optax.MultiSteps(gefen(1e-2), 4)
    found, state = train(accumulating, params, grads)
    means = [
        jax.tree.map(lambda *g: sum(x.astype(jnp.float32) for x in g).astype(g[0].dtype) / 4, *grads[i : i + 4])
        for i in (0, 4)
    ]
    expected, _ = train(gefen(1e-2), params, means)
    assert int(state.gradient_step) == 2
    for a, b, p in zip(*map(jax.tree.leaves, (found, expected, params))):
        assert a.dtype == jnp.bfloat16
        moved = np.abs(np.asarray(b, np.float32) - np.asarray(p, np.float32)).max()
        # The running mean is kept in the parameters' dtype, so signs of near-zero entries may differ there.
        differ = np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)) > 0.25 * moved
        assert differ.mean() < 0.02


class TestApplyIfFinite:
    """A bad step is one that never was."""

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_changes_no_bit(self, bad):
        tx, params = optax.apply_if_finite(gefen(1e-2), 5), tree(0)
        step = step_of(tx)
        params, state = step(params, tx.init(params), GRADS[0])
        before = snapshot((params, state.inner_state))
        poison = GRADS[1] | {"table": GRADS[1]["table"].at[5, 3].set(bad)}
        after, skipped = step(params, state, poison)
        same((after, skipped.inner_state), before)
        assert int(skipped.total_notfinite) == 1
        same(step(after, skipped, GRADS[2])[0], step(params, state, GRADS[2])[0])

    def test_without_it_the_bad_element_never_leaves_its_leaf(self):
        """How far it spreads there is in core/test_non_finite.py."""
        tx, params = gefen(1e-2), tree(0)
        poison = GRADS[0] | {"table": GRADS[0]["table"].at[5, 3].set(jnp.nan)}
        moved, state = train(tx, params, [poison])
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((moved["dense"], state.nu["dense"])))


def test_conditionally_transform_stops_when_told():
    tx, params = WRAPPERS["conditionally_transform"](), tree(0)
    step = step_of(tx)
    states = [tx.init(params)]
    for g in GRADS:
        params, state = step(params, states[-1], g)
        states.append(state)
    same(states[3].inner_state, states[2].inner_state)
    assert int(states[3].inner_state.count) == 2


def test_lookahead_keeps_state_for_the_fast_weights():
    tx = optax.lookahead(gefen(1e-2), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(tree(0))
    state = calibrate(tx.init(params), structured(0))
    assert explain(state).codebook == "256 words, learned"
    start = tree(0)
    moved, _ = train(tx, params, [GRADS[0]] * 2, state)
    fast, _ = train(gefen(1e-2), start, [GRADS[0]] * 2, calibrate(gefen(1e-2).init(start), structured(0)))
    close(moved.slow, jax.tree.map(lambda a, b: a + 0.5 * (b - a), start, fast), rtol=1e-5, atol=1e-6)


def test_sam_takes_gefen_as_its_outer_optimizer():
    params = tree(0)
    tx = optax.contrib.sam(gefen(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2)
    moved, state = train(tx, params, [GRADS[0], GRADS[1]])
    alone, _ = train(gefen(1e-2), params, [GRADS[1]])
    close(moved, alone, rtol=1e-5, atol=1e-6)
    assert explain(calibrate(state, structured(0))).codebook == "256 words, learned"


class TestFlatten:
    """`optax.flatten` hides the tree: one vector without a path."""

    def test_works_uncalibrated(self):
        tx, params = optax.flatten(gefen(1e-2)), tree(0)
        moved, state = train(tx, params, GRADS[:2])
        vector, _ = train(gefen(1e-2), jax.flatten_util.ravel_pytree(params)[0], [
            jax.flatten_util.ravel_pytree(g)[0] for g in GRADS[:2]
        ])  # fmt: skip
        close(jax.flatten_util.ravel_pytree(moved)[0], vector, rtol=3e-7, atol=1e-8)
        assert [row.path for row in explain(state).rows] == [""]

    def test_refuses_a_plan_of_the_tree(self, plan):
        with pytest.raises(
            ValueError, match=r"the plan has a leaf .* '' is not in the plan: was the tree renamed or fl"
        ):
            optax.flatten(gefen(1e-2, plan=plan)).init(tree(0))
        with pytest.raises(ValueError, match="parameter '' is not in the plan, which was made for another tree"):
            calibrate(optax.flatten(gefen(1e-2)).init(tree(0)), plan)


def test_reduce_on_plateau_scales_the_updates():
    tx, params = WRAPPERS["reduce_on_plateau"](), tree(0)
    state, step = tx.init(params), step_with_value(tx)
    scales = []
    for _ in range(5):
        _, state = step(params, state, GRADS[0])
        scales.append(float(state[1].scale))
    assert scales[0] == 1.0
    assert scales[-1] < 1.0


def test_full_precision_keeps_chosen_leaves_exactly_adam():
    params = tree(0)
    ours, state = train(gefen(1e-2, full_precision="^table$"), params, GRADS)
    theirs, _ = train(optax.adamw(1e-2), params, GRADS)
    close(ours["table"], theirs["table"], rtol=1e-6, atol=1e-6)
    assert {row.path: row.first_moment for row in explain(state).rows}["table"] == "float32"
    by_function = gefen(1e-2, full_precision=lambda path, leaf: leaf.shape == (640, 16)).init(params)
    same(by_function, gefen(1e-2, full_precision="table").init(params))
    calibrated = calibrate(by_function, structured(0))
    assert blocks(calibrated)["table"].reason == "full precision"
