"""Adam-mini's partition for Flax layouts, and its step against float64 written from the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from gefen_jax.baselines import DEFAULT_RULES, Rule, adam_mini, scale_by_adam_mini
from gefen_jax.baselines.mini_rules import sharing

HEAD_DIM = {"head_dim": 4}


@pytest.mark.parametrize(
    ("path", "shape", "nu_shape"),
    [
        ("h_0/attn/query/kernel", (24, 6, 4), (1, 6, 1)),
        ("h_0/attn/key/kernel", (24, 24), (1, 6, 1)),
        ("layers/3/k_proj/kernel", (24, 8), (1, 2, 1)),
        ("layer_0/q/kernel", (24, 24), (1, 6, 1)),
        ("h_0/attn/value/kernel", (24, 6, 4), (1, 6, 4)),
        ("layer_0/v/kernel", (24, 8), (1, 8)),
        ("h_0/attn/out/kernel", (6, 4, 24), (1, 1, 24)),
        ("layer_0/o_proj/kernel", (24, 24), (1, 24)),
        ("h_0/attn_qkv/kernel", (24, 72), (1, 18, 1)),
        ("h_0/attn/qkv/kernel", (24, 3, 6, 4), (1, 3, 6, 1)),
        ("h_0/mlp_in/kernel", (24, 96), (1, 96)),
        ("Dense_0/kernel", (24, 96), (1, 96)),
        ("lm_head/kernel", (24, 101), (1, 101)),
        ("wte/embedding", (101, 24), (101, 1)),
        ("pos_embed", (1, 7, 24), (1, 7, 1)),
        ("adapter/lora_a", (24, 4), (1, 4)),
        ("adapter/lora_b", (4, 24), (1, 24)),
        ("Conv_0/kernel", (3, 3, 8, 16), (1, 1, 1, 1)),
        ("stem/kernel", (3, 3, 8, 16), (1, 1, 1, 1)),
        ("conv/kernel", (5, 8, 16), (1, 1, 1)),
        ("ln_1/scale", (24,), (1,)),
        ("attn/query_norm/scale", (6, 4), (1, 1)),
        ("ln_1/bias", (24,), (24,)),
        ("h_0/attn/query/bias", (6, 4), (6, 4)),
        ("temperature", (), ()),
        ("cls", (24,), (1,)),
    ],
)
def test_default_rules(path, shape, nu_shape):
    assert sharing(path, shape, sizes=HEAD_DIM).nu_shape == nu_shape
    stacked = sharing(f"layers/{path}", (5, *shape), sizes=HEAD_DIM, scanned="^layers")
    assert stacked.nu_shape == (5, *nu_shape)


def test_rules_cover_flax_modules():
    attention = linen.MultiHeadDotProductAttention(num_heads=2)
    params = jax.eval_shape(attention.init, jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
    state = jax.eval_shape(scale_by_adam_mini().init, params)
    assert {name: leaf["kernel"].shape for name, leaf in state.nu.items()} == {
        "query": (1, 2, 1),
        "key": (1, 2, 1),
        "value": (1, 2, 4),
        "out": (1, 1, 8),
    }
    model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    state = scale_by_adam_mini().init(nnx.state(model, nnx.Param))
    assert state.nu["query"]["kernel"][...].shape == (1, 2, 1)


def reference(gradients, view, reduced, b1=0.9, b2=0.99, eps=1e-8):
    """Updates of the last step, in float64: Adam-mini as in arXiv 2406.16793, Algorithm 1."""
    mu = nu = 0.0
    for step, gradient in enumerate(gradients, 1):
        g = gradient.astype(np.float64).reshape(view)
        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * (g**2).mean(axis=reduced, keepdims=True)
        update = (mu / (1 - b1**step)) / (np.sqrt(nu / (1 - b2**step)) + eps)
    return update.reshape(gradients[0].shape)


@pytest.mark.parametrize(
    ("path", "shape", "view", "reduced"),
    [
        ("query/kernel", (7, 12), (7, 3, 4), (0, 2)),
        ("query/kernel", (7, 3, 4), (7, 3, 4), (0, 2)),
        ("value/kernel", (7, 3, 4), (7, 3, 4), (0,)),
        ("out/kernel", (3, 4, 7), (3, 4, 7), (0, 1)),
        ("embedding", (11, 5), (11, 5), (1,)),
        ("mlp/kernel", (13, 5), (13, 5), (0,)),
        ("conv/kernel", (3, 3, 2, 5), (3, 3, 2, 5), (0, 1, 2, 3)),
        ("scale", (13,), (13,), (0,)),
        ("bias", (13,), (13,), ()),
        ("temperature", (), (), ()),
    ],
)
def test_step_equals_float64(path, shape, view, reduced):
    draw = np.random.RandomState(0)
    gradients = [(draw.standard_normal(shape) * 10 ** draw.uniform(-3, 0, shape)).astype(np.float32) for _ in range(3)]
    tx = scale_by_adam_mini(0.9, 0.99, 1e-8, sizes=HEAD_DIM)
    state = tx.init({path: jnp.zeros(shape)})
    update = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update({path: gradient}, state)
    np.testing.assert_allclose(updates[path], reference(gradients, view, reduced), rtol=1e-5)


def test_stacked_layers_equal_separate_ones():
    draw = np.random.RandomState(0)
    layers = [
        {
            "query": {"kernel": draw.standard_normal((8, 12)), "bias": draw.standard_normal(12)},
            "norm": {"scale": draw.standard_normal(8).astype(np.float32)},
        }
        for _ in range(3)
    ]
    stacked = {"layers": jax.tree.map(lambda *leaf: jnp.stack(leaf), *layers)}
    tx = scale_by_adam_mini(sizes=HEAD_DIM, scanned="layers/")
    step = jax.jit(tx.update)
    updates, _ = step(stacked, tx.init(stacked))
    for i, layer in enumerate(layers):
        expected, _ = step(layer, tx.init(layer))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a[i], b, rtol=1e-6),  # noqa: B023
            updates["layers"],
            expected,
        )


def test_fused_qkv_equals_its_three_parts():
    draw = np.random.RandomState(0)
    parts = {name: {"kernel": draw.standard_normal((8, 12)).astype(np.float32)} for name in ("query", "key")}
    fused = {"qkv": {"kernel": np.concatenate([p["kernel"] for p in (*parts.values(), parts["query"])], axis=1)}}
    tx = scale_by_adam_mini(sizes=HEAD_DIM)
    expected, _ = tx.update(parts, tx.init(parts))
    updates, _ = tx.update(fused, tx.init(fused))
    wanted = np.concatenate([expected[name]["kernel"] for name in ("query", "key", "query")], axis=1)
    np.testing.assert_allclose(updates["qkv"]["kernel"], wanted, rtol=1e-6)


def test_own_rule_comes_first():
    rules = (Rule("router/kernel$", "... ->"), *DEFAULT_RULES)
    state = adam_mini(1e-3, rules=rules).init({"router": {"kernel": jnp.ones((4, 5))}, "kernel": jnp.ones((4, 5))})
    assert state[0].nu["router"]["kernel"].shape == (1, 1)
    assert state[0].nu["kernel"].shape == (1, 5)


def test_element_rule_everywhere_is_adam():
    tx, adam = scale_by_adam_mini(rules=(Rule("", "... -> ..."),)), optax.scale_by_adam()
    grads = {"w": jax.random.normal(jax.random.key(0), (9, 5))}
    state, exact = tx.init(grads), adam.init(grads)
    for _ in range(3):
        updates, state = tx.update(grads, state)
        expected, exact = adam.update(grads, exact)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)


@pytest.mark.parametrize(
    ("path", "shape", "options", "message"),
    [
        ("blocks/w1", (4, 5), {}, r"'blocks/w1' of shape \(4, 5\) has no Adam-mini rule; add one"),
        ("mlp/kernel", (3, 4, 5), {}, r"'mlp/kernel' of shape \(3, 4, 5\).*knows only.*scanned="),
        ("query/kernel", (2, 3, 4, 5), {}, r"'query/kernel' of shape \(2, 3, 4, 5\).*knows only"),
        ("query/kernel", (8, 12), {}, r"'query/kernel'.*axis of 12 into head \* head_dim; give.*head_dim"),
        ("query/kernel", (8, 12), {"sizes": {"head_dim": 5}}, r"'query/kernel': an axis of 12 cannot.*'head_dim': 5"),
        ("query/kernel", (8, 12), {"sizes": {"head": 2, "head_dim": 3}}, r"'query/kernel': an axis of 12 cannot"),
        ("layers/cls", (), {"scanned": "layers"}, r"'layers/cls' is a scalar, yet scanned='layers'"),
    ],
)
def test_leaves_that_no_rule_can_partition(path, shape, options, message):
    *folders, last = path.split("/")
    params = {last: jnp.ones(shape)}
    for folder in reversed(folders):
        params = {folder: params}
    with pytest.raises(ValueError, match=message):
        scale_by_adam_mini(**options).init(params)


@pytest.mark.parametrize(
    "layouts",
    ["in out", "in out -> head", "in in -> in", "in (head head_dim -> head", "in ((a b)) -> a", "in ... -> in"],
)
def test_malformed_layouts_are_refused_at_construction(layouts):
    with pytest.raises(ValueError, match="rule 'w'"):
        scale_by_adam_mini(rules=(Rule("w", layouts),))


def test_malformed_pattern_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"rule '\(' is not a regular expression"):
        scale_by_adam_mini(rules=(Rule("(", "... ->"),))
    with pytest.raises(ValueError, match=r"scanned '\(' is not a regular expression"):
        scale_by_adam_mini(scanned="(")


def test_state_of_other_rules_is_refused():
    params = {"query": {"kernel": jnp.ones((8, 12))}}
    state = scale_by_adam_mini(sizes={"head_dim": 4}).init(params)
    with pytest.raises(ValueError, match=r"'query/kernel'.*\(1, 2, 1\).*\(1, 3, 1\)"):
        scale_by_adam_mini(sizes={"head_dim": 6}).update(params, state)
