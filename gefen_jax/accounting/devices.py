"""What devices can do at most: FLOP/s by dtype, memory bandwidth, memory; a table that users can extend."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["DEVICES", "Device", "find_device", "local_device", "measure_cpu"]

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Peak rates of one device.

    Attributes:
      name: short name, the key of the table.
      flops: dtype name -> peak FLOP/s of dense matrix multiplications. "float32" is what JAX does with float32
        at its default precision: TF32 on NVIDIA GPUs since A100, one bfloat16 pass on TPUs.
      bandwidth: bytes/s between the device's memory and its cores.
      memory: bytes of device memory.
      kinds: regular expressions, searched in `jax.Device.device_kind`, by which the device is recognised.
      source: where the numbers come from.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    kinds: tuple[str, ...] = ()
    source: str = ""

    def peak(self, dtype: Any) -> float:
        """Peak FLOP/s for matrix multiplications of this dtype.

        Raises:
          ValueError: the table has no figure for the dtype; the message lists those it has.
        """
        key = jnp.dtype(dtype).name
        if key not in self.flops:
            raise ValueError(
                f"device {self.name}: no peak FLOP/s for {key}, only for {', '.join(self.flops)}; pass"
                " dataclasses.replace(device, flops={...}) with a figure of your own"
            )
        return self.flops[key]


def _gpu(
    name: str, half: float, tf32: float, bandwidth: float, memory: int, kinds: tuple[str, ...], source: str
) -> Device:
    flops = {"bfloat16": half, "float16": half, "float32": tf32}
    return Device(name, MappingProxyType(flops), bandwidth, memory, kinds, source)


def _tpu(name: str, half: float, bandwidth: float, memory: int, kinds: tuple[str, ...]) -> Device:
    flops = {"bfloat16": half, "float32": half}
    return Device(name, MappingProxyType(flops), bandwidth, memory, kinds, f"Google Cloud, {name} page")


# Variants with other rates (PCIe cards, laptop chips) are left out on purpose: a wrong peak is worse than none.
_ALL = (
    _gpu("a100", 312e12, 156e12, 2.039e12, 80 * GIB, (r"A100-SXM4-80GB",), "NVIDIA A100 80GB SXM"),
    _gpu("a100-40gb", 312e12, 156e12, 1.555e12, 40 * GIB, (r"A100-(SXM4|PCIE)-40GB",), "NVIDIA A100 40GB"),
    _gpu("h100", 989e12, 494e12, 3.35e12, 80 * GIB, (r"\bH100 80GB HBM3",), "NVIDIA H100 SXM, without sparsity"),
    _gpu("h200", 989e12, 494e12, 4.8e12, 140 * GIB, (r"\bH200$",), "NVIDIA H200 SXM, without sparsity"),
    _gpu("b200", 2250e12, 1125e12, 8.0e12, 180 * GIB, (r"\bB200$",), "NVIDIA HGX B200, without sparsity"),
    _gpu("l4", 121e12, 60e12, 0.3e12, 24 * GIB, (r"\bL4$",), "NVIDIA L4, without sparsity"),
    _gpu("rtx4090", 165e12, 82.6e12, 1.008e12, 24 * GIB, (r"\bRTX 4090$",), "NVIDIA Ada, float32 accumulation"),
    _tpu("tpu-v4", 275e12, 1.228e12, 32 * GIB, (r"TPU v4$",)),
    _tpu("tpu-v5e", 197e12, 0.819e12, 16 * GIB, (r"TPU v5 ?(lite|e)$",)),
    _tpu("tpu-v5p", 459e12, 2.765e12, 95 * GIB, (r"TPU v5p?$",)),
    _tpu("tpu-v6e", 918e12, 1.64e12, 32 * GIB, (r"TPU v6 ?(lite|e)$",)),
)

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _ALL})


def find_device(device: str | Device, table: Mapping[str, Device] = DEVICES) -> Device:
    """Look a device up by its short name or by a `device_kind`.

    Args:
      device: a name such as "h100", a ``device_kind`` such as "NVIDIA H100 80GB HBM3", or a `Device`, which is
        returned as it is.
      table: the table; extend it by ``{**DEVICES, "mine": Device(...)}``.

    Raises:
      ValueError: unknown device; the message lists the known ones.

    Examples:
      >>> find_device("NVIDIA H100 80GB HBM3").name
      'h100'
      >>> mine = Device("mine", {"bfloat16": 1e12}, 1e11, 2**34)
      >>> find_device("mine", {**DEVICES, "mine": mine}).peak("bfloat16")
      1000000000000.0
    """
    if isinstance(device, Device):
        return device
    if device.lower() in table:
        return table[device.lower()]
    for known in table.values():
        if any(re.search(kind, device, re.IGNORECASE) for kind in known.kinds):
            return known
    raise ValueError(
        f"unknown device {device!r}; known: {', '.join(table)}, and 'cpu' (measured). For another one pass"
        " Device(name, flops={'bfloat16': ...}, bandwidth=..., memory=...)"
    )


def local_device(table: Mapping[str, Device] = DEVICES) -> Device:
    """The device that JAX uses by default: from the table, or measured (`measure_cpu`) on a CPU.

    Raises:
      ValueError: the device is not in the table.
    """
    device = jax.devices()[0]
    return measure_cpu() if device.platform == "cpu" else find_device(device.device_kind, table)


def measure_cpu(size: int = 1024, repeats: int = 8) -> Device:
    """Measure what this CPU reaches on a matrix multiplication and on a copy: a peak to divide by, not a datasheet.

    The best of a few short runs (about half a second in all). FLOP/s from a float32 and a bfloat16 product of
    ``size`` by ``size`` matrices, bandwidth from an addition over 64 MiB (one read, one write).

    Args:
      size: rows and columns of the matrices.
      repeats: runs of each kind.

    Returns:
      A `Device` named "cpu" with ``memory`` = 0 if the machine's memory cannot be read.
    """
    cpu = jax.devices("cpu")[0]
    flops = {}
    for dtype in ("float32", "bfloat16"):
        matrix = jax.device_put(jnp.ones((size, size), dtype), cpu)
        flops[dtype] = 2 * size**3 / _best(jax.jit(jnp.matmul), repeats, matrix, matrix)
    vector = jax.device_put(jnp.ones(16 * 2**20, jnp.float32), cpu)
    moved = 2 * vector.nbytes
    add = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: new pages would be measured otherwise
    best = math.inf
    for _ in range(repeats + 1):
        start = time.perf_counter()
        vector = jax.block_until_ready(add(vector))
        best = min(best, time.perf_counter() - start)
    bandwidth = moved / best
    return Device("cpu", MappingProxyType(flops), bandwidth, _machine_memory(), ("cpu",), "measured on this machine")


def _best(function: Any, repeats: int, *args: Any) -> float:
    jax.block_until_ready(function(*args))
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        best = min(best, time.perf_counter() - start)
    return best


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
