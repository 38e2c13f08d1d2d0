"""The optimizers of the quality study: those of `optimizers.OPTIMIZERS`, and Gefen with one part replaced."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from gefen_jax import Plan, calibrate, learn_plan
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.optimizers import OPTIMIZERS, Choice, gefen_choice
from gefen_jax.lab.quality_codebooks import FAMILIES, Words
from gefen_jax.plan import LeafPlan
from gefen_jax.state import is_gefen
from gefen_jax.tiling import Shape, largest_divisor


def with_words(words: Words, bits: int) -> Callable[[Any, Any], Any]:
    """Calibration whose codebook is ``words`` of the learned plan's histogram."""

    def prepare(opt_state: Any, grads: Any) -> Any:
        plan = learn_plan(grads, bits=bits)
        assert plan.counts is not None  # a gradient that is not 0 anywhere has them
        chosen = jax.numpy.asarray(words(plan.counts, bits))

        def replace(node: Any) -> Any:
            return node._replace(codebook=chosen) if is_gefen(node) else node

        return jax.tree.map(replace, calibrate(opt_state, plan), is_leaf=is_gefen)

    return prepare


def with_tiles(tile: Callable[[Shape], Shape], bits: int) -> Callable[[Any, Any], Any]:
    """Calibration with other blocks of the first moment; ``tile`` maps a parameter's shape to a block's."""

    def replaced(leaf: LeafPlan) -> LeafPlan:
        return leaf if leaf.exact else dataclasses.replace(leaf, mu=("tile", tile(leaf.shape)))

    def prepare(opt_state: Any, grads: Any) -> Any:
        plan: Plan = learn_plan(grads, bits=bits)
        leaves = {path: replaced(leaf) for path, leaf in plan.leaves.items()}
        return calibrate(opt_state, dataclasses.replace(plan, leaves=leaves))

    return prepare


def row_block(size: int) -> Callable[[Shape], Shape]:
    """Blocks of at most ``size`` elements along the last axis, and across the axis before where that is short.

    >>> row_block(256)((96, 288)), row_block(256)((512, 32))
    ((1, 144), (8, 32))
    """

    def tile(shape: Shape) -> Shape:
        run = largest_divisor(shape[-1], size)
        rows = largest_divisor(shape[-2], size // run) if len(shape) > 1 else 1
        return ((1,) * len(shape) + (rows, run))[-len(shape) :]

    return tile


def column_block(size: int) -> Callable[[Shape], Shape]:
    """Blocks of at most ``size`` elements along the axis before the last.

    >>> column_block(256)((96, 288))
    (96, 1)
    """

    def tile(shape: Shape) -> Shape:
        rows = largest_divisor(shape[-2], size) if len(shape) > 1 else 1
        return ((1,) * len(shape) + (rows, 1))[-len(shape) :]

    return tile


def _variants() -> dict[str, Choice]:
    found = dict(OPTIMIZERS)
    for bits, name, label in ((8, "gefen", "Gefen"), (4, "gefen_4bit", "Gefen, 4 bits")):
        for family, words in FAMILIES.items():
            if family != "learned":
                prepare = with_words(words, bits)
                found[f"{name}_{family}"] = gefen_choice(f"{label}, codebook {family}", prepare, bits=bits)
        for size in (64, 128, 256, 1024):
            prepare = with_tiles(row_block(size), bits)
            found[f"{name}_rows{size}"] = gefen_choice(f"{label}, blocks of {size}", prepare, bits=bits)
        prepare = with_tiles(column_block(256), bits)
        found[f"{name}_columns256"] = gefen_choice(f"{label}, column blocks", prepare, bits=bits)
    found["gefen_companding"] = gefen_choice("Gefen, companding codec", codec="companding")
    found["gefen_batches4"] = gefen_choice("Gefen, calibrated on 4 batches", batches=4)
    return found


VARIANTS: Mapping[str, Choice] = MappingProxyType(_variants())
"""Name -> `optimizers.Choice`."""


def choose(name: str) -> Choice:
    """The optimizer of that name; `UsageError` lists the names there are."""
    if name not in VARIANTS:
        raise UsageError(f"unknown optimizer {name!r}; choose among: {', '.join(VARIANTS)}")
    return VARIANTS[name]
