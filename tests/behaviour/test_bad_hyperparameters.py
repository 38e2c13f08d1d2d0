"""Wrong arguments of `gefen`, `scale_by_gefen` and `learn_plan`: refused where they are given, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import structured, tree

from gefen_jax import Plan, calibrate, explain, gefen, learn_plan, scale_by_gefen

NAN, INF = float("nan"), float("inf")
BUILDERS = (lambda **kw: gefen(1e-3, **kw), scale_by_gefen)


@pytest.mark.parametrize("build", BUILDERS, ids=["gefen", "scale_by_gefen"])
@pytest.mark.parametrize("name", ["b1", "b2"])
@pytest.mark.parametrize("value", [-0.1, 1, 1.0, 1.5, NAN, INF, -INF, 1 - 1e-9, np.float64(2), np.array(1.0)])
def test_decay_rates_outside_zero_to_one_are_refused(build, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be finite and >= 0 and < 1 in float32; found"):
        build(**{name: value})


@pytest.mark.parametrize("build", BUILDERS, ids=["gefen", "scale_by_gefen"])
@pytest.mark.parametrize("value", [0, 0.0, -1e-8, NAN, INF, 1e-46, 1e-40, 1e39])
def test_eps_that_is_not_a_positive_float32_is_refused(build, value):
    with pytest.raises(ValueError, match="eps must be finite and > 0 in float32; found"):
        build(eps=value)


def test_reference_rule_accepts_no_eps_but_refuses_a_negative_one():
    gefen(1e-3, eps=0.0, rule="reference")
    with pytest.raises(ValueError, match="eps must be finite and >= 0"):
        gefen(1e-3, eps=-1e-8, rule="reference")


@pytest.mark.parametrize("value", [-1e-3, NAN, INF, -INF, 1e39, np.float32(-1), np.array(-1.0)])
def test_learning_rate_and_decay_that_are_negative_or_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="learning_rate must be finite and >= 0 in float32; found"):
        gefen(value)
    with pytest.raises(ValueError, match="weight_decay must be finite and >= 0 in float32; found"):
        gefen(1e-3, weight_decay=value)


@pytest.mark.parametrize("value", [None, "1e-3", True, 1e-3 + 0j, [1e-3], np.array([1e-3]), {}])
@pytest.mark.parametrize("name", ["learning_rate", "b1", "b2", "eps", "weight_decay"])
def test_hyperparameters_of_a_wrong_type_are_refused(name, value):
    arguments = {"learning_rate": 1e-3} | {name: value}
    with pytest.raises(TypeError, match=f"{name} must be a real number or a scalar array; found"):
        gefen(**arguments)


@pytest.mark.parametrize("value", [jnp.array([1e-3, 2e-3]), jnp.array([1e-3]), jnp.array(1j), jnp.array(True)])
def test_arrays_that_are_no_real_scalar_are_refused(value):
    for name in ("learning_rate", "b1", "b2", "eps", "weight_decay"):
        with pytest.raises(TypeError, match=rf"{name} must be .*; found an array of shape .* and dtype"):
            gefen(**({"learning_rate": 1e-3} | {name: value}))


def test_array_arguments_are_seen_inside_jit_too():
    with pytest.raises(TypeError, match=r"b2 arrives in bfloat16, which rounds 0.999 to 1"):
        jax.jit(lambda b2: gefen(1e-3, b2=b2).init(jnp.ones(3)))(jnp.bfloat16(0.999))


def test_a_schedule_where_a_number_is_meant_points_to_inject_hyperparams():
    for name in ("b1", "b2", "eps", "weight_decay"):
        with pytest.raises(TypeError, match=f"{name} must .* for a schedule use optax.inject_hyperparams"):
            gefen(1e-3, **{name: optax.constant_schedule(0.1)})


def test_a_schedule_that_gives_a_vector_is_refused_at_trace_time():
    tx = gefen(lambda count: jnp.ones(3) * 1e-3)
    params = jnp.ones(3)
    with pytest.raises(ValueError, match=r"learning rate must be a scalar; the schedule gave shape \(3,\)"):
        jax.jit(tx.update)(params, tx.init(params), params)


def test_arguments_after_eps_are_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        gefen(1e-3, 0.9, 0.999, 1e-8, 0.0)  # optax.adamw has eps_root here


CHOICES = [
    ("rule", "Gefen", "must be one of 'gefen', 'reference'; found 'Gefen'"),
    ("rule", 3, "must be one of"),
    ("rule", ["gefen"], "must be one of"),
    ("second_moment", "row", "must be one of 'auto', 'block', 'factored', 'full'; found 'row'"),
    ("bits", 5, "must be one of 8, 4; found 5"),
    ("bits", "8", "must be one of 8, 4; found '8'"),
    ("bits", 8.0, "must be one of"),
    ("bits", True, "must be one of"),
    ("codec", "uniform", "must be one of 'table', 'companding'; found 'uniform'"),
    ("codec", 8, "must be one of"),
    ("min_size", -1, "must be a whole number of elements >= 0; found -1"),
    ("min_size", 2.5, "must be a whole number"),
    ("min_size", "4096", "must be a whole number"),
    ("min_size", True, "must be a whole number"),
]


@pytest.mark.parametrize(("name", "value", "message"), CHOICES)
def test_unknown_structural_arguments_are_refused_everywhere(name, value, message):
    for build in (*BUILDERS, lambda **kw: learn_plan(structured(0), **kw)):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            build(**{name: value})


@pytest.mark.parametrize("value", ["cuda", "", None, 3, "Jnp"])
def test_unknown_implementation_is_refused(value):
    with pytest.raises(ValueError, match=f"implementation must be one of 'auto', .*; found {value!r}"):
        gefen(1e-3, implementation=value)


@pytest.mark.parametrize("value", [0, -8, 1.5, "8", True])
def test_learn_plan_refuses_a_wrong_align(value):
    with pytest.raises(ValueError, match="align must be a whole number of devices >= 1; found"):
        learn_plan(structured(0), align=value)


@pytest.mark.parametrize(
    "given",
    [
        {"second_moment": "block"},
        {"bits": 4},
        {"min_size": 4096},
        {"axes": {"table": (0, 1)}},
        {"full_precision": "table"},
        {"full_precision": lambda path, leaf: False},
    ],
)
def test_reference_rule_has_no_options(given):
    name = next(iter(given))
    for build in (*BUILDERS, lambda **kw: learn_plan(structured(0), **kw)):
        with pytest.raises(ValueError, match=f"rule 'reference' is the original method, which has no .*{name}"):
            build(rule="reference", **given)


@pytest.mark.parametrize("other", [{"bits": 4}, {"rule": "reference"}])
def test_companding_exists_for_eight_bits_and_the_default_rule(other):
    for build in (*BUILDERS, lambda **kw: learn_plan(structured(0), **kw)):
        with pytest.raises(ValueError, match=r"companding.*|which has no codec='companding'"):
            build(codec="companding", **other)


@pytest.mark.parametrize("value", ["(", "[a-", "*x"])
def test_full_precision_that_is_no_regular_expression_is_refused(value):
    with pytest.raises(ValueError, match=r"full_precision .* is no regular expression"):
        gefen(1e-3, full_precision=value)


@pytest.mark.parametrize("value", [3, ["embed"], {"embed": True}, True])
def test_full_precision_of_a_wrong_type_is_refused(value):
    with pytest.raises(TypeError, match="full_precision must be a regular expression or a function; found"):
        gefen(1e-3, full_precision=value)


@pytest.mark.parametrize("value", [[("table", (0, 1))], "table", 3])
def test_axes_of_a_wrong_type_are_refused(value):
    with pytest.raises(TypeError, match="axes must map paths to"):
        gefen(1e-3, axes=value)


@pytest.mark.parametrize("value", [(0, 3), (2, 1), (-1, 1), (0, 0), (1,), "ab", None, 3, (0.0, 1.0), (0, 1, 1)])
def test_axes_that_do_not_fit_the_leaf_are_refused_by_path(value):
    params = tree(0)
    with pytest.raises(ValueError, match=r"axes\['dense/kernel'\] = .* does not fit the parameter's shape \(96, 192\)"):
        gefen(1e-3, axes={"dense/kernel": value}).init(params)
    with pytest.raises(ValueError, match=r"axes\['dense/kernel'\] = .* does not fit"):
        learn_plan(structured(0), axes={"dense/kernel": value})


def test_axes_of_an_unknown_leaf_are_refused():
    with pytest.raises(ValueError, match="axes names 'dense/kernl', which is no parameter; there are 'dense/bias'"):
        gefen(1e-3, axes={"dense/kernl": (0, 1)}).init(tree(0))
    with pytest.raises(ValueError, match="axes names 'dense/kernl'"):
        learn_plan(structured(0), axes={"dense/kernl": (0, 1)})


class TestMask:
    """Which leaves decay."""

    @pytest.mark.parametrize(
        "mask", [{"dense": True}, {"dense": {"bias": True}, "table": True}, [True, False], {"table": True}]
    )
    def test_of_another_tree_is_refused_by_init(self, mask):
        with pytest.raises(ValueError, match="mask does not fit the parameters: expected a tree of booleans"):
            gefen(1e-3, mask=mask).init(tree(0))

    @pytest.mark.parametrize("value", [1, 0.5, "yes", np.float32(1)])
    def test_without_booleans_is_refused(self, value):
        with pytest.raises(TypeError, match="mask must hold booleans; found"):
            gefen(1e-3, mask={"dense": value, "table": True}).init(tree(0))

    def test_function_that_returns_another_tree_is_refused(self):
        with pytest.raises(ValueError, match="mask does not fit the parameters"):
            gefen(1e-3, mask=lambda params: {"dense": True}).init(tree(0))

    @pytest.mark.parametrize("mask", [True, False, np.True_, np.array(False), jnp.array(True), jnp.float32(1)])
    def test_scalar_is_what_inject_hyperparams_makes_of_a_function(self, mask):
        with pytest.raises(TypeError, match=r"mask is a scalar.*static_args=\('mask', 'full_precision'\)"):
            gefen(1e-3, mask=mask)

    def test_may_be_a_prefix(self):
        gefen(1e-3, mask={"dense": True, "table": False}).init(tree(0))

    def test_is_checked_in_update_where_init_was_another(self):
        params = tree(0)
        opt_state = gefen(1e-3).init(params)
        with pytest.raises(ValueError, match="mask does not fit the parameters"):
            gefen(1e-3, mask={"dense": True}).update(params, opt_state, params)


@pytest.mark.parametrize("function", [explain, lambda s: calibrate(s, tree(0)), lambda s: calibrate(s, None)])
@pytest.mark.parametrize("opt_state", [None, {}, 3, optax.EmptyState()])
def test_an_optimizer_state_without_gefen_is_refused(function, opt_state):
    with pytest.raises(ValueError, match=r"there is no Gefen state .* pass what tx.init\(params\) returned"):
        function(opt_state)


@pytest.mark.parametrize("plan", ["plan.json", {}, 3, True])
def test_a_plan_that_is_none_is_refused(plan):
    with pytest.raises(TypeError, match=r"plan must come from learn_plan, Plan\.load or plan_from_state; found"):
        gefen(1e-3, plan=plan)
    assert isinstance(learn_plan(structured(0)), Plan)
