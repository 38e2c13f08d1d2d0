"""The registry: what each name builds, what it heeds, and what its state costs on GPT-2."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gefen_jax.baselines import PEERS, Peer, build, state_bytes, state_table
from gefen_jax.baselines.registry import muon_matrices

OPTIONS = {"adam_mini": {"sizes": {"head_dim": 64}}}


def gpt2_shapes(width=768, layers=12, vocab=50257, context=1024):
    """GPT-2 124M as published: 148 leaves, fused q, k and v, the output head tied to the embedding."""

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def dense(inputs, outputs):
        return {"kernel": shape(inputs, outputs), "bias": shape(outputs)}

    def norm():
        return {"scale": shape(width), "bias": shape(width)}

    block = {
        "ln_1": norm(),
        "attn": {"c_attn": dense(width, 3 * width), "c_proj": dense(width, width)},
        "ln_2": norm(),
        "mlp": {"c_fc": dense(width, 4 * width), "c_proj": dense(4 * width, width)},
    }
    outer = {"wte": {"embedding": shape(vocab, width)}, "wpe": {"embedding": shape(context, width)}, "ln_f": norm()}
    return {**outer, **{f"h_{i}": block for i in range(layers)}}


def test_gpt2_has_its_published_size():
    leaves = jax.tree.leaves(gpt2_shapes())
    assert len(leaves) == 148
    assert sum(math.prod(leaf.shape) for leaf in leaves) == 124_439_808


@pytest.mark.parametrize("name", PEERS)
def test_state_bytes_per_parameter_on_gpt2(name):
    total = state_bytes(build(name, 1e-3, **OPTIONS.get(name, {})), gpt2_shapes())
    assert total / 124_439_808 == pytest.approx(PEERS[name].bytes_per_parameter, abs=6e-4)


def expected_bytes(block, codes_per_byte):
    """Codes and one float32 scale per block for both moments, from the shapes alone."""
    total = 4
    for leaf in jax.tree.leaves(gpt2_shapes()):
        n = math.prod(leaf.shape)
        if n < 4096:
            total += 8 * n + 8
        elif codes_per_byte == 1:
            total += 2 * (n + 4 * -(-n // block))
        else:
            total += 2 * -(-n // 2) + 4 * -(-n // block) + 4 * sum(leaf.shape)
    return total


def test_low_bit_state_is_codes_and_scales_and_nothing_else():
    assert state_bytes(build("adam8bit", 1e-3), gpt2_shapes()) == expected_bytes(256, 1)
    assert state_bytes(build("adam4bit", 1e-3), gpt2_shapes()) == expected_bytes(128, 2)


def test_table_is_sorted_and_complete():
    lines = state_table(gpt2_shapes(), options=OPTIONS).splitlines()
    assert lines[0] == "| optimizer | state bytes | bytes per parameter |"
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert sorted(names) == sorted(PEERS)
    sizes = [int(line.split("|")[2].replace(",", "")) for line in lines[2:]]
    assert sizes == sorted(sizes)
    assert "| adamw | 995,518,468 | 8.000 |" in lines


def tree(seed):
    draw = np.random.RandomState(seed)
    shapes = {
        "wte": {"embedding": (11, 24)},
        "mlp": {"kernel": (65, 67), "bias": (67,)},
        "head": {"kernel": (24, 11)},
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(draw.standard_normal(shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def two_steps(tx, scale=1.0):
    params, step = tree(0), jax.jit(tx.update)
    state = tx.init(params)
    for seed in (1, 2):
        grads = jax.tree.map(lambda g: scale * g, tree(seed))
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def close(a, b, rtol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b)


@pytest.mark.parametrize("name", PEERS)
def test_decay_is_decoupled_masked_and_times_the_learning_rate(name):
    params = tree(0)
    mask = {**jax.tree.map(lambda _: True, params), "mlp": {"kernel": False, "bias": True}}
    tx = build(name, 0.01, weight_decay=0.1, mask=mask, **OPTIONS.get(name, {}))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    close(updates, jax.tree.map(lambda p, decayed: -0.001 * p * decayed, params, mask))


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_descends(name):
    goal = tree(5)
    tx = build(name, optax.linear_schedule(0.1, 0.0, 150), weight_decay=0.0, **OPTIONS.get(name, {}))

    def loss(params):
        parts = jax.tree.map(lambda p, q: jnp.sum((p - q) ** 2), params, goal)
        return sum(jax.tree.leaves(parts))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    start = tree(0)
    (end, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=150))((start, tx.init(start)))
    assert loss(end) < 0.5 * loss(start)


def test_names_are_what_optax_builds():
    moments = {"b1": 0.8, "b2": 0.95, "eps": 1e-7}
    close(
        two_steps(build("adamw", 0.01, weight_decay=0.1, **moments)),
        two_steps(optax.adamw(0.01, weight_decay=0.1, **moments)),
    )
    close(
        two_steps(build("adamw_bf16", 0.01, weight_decay=0.1, **moments)),
        two_steps(optax.adamw(0.01, weight_decay=0.1, mu_dtype=jnp.bfloat16, **moments)),
    )
    close(
        two_steps(build("lion", 0.01, weight_decay=0.1, **moments)),
        two_steps(optax.lion(0.01, b1=0.8, b2=0.99, weight_decay=0.1)),
    )
    close(
        two_steps(build("adafactor", 0.01, weight_decay=0.0, min_dim_size_to_factor=8)),
        two_steps(optax.adafactor(0.01, min_dim_size_to_factor=8, multiply_by_parameter_scale=False)),
    )
    close(two_steps(build("sm3", 0.01, weight_decay=0.0, b1=0.8)), two_steps(optax.sm3(0.01, momentum=0.8)))
    close(
        two_steps(build("muon", 0.01, weight_decay=0.0, **moments)),
        two_steps(
            optax.contrib.muon(
                0.01,
                eps=1e-7,
                adam_b1=0.8,
                adam_b2=0.95,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=muon_matrices,
            )
        ),
    )


@pytest.mark.parametrize("name", PEERS)
def test_uses_says_which_hyperparameters_matter(name):
    base = {"b1": jnp.float32(0.9), "b2": jnp.float32(0.99), "eps": jnp.float32(1e-8)}
    run = jax.jit(lambda moments: two_steps(build(name, 0.01, **moments, **OPTIONS.get(name, {}))))
    expected = run(base)
    for changed, value in (("b1", 0.5), ("b2", 0.5), ("eps", 0.1)):
        found = run({**base, changed: jnp.float32(value)})
        same = all((a == b).all() for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)))
        assert same == (changed not in PEERS[name].uses), changed


def test_muon_takes_hidden_matrices_only():
    taken = muon_matrices(tree(0))
    assert taken["mlp"]["kernel"] is not None
    assert taken["mlp"]["bias"] is None
    assert taken["wte"]["embedding"] is None
    assert taken["head"]["kernel"] is None


def test_more_peers_can_be_added_without_changing_ours():
    def sgd(learning_rate, *, weight_decay, b1, b2, eps, mask):
        return optax.sgd(learning_rate)

    peers = {**PEERS, "sgd": Peer(sgd, 0.0, (), "no state")}
    assert state_bytes(build("sgd", 0.1, peers=peers), gpt2_shapes()) == 0
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'; choose one of: adamw, "):
        build("sgd", 0.1)
    with pytest.raises(TypeError, match="assignment"):
        PEERS["sgd"] = peers["sgd"]
