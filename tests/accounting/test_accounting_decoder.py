"""The plain-JAX decoder against the laboratory's Flax models: the same parameters give the same loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_models import GPT, LLAMA, decoder_parameters

from gefen_jax.accounting import Decoder, decoder_loss

language = pytest.importorskip("gefen_jax.lab.language")


def gpt_in_flax(params):
    tree = {
        "wte": {"embedding": params["embedding"]},
        "wpe": {"embedding": params["position_embedding"]},
        "ln_f": params["norm"],
    }
    names = {
        "ln_1": "norm_1",
        "ln_2": "norm_2",
        "attn_qkv": "qkv",
        "attn_out": "output",
        "mlp_in": "up",
        "mlp_out": "down",
    }
    return tree | {"h_0": {theirs: params["layer_0"][ours] for theirs, ours in names.items()}}


def llama_in_flax(params):
    names = {"attn_norm": "norm_1", "mlp_norm": "norm_2", "q": "query", "k": "key", "v": "value", "o": "output"}
    names |= {name: name for name in ("gate", "up", "down")}
    layer = {theirs: params["layer_0"][ours] for theirs, ours in names.items()}
    return {
        "embed": {"embedding": params["embedding"]},
        "layer_0": layer,
        "norm": params["norm"],
        "head": params["head"],
    }


@pytest.mark.parametrize("decoder", [GPT, LLAMA])
def test_loss_equals_the_flax_model(decoder):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32), decoder_parameters(decoder)
    )
    tokens = jnp.asarray(rng.integers(0, decoder.vocabulary, (2, 13)), jnp.int32)
    if decoder.style == "gpt":
        config = language.GPTConfig(decoder.vocabulary, decoder.context, 1, decoder.heads, decoder.width)
        logits = jax.jit(language.GPT(config).apply)({"params": gpt_in_flax(params)}, tokens[:, :-1])
    else:
        config = language.LlamaConfig(
            decoder.vocabulary, decoder.context, 1, decoder.heads, decoder.kv_heads, decoder.width, decoder.hidden
        )
        logits = jax.jit(language.Llama(config).apply)({"params": llama_in_flax(params)}, tokens[:, :-1])
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    expected = -np.mean(np.take_along_axis(log_p, np.asarray(tokens)[:, 1:, None], axis=-1))
    for options, tolerance in (({}, 1e-5), ({"remat": True}, 1e-5), ({"dtype": jnp.bfloat16}, 0.03)):
        loss = jax.jit(partial(decoder_loss, decoder, **options))(params, tokens)
        assert float(loss) == pytest.approx(expected, rel=tolerance)


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="found style 'bert'"):
        Decoder("x", "bert", 1, 8, 2, 2, 4, 32, 10, 4)
    with pytest.raises(ValueError, match="found 3 heads and 2 key/value heads"):
        Decoder("x", "llama", 1, 8, 3, 2, 4, 32, 10, 4)
