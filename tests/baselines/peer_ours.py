"""Our baselines, run on the cases that their originals were run on, and compared with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peer_cases as cases

from gefen_jax.baselines import adam4bit, adam8bit, adam_mini
from gefen_jax.baselines.lowbit import unpack_pairs

HYPERPARAMETERS = {"b1": cases.B1, "b2": cases.B2, "eps": cases.EPS, "weight_decay": cases.WEIGHT_DECAY}


def decayed(params):
    """The leaves that Adam-mini's original decays."""
    return {path: "bias" not in path and "norm" not in path for path in params}


OURS = {
    "bitsandbytes_adam8bit": adam8bit(cases.LEARNING_RATE, **HYPERPARAMETERS),
    "torchao_adam4bit": adam4bit(cases.LEARNING_RATE, **HYPERPARAMETERS),
    "lpmm_adam4bit": adam4bit(cases.LEARNING_RATE, **HYPERPARAMETERS),
    "adam_mini": adam_mini(cases.LEARNING_RATE, **HYPERPARAMETERS, mask=decayed, sizes={"head_dim": cases.HEAD_DIM}),
}


def run(transformation, case):
    """Parameters and the Adam state after the case's steps."""

    @jax.jit
    def step(params, state, gradients):
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, cases.params(case))
    state = transformation.init(params)
    for i in range(cases.STEPS):
        params, state = step(params, state, cases.gradients(case, i))
    return params, state[0]


def field(state, name, path, shape):
    """One leaf of the state, flat, with codes one per byte."""
    value = getattr(state, name)[path]
    if value.dtype == jnp.uint8 and value.shape != shape:
        value = unpack_pairs(value, shape)
    return np.asarray(value).reshape(-1)


def compare(original, case, params, state):
    """Asserts that parameters, codes and scales agree; a tie rounded the other way may touch one element in 1000."""
    for path, shape in case.shapes.items():
        off = np.abs(original[f"{path}:param"] - np.asarray(params[path])) > 5e-6
        assert off.mean() <= 1e-3, path
        for name in ("mu", "nu", "mu_scale", "nu_scale"):
            if f"{path}:{name}" not in original:
                continue
            found = field(state, name, path, shape)
            expected = original[f"{path}:{name}"].reshape(-1)
            expected = expected[: found.size]  # lpmm fills the last block up with zeros
            assert expected.shape == found.shape, (path, name)
            if expected.dtype == np.uint8:
                assert found.dtype == np.uint8
                assert (expected != found).mean() <= 1e-3, (path, name)
            else:
                np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7, err_msg=f"{path} {name}")
