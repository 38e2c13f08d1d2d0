"""Image classifiers in Flax: a perceptron, a small convolutional network, a residual network.

All map images, floats from 0 to 1 of shape (batch, height, width, channels), to logits of shape
(batch, classes). The residual network (He et al., arXiv 1512.03385 and 1603.05027) uses GroupNorm (Wu and He,
arXiv 1803.08494), so that a model is its parameters and nothing else: no running statistics.
"""

import dataclasses

import flax.linen as nn
import jax


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Fully connected layers over the flattened image."""

    shape: tuple[int, int, int]  # height, width, channels
    classes: int
    hidden: tuple[int, ...] = (256, 128)


@dataclasses.dataclass(frozen=True)
class CNNConfig:
    """3x3 convolutions, each followed by ReLU and 2x2 mean pooling, then one hidden layer."""

    shape: tuple[int, int, int]
    classes: int
    widths: tuple[int, ...] = (32, 64)
    hidden: int = 128


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Stages of residual blocks; each stage after the first doubles the width and halves the image."""

    shape: tuple[int, int, int]
    classes: int
    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)
    groups: int = 8  # of GroupNorm

    def __post_init__(self) -> None:
        if self.width % self.groups:
            raise ValueError(f"ResNetConfig: width {self.width} is not a multiple of groups {self.groups}")


class MLP(nn.Module):
    config: MLPConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(images.shape[0], -1)
        x = nn.Dense(self.config.hidden[0], name="dense_0")(x)
        for i, width in enumerate(self.config.hidden[1:], 1):
            x = nn.Dense(width, name=f"dense_{i}")(nn.relu(x))
        return nn.Dense(self.config.classes, name="head")(nn.relu(x))


class CNN(nn.Module):
    config: CNNConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for i, width in enumerate(self.config.widths):
            x = nn.relu(nn.Conv(width, (3, 3), name=f"conv_{i}")(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(self.config.hidden, name="dense")(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.config.classes, name="head")(x)


class ResNetBlock(nn.Module):
    width: int
    stride: int
    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stride = (self.stride, self.stride)
        h = nn.relu(nn.GroupNorm(self.groups, name="norm_1")(x))
        shortcut = x
        if x.shape[-1] != self.width or self.stride != 1:
            shortcut = nn.Conv(self.width, (1, 1), stride, use_bias=False, name="shortcut")(h)
        h = nn.Conv(self.width, (3, 3), stride, use_bias=False, name="conv_1")(h)
        h = nn.relu(nn.GroupNorm(self.groups, name="norm_2")(h))
        return shortcut + nn.Conv(self.width, (3, 3), use_bias=False, name="conv_2")(h)


class ResNet(nn.Module):
    config: ResNetConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        c = self.config
        x = nn.Conv(c.width, (3, 3), use_bias=False, name="stem")(images)
        for stage, blocks in enumerate(c.blocks):
            for i in range(blocks):
                stride = 2 if stage and i == 0 else 1
                x = ResNetBlock(c.width << stage, stride, c.groups, name=f"stage_{stage}_{i}")(x)
        x = nn.relu(nn.GroupNorm(c.groups, name="norm")(x)).mean(axis=(1, 2))
        return nn.Dense(c.classes, name="head")(x)
