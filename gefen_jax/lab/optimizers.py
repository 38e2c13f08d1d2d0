"""Optimizers by name, all built alike: clipped gradients, one schedule, one weight decay."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gefen_jax import calibrate, gefen
from gefen_jax.baselines import registry
from gefen_jax.lab import models
from gefen_jax.lab.errors import UsageError


def _nothing(config: models.Config) -> dict[str, Any]:
    return {}


def _heads(config: models.Config) -> dict[str, Any]:
    return {"sizes": {"head_dim": config.head_size}} if isinstance(config, models.Decoder) else {}


def _sgd(
    learning_rate: optax.Schedule, *, weight_decay: Any, b1: Any, b2: Any, eps: Any, mask: Any
) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(optax.trace(b1), decay, optax.scale_by_learning_rate(learning_rate))


@dataclasses.dataclass(frozen=True)
class Choice:
    """One optimizer to compare.

    Attributes:
      label: its name for people.
      make: its constructor, as in `gefen_jax.baselines.registry.Peer`.
      rate: its learning rate as a multiple of AdamW's; its weight decay is divided by it, so that decay times rate
        is the same for all.
      prepare: maps (opt_state, first gradients) to the state to start with, outside jit; None: nothing to do.
      options: what its constructor must know of the model.
      batches: how many batches' gradients ``prepare`` wants; more than one are given as a list.
    """

    label: str
    make: registry.Make
    rate: float = 1.0
    prepare: Callable[[Any, Any], Any] | None = None
    options: Callable[[models.Config], dict[str, Any]] = _nothing
    batches: int = 1


def gefen_choice(
    label: str, prepare: Callable[[Any, Any], Any] | None = calibrate, batches: int = 1, **structure: Any
) -> Choice:
    """Gefen with structural arguments; calibrated unless ``prepare`` is None."""

    def make(learning_rate: optax.Schedule, *, eps: Any, **options: Any) -> optax.GradientTransformation:
        return gefen(learning_rate, eps=eps, **options, **structure)

    return Choice(label, make, prepare=prepare, batches=batches)


def _peer(name: str, label: str, **fields: Any) -> Choice:
    return Choice(label, registry.PEERS[name].make, **fields)


# Lion's authors advise a third to a tenth of AdamW's rate (arXiv 2302.06675). SGD's is a starting point, not tuned.
OPTIMIZERS: Mapping[str, Choice] = MappingProxyType(
    {
        "adamw": _peer("adamw", "AdamW"),
        "gefen": gefen_choice("Gefen"),
        "gefen_shapes": gefen_choice("Gefen, not calibrated", None),
        "gefen_reference": gefen_choice("Gefen, reference's rule", rule="reference"),
        "gefen_4bit": gefen_choice("Gefen, 4 bits", bits=4),
        "gefen_4bit_shapes": gefen_choice("Gefen, 4 bits, not calibrated", None, bits=4),
        "gefen_block": gefen_choice("Gefen, blocks only", second_moment="block"),
        "gefen_block_shapes": gefen_choice("Gefen, blocks only, not calibrated", None, second_moment="block"),
        "gefen_factored": gefen_choice("Gefen, factors", second_moment="factored"),
        "gefen_full": gefen_choice("Gefen, full second moment", second_moment="full"),
        "gefen_all": gefen_choice("Gefen, small leaves too", min_size=0),
        "adamw_bf16": _peer("adamw_bf16", "AdamW, bf16 momentum"),
        "adam_mini": _peer("adam_mini", "Adam-mini", options=_heads),
        "adam8bit": _peer("adam8bit", "8-bit Adam"),
        "adam4bit": _peer("adam4bit", "4-bit Adam"),
        "adafactor": _peer("adafactor", "Adafactor"),
        "sm3": _peer("sm3", "SM3"),
        "lion": _peer("lion", "Lion", rate=0.1),
        "muon": _peer("muon", "Muon"),
        "sgd": Choice("SGD with momentum", _sgd, rate=100.0),
    }
)


def choose(name: str) -> Choice:
    """The optimizer of that name; `UsageError` lists the names there are."""
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}; choose among: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def build(
    name: str,
    config: models.Config,
    learning_rate: float,
    steps: int,
    *,
    weight_decay: float = 0.1,
    b2: float = 0.99,
) -> optax.GradientTransformation:
    """The named optimizer of `OPTIMIZERS` as `build_choice` makes it."""
    return build_choice(choose(name), config, learning_rate, steps, weight_decay=weight_decay, b2=b2)


def build_choice(
    choice: Choice,
    config: models.Config,
    learning_rate: float | jax.Array,
    steps: int,
    *,
    weight_decay: float = 0.1,
    b2: float = 0.99,
) -> optax.GradientTransformation:
    """An optimizer as it is trained here: gradients clipped to global norm 1, warm-up and cosine decay.

    Args:
      choice: the optimizer.
      config: the model's; some optimizers must know its heads.
      learning_rate: AdamW's peak; `Choice.rate` makes it the optimizer's own. May be traced.
      steps: length of the schedule.
      weight_decay: AdamW's; divided by `Choice.rate`.
      b2: decay of the second moment, where there is one.
    """
    tx = choice.make(
        warmup_cosine(choice.rate * learning_rate, steps),
        weight_decay=weight_decay / choice.rate,
        b1=0.9,
        b2=b2,
        eps=1e-8,
        mask=None,
        **choice.options(config),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def warmup_cosine(peak: float | jax.Array, steps: int, warmup: float = 0.05, end: float = 0.1) -> optax.Schedule:
    """Linear rise to ``peak`` over the share ``warmup`` of the steps, cosine fall to ``end * peak`` at the last.

    The first step already moves: its rate is ``peak`` divided by the number of warm-up steps.

    Examples:
      >>> schedule = warmup_cosine(1.0, 100)
      >>> [round(float(schedule(step)), 3) for step in (0, 4, 5, 99)]
      [0.2, 1.0, 1.0, 0.1]
    """
    rise = max(1, round(warmup * steps))
    fall = max(1, steps - rise - 1)

    def schedule(count: Any) -> Any:
        step = jnp.asarray(count, jnp.float32)
        cosine = end + (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((step - rise) / fall, 0, 1)))
        return peak * jnp.where(step < rise, (step + 1) / rise, cosine)

    return schedule
