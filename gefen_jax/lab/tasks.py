"""A task: a model and data made into numbers to minimise. The same for every optimizer that is compared.

Losses are mean cross-entropies in nats per byte (text) or per image. What is trained is usually the model's
parameters; a task may train something else that they follow from, such as the adapters of a fine-tune.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax.lab import models
from gefen_jax.lab.data import DataError, Images, Text
from gefen_jax.lab.models import Config, LanguageConfig, Params, VisionConfig


class Batch(NamedTuple):
    inputs: np.ndarray | jax.Array  # uint8: (batch, length) or (batch, height, width, channels)
    labels: np.ndarray | jax.Array  # (batch, length) or (batch,)


class Metrics(NamedTuple):
    loss: float  # nats
    accuracy: float  # share of right predictions, 0..1


@dataclasses.dataclass(frozen=True)
class Task:
    """What to learn. `train(index)` and `validation(index)` look examples up on the host, as a `Batch`."""

    config: Config
    train: Callable[[np.ndarray], Batch]
    validation: Callable[[np.ndarray], Batch]
    train_examples: int  # indices of `train` are 0 .. train_examples - 1
    validation_index: np.ndarray  # int64, (n,): the fixed validation examples
    unit: str  # what one prediction is: "byte" or "image"
    length: int = 1  # predictions per example: bytes of a window
    start: Callable[[jax.Array], Params] | None = None  # fresh parameters from a key; None: the model's
    weights: Callable[[Params], Params] | None = None  # the model's parameters from those trained; None: they are

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters to train, a pure function of the key."""
        return models.init(self.config, key) if self.start is None else self.start(key)

    def model(self, params: Params) -> Params:
        """The model's parameters, from those that are trained."""
        return params if self.weights is None else self.weights(params)

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Mean cross-entropy, a float32 scalar."""
        logits = models.logits(self.config, self.model(params), batch.inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.labels, jnp.int32)).mean()

    def batches(self, steps: int, size: int, seed: int) -> Iterator[Batch]:
        """`steps` batches of random examples: a pure function of the arguments, equal for all optimizers."""
        random = np.random.default_rng(seed)
        for _ in range(steps):
            yield self.train(random.integers(self.train_examples, size=size))


def text_task(config: LanguageConfig, text: Text, windows: int = 128, length: int | None = None) -> Task:
    """Predict the next byte in windows of `length` bytes (None: the model's context).

    Training windows start anywhere; `windows` validation windows are spread evenly over the validation text.
    """
    length = length or config.context
    shortest = min(text.train.size, text.validation.size)
    if shortest <= length:
        raise DataError(
            f"data {text.source!r}: {shortest} bytes of train or validation text, but the model reads windows "
            f"of {length + 1}; give more text or a model with a shorter context"
        )
    if config.vocab < 256:
        raise ValueError(f"text_task: bytes need a vocabulary of 256, found {config.vocab}")

    def look_up(data: np.ndarray) -> Callable[[np.ndarray], Batch]:
        def windows_at(index: np.ndarray) -> Batch:
            window = data[np.asarray(index)[:, None] + np.arange(length + 1)]
            return Batch(window[:, :-1], window[:, 1:])

        return windows_at

    last = text.validation.size - length - 1
    return Task(
        config=config,
        train=look_up(text.train),
        validation=look_up(text.validation),
        train_examples=text.train.size - length,
        validation_index=np.unique(np.linspace(0, last, min(windows, last + 1)).astype(np.int64)),
        unit="byte",
        length=length,
    )


def image_task(config: VisionConfig, images: Images, examples: int = 2000) -> Task:
    """Name the class of an image; the first `examples` validation images are used."""
    if tuple(images.train.shape[1:]) != config.shape:
        raise ValueError(f"image_task: {config} does not fit images of shape {images.train.shape[1:]}")
    if config.classes < images.classes:
        raise ValueError(f"image_task: {images.classes} classes, but the model has {config.classes}")
    return Task(
        config=config,
        train=lambda index: Batch(images.train[index], images.train_labels[index]),
        validation=lambda index: Batch(images.validation[index], images.validation_labels[index]),
        train_examples=len(images.train),
        validation_index=np.arange(min(examples, len(images.validation))),
        unit="image",
    )
