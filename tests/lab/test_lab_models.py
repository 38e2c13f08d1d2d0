"""Models: forward passes against float64 NumPy, parameter counts against formulas, and what makes them causal."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_models as reference
import pytest

from gefen_jax.lab import models
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.language import GPTConfig, LlamaConfig
from gefen_jax.lab.vision import CNNConfig, MLPConfig, ResNetConfig

GPT = GPTConfig(vocab=61, context=9, layers=2, heads=3, width=12)
LLAMA = LlamaConfig(vocab=61, context=9, layers=2, heads=4, kv_heads=2, width=24, hidden=20)
QWEN = dataclasses.replace(LLAMA, tied=True, qk_norm=True, head_dim=8, rope_theta=1e4)
CASES = {
    "gpt": (GPT, reference.gpt),
    "llama": (LLAMA, reference.llama),
    "llama, split heads": (dataclasses.replace(LLAMA, split_heads=True), reference.llama),
    "qwen": (QWEN, reference.llama),
    "mlp": (MLPConfig((5, 7, 3), 4, (11, 6)), reference.mlp),
    "cnn": (CNNConfig((9, 9, 2), 5, (4, 6), 7), reference.cnn),
    "resnet": (ResNetConfig((7, 7, 1), 3, 4, (1, 2), 2), reference.resnet),
    "resnet, even": (ResNetConfig((8, 8, 3), 3, 4, (1, 1, 1), 4), reference.resnet),
}


logits = jax.jit(models.logits, static_argnums=0)


def random_params(config, seed=0):
    """Parameters of unit scale everywhere, norm scales and biases included, so that every term counts."""
    random = np.random.default_rng(seed)
    shapes = models.shapes(config)
    return jax.tree.map(lambda s: (random.normal(size=s.shape) / np.sqrt(max(1, s.shape[0]))).astype("f4"), shapes)


def inputs_for(config, seed=1):
    random = np.random.default_rng(seed)
    if isinstance(config, models.LanguageConfig):
        return random.integers(config.vocab, size=(2, config.context)).astype(np.uint8)
    return random.integers(256, size=(3, *config.shape)).astype(np.uint8)


@pytest.mark.parametrize("name", CASES)
def test_forward_pass_equals_numpy(name):
    config, forward = CASES[name]
    params, inputs = random_params(config), inputs_for(config)
    expected = forward(config, jax.tree.map(np.float64, params), np.asarray(inputs, int))
    found = logits(config, params, inputs)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "config",
    [GPT, LLAMA, QWEN, dataclasses.replace(LLAMA, scan=True)],
    ids=["gpt", "llama", "qwen", "scanned"],
)
def test_a_later_byte_changes_no_earlier_logit(config):
    params, tokens = random_params(config), inputs_for(config)
    changed = tokens.copy()
    changed[:, 5] = (changed[:, 5] + 1) % config.vocab
    before, after = (logits(config, params, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before - after)[:, 5:].max(-1) > 1e-6).all()  # and every later one does change


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values():
    full = dataclasses.replace(LLAMA, kv_heads=LLAMA.heads)
    params, tokens = random_params(LLAMA), inputs_for(LLAMA)
    repeated = jax.tree.map(lambda x: x, params)
    for i in range(LLAMA.layers):
        for name in ("k", "v"):
            kernel = params[f"layer_{i}"][name]["kernel"].reshape(LLAMA.width, LLAMA.kv_heads, LLAMA.head_size)
            repeated[f"layer_{i}"][name]["kernel"] = kernel.repeat(2, axis=1).reshape(LLAMA.width, -1)
    assert models.count(models.shapes(full)) > models.count(params)
    np.testing.assert_allclose(logits(LLAMA, params, tokens), logits(full, repeated, tokens), rtol=1e-5, atol=1e-5)


def test_scanned_layers_are_the_same_model():
    scanned = dataclasses.replace(LLAMA, scan=True)
    params, tokens = random_params(LLAMA), inputs_for(LLAMA)
    layers = [params[f"layer_{i}"] for i in range(LLAMA.layers)]
    stacked = {name: part for name, part in params.items() if not name.startswith("layer_")}
    stacked["layers"] = {"block": jax.tree.map(lambda *parts: np.stack(parts), *layers)}
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, models.shapes(scanned))
    np.testing.assert_allclose(logits(scanned, stacked, tokens), logits(LLAMA, params, tokens), rtol=1e-5, atol=1e-5)


def test_split_heads_change_the_shapes_only():
    split = dataclasses.replace(LLAMA, split_heads=True)
    shapes = models.shapes(split)
    assert shapes["layer_0"]["q"]["kernel"].shape == (24, 4, 6)
    assert shapes["layer_0"]["o"]["kernel"].shape == (4, 6, 24)
    params = random_params(LLAMA)
    same = jax.tree.map(lambda x, s: x.reshape(s.shape), params, shapes)
    tokens = inputs_for(LLAMA)
    np.testing.assert_allclose(logits(split, same, tokens), logits(LLAMA, params, tokens), rtol=1e-5, atol=1e-5)


def gpt_formula(c):
    d = c.width
    block = 12 * d * d + 13 * d  # 4 d^2 attention, 8 d^2 MLP; biases 9 d, norms 4 d
    return (c.vocab + c.context) * d + c.layers * block + 2 * d


def llama_formula(c):
    d, size = c.width, c.head_size
    attention = 2 * d * size * (c.heads + c.kv_heads) + 2 * size * c.qk_norm
    return c.vocab * d * (1 if c.tied else 2) + c.layers * (attention + 3 * d * c.hidden + 2 * d) + d


@pytest.mark.parametrize("name", models.LANGUAGE)
def test_parameter_counts_equal_the_formulas(name):
    config = models.preset(name)
    formula = gpt_formula if isinstance(config, GPTConfig) else llama_formula
    assert models.count(models.shapes(config)) == formula(config)


def test_known_models_have_their_known_sizes():
    gpt2 = models.shapes(models.preset("gpt2-124m"))
    assert len(jax.tree.leaves(gpt2)) == 148
    assert models.count(gpt2) == 124_439_808
    llama = models.preset("llama3-1.5b")
    assert models.count(models.shapes(llama)) == 1_498_482_688
    scanned = models.shapes(dataclasses.replace(llama, scan=True, split_heads=True))
    assert models.count(scanned) == 1_498_482_688
    assert scanned["layers"]["block"]["q"]["kernel"].shape == (16, 2048, 32, 64)
    assert models.count(models.shapes(models.preset("qwen3-1.7b"))) == 1_720_574_976


def test_image_model_counts_equal_the_formulas():
    assert models.count(models.shapes(MLPConfig((8, 8, 1), 10, (32, 16)))) == 65 * 32 + 33 * 16 + 17 * 10
    cnn = CNNConfig((8, 8, 3), 10, (4, 6), 20)
    assert models.count(models.shapes(cnn)) == (27 + 1) * 4 + (36 + 1) * 6 + (2 * 2 * 6 + 1) * 20 + 21 * 10
    resnet = ResNetConfig((8, 8, 1), 10, 8, (1, 1), 4)
    stage_0 = 2 * 9 * 8 * 8 + 4 * 8
    stage_1 = 9 * 8 * 16 + 9 * 16 * 16 + 8 * 16 + 2 * 8 + 2 * 16
    assert models.count(models.shapes(resnet)) == 9 * 8 + stage_0 + stage_1 + 2 * 16 + 17 * 10


@pytest.mark.parametrize("config", [GPT, CASES["cnn"][0]], ids=["gpt", "cnn"])
def test_bfloat16_parameters_compute_in_bfloat16(config):
    params, inputs = random_params(config), inputs_for(config)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    text = logits.lower(config, half, inputs).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line or "stablehlo.convolution" in line]
    assert products
    assert all("bf16" in line and "xf32>, tensor" not in line for line in products)
    exact, found = logits(config, params, inputs), logits(config, half, inputs)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=0.1 * np.abs(exact).max())


def test_initialisation():
    config = models.preset("gpt-study")
    params = models.init(config, jax.random.key(3))
    again = models.init(config, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    block = params["h_0"]
    assert np.std(block["mlp_in"]["kernel"]) == pytest.approx(config.stddev, rel=0.02)
    residual = config.stddev / np.sqrt(6)  # 2 branches x 3 layers
    assert np.std(block["mlp_out"]["kernel"]) == pytest.approx(residual, rel=0.02)
    assert (block["ln_1"]["scale"] == 1).all()
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTConfig(vocab=9, context=9, layers=1, heads=3, width=10), "width 10 is not a multiple of heads 3"),
        (lambda: dataclasses.replace(LLAMA, kv_heads=3), "heads 4 is not a multiple of kv_heads 3"),
        (lambda: dataclasses.replace(LLAMA, width=26), "width 26 is not a multiple of heads 4"),
        (lambda: dataclasses.replace(LLAMA, head_dim=5), "even head size, found 5"),
        (lambda: ResNetConfig((8, 8, 1), 2, 12, (1,), 8), "width 12 is not a multiple of groups 8"),
        (lambda: models.preset("gpt3"), "unknown model 'gpt3'; choose one of: gpt-tiny"),
        (lambda: logits(GPT, random_params(GPT), np.zeros((1, 10), int)), "10 tokens, but the model"),
    ],
)
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_names_are_the_users_to_put_right():
    with pytest.raises(UsageError):
        models.preset("gpt3")
