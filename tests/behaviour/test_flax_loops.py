"""Flax, both ways: linen with TrainState, and NNX with its Optimizer; boxed parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import same, train
from flax import linen, nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState

from gefen_jax import blocks, calibrate, explain, gefen, learn_plan, plan_from_state

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 128, (4, 16)))


class Linen(linen.Module):
    """An embedding and a kernel, both large enough to be quantised."""

    partition: bool = False

    @linen.compact
    def __call__(self, tokens):
        init = linen.initializers.lecun_normal()
        kernel_init = linen.with_partitioning(init, (None, "model")) if self.partition else init
        hidden = linen.Embed(128, 64, name="embed")(tokens)
        return linen.Dense(128, kernel_init=kernel_init, name="dense")(hidden)


class Net(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(128, 64, rngs=rngs)
        self.dense = nnx.Linear(64, 128, rngs=rngs)

    def __call__(self, tokens):
        return self.dense(self.embed(tokens))


def net():
    return Net(nnx.Rngs(0))


def loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def linen_grads(model, params):
    return jax.grad(lambda p: loss(model.apply({"params": p}, TOKENS), TOKENS))(params)


def nnx_grads(model):
    return nnx.grad(lambda m: loss(m(TOKENS), TOKENS))(model)


@nnx.jit
def nnx_step(model, optimizer):
    optimizer.update(model, nnx.grad(lambda m: loss(m(TOKENS), TOKENS))(model))


class TestTrainState:
    """Linen."""

    @pytest.mark.parametrize("freezing", [False, True])
    def test_calibrated_or_planned_it_is_one_run(self, freezing):
        model = Linen()
        params = model.init(jax.random.key(0), TOKENS)["params"]
        params = freeze(params) if freezing else params
        grads = linen_grads(model, params)

        @jax.jit
        def step(state):
            return state.apply_gradients(grads=linen_grads(model, state.params))

        tx = optax.chain(optax.clip_by_global_norm(1.0), gefen(1e-2))
        after = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        after = after.replace(opt_state=calibrate(after.opt_state, grads), step=jnp.int32(0))
        planned = optax.chain(optax.clip_by_global_norm(1.0), gefen(1e-2, plan=learn_plan(grads)))
        before = TrainState.create(apply_fn=model.apply, params=params, tx=planned)
        same(before.opt_state, after.opt_state)
        start = loss(model.apply({"params": params}, TOKENS), TOKENS)
        for _ in range(3):
            after = step(after)
        assert step._cache_size() == 1
        assert loss(model.apply({"params": after.params}, TOKENS), TOKENS) < start
        assert isinstance(after.params, FrozenDict) == freezing
        assert set(blocks(after.opt_state)) == {"embed/embedding", "dense/kernel", "dense/bias"}

    def test_boxed_parameters_keep_their_boxes_and_statistics_are_bare(self):
        model = Linen(partition=True)
        boxed = model.init(jax.random.key(0), TOKENS)["params"]
        bare = linen.unbox(boxed)
        tx = gefen(1e-2)
        state = tx.init(boxed)
        assert isinstance(state.mu["dense"]["kernel"], linen.Partitioned)
        for name in ("mu_scale", "nu", "nu_cross"):
            assert isinstance(getattr(state, name)["dense"]["kernel"], jax.Array)
        assert blocks(state) == blocks(tx.init(bare))
        assert [row.path for row in explain(state).rows] == ["dense/bias", "dense/kernel", "embed/embedding"]
        grads = linen_grads(model, boxed)
        updates, new = jax.jit(tx.update)(grads, state, boxed)
        plain, plain_new = jax.jit(tx.update)(linen.unbox(grads), tx.init(bare), bare)
        same(linen.unbox(updates), plain)
        same(linen.unbox(new), plain_new)
        assert jax.tree.structure(updates) == jax.tree.structure(boxed)

    def test_one_plan_serves_boxed_and_unboxed_trees(self):
        model = Linen(partition=True)
        boxed = model.init(jax.random.key(0), TOKENS)["params"]
        plan = learn_plan(linen_grads(model, boxed))
        assert plan == learn_plan(linen.unbox(linen_grads(model, boxed)))
        same(linen.unbox(gefen(1e-2, plan=plan).init(boxed)), gefen(1e-2, plan=plan).init(linen.unbox(boxed)))
        same(calibrate(gefen(1e-2).init(boxed), plan), gefen(1e-2, plan=plan).init(boxed))


class TestNnxOptimizer:
    """NNX."""

    @pytest.mark.parametrize(
        "wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)], ids=["bare", "chain"]
    )
    def test_calibrated_before_construction_or_after_it_is_one_run(self, wrap):
        models = net(), net()
        grads = nnx_grads(models[0])
        before = nnx.Optimizer(models[0], wrap(gefen(1e-2, plan=learn_plan(grads))), wrt=nnx.Param)
        after = nnx.Optimizer(models[1], wrap(gefen(1e-2)), wrt=nnx.Param)
        after.opt_state = calibrate(after.opt_state, grads)
        assert jax.tree.structure(before.opt_state) == jax.tree.structure(after.opt_state)
        for _ in range(2):
            nnx_step(models[0], before)
            nnx_step(models[1], after)
        same(nnx.state(models[0]), nnx.state(models[1]))
        same(nnx.state(before), nnx.state(after))
        assert explain(after.opt_state).codebook == "256 words, learned"
        assert plan_from_state(after.opt_state).leaves["dense/kernel"].reason == "learned"

    def test_one_trace_and_the_same_numbers_as_without_nnx(self):
        model = net()
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        grads = nnx.to_pure_dict(nnx_grads(model))
        optimizer = nnx.Optimizer(model, gefen(1e-2), wrt=nnx.Param)
        traces = []

        @nnx.jit
        def step(model, optimizer, grads):
            traces.append(1)
            optimizer.update(model, grads)

        for _ in range(3):
            step(model, optimizer, nnx_grads(net()))
        assert len(traces) == 1
        tx = gefen(1e-2)
        params, _ = train(tx, params, [grads] * 3)
        same(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)

    def test_inside_partition(self):
        def label(params):
            return jax.tree_util.tree_map_with_path(
                lambda path, _: "table" if "embed" in jax.tree_util.keystr(path) else "rest", params
            )

        model = net()
        plan = learn_plan(nnx_grads(model))
        groups = {"table": gefen(1e-3, plan=plan), "rest": gefen(1e-2, plan=plan)}
        optimizer = nnx.Optimizer(model, optax.partition(groups, label), wrt=nnx.Param)
        before = jax.tree.map(np.array, nnx.state(model, nnx.Param))
        for _ in range(3):
            nnx_step(model, optimizer)
        assert {path: leaf.reason for path, leaf in blocks(optimizer.opt_state).items()} == {
            path: leaf.reason for path, leaf in plan.leaves.items()
        }
        moved = [
            np.abs(a - np.asarray(b)).max()
            for a, b in zip(*map(jax.tree.leaves, (before, nnx.state(model, nnx.Param))))
        ]
        paths = list(plan.leaves)
        assert moved[paths.index("embed/embedding")] < 0.2 * moved[paths.index("dense/kernel")]

    @pytest.mark.parametrize("wrapper", [optax.apply_if_finite, optax.MultiSteps])
    def test_inside_wrappers_that_select_between_states(self, wrapper):
        model = net()
        optimizer = nnx.Optimizer(model, wrapper(gefen(1e-2), 2), wrt=nnx.Param)
        optimizer.opt_state = calibrate(optimizer.opt_state, nnx_grads(model))
        before = np.array(model.dense.kernel[...])
        for _ in range(2):
            nnx_step(model, optimizer)
        assert not np.array_equal(before, model.dense.kernel[...])
        assert explain(optimizer.opt_state).codebook == "256 words, learned"

    def test_only_some_parameters(self):
        """``wrt`` of a filter: the others are in no state (LoRA, frozen layers)."""
        model = net()
        only = nnx.All(nnx.Param, lambda path, _: "dense" in path)
        optimizer = nnx.Optimizer(model, gefen(1e-2), wrt=only)
        assert set(blocks(optimizer.opt_state)) == {"dense/kernel", "dense/bias"}
        grads = nnx.grad(lambda m: loss(m(TOKENS), TOKENS), argnums=nnx.DiffState(0, only))(model)
        before = np.array(model.embed.embedding[...])
        optimizer.update(model, grads)
        np.testing.assert_array_equal(before, model.embed.embedding[...])
