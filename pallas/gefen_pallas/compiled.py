"""Runs the Triton source on an NVIDIA GPU, inside a jitted program, through jax-triton.

Compiled kernels are cached in memory, per process: a restart compiles them again (about a second for 148 leaves).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gefen_pallas import geometry

WARPS = 8
REGISTERS, LOOP_REGISTERS = 64, 80
"""Most registers of a thread, and the same for classes with loops: four or three programs of 8 warps then share a
processor. Tests read from the binary that nothing spills."""
PTX_VERSION = 86
"""PTX that the assemblers of CUDA 12.6 and later accept; Triton's own default is newer than most drivers."""
PTX_VERSION_SM120 = 87


def unavailable() -> str | None:
    """Why jax-triton cannot be used here, in words; None if it can. Imports nothing."""
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'gefen-jax[cuda12]'; it needs Python 3.12)"
    if jax.__version_info__ < (0, 11):
        return f"jax-triton 0.4 needs jax 0.11; found {jax.__version__}"
    return None


@functools.cache
def _load() -> Any:
    """jax-triton, mended where it needs it."""
    reason = unavailable()
    if reason is not None:
        raise ImportError(reason)
    # Triton 3.9 warns that the default will change; which one holds is said in `_options`.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import jax_triton
    from jax_triton import triton_lib

    if jax.__version_info__ >= (0, 12):
        _accept_three_arguments(triton_lib)
    return jax_triton


def _accept_three_arguments(triton_lib: Any) -> None:
    """jax 0.12 calls rules for dead code with (used, live, equation); jax-triton 0.4.1 takes (used, equation)."""
    import inspect

    from jax._src.interpreters import partial_eval

    rule: Any = partial_eval.dce_rules[triton_lib.triton_kernel_call_p]
    if len(inspect.signature(rule).parameters) == 2:
        rules: dict[Any, Any] = partial_eval.dce_rules
        rules[triton_lib.triton_kernel_call_p] = lambda used, live, eqn: rule(used, eqn)


class Compiled:
    """A `tree.Launcher` for traced arrays.

    Args:
      own_parameters: whether kernels read their own parameter list to find a leaf's pointers; otherwise they select
        among all of them, which is slower and rests on nothing undocumented.
    """

    def __init__(self, own_parameters: bool = True):
        self.own_parameters = own_parameters

    def mutable(self, array: Any) -> Any:
        return jax.new_ref(array)

    def value(self, handle: Any) -> Any:
        return handle[...]

    def constant(self, array: np.ndarray) -> Any:
        return jnp.asarray(array)

    def zeros(self, length: int) -> Any:
        return jax.new_ref(jnp.zeros(length, jnp.int32))

    def launch(
        self, name: str, programs: int, operands: list[Any], outputs: Sequence[int], **constants: Any
    ) -> list[Any]:
        from gefen_pallas import reductions, source

        options = {
            "ptx_version": _ptx_version(),
            "enable_fp_fusion": True,
            "maxnreg": _registers(name, constants["CLASSES"]),
        }
        found = _load().triton_call(
            *operands,
            kernel=getattr(source if name == "gefen_step" else reductions, name),
            name=name,
            grid=(programs,),
            out_type=tuple(jax.ShapeDtypeStruct((length,), jnp.float32) for length in outputs),
            num_warps=WARPS,
            num_stages=1,
            backend_options=options,
            KERNEL=name if self.own_parameters else "",
            **constants,
        )
        return list(found)


def _ptx_version() -> int:
    """The PTX version for the device at hand; unknown devices (deviceless compilation) get the common one."""
    if jax.default_backend() != "gpu":
        return PTX_VERSION
    capability = str(getattr(jax.devices()[0], "compute_capability", "0.0"))
    return PTX_VERSION_SM120 if int(capability.split(".")[0]) >= 12 else PTX_VERSION


def _registers(name: str, classes: tuple[tuple[int, ...], ...]) -> int:
    """The register limit of a launch; it pays for its hungriest class."""
    if name != "gefen_step":
        return REGISTERS
    kinds = [geometry.TileClass(*kind) for kind in classes]
    light = all(kind.loop == geometry.ONCE and (kind.exact or kind.vector > 1) for kind in kinds)
    return REGISTERS if light else LOOP_REGISTERS
