"""Runs the Triton source on a CPU, on NumPy arrays: the kernel's logic without a GPU.

Triton decides whether functions are compiled or interpreted when it is imported: the environment variable
TRITON_INTERPRET=1 must be set before, and the process then cannot compile. Programs run one after the other, so races
are not found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class _Buffer:
    """What the interpreter asks of a torch tensor, on a NumPy array: it works in place, so copies are itself."""

    def __init__(self, array: np.ndarray):
        self.array = np.require(array, requirements=["C", "W"])  # a copy of what is read only
        self.dtype = _Name(str(array.dtype))

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Buffer:
        return self

    cpu = untyped_storage

    def new_empty(self, *_: Any, **__: Any) -> _Buffer:
        return _Buffer(self.array)

    def set_(self, storage: _Buffer, *_: Any) -> None:
        self.array = storage.array

    def copy_(self, _: Any) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset


class _Name:
    """A dtype that Triton knows by its printed name."""

    def __init__(self, name: str):
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and self.name == other.name


class Interpreter:
    """A `tree.Launcher` on NumPy arrays, which it copies before they are written. Fresh vectors hold NaN."""

    def mutable(self, array: np.ndarray) -> np.ndarray:
        return np.array(array, order="C")

    def value(self, handle: np.ndarray) -> np.ndarray:
        return handle

    constant = mutable

    def zeros(self, length: int) -> np.ndarray:
        return np.zeros(length, np.int32)

    def launch(
        self, name: str, programs: int, operands: list[Any], outputs: Sequence[int], **constants: Any
    ) -> list[np.ndarray]:
        from gefen_pallas import reductions, source

        kernel = getattr(source if name == "gefen_step" else reductions, name)
        if not type(kernel).__name__.startswith("Interpreted"):
            raise RuntimeError("Triton was imported to compile: set TRITON_INTERPRET=1 before the process imports it")
        written = [np.full(length, np.nan, np.float32) for length in outputs]
        wrapped = [tuple(map(_Buffer, x)) if isinstance(x, tuple) else _Buffer(x) for x in [*operands, *written]]
        with np.errstate(all="ignore"):  # masked lanes compute on whatever they hold
            kernel[(programs,)](*wrapped, **constants, KERNEL="")
        return written
