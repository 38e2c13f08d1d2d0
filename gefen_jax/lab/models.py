"""Every model of the laboratory as pure functions of a configuration: `init`, `shapes`, `logits`.

>>> import jax
>>> params = init(preset("gpt-tiny"), jax.random.key(0))
>>> count(params)
31320
>>> logits(preset("gpt-tiny"), params, jax.numpy.zeros((2, 5), "uint8")).shape
(2, 5, 256)
>>> count(shapes(preset("gpt2-124m")))  # shapes only: no memory is used
124439808
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.language import GPT, GPTConfig, Llama, LlamaConfig
from gefen_jax.lab.ngrams import NGram, NGramConfig
from gefen_jax.lab.vision import CNN, MLP, CNNConfig, MLPConfig, ResNet, ResNetConfig

Decoder = GPTConfig | LlamaConfig
LanguageConfig = Decoder | NGramConfig
VisionConfig = MLPConfig | CNNConfig | ResNetConfig
Config = LanguageConfig | VisionConfig
Params = Any  # a nested dict of arrays

# Standard deviation of the study's initial weights: 0.02 at width 768, and in proportion to 1 / sqrt(width). At 0.02
# narrow models spend their first hundreds of steps on a plateau; when it ends is chance, and hides what is compared.
NARROW = 0.06

LANGUAGE: dict[str, Decoder] = {
    "gpt-tiny": GPTConfig(vocab=256, context=32, layers=1, heads=2, width=40),
    "gpt-study": GPTConfig(vocab=256, context=64, layers=3, heads=4, width=96, stddev=NARROW),
    "gpt": GPTConfig(vocab=256, context=128, layers=4, heads=4, width=128),
    "gpt2-124m": GPTConfig(vocab=50257, context=1024, layers=12, heads=12, width=768),
    "llama-tiny": LlamaConfig(vocab=256, context=32, layers=1, heads=4, kv_heads=2, width=32, hidden=64),
    "llama-study": LlamaConfig(
        vocab=256, context=64, layers=3, heads=4, kv_heads=2, width=96, hidden=256, stddev=NARROW
    ),
    "llama": LlamaConfig(vocab=256, context=128, layers=4, heads=4, kv_heads=2, width=128, hidden=352),
    "llama3-1.5b": LlamaConfig(vocab=128256, context=8192, layers=16, heads=32, kv_heads=8, width=2048, hidden=8192),
    "qwen3-1.7b": LlamaConfig(
        vocab=151936,
        context=32768,
        layers=28,
        heads=16,
        kv_heads=8,
        width=2048,
        hidden=6144,
        head_dim=128,
        rope_theta=1e6,
        tied=True,
        qk_norm=True,
    ),
}


def preset(name: str) -> Decoder:
    """The language model configuration of that name; `UsageError` lists the names there are.

    The last three are for `shapes` only: they do not fit a small machine.
    """
    if name not in LANGUAGE:
        raise UsageError(f"unknown model {name!r}; choose one of: {', '.join(LANGUAGE)}")
    return LANGUAGE[name]


def module(config: Config) -> nn.Module:
    """The Flax module of a configuration."""
    match config:
        case GPTConfig():
            return GPT(config)
        case LlamaConfig():
            return Llama(config)
        case NGramConfig():
            return NGram(config)
        case MLPConfig():
            return MLP(config)
        case CNNConfig():
            return CNN(config)
        case ResNetConfig():
            return ResNet(config)
    raise TypeError(f"not a model configuration: {config!r}")


@functools.partial(jax.jit, static_argnums=0)
def init(config: Config, key: jax.Array) -> Params:
    """Fresh parameters: a nested dict of float32 arrays, a pure function of the key."""
    if isinstance(config, LanguageConfig):
        example = jnp.zeros((1, 2), jnp.uint8)
    else:
        example = jnp.zeros((1, *config.shape), jnp.float32)
    return module(config).init(key, example)["params"]


def shapes(config: Config) -> Params:
    """What `init` would return, as `jax.ShapeDtypeStruct`: for counting models of any size. No device is touched."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def count(params: Params) -> int:
    """Number of parameters of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def logits(config: Config, params: Params, inputs: ArrayLike) -> jax.Array:
    """Float32 logits: tokens (batch, length) -> (batch, length, vocab); images, uint8 -> (batch, classes)."""
    if isinstance(config, VisionConfig):
        inputs = jnp.asarray(inputs, jax.tree.leaves(params)[0].dtype) / 255
    return jnp.asarray(module(config).apply({"params": params}, inputs), jnp.float32)
