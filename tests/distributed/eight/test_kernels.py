"""Kernels under sharding: shard by shard where blocks are local, the plain step otherwise, and never a gather.

Kernels are Pallas' here, interpreted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_cases import AUTO, EXPLICIT, LAYOUTS, assert_lies, collectives, placed, tree
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import explain, gefen, implementation, learn_plan, state_sharding

SHARD_BY_SHARD = ("pallas", "asked for, shard by shard")


@pytest.fixture
def chosen(monkeypatch):
    """What decides on each leaf, in order of the calls that know where it lives."""
    seen = []
    original = implementation.choose

    def choose(requested, shape, leaf, gradient=None, parameter=None, home=None, **options):
        found = original(requested, shape, leaf, gradient, parameter, home, **options)
        if home is not None:
            seen.append(found)
        return found

    monkeypatch.setattr(implementation, "choose", choose)
    return seen


def optimizer(plan=None, shardings=None, second_moment=None, implementation="pallas", **options):
    rate = optax.linear_schedule(1e-2, 1e-3, 4)
    return gefen(
        rate,
        weight_decay=0.1,
        mask=jax.tree.map(lambda p: p.ndim > 1, tree(0)),
        plan=plan,
        second_moment=second_moment,
        implementation=implementation,
        shardings=shardings,
        **options,
    )


def assert_same_step(found, expected):
    """Codes may differ at a threshold between two words: sums in a block are not taken in one order everywhere."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        if x.dtype == jnp.uint8:
            assert np.mean(np.asarray(x) != np.asarray(y)) < 2e-3
        else:
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)


def aligned(second_moment):
    """A plan whose blocks lie inside the shards of up to eight devices."""
    return learn_plan(tree(7), second_moment=second_moment, align=8)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(("layout", "second_moment"), [("rows", "auto"), ("2x4", "full"), ("columns", "full")])
def test_a_step_is_that_of_one_device(layout, second_moment, kind, chosen):
    """Automatic meshes are told where parameters live, explicit ones have it in their types."""
    plan, shardings = aligned(second_moment), LAYOUTS[layout].shardings(kind)
    params, grads = tree(0), tree(1)
    one = optimizer(plan, implementation="jnp")
    expected = jax.jit(one.apply)(grads, params, one.init(params))
    assert not chosen

    tx = optimizer(plan, shardings if kind == AUTO else None)
    params, grads = placed(params, shardings), placed(grads, shardings)
    opt_state = jax.jit(tx.init, out_shardings=state_sharding(jax.eval_shape(tx.init, params), shardings))(params)
    compiled = jax.jit(tx.apply).lower(grads, params, opt_state).compile()
    found = compiled(grads, params, opt_state)
    assert_same_step(found, expected)
    assert_lies(found[0], shardings)
    if second_moment == "full":
        assert chosen == [SHARD_BY_SHARD] * 6
        assert collectives(compiled) == []
    else:
        assert SHARD_BY_SHARD in chosen
        assert ("jnp", "no kernel: its row or column factors are sums over several devices") in chosen
        assert not any("gather" in operation for operation, *_ in collectives(compiled))


def test_updates_inside_a_chain(chosen):
    shardings = LAYOUTS["2x4"].shardings()
    params, grads = tree(0), tree(1)
    plan = aligned("full")
    one, several = (optax.chain(optax.clip_by_global_norm(0.5), optimizer(plan, *more)) for more in ((), (shardings,)))
    expected, _ = jax.jit(one.update)(grads, one.init(params), params)
    opt_state = several.init(placed(params, shardings))
    found, _ = jax.jit(several.update)(placed(grads, shardings), opt_state, placed(params, shardings))
    assert_same_step(found, expected)
    assert chosen == [SHARD_BY_SHARD] * 6


def test_concrete_arrays_tell_where_they_lie(chosen):
    kernel = jnp.asarray(tree(0)["attention"]["kernel"])
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    tx, one = (gefen(1e-2, second_moment="full", implementation=name) for name in ("pallas", "jnp"))
    params = jax.device_put(kernel, NamedSharding(mesh, P("d")))
    found, _ = tx.apply(0.1 * params, params, tx.init(params))
    assert chosen == [SHARD_BY_SHARD]
    assert_same_step(found, one.apply(0.1 * kernel, kernel, one.init(kernel))[0])


def test_explain_says_which_leaves_and_why():
    shardings = LAYOUTS["columns"].shardings()
    params = placed(tree(0), shardings)
    opt_state = optimizer(second_moment="full").init(params)
    for given in ({"tx": optimizer(shardings=shardings)}, {"implementation": "pallas", "shardings": shardings}):
        rows = {row.path: (row.implementation, row.because) for row in explain(opt_state, params, **given).rows}
        assert rows["embed"][1] == (
            "no kernel: blocks of its first moment cross shards along axis 1 (1 blocks, 8 shards; a plan learned with "
            "align=8 avoids it)"
        )
        assert rows["attention/kernel"][0] == "jnp"
        assert rows["attention/bias"] == rows["odd"] == SHARD_BY_SHARD
    factored = explain(optimizer().init(params), params, implementation="pallas", shardings=shardings)
    assert "sums over several devices" in factored.rows[1].because
    unknown = explain(jax.eval_shape(optimizer().init, params), implementation="pallas")
    assert {row.implementation for row in unknown.rows} == {"jnp"}
    assert "state it with gefen(shardings=...)" in str(unknown)


def test_four_bits_share_bytes_inside_shards(chosen):
    """Eight shards of 64 x 12: pairs of codes lie in the second axis, which only the first case leaves whole."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    params = {"w": jnp.ones((512, 8))}
    for spec, expected in ((P("d"), "pallas"), (P(None, "d"), "jnp")):
        shardings = {"w": NamedSharding(mesh, spec)}
        tx = gefen(1e-2, bits=4, second_moment="full", min_size=0, implementation="pallas", shardings=shardings)
        opt_state = jax.eval_shape(tx.init, params)
        [row] = explain(opt_state, params, tx=tx).rows
        assert (row.implementation, "share a byte" in row.because) == (expected, expected == "jnp")


def test_wrong_statements_are_refused():
    rows, columns = LAYOUTS["rows"].shardings(), LAYOUTS["columns"].shardings()
    params = placed(tree(0), rows)
    with pytest.raises(TypeError, match=r"expected a jax.sharding.NamedSharding for 'w', found SingleDeviceSharding"):
        gefen(1e-2, shardings={"w": SingleDeviceSharding(jax.devices()[0])})
    with pytest.raises(ValueError, match="there is none for parameter 'attention/bias'; there are 'embed'"):
        gefen(1e-2, shardings={"embed": rows["embed"]}).init(params)
    tx = optimizer(shardings=columns)
    with pytest.raises(ValueError, match=r"'attention/kernel' was said to be placed as .*, but is placed as"):
        tx.apply(placed(tree(1), rows), params, tx.init(params))


def test_one_device_needs_no_shard_map(chosen):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AUTO,), devices=jax.devices()[:1])
    params = jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P()))
    tx = gefen(1e-2, implementation="pallas", shardings=NamedSharding(mesh, P()))
    tx.apply(params, params, tx.init(params))
    assert not chosen
