"""Parameters of every kind of tree: Equinox modules, dataclasses, FrozenDicts, None, lists; masks that are modules."""

import collections
import dataclasses

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import close, same, structured, train, tree
from flax import struct
from flax.core import FrozenDict, freeze

from gefen_jax import blocks, calibrate, explain, gefen, learn_plan

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64), np.float32))


def loss(model):
    return jnp.mean(jax.vmap(model)(X) ** 2)


def mlp(seed=0):
    return equinox.nn.MLP(64, 64, 128, 1, key=jax.random.key(seed))


class TestEquinox:
    """Modules are pytrees that hold functions and None besides arrays."""

    def test_trains_through_filtered_trees(self):
        model = mlp()
        tx = gefen(1e-2)
        state = tx.init(equinox.filter(model, equinox.is_array))
        grads = equinox.filter_grad(loss)(model)
        state = calibrate(state, grads)

        @equinox.filter_jit
        def step(model, state):
            grads = equinox.filter_grad(loss)(model)
            updates, state = tx.update(grads, state, equinox.filter(model, equinox.is_array))
            return equinox.apply_updates(model, updates), state

        start = loss(model)
        for _ in range(5):
            model, state = step(model, state)
        assert loss(model) < 0.7 * start
        assert "layers/0/weight" in blocks(state)
        assert explain(state).codebook == "256 words, learned"
        planned = gefen(1e-2, plan=learn_plan(grads)).init(equinox.filter(mlp(), equinox.is_array))
        same(planned, calibrate(tx.init(equinox.filter(mlp(), equinox.is_array)), grads))

    def test_a_mask_that_is_a_callable_module_is_not_called(self):
        model = equinox.nn.Linear(64, 128, key=jax.random.key(0))
        params = equinox.filter(model, equinox.is_array)
        mask = jax.tree.map(lambda p: p.ndim > 1, params)
        assert callable(mask)
        grads = jax.tree.map(jnp.zeros_like, params)
        tx = gefen(0.1, weight_decay=1.0, mask=mask)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        close(updates.weight, -0.1 * params.weight, rtol=1e-6)
        assert not np.any(updates.bias)
        hidden = optax.masked(gefen(0.1, weight_decay=1.0), lambda params: mask)
        assert set(blocks(hidden.init(params))) == {"weight"}

    def test_two_models_with_one_transformation(self):
        """The transformation holds no state of its own."""
        tx = gefen(1e-2)
        small, large = equinox.nn.Linear(8, 4, key=jax.random.key(0)), equinox.nn.Linear(64, 128, key=jax.random.key(1))
        states = [tx.init(small), tx.init(large)]
        for model, state in zip((small, large), states):
            updates, _ = jax.jit(tx.update)(model, state, model)
            assert jax.tree.structure(updates) == jax.tree.structure(model)
        same(tx.init(small), states[0])


@struct.dataclass
class Struct:
    """A Flax dataclass."""

    kernel: jax.Array
    bias: jax.Array
    name: str = struct.field(pytree_node=False, default="dense")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """A dataclass registered with JAX."""

    kernel: jax.Array
    bias: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="dense")


Pair = collections.namedtuple("Pair", ["kernel", "bias"])


@jax.tree_util.register_pytree_node_class
class Custom:
    """A node without keys."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def tree_flatten(self):
        return (self.kernel, self.bias), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


KINDS = {
    "dict": lambda kernel, bias: {"kernel": kernel, "bias": bias},
    "FrozenDict": lambda kernel, bias: freeze({"kernel": kernel, "bias": bias}),
    "OrderedDict": lambda kernel, bias: collections.OrderedDict(kernel=kernel, bias=bias),
    "nested list": lambda kernel, bias: [[kernel], (bias,)],
    "named tuple": Pair,
    "Flax dataclass": Struct,
    "JAX dataclass": Data,
    "custom node": Custom,
    "with None": lambda kernel, bias: {"a": None, "kernel": kernel, "z": {"bias": bias, "none": None}},
    "integer keys": lambda kernel, bias: {3: kernel, 11: {0: bias}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_tree_gives_the_same_numbers_in_its_own_form(kind):
    make = KINDS[kind]

    def both(seed):
        g = structured(seed)["dense"]
        return make(g["kernel"], g["bias"]), g

    tx = gefen(1e-2, weight_decay=0.1)
    (params, plain), (grads, plain_grads) = both(0), both(1)
    state = calibrate(tx.init(params), grads)
    moved, state = train(tx, params, [grads], state)
    expected, _ = train(tx, plain, [plain_grads], calibrate(tx.init(plain), plain_grads))
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    found = sorted(jax.tree.leaves(moved), key=lambda x: x.ndim)
    for a, b in zip(found, (expected["bias"], expected["kernel"])):
        np.testing.assert_array_equal(a, b)
    assert len(blocks(state)) == 2
    assert all(path for path in blocks(state))
    assert learn_plan([grads]).leaves == blocks(state)
    for column in (state.mu, state.mu_scale, state.nu, state.nu_cross):
        assert jax.tree.structure(column) == jax.tree.structure(params)


def test_gradients_in_another_container_of_the_same_leaves_are_taken():
    """FrozenDict parameters and plain gradients, as older Flax gives them: the updates have the gradients' form."""
    params = tree(0)
    tx = gefen(1e-2)
    state = tx.init(freeze(params))
    updates, new = jax.jit(tx.update)(params, state, freeze(params))
    assert isinstance(updates, dict)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    same(new.mu, freeze(jax.jit(tx.update)(params, tx.init(params), params)[1].mu))


@pytest.mark.parametrize("form", ["dict", "function", "FrozenDict", "prefix", "arrays"])
def test_masks_of_every_form_decay_the_same_leaves(form):
    params = freeze(tree(0)) if form == "FrozenDict" else tree(0)
    wanted = {"dense": {"bias": False, "kernel": True}, "table": False}
    mask = {
        "dict": wanted,
        "function": lambda p: jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in str(path), p),
        "FrozenDict": freeze(wanted),
        "prefix": {"dense": {"bias": False, "kernel": True}, "table": False},
        "arrays": jax.tree.map(jnp.array, wanted),
    }[form]
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = gefen(0.1, weight_decay=1.0, mask=mask)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    close(updates["dense"]["kernel"], -0.1 * params["dense"]["kernel"], rtol=1e-6)
    for untouched in (updates["dense"]["bias"], updates["table"]):
        assert not np.any(untouched)
    assert isinstance(updates, FrozenDict) == (form == "FrozenDict")


def test_a_leaf_replaced_by_one_newly_initialised():
    """A new head: its state is made anew, all other state stays bit for bit."""
    tx = gefen(1e-2)
    moved, state = train(tx, tree(0), [tree(1), tree(2)])
    fresh = tx.init(moved)
    swapped = state._replace(
        **{
            name: getattr(state, name) | {"table": getattr(fresh, name)["table"]}
            for name in ("mu", "mu_scale", "nu", "nu_cross")
        }
    )
    after, new = train(tx, moved, [tree(3)], swapped)
    kept, kept_state = train(tx, moved, [tree(3)], state)
    same(after["dense"], kept["dense"])
    same(new.mu["dense"], kept_state.mu["dense"])
    first, _ = train(tx, moved, [tree(3)])  # the leaf's own first step, with the bias correction of the third
    assert np.array_equal(np.sign(after["table"] - moved["table"]), np.sign(first["table"] - moved["table"]))


def test_numpy_parameters_and_gradients():
    params = jax.tree.map(np.asarray, tree(0))
    tx = gefen(1e-2)
    expected = train(tx, tree(0), [tree(1)])
    same(train(tx, params, [jax.tree.map(np.asarray, tree(1))]), expected)
