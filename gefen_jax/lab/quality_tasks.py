"""The tasks of the quality study, by name: small models of the kinds that people train, on real data.

A task is built from data, its default's or the user's own; everything else about it is fixed here, so that results
of one task compare.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gefen_jax.lab import adapters, data, models, tasks, train
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.language import GPTConfig, LlamaConfig
from gefen_jax.lab.ngrams import NGramConfig
from gefen_jax.lab.optimizers import build
from gefen_jax.lab.vision import CNNConfig, ResNetConfig

WINDOWS = 512  # of text to validate on
EXAMPLES = 2000  # images to validate on, at most
RANK = 32  # of the adapters: those of the wider layers are then large enough to be quantised
PRETRAINING = 400  # steps of AdamW for the model that the adapters tune

QWEN = LlamaConfig(
    vocab=256,
    context=64,
    layers=3,
    heads=4,
    kv_heads=2,
    width=96,
    hidden=256,
    head_dim=32,
    tied=True,
    qk_norm=True,
    stddev=models.NARROW,
)
NGRAM = NGramConfig(vocab=256, context=64, orders=5, rows=8192, width=16, hidden=128)


class Loaded(NamedTuple):
    """A task with its data."""

    task: tasks.Task
    fingerprint: str  # of the data
    source: str  # what the data are, for people


@dataclasses.dataclass(frozen=True)
class StudyTask:
    """One task of the study.

    Attributes:
      label: its name for people.
      load: makes the task from a data spec (`gefen_jax.lab.data`).
      data: the default spec.
      batch: examples per step.
      language: whether it is one of the language-model tasks, over which the gate pools.
      held_out: whether it has no part in any decision about the optimizer.
      trial: whether it is for trying things out, and no part of a complete study.
    """

    label: str
    load: Callable[[str], Loaded]
    data: str
    batch: int = 16
    language: bool = False
    held_out: bool = False
    trial: bool = False


def text_task(config: models.LanguageConfig, spec: str) -> Loaded:
    """Predict the next byte of a text."""
    text = data.load_text(spec)
    return Loaded(tasks.text_task(config, text, WINDOWS), data.fingerprint(text.train, text.validation), text.source)


def image_task(config: Callable[..., Any], spec: str) -> Loaded:
    """Name the class of an image; ``config(shape, classes)`` is the model's."""
    images = data.load_images(spec)
    shape: Any = images.train.shape[1:]
    found = data.fingerprint(images.train, images.train_labels, images.validation, images.validation_labels)
    return Loaded(tasks.image_task(config(shape, images.classes), images, EXAMPLES), found, images.source)


def bfloat16_task(load: Callable[[str], Loaded], spec: str) -> Loaded:
    """The same task with parameters, gradients and activations in bfloat16."""
    loaded = load(spec)

    def start(key: jax.Array) -> models.Params:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded.task.init(key))

    return loaded._replace(task=dataclasses.replace(loaded.task, start=start))


def adapter_task(config: models.LanguageConfig, spec: str) -> Loaded:
    """Tune a model that was trained on source code to another text, through low-rank adapters."""
    loaded = text_task(config, spec)

    def start(key: jax.Array) -> models.Params:
        return adapters.adapters(models.shapes(config), RANK, key)

    def weights(params: models.Params) -> models.Params:
        return adapters.merge(pretrained(config), params)

    return loaded._replace(task=dataclasses.replace(loaded.task, start=start, weights=weights))


@functools.cache
def pretrained(config: models.LanguageConfig, steps: int = PRETRAINING, size: int = 16) -> models.Params:
    """A model trained with AdamW on the standard library's sources: what a fine-tune starts from. Seed 0."""
    task = text_task(config, "stdlib").task
    batches = train.stack(list(task.batches(steps, size, seed=0)))
    tx = build("adamw", config, 2e-3, steps)
    with jax.ensure_compile_time_eval():  # the first who asks may be tracing
        params = task.init(jax.random.key(0))
        return jax.jit(train.many_steps(task, tx))(params, tx.init(params), batches)[0]


def _task(label: str, load: Callable[..., Loaded], config: Any, spec: str, **fields: Any) -> StudyTask:
    return StudyTask(label, functools.partial(load, config), spec, **fields)


_SMALL = GPTConfig(vocab=256, context=32, layers=2, heads=2, width=64, stddev=0.07)
_GPT, _LLAMA = models.preset("gpt-study"), models.preset("llama-study")
_IMAGES = "fashion-mnist" if Path(data.FASHION_MNIST).is_dir() else "digits"

TASKS: Mapping[str, StudyTask] = MappingProxyType(
    {
        "gpt": _task("GPT-2 style, source code", text_task, _GPT, "stdlib", language=True),
        "llama": _task("Llama 3 style, source code", text_task, _LLAMA, "stdlib", language=True),
        "qwen": _task("Qwen3 style, prose", text_task, QWEN, "pydoc", language=True, held_out=True),
        "gpt_bf16": _task(
            "GPT-2 style, bf16", bfloat16_task, functools.partial(text_task, _GPT), "stdlib", language=True
        ),
        "llama_bf16": _task(
            "Llama 3 style, bf16", bfloat16_task, functools.partial(text_task, _LLAMA), "stdlib", language=True
        ),
        "lora": _task("LoRA fine-tune to prose", adapter_task, _GPT, "pydoc"),
        "ngram": _task("n-gram embeddings, rare rows", text_task, NGRAM, "stdlib"),
        "small": _task("GPT-2 style, 0.12 M parameters", text_task, _SMALL, "stdlib", trial=True),
        "cnn": _task("convolutional network, digits", image_task, CNNConfig, "digits", batch=64),
        "resnet": _task("residual network, images", image_task, ResNetConfig, _IMAGES, batch=64),
    }
)
"""Name -> `StudyTask`."""


def choose(name: str) -> StudyTask:
    """The task of that name; `UsageError` lists the names there are."""
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}; choose among: {', '.join(TASKS)}")
    return TASKS[name]
