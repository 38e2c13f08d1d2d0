"""Bytes of optimizer states side by side, from shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from gefen_jax.accounting.report import Formatter, Report, Row, format_bytes, format_plain
from gefen_jax.accounting.tensors import tree_bytes

__all__ = ["OptimizerStates", "optimizer_states"]


@dataclass(frozen=True)
class OptimizerStates(Report):
    """Bytes of several optimizers' states. Made by `optimizer_states`."""

    parameters: int
    states: Mapping[str, tuple[int, int]]

    columns: ClassVar[Mapping[str, Formatter]] = {
        "optimizer": str,
        "arrays": format_plain,
        "state": format_bytes,
        "B/parameter": lambda x: f"{x:.3f}",
    }

    @property
    def title(self) -> str:
        return f"Optimizer state for {self.parameters:,} parameters"

    @property
    def rows(self) -> list[Row]:
        return [
            {"optimizer": name, "arrays": arrays, "state": size, "B/parameter": size / self.parameters}
            for name, (arrays, size) in self.states.items()
        ]


def optimizer_states(params: Any, optimizers: Mapping[str, Any]) -> OptimizerStates:
    """Bytes of the state of each optimizer for these parameters, without making it.

    Args:
      params: arrays or shapes.
      optimizers: name -> Optax transformation.

    Examples:
      >>> import jax, optax
      >>> params = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
      >>> print(optimizer_states(params, {"adamw": optax.adamw(1e-3), "lion": optax.lion(1e-3)}))
      Optimizer state for 4,096 parameters
      optimizer  | arrays  |     state  | B/parameter
      -----------+---------+------------+------------
      adamw      |      3  | 32.00 KiB  |       8.001
      lion       |      2  | 16.00 KiB  |       4.001
    """
    found = {}
    for name, transformation in optimizers.items():
        state = jax.eval_shape(transformation.init, params)
        found[name] = (len(jax.tree.leaves(state)), tree_bytes(state))
    return OptimizerStates(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)), found)
