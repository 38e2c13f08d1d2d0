"""Several devices for the demo and the examples: making them, dividing parameters among them, counting bytes on one."""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.models import Params
from gefen_jax.lab.tasks import Batch, Task


def data_mesh(count: int) -> Mesh:
    """A mesh of one axis, "data", over the first ``count`` devices.

    On a machine without accelerators the host's processor is divided into as many devices. That has to be asked for
    before JAX is first used in a process.

    Raises:
      UsageError: there are fewer devices.
    """
    with contextlib.suppress(RuntimeError):  # JAX is in use already, with what devices it has
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        raise UsageError(
            f"--devices {count}: there are {len(devices)} {devices[0].platform} devices; give at most as many, or set "
            "JAX_PLATFORMS=cpu to use parts of the processor"
        )
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:count])


def fsdp(params: Params, mesh: Mesh) -> Params:
    """A sharding for each parameter: its largest axis that the number of devices divides, else a copy on each.

    Examples:
      >>> mesh = data_mesh(1)
      >>> tuple(fsdp({"kernel": jax.numpy.zeros((4, 8))}, mesh)["kernel"].spec)
      (None, 'data')
    """

    def of(p: jax.Array) -> NamedSharding:
        divisible = [axis for axis, size in enumerate(p.shape) if size % mesh.size == 0]
        names: list[str | None] = [None] * len(p.shape)
        if divisible:
            names[max(divisible, key=lambda axis: p.shape[axis])] = "data"
        return NamedSharding(mesh, PartitionSpec(*names))

    return jax.tree.map(of, params)


def divided(task: Task, mesh: Mesh) -> Task:
    """The task with the examples of each batch divided among the devices (or on all, if they do not divide them)."""

    def shared_out(look_up: Callable[[np.ndarray], Batch]) -> Callable[[np.ndarray], Batch]:
        def batch(index: np.ndarray) -> Batch:
            spec = PartitionSpec("data") if len(index) % mesh.size == 0 else PartitionSpec()
            return Batch(*jax.device_put(tuple(look_up(index)), NamedSharding(mesh, spec)))

        return batch

    return dataclasses.replace(task, train=shared_out(task.train), validation=shared_out(task.validation))


def bytes_on_one_device(tree: Params) -> int:
    """Bytes of a tree of arrays on the device that holds most of it."""
    held: dict[jax.Device, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())
