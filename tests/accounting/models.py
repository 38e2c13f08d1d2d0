"""Small models in plain JAX for the accounting tests: an MLP and a CNN (the decoders come from the package)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mlp_parameters(key=0, sizes=(33, 64, 96, 10)):
    """Weights and biases of a multilayer perceptron, float32."""
    keys = jax.random.split(jax.random.key(key), len(sizes))
    return {
        f"layer{i}": {"kernel": jax.random.normal(keys[i], (a, b)) / a**0.5, "bias": jnp.zeros(b)}
        for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:]))
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


def cnn_parameters(key=0):
    keys = jax.random.split(jax.random.key(key), 3)
    return {
        "conv0": {"kernel": jax.random.normal(keys[0], (3, 3, 3, 16)) * 0.2, "bias": jnp.zeros(16)},
        "conv1": {"kernel": jax.random.normal(keys[1], (5, 3, 16, 32)) * 0.1, "bias": jnp.zeros(32)},
        "head": {"kernel": jax.random.normal(keys[2], (32 * 8 * 9, 10)) * 0.02, "bias": jnp.zeros(10)},
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
