"""Small models and training steps for the accounting tests."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import gefen
from gefen_jax.accounting import Decoder, decoder_loss


def normal(seed, scale, *shape):
    """Normal float32 numbers, made by NumPy: nothing to compile."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def mlp_parameters(sizes=(33, 64, 96, 10)):
    """Weights and biases of a multilayer perceptron, float32."""
    return {
        f"layer{i}": {"kernel": normal(i, a**-0.5, a, b), "bias": jnp.asarray(np.zeros(b, np.float32))}
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def mlp_loss(params, batch):
    """Mean squared error; ``batch`` = (inputs (n, features), targets (n, classes))."""
    x, y = batch
    for i in range(len(params)):
        layer = params[f"layer{i}"]
        x = x @ layer["kernel"] + layer["bias"]
        if i + 1 < len(params):
            x = jax.nn.relu(x)
    return jnp.mean((x - y) ** 2)


def mlp_batch(rows=16, features=33, classes=10):
    return jnp.ones((rows, features)), jnp.ones((rows, classes))


def cnn_parameters():
    """Two convolutions and a head, float32."""
    zeros = np.zeros(48, np.float32)
    return {
        "conv0": {"kernel": normal(0, 0.2, 3, 3, 3, 16), "bias": jnp.asarray(zeros[:16])},
        "conv1": {"kernel": normal(1, 0.1, 5, 3, 16, 32), "bias": jnp.asarray(zeros[:32])},
        "head": {"kernel": normal(2, 0.02, 32 * 8 * 9, 10), "bias": jnp.asarray(zeros[:10])},
    }


def convolve(x, kernel, strides=(1, 1), padding="SAME"):
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def cnn_loss(params, batch):
    """Two convolutions (the second strided) and a linear head; images (n, 16, 17, 3)."""
    x, y = batch
    x = jax.nn.relu(convolve(x, params["conv0"]["kernel"]) + params["conv0"]["bias"])
    x = jax.nn.relu(convolve(x, params["conv1"]["kernel"], (2, 2)) + params["conv1"]["bias"])
    x = x.reshape(x.shape[0], -1) @ params["head"]["kernel"] + params["head"]["bias"]
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(x) * y, axis=-1))


def cnn_batch(rows=4):
    return jnp.ones((rows, 16, 17, 3)), jnp.ones((rows, 10)) / 10


GPT = Decoder("gpt", "gpt", 1, 48, 3, 3, 16, 192, 131, 24)
LLAMA = Decoder("llama", "llama", 1, 48, 4, 2, 12, 128, 137, 24, tied=False)
QWEN = Decoder("qwen", "llama", 1, 48, 2, 1, 32, 96, 101, 24, qk_norm=True)


def decoder_parameters(decoder):
    return jax.tree.map(lambda leaf: normal(1, 0.05, *leaf.shape), decoder.parameters())


def token_batch(rows=3, length=20):
    return jnp.ones((rows, length + 1), jnp.int32)


def model(name):
    """(loss(params, batch), parameters, batch) of a small model, real arrays."""
    if name == "mlp":
        return mlp_loss, mlp_parameters(), mlp_batch()
    if name == "cnn":
        return cnn_loss, cnn_parameters(), cnn_batch()
    decoder = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN}[name]
    return partial(decoder_loss, decoder), decoder_parameters(decoder), token_batch()


MODELS = ("mlp", "cnn", "gpt", "llama", "qwen")

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adamw bf16": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "adafactor": optax.adafactor(1e-3),
    "sm3": optax.sm3(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "gefen": gefen(1e-3, min_size=256),
}


def train_step(loss, optimizer):
    """A step ``(params, opt_state, batch) -> (params, opt_state, loss)``, not jitted."""

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step
