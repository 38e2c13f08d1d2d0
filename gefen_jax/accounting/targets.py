"""Compile for GPUs that this machine does not have: XLA needs their description, not the chips.

The optional wheels ``jax-cuda12-plugin`` and ``jax-cuda12-pjrt`` (of the version of jax) and a ``ptxas`` do the
work. The descriptions below hold the published figures of each chip; XLA's cost model reads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gefen_jax.accounting.devices import find_device

__all__ = ["TARGETS", "Target", "TargetUnavailableError", "make_target"]


class TargetUnavailableError(RuntimeError):
    """This installation cannot compile for the target; the message says what to install or set."""


@dataclass(frozen=True)
class Chip:
    """What XLA wants to know of a GPU beyond the table of `gefen_jax.accounting.devices`."""

    description: str
    major: int
    minor: int
    cores: int
    clock_ghz: float
    l2_cache: int
    shared_per_core: int
    shared_per_block_optin: int
    memory: int
    threads_per_core: int = 2048
    float32_units_per_core: int = 128


TARGETS: Mapping[str, Chip] = MappingProxyType(
    {
        "a100": Chip("NVIDIA A100-SXM4-80GB", 8, 0, 108, 1.41, 40 * 2**20, 167936, 166912, 85_097_971_712, 2048, 64),
        "h100": Chip("NVIDIA H100 80GB HBM3", 9, 0, 132, 1.98, 50 * 2**20, 233472, 232448, 84_978_434_048),
        "h200": Chip("NVIDIA H200", 9, 0, 132, 1.98, 50 * 2**20, 233472, 232448, 150_754_820_096),
        "b200": Chip("NVIDIA B200", 10, 0, 148, 1.965, 126 * 2**20, 233472, 232448, 191_512_903_680),
        "l4": Chip("NVIDIA L4", 8, 9, 58, 2.04, 48 * 2**20, 102400, 101376, 23_660_199_936, 1536),
        "rtx4090": Chip("NVIDIA GeForce RTX 4090", 8, 9, 128, 2.52, 72 * 2**20, 102400, 101376, 25_393_692_672, 1536),
    }
)

_INSTALL = (
    "pip install jax-cuda12-plugin=={version} (which brings jax-cuda12-pjrt), have ptxas on the path (a CUDA toolkit,"
    " or pip install nvidia-cuda-nvcc-cu12), and on a machine without a GPU set JAX_PLATFORMS=cpu before jax is"
    " imported"
)


@dataclass(frozen=True)
class Target:
    """A GPU (or a mesh of them) to compile for. Made by `make_target`.

    Attributes:
      name: "h100" and so on; "h100 x 8" for several.
      mesh: mesh over the absent devices.
    """

    name: str
    mesh: jax.sharding.Mesh

    def place(self, tree: Any) -> Any:
        """Turn arrays and shapes into shapes on the target.

        A leaf with a `NamedSharding` keeps its partition spec (the target's mesh must have the same axes);
        any other leaf is replicated. Leaves that are no arrays stay as they are.
        """

        def one(value: Any) -> Any:
            if not (hasattr(value, "shape") and hasattr(value, "dtype")):
                return value
            sharding = getattr(value, "sharding", None)
            spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            missing = {name for part in spec for name in _names(part)} - set(self.mesh.axis_names)
            if missing:
                raise TargetUnavailableError(
                    f"target {self.name}: an argument is sharded over {sorted(missing)}, the target's mesh has"
                    f" {self.mesh.axis_names}; pass make_target(..., mesh={{'{min(missing)}': ...}})"
                )
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(one, tree)

    def context(self) -> Any:
        """What tracing for the target has to happen in: kernels read the architecture from it."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)


def make_target(name: str, mesh: Mapping[str, int] | None = None) -> Target:
    """A GPU to compile for without having one.

    Args:
      name: a key of `TARGETS`: "a100", "h100", "h200", "b200", "l4", "rtx4090".
      mesh: axis name -> size, for several devices, e.g. ``{"fsdp": 8}``; ``None`` means one device.

    Returns:
      A `Target`, for ``step_memory(..., target=target)``.

    Raises:
      ValueError: unknown name.
      TargetUnavailableError: the wheels are missing, or JAX was imported without ``JAX_PLATFORMS=cpu``.
    """
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}; known: {', '.join(TARGETS)}")
    axes = dict(mesh or {"device": 1})
    count = 1
    for size in axes.values():
        count *= size
    try:
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(name), topology=f"1x1x{count}"
        )
    except Exception as error:
        hint = _INSTALL.format(version=jax.__version__)
        if os.environ.get("JAX_PLATFORMS") != "cpu":
            hint += f" (found JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r})"
        raise TargetUnavailableError(
            f"cannot compile for {name} here: {type(error).__name__}: {error}. What to do: {hint}"
        ) from error
    devices = topologies.make_mesh(topology, tuple(axes.values()), tuple(axes))
    return Target(name if count == 1 else f"{name} x {count}", devices)


def target_config(name: str) -> str:
    """XLA's description of a GPU, as the text of a protocol buffer."""
    chip = TARGETS[name]
    bandwidth = int(find_device(name).bandwidth)
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_per_core} threads_per_core_limit: {chip.threads_per_core}
  core_count: {chip.cores} fpus_per_core: {chip.float32_units_per_core} block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
  l2_cache_size: {chip.l2_cache} clock_rate_ghz: {chip.clock_ghz} device_memory_size: {chip.memory}
  shared_memory_per_block_optin: {chip.shared_per_block_optin}
  cuda_compute_capability {{ major: {chip.major} minor: {chip.minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.description}"
"""


def _names(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)
