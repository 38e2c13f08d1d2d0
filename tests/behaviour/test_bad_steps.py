"""Gradients, parameters and states that do not belong together: refused when the step is traced, by path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import same, snapshot, structured, tree

from gefen_jax import calibrate, explain, gefen, scale_by_gefen

TX = gefen(1e-3)


@pytest.fixture(params=["eager", "jit"])
def update(request):
    """`tx.update`, called plainly or under jit: the message is the same."""
    return (lambda tx: tx.update) if request.param == "eager" else (lambda tx: jax.jit(tx.update))


@pytest.fixture(scope="module")
def params():
    return tree(0)


@pytest.fixture(scope="module")
def opt_state(params):
    return TX.init(params)


class TestParameters:
    """What `init` refuses."""

    @pytest.mark.parametrize("leaf", [1.0, 3, "w", [1, 2], object()])
    def test_that_are_no_arrays(self, leaf):
        with pytest.raises(TypeError, match=r"parameter 'w(/0)?' must be an array; found .*: use jnp\.asarray"):
            TX.init({"w": leaf})

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
    def test_that_are_not_real_numbers(self, dtype):
        with pytest.raises(TypeError, match=f"parameter 'w' has dtype {jnp.dtype(dtype)}; Gefen trains real floating"):
            TX.init({"v": jnp.zeros(3), "w": jnp.zeros(3, dtype)})
        with pytest.raises(TypeError, match=r"leave it out with optax\.masked or optax\.partition"):
            jax.eval_shape(TX.init, {"w": jax.ShapeDtypeStruct((3,), dtype)})

    def test_that_share_a_path(self):
        with pytest.raises(ValueError, match="two leaves have the path 'a/b', by which plans and explain tell them"):
            TX.init({"a": {"b": jnp.zeros(3)}, "a/b": jnp.zeros(3)})

    def test_missing_where_decay_needs_them(self, update, params, opt_state):
        with pytest.raises(ValueError, match="weight decay needs the parameters: call update"):
            update(TX)(params, opt_state)
        jax.eval_shape(gefen(1e-3, weight_decay=0.0).update, params, opt_state)
        jax.eval_shape(scale_by_gefen().update, params, opt_state)

    def test_missing_where_the_reference_rule_needs_them(self):
        tx = gefen(1e-3, rule="reference", weight_decay=0.0)
        grads = {"w": jnp.ones(8)}
        with pytest.raises(ValueError, match="rule 'reference' needs the parameters"):
            jax.eval_shape(tx.update, grads, tx.init(grads))

    def test_of_another_tree_or_shape_in_update(self, update, params, opt_state):
        grads = params
        with pytest.raises(ValueError, match="the parameters have no leaf 'table'"):
            update(TX)(grads, opt_state, {"dense": params["dense"]})
        with pytest.raises(ValueError, match="the parameters have a leaf 'extra' beyond those that the gradients have"):
            update(TX)(grads, opt_state, params | {"extra": jnp.zeros(2)})
        with pytest.raises(ValueError, match=r"parameter 'table' has shape \(16, 640\), its gradient \(640, 16\)"):
            update(TX)(grads, opt_state, params | {"table": params["table"].T})


class TestGradients:
    """What `update` refuses of gradients."""

    @pytest.mark.parametrize("missing", [("table",), ("dense", "kernel")])
    @pytest.mark.parametrize("how", ["None", "absent"])
    def test_missing_ones(self, update, params, opt_state, missing, how):
        grads = jax.tree.map(lambda x: x, params)
        node = grads if len(missing) == 1 else grads["dense"]
        if how == "None":
            node[missing[-1]] = None
        else:
            del node[missing[-1]]
        path = "/".join(missing)
        with pytest.raises(ValueError, match=rf"gradients have no leaf '{path}' .*pass zeros .* or leave it out with"):
            update(TX)(grads, opt_state, params)

    def test_additional_ones(self, update, params, opt_state):
        with pytest.raises(ValueError, match="the gradients have a leaf 'more' beyond those that init saw"):
            update(TX)(params | {"more": jnp.zeros(3)}, opt_state, params)

    @pytest.mark.parametrize("shape", [(192, 96), (96, 96), (96, 191), (18432,), (1, 96, 192), (192, 192), ()])
    def test_of_another_shape(self, update, params, opt_state, shape):
        grads = {"dense": {"bias": params["dense"]["bias"], "kernel": jnp.zeros(shape)}, "table": params["table"]}
        with pytest.raises(ValueError, match=r"gradient of 'dense/kernel' has shape .*, the state was made for"):
            update(TX)(grads, opt_state, grads)

    @pytest.mark.parametrize("shape", [(64, 128), (128, 64), (64, 32), (32, 64)])
    @pytest.mark.parametrize("bits", [8, 4])
    def test_twice_or_half_as_long_as_the_state(self, update, bits, shape):
        """Packed codes must not pass for those of another shape."""
        tx = gefen(1e-3, min_size=0, bits=bits)
        grads = {"w": jnp.zeros(shape)}
        with pytest.raises(ValueError, match=r"gradient of 'w' has shape .*, the state was made for"):
            update(tx)(grads, tx.init({"w": jnp.zeros((64, 64))}), grads)

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
    def test_that_are_not_real_numbers(self, update, params, opt_state, dtype):
        grads = params | {"table": jnp.zeros((640, 16), dtype)}
        with pytest.raises(TypeError, match=f"gradient of 'table' must be a real floating.*found {jnp.dtype(dtype)}"):
            update(TX)(grads, opt_state, params)

    def test_that_are_no_arrays(self, params, opt_state):
        with pytest.raises(TypeError, match="gradient of 'table' must be a real floating-point array; found float"):
            TX.update(params | {"table": 1.0}, opt_state, params)

    def test_a_float0_tangent_of_an_integer(self, params, opt_state):
        grads = params | {"table": np.zeros((640, 16), jax.dtypes.float0)}
        with pytest.raises(TypeError, match="gradient of 'table' must be a real floating-point array"):
            TX.update(grads, opt_state, params)


def replaced(opt_state, name, change):
    """The state with ``change`` applied to the leaf of the kernel in one of its trees."""
    column = getattr(opt_state, name)
    return opt_state._replace(**{name: {"dense": {**column["dense"], "kernel": change(column["dense"]["kernel"])},
                                        "table": column["table"]}})  # fmt: skip


BROKEN_LEAVES = {
    "codes as float32": ("mu", lambda x: x.astype(jnp.float32), ValueError, "is not one of a parameter of shape"),
    "codes as bfloat16": ("mu", lambda x: x.astype(jnp.bfloat16), TypeError, "has dtype bfloat16, expected uint8"),
    "codes as int32": ("mu", lambda x: x.astype(jnp.int32), TypeError, "has dtype int32, expected uint8 codes"),
    "scales as bfloat16": ("mu_scale", lambda x: x.astype(jnp.bfloat16), TypeError, "bfloat16, float32, expected"),
    "rows as bfloat16": ("nu", lambda x: x.astype(jnp.bfloat16), TypeError, "the state was cast"),
    "columns as float16": ("nu_cross", lambda x: x.astype(jnp.float16), TypeError, "the state was cast"),
    "scales of other blocks": ("mu_scale", lambda x: x[:-1], ValueError, "is not one of a parameter of shape"),
    "too many scales": ("mu_scale", lambda x: jnp.ones((96, 5)), ValueError, r"mu_scale \(96, 5\)"),
    "rows of another leaf": ("nu", lambda x: jnp.ones((95, 1)), ValueError, r"nu \(95, 1\)"),
    "columns of another leaf": ("nu_cross", lambda x: jnp.ones((1, 191)), ValueError, r"nu_cross \(1, 191\)"),
    "scales of another rank": ("mu_scale", lambda x: x.reshape(-1), ValueError, "is not one of a parameter of shape"),
}


@pytest.mark.parametrize("how", BROKEN_LEAVES)
def test_a_state_with_a_replaced_or_cast_part_is_refused(update, params, opt_state, how):
    name, change, error, message = BROKEN_LEAVES[how]
    broken = replaced(opt_state, name, change)
    with pytest.raises(error, match=f"'dense/kernel'.*{message}"):
        update(TX)(params, broken, params)


BROKEN_HEADS = {
    "count": (lambda s: s._replace(count=s.count.astype(jnp.float32)), r"state's count is float32\[\], expected int32"),
    "format as float": (lambda s: s._replace(format=s.format.astype(jnp.float32)), "state's format is float32"),
    "format of another tree": (lambda s: s._replace(format=s.format[:-1]), r"format is uint32\[4\], expected .*\[5\]"),
    "words as bfloat16": (lambda s: s._replace(codebook=s.codebook.astype(jnp.bfloat16)), "codebook is bfloat16"),
    "half the words": (lambda s: s._replace(codebook=s.codebook[:128]), r"codebook is float32\[128\], expected .*256"),
}


@pytest.mark.parametrize("how", BROKEN_HEADS)
def test_common_arrays_that_were_replaced_or_cast_are_refused(update, params, opt_state, how):
    change, message = BROKEN_HEADS[how]
    with pytest.raises(ValueError, match=message + ".*start from tx"):
        update(TX)(params, change(opt_state), params)


def test_trees_of_unequal_length_are_refused(update, params, opt_state):
    broken = opt_state._replace(nu={"dense": opt_state.nu["dense"]})
    with pytest.raises(ValueError, match="must have equally many leaves; found 3, 3, 2, 3: was the state rebuilt from"):
        update(TX)(params, broken, params)
    with pytest.raises(ValueError, match="equally many leaves"):
        explain(broken)


def test_a_state_of_another_kind_is_refused(update, params):
    with pytest.raises(TypeError, match=r"expected a GefenState, found ScaleByAdamState: pass what tx\.init\(params\)"):
        update(TX)(params, optax.scale_by_adam().init(params), params)


def test_a_state_of_another_width_is_refused_even_inside_jit(update, params):
    with pytest.raises(ValueError, match=r"codebook is float32\[16\], expected float32\[256\]"):
        update(TX)(params, gefen(1e-3, bits=4).init(params), params)


def test_a_state_of_another_rule_is_refused_where_it_is_concrete(params, opt_state):
    with pytest.raises(ValueError, match=r"state was made with rule 'reference', 8 bits .*, the transformation with"):
        TX.update(params, gefen(1e-3, rule="reference").init(params), params)
    with pytest.raises(ValueError, match="build the transformation as it was, or start from"):
        gefen(1e-3, rule="reference").update(params, opt_state, params)
    with pytest.raises(ValueError, match="companding"):
        gefen(1e-3, codec="companding").update(params, opt_state, params)


FORMATS = {
    "later version": (lambda w: w + np.array([1, 0, 0, 0, 0], np.uint32), "layout version 2.*reads version 1"),
    "no version": (lambda w: w * 0, "layout version 0"),
    "rule": (lambda w: w | np.array([15 << 8, 0, 0, 0, 0], np.uint32), "unknown fields: written by a later release"),
    "bits": (lambda w: w ^ np.array([1 << 12, 0, 0, 0, 0], np.uint32), "unknown fields"),
    "field": (lambda w: w | np.array([1 << 26, 0, 0, 0, 0], np.uint32), "unknown fields"),
    "reason": (lambda w: w | np.array([0, 0, 0, 255, 0], np.uint32), "unknown reason"),
    "normalised": (lambda w: w | np.array([1 << 20, 0, 0, 0, 0], np.uint32), "normalised momentum"),
}


@pytest.mark.parametrize("how", FORMATS)
def test_a_state_of_another_version_is_refused_by_name(params, opt_state, how):
    change, message = FORMATS[how]
    other = opt_state._replace(format=jnp.asarray(change(np.asarray(opt_state.format))))
    with pytest.raises(ValueError, match=message):
        TX.update(params, other, params)
    if how != "normalised":
        for function in (explain, lambda s: calibrate(s, structured(0))):
            with pytest.raises(ValueError, match=message):
                function(other)


def test_codes_cast_to_float_are_seen_by_explain_and_calibrate(opt_state):
    """A tree cast to float32 as a whole: every leaf then looks exact, and only the format tells."""
    cast = replaced(opt_state, "mu", lambda x: x.astype(jnp.float32))
    for function in (explain, lambda s: calibrate(s, structured(0))):
        with pytest.raises(ValueError, match="state of 'dense/kernel': its first moment is float32, its format word"):
            function(cast)


def test_an_error_changes_nothing(params):
    opt_state = TX.init(params)
    before, grads = snapshot(opt_state), snapshot(params)
    with pytest.raises(ValueError, match="table"):
        TX.update(params | {"table": None}, opt_state, params)
    same(opt_state, before)
    same(params, grads)
