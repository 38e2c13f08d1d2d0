"""Flax under a mesh: NNX parameters that carry their sharding, and linen's boxes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_cases import AUTO, EXPLICIT, assert_lies, close, same
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import blocks, calibrate, gefen, learn_plan, plan_from_state, state_sharding

X = np.random.default_rng(0).standard_normal((16, 64), np.float32)


class Net(nnx.Module):
    """A kernel split along its rows, one along its columns, whose statistics the mesh does not divide everywhere."""

    def __init__(self, rngs, split=True):
        def init(*names):
            plain = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(plain, names) if split else plain

        self.up = nnx.Linear(64, 192, kernel_init=init(None, "d"), rngs=rngs)
        self.down = nnx.Linear(192, 64, kernel_init=init("d", None), rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def loss(model):
    return jnp.mean((model(X) - X) ** 2)


@nnx.jit
def step(model, optimizer):
    optimizer.update(model, nnx.grad(loss)(model))


@functools.cache
def alone():
    """Two steps without a mesh."""
    model = Net(nnx.Rngs(0), split=False)
    plan = learn_plan(nnx.grad(loss)(model))
    optimizer = nnx.Optimizer(model, gefen(1e-2, plan=plan), wrt=nnx.Param)
    for _ in range(2):
        step(model, optimizer)
    return plan, nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer.opt_state


@pytest.mark.parametrize("how", ["planned", "calibrated after", "not calibrated"])
def test_an_nnx_optimizer_under_a_mesh(how):
    """Constructed inside the mesh, where Flax applies the parameters' metadata to what it finds in variables."""
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(AUTO,))):
        model = Net(nnx.Rngs(0))
        assert model.up.kernel.sharding.spec == P(None, "d")
        grads = nnx.grad(loss)(model)
        tx = gefen(1e-2, plan=alone()[0] if how == "planned" else None)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        if how == "calibrated after":
            optimizer.opt_state = calibrate(optimizer.opt_state, grads)
        mu = optimizer.opt_state.mu["up"]["kernel"]
        assert mu.sharding.spec == P(None, "d")
        assert mu[...].dtype == jnp.uint8
        for name in ("mu_scale", "nu", "nu_cross"):
            assert not isinstance(getattr(optimizer.opt_state, name)["up"]["kernel"], nnx.Param)
        for _ in range(2):
            step(model, optimizer)
        assert optimizer.opt_state.mu["up"]["kernel"].sharding.spec == P(None, "d")
    if how == "not calibrated":
        assert blocks(optimizer.opt_state)["up/kernel"].reason == "shape rule"
        return
    plan, params, state = alone()
    assert plan_from_state(optimizer.opt_state).leaves == plan.leaves
    for module in ("up", "down"):
        codes, expected = (np.asarray(s.mu[module]["kernel"][...]) for s in (optimizer.opt_state, state))
        assert np.mean(codes != expected) < 0.01  # gradients are summed in another order
        close(getattr(model, module).kernel[...], params[module]["kernel"], rtol=1e-4, atol=1e-4)


def test_an_nnx_optimizer_inside_partition_under_a_mesh():
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(AUTO,))):
        model = Net(nnx.Rngs(0))
        plan = learn_plan(nnx.grad(loss)(model))
        label = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: str(path[0].key), tree)  # noqa: E731
        groups = {"up": gefen(1e-2, plan=plan), "down": gefen(1e-2, plan=plan)}
        optimizer = nnx.Optimizer(model, optax.partition(groups, label), wrt=nnx.Param)
        for _ in range(2):
            step(model, optimizer)
    assert blocks(optimizer.opt_state) == plan.leaves
    close(model.up.kernel[...], alone()[1]["up"]["kernel"], rtol=1e-4, atol=1e-4)


class Boxed(linen.Module):
    """The same in linen, with boxes."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        up = linen.Dense(192, kernel_init=linen.with_partitioning(init, (None, "d")), name="up")
        down = linen.Dense(64, kernel_init=linen.with_partitioning(init, ("d", None)), name="down")
        return down(jax.nn.relu(up(x)))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_specs_that_linen_reads_from_boxes_fit_the_state(kind):
    """`nn.get_partition_spec` of the whole state: codes have the parameter's spec, bare statistics none."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    model, tx = Boxed(), gefen(1e-2)

    def init():
        params = model.init(jax.random.key(0), X)["params"]
        return params, tx.init(params)

    specs = linen.get_partition_spec(jax.eval_shape(init))
    assert specs[1].mu["up"]["kernel"] == P(None, "d")
    assert specs[1].nu["up"]["kernel"] == specs[1].mu_scale["up"]["kernel"] == P()
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    if kind == EXPLICIT:
        held = jax.device_put(jax.jit(init)(), shardings)
    else:
        held = jax.jit(init, out_shardings=shardings)()
    params, opt_state = held
    assert_lies(linen.unbox(params), shardings[0])
    grads = jax.tree.map(jnp.ones_like, params)
    updates, new = jax.jit(tx.update)(grads, opt_state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    bare = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), linen.unbox((grads, params)))
    expected, state = jax.jit(tx.update)(bare[0], tx.init(bare[1]), bare[1])
    same(linen.unbox(new).mu, state.mu)
    close(linen.unbox(updates), expected, rtol=1e-6, atol=1e-9)
    ours = state_sharding(jax.eval_shape(tx.init, linen.unbox(params)), shardings[0])
    assert ours.mu["up"]["kernel"].spec == P(None, "d")
