"""Where state lies: fresh, under jit, derived by `state_sharding`, on two meshes at once, or in the wrong place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_cases import AUTO, EXPLICIT, LAYOUTS, assert_lies, close, placed, same, train, tree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import diagnose, from_adam_state, gefen, learn_plan, state_sharding, to_adam_state
from gefen_jax.sharding import fit_spec

PARAMS = tree(0)
GRADS = tree(1)
TX = gefen(1e-2, weight_decay=0.1)
ABSTRACT = jax.eval_shape(TX.init, PARAMS)


def spec(x):
    """A sharding's spec, or an array's, without trailing Nones."""
    names = list(getattr(x, "sharding", x).spec)
    while names and names[-1] is None:
        names.pop()
    return tuple(names)


# -------------------------------------------------------------------------------- init


def test_jitted_init_on_an_explicit_mesh_places_state():
    layout = LAYOUTS["4x2"]
    shardings = layout.shardings(EXPLICIT)
    with jax.set_mesh(layout.mesh(EXPLICIT)):
        opt_state = jax.jit(TX.init)(placed(PARAMS, shardings))
    for x, wanted in zip(jax.tree.leaves(opt_state), jax.tree.leaves(state_sharding(ABSTRACT, shardings))):
        assert x.sharding.is_equivalent_to(wanted, x.ndim)
    same(opt_state, TX.init(PARAMS))


def test_jitted_init_on_an_automatic_mesh_takes_out_shardings():
    shardings = LAYOUTS["2x4"].shardings(AUTO)
    wanted = state_sharding(ABSTRACT, shardings)
    opt_state = jax.jit(TX.init, out_shardings=wanted)(placed(PARAMS, shardings))
    assert_lies(opt_state, wanted)
    same(opt_state, TX.init(PARAMS))


def test_abstract_init_on_an_explicit_mesh_has_the_shardings_in_its_types():
    layout = LAYOUTS["4x2"]
    shardings = layout.shardings(EXPLICIT)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), PARAMS, shardings)
    with jax.set_mesh(layout.mesh(EXPLICIT)):
        abstract = jax.eval_shape(TX.init, params)
    for trees in zip(abstract[3:], state_sharding(ABSTRACT, shardings)[3:]):
        for x, wanted in zip(*map(jax.tree.leaves, trees)):
            assert spec(x) == spec(wanted)


@pytest.mark.parametrize("plan", [None, learn_plan(GRADS, second_moment="block", bits=4)], ids=["fresh", "planned"])
def test_no_array_of_a_fresh_state_lies_elsewhere(plan):
    """A checkpoint before the first step holds global arrays only, and the first step does not move anything."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), gefen(1e-3, plan=plan))
    shardings = LAYOUTS["2x4"].shardings(AUTO)
    opt_state = tx.init(placed(PARAMS, shardings))
    assert_lies(opt_state, state_sharding(jax.eval_shape(tx.init, PARAMS), shardings))
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(opt_state))


def test_two_leaves_on_two_meshes():
    """Each leaf steps on its own mesh, eagerly (one program cannot span both)."""
    rng = np.random.default_rng(0)
    params, grads = ({k: rng.standard_normal((64, 128), np.float32) for k in "ab"} for _ in range(2))
    alone, state_alone, _ = train(TX, params, TX.init(jax.tree.map(jnp.asarray, params)), [grads])
    for kind in (AUTO, EXPLICIT):
        meshes = [
            jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=part)
            for part in np.split(np.array(jax.devices()), 2)
        ]
        shardings = dict(zip("ab", (NamedSharding(mesh, P("x")) for mesh in meshes)))
        there = placed(params, shardings)
        opt_state = TX.init(there)
        assert opt_state.nu["a"].sharding.mesh == meshes[0]
        assert opt_state.nu["b"].sharding.mesh == meshes[1]
        updates, opt_state = TX.update(placed(grads, shardings), opt_state, there)
        assert_lies(updates, shardings)
        assert_lies(opt_state.mu, shardings)
        same(opt_state.mu, state_alone.mu)
        close(optax.apply_updates(there, updates), alone, rtol=5e-7, atol=1e-7)


# -------------------------------------------------------------------------------- arrays in other places


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("what", ["state", "grads", "one gradient"])
def test_arrays_that_are_nowhere_go_where_the_others_are(kind, what):
    shapes = {"w": (64, 128), "v": (64, 128)}
    params, grads = tree(0, shapes), tree(1, shapes)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    shardings = dict.fromkeys(shapes, NamedSharding(mesh, P(None, "d")))
    there = placed(params, shardings)
    opt_state = TX.init(jax.tree.map(jnp.asarray, params)) if what == "state" else TX.init(there)
    given = placed(grads, shardings)
    given |= {"grads": grads, "one gradient": {"w": jnp.asarray(grads["w"])}}.get(what, {})
    alone, state_alone, _ = train(TX, params, TX.init(jax.tree.map(jnp.asarray, params)), [grads])
    updates, new = jax.jit(TX.update)(given, opt_state, there)
    same(new.mu, state_alone.mu)
    close(optax.apply_updates(there, updates), alone, rtol=5e-7, atol=1e-7)
    if kind == EXPLICIT:
        updates, new = TX.update(given, opt_state, there)
        same(new.mu, state_alone.mu)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_state_on_other_devices_is_refused_by_name(kind):
    shapes = {"w": (64, 128)}
    params, grads = tree(0, shapes), tree(1, shapes)
    small, large = (
        {"w": NamedSharding(jax.make_mesh((n,), ("d",), axis_types=(kind,), devices=jax.devices()[:n]), P("d"))}
        for n in (4, 8)
    )
    opt_state = TX.init(placed(params, small))
    given = placed(grads, large), opt_state, placed(params, large)
    with pytest.raises(ValueError, match=r"the state of 'w' lies on other devices .* state_sharding"):
        TX.update(*given)
    with pytest.raises(ValueError, match=r"incompatible devices.*updates\['w'\]"):
        jax.jit(TX.update)(*given)
    moved = jax.device_put(opt_state, state_sharding(opt_state, large))
    _, new = jax.jit(TX.update)(given[0], moved, given[2])
    assert_lies(new.mu, large)


# -------------------------------------------------------------------------------- state_sharding


def test_shardings_through_wrappers():
    shardings = LAYOUTS["2x4"].shardings(AUTO)
    labels = {"attention": "a", "embed": "b", "layers": "a", "odd": "a", "gain": "a"}
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(optax.partition({"a": gefen(1e-3), "b": optax.adam(1e-3)}, labels), 2),
    )
    abstract = jax.eval_shape(tx.init, PARAMS)
    wanted = state_sharding(abstract, shardings)
    assert jax.tree.structure(wanted) == jax.tree.structure(abstract)
    multi = wanted[1]
    assert jax.tree.map(spec, multi.acc_grads) == jax.tree.map(spec, shardings)  # accumulators are like parameters
    a, b = (multi.inner_opt_state.inner_states[label].inner_state for label in "ab")
    assert spec(a.mu["attention"]["kernel"]) == ("f", "t")
    assert spec(a.nu["attention"]["kernel"]) == ("f",)  # (128, 1)
    assert spec(a.nu_cross["attention"]["kernel"]) == (None, "t")  # (1, 256)
    assert spec(a.mu_scale["attention"]["kernel"]) == ("f",)  # (128, 1)
    assert spec(b[0].mu["embed"]) == spec(b[0].nu["embed"]) == ("t", "f")
    for x in (multi.mini_step, multi.gradient_step, a.count, a.codebook, a.format, b[0].count):
        assert spec(x) == ()


def test_parameters_named_like_the_states_own_arrays():
    """A codebook of a VQ-VAE is sharded; the optimizer's own is not."""
    mesh = LAYOUTS["rows"].mesh()
    names = ("codebook", "count", "format", "value")
    params = {"vq": dict.fromkeys(names, jnp.zeros((64, 128))), **dict.fromkeys(names, jnp.zeros((64, 128)))}
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, P("d")), params)
    wanted = state_sharding(jax.eval_shape(TX.init, params), shardings)
    assert all(spec(x) == ("d",) for x in jax.tree.leaves(wanted.mu))
    assert spec(wanted.codebook) == spec(wanted.count) == spec(wanted.format) == ()


def test_paths_that_end_alike_and_one_sharding_for_all():
    mesh = LAYOUTS["rows"].mesh()
    params = {"w": jnp.zeros((64, 128)), "deep": {"w": jnp.zeros((64, 128))}}
    shardings = {"w": NamedSharding(mesh, P("d")), "deep": {"w": NamedSharding(mesh, P(None, "d"))}}
    wanted = state_sharding(jax.eval_shape(TX.init, params), shardings)
    assert (spec(wanted.mu["w"]), spec(wanted.mu["deep"]["w"])) == (("d",), (None, "d"))
    whole = state_sharding(jax.eval_shape(TX.init, params), NamedSharding(mesh, P("d")))
    assert spec(whole.mu["w"]) == spec(whole.mu["deep"]["w"]) == spec(whole.nu["w"]) == ("d",)
    bare = state_sharding(jax.eval_shape(TX.init, params["w"]), NamedSharding(mesh, P("d")))
    assert (spec(bare.mu), spec(bare.codebook)) == (("d",), ())


def test_memory_kind_is_that_of_all_arrays():
    shardings = LAYOUTS["rows"].shardings(AUTO)
    wanted = state_sharding(ABSTRACT, shardings, "pinned_host")
    assert {x.memory_kind for x in jax.tree.leaves(wanted)} == {"pinned_host"}
    host = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), shardings)
    assert {x.memory_kind for x in jax.tree.leaves(state_sharding(ABSTRACT, host))} == {"pinned_host"}


def test_shardings_that_do_not_fit_are_refused():
    mesh = LAYOUTS["rows"].mesh()
    here = NamedSharding(mesh, P())
    with pytest.raises(ValueError, match=r"no sharding for the parameter 'embed' of the state; there are 'embd'"):
        state_sharding(jax.eval_shape(TX.init, {"embed": PARAMS["embed"]}), {"embd": here})
    with pytest.raises(TypeError, match=r"expected a NamedSharding for \['w'\], found SingleDeviceSharding"):
        state_sharding(ABSTRACT, {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])})
    with pytest.raises(ValueError, match="there are no parameter shardings"):
        state_sharding(ABSTRACT, {})


@pytest.mark.parametrize(
    ("shape", "given", "fitted"),
    [
        ((8, 4), P("f", "t"), ("f", "t")),
        ((8, 1), P("f", "t"), ("f",)),
        ((3, 4), P("f", "t"), (None, "t")),
        ((8, 6), P(None, ("f", "t")), ()),
        ((8, 16), P(None, ("f", "t")), (None, ("f", "t"))),
        ((8,), P("f", "t"), ("f",)),
        ((8, 4, 3), P("f"), ("f",)),
        ((), P("f"), ()),
    ],
)
def test_fit_spec(shape, given, fitted):
    for kind in (AUTO, EXPLICIT):
        sharding = fit_spec(shape, NamedSharding(LAYOUTS["2x4"].mesh(kind), given))
        assert spec(sharding) == fitted
        assert len(sharding.spec) == (len(fitted) if kind == AUTO else len(shape))
        sharding.shard_shape(shape)  # raises if it does not divide
    open_axis = NamedSharding(LAYOUTS["2x4"].mesh(AUTO), P(P.UNCONSTRAINED, "t"))
    assert spec(fit_spec((8, 4), open_axis)) == (None, "t")


# -------------------------------------------------------------------------------- loops over sharded state


def test_a_scan_over_steps_is_the_loop():
    shapes = {"w": (64, 128), "b": (32,)}
    shardings = {
        "w": (s := NamedSharding(LAYOUTS["rows"].mesh(EXPLICIT), P(None, "d"))),
        "b": NamedSharding(s.mesh, P("d")),
    }
    params = placed(tree(0, shapes), shardings)
    gradients = [placed(tree(seed, shapes), shardings) for seed in (1, 2, 3)]
    opt_state = TX.init(params)
    looped, looped_state, _ = train(TX, params, opt_state, gradients)

    def body(carry, grads):
        params, opt_state = carry
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *gradients)
    (params, opt_state), _ = jax.jit(lambda *c: jax.lax.scan(body, c, stacked))(params, opt_state)
    assert_lies(params, shardings)
    same(opt_state.mu, looped_state.mu)
    close((params, opt_state.nu), (looped, looped_state.nu), rtol=5e-7, atol=1e-7)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_seeds_over_devices(kind):
    """Eight runs, one on each device: `vmap` with its axis sharded."""
    mesh = jax.make_mesh((8,), ("seed",), axis_types=(kind,))
    over = NamedSharding(mesh, P("seed"))
    params = np.stack([tree(seed, (64, 128)) for seed in range(8)])
    grads = np.stack([tree(seed + 8, (64, 128)) for seed in range(8)])

    @jax.jit
    def step(params, grads):
        def one(p, g):
            updates, opt_state = TX.update(g, TX.init(p), p)
            return updates, opt_state.mu

        return jax.vmap(one)(params, grads)

    updates, codes = step(jax.device_put(params, over), jax.device_put(grads, over))
    assert updates.sharding.is_equivalent_to(over, 3)
    assert codes.sharding.is_equivalent_to(over, 3)
    for seed in (0, 7):
        expected, opt_state = jax.jit(TX.update)(grads[seed], TX.init(jnp.asarray(params[seed])), params[seed])
        same(np.asarray(codes)[seed], opt_state.mu)
        close(np.asarray(updates)[seed], expected, rtol=5e-7, atol=1e-8)


# -------------------------------------------------------------------------------- what users do to states


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_conversion_and_diagnosis_on_meshes(kind):
    shapes = {"w": (64, 128), "b": (32,)}
    specs = {"w": P(None, "d"), "b": P("d")}
    mesh = LAYOUTS["rows"].mesh(kind)
    shardings = {name: NamedSharding(mesh, specs[name]) for name in shapes}
    grads, params = tree(1, shapes), tree(0, shapes)
    adamw = optax.adamw(1e-3)

    def tour(params, grads):
        _, adam = jax.jit(adamw.update)(grads, adamw.init(params), params)
        opt_state = from_adam_state(adam, TX.init(params))
        return opt_state, to_adam_state(opt_state, adamw.init(params)), jax.jit(diagnose)(grads, opt_state)

    opt_state, adam, found = tour(placed(params, shardings), placed(grads, shardings))
    assert_lies(opt_state.mu, shardings)
    assert_lies((adam[0].mu, adam[0].nu), (shardings, shardings))
    alone, adam_alone, found_alone = tour(*(jax.tree.map(jnp.asarray, x) for x in (params, grads)))
    same(opt_state.mu, alone.mu)
    close((opt_state, adam), (alone, adam_alone), rtol=5e-7, atol=1e-30)
    close(found, found_alone, rtol=1e-5)
    if kind == EXPLICIT:
        eager = diagnose(placed(grads, shardings), opt_state)
        close(eager, found, rtol=1e-5)
