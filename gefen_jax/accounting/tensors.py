"""Bytes of any pytree, leaf by leaf: by category, by dtype, per device, with shared buffers counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gefen_jax import paths
from gefen_jax.accounting.report import Formatter, Report, Row, format_bytes, format_percent, format_plain

__all__ = [
    "Leaf",
    "Tensors",
    "live_bytes",
    "physical_bytes",
    "tensors",
    "tree_bytes",
]


@dataclass(frozen=True)
class Leaf:
    """One array of a pytree, as its devices hold it.

    Attributes:
      category: what it is for, e.g. "parameters".
      path: where it is, parts joined by "/".
      shape: global shape.
      dtype: name of the dtype.
      bytes: number of elements times size of the dtype (4-bit types: two elements a byte).
      device_bytes: bytes on one device (its shard); 0 if the array lives in host memory, shares the buffer
        of an earlier leaf, or was donated.
      host_bytes: the same for an array in host memory (``pinned_host``, ``unpinned_host``).
      total_bytes: bytes on all devices together, replicas counted each time.
      devices: number of devices that hold a part of it.
      status: "", "alias of <path>" or "donated".
    """

    category: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    device_bytes: int
    host_bytes: int
    total_bytes: int
    devices: int
    status: str = ""


@dataclass(frozen=True)
class Tensors(Report):
    """Bytes of the leaves of one or more pytrees. Made by `tensors`."""

    leaves: tuple[Leaf, ...]
    by: str = "category"
    largest: int = 0

    columns: ClassVar[Mapping[str, Formatter]] = {
        "group": format_plain,
        "leaves": format_plain,
        "elements": lambda n: f"{n:,}",
        "bytes": format_bytes,
        "per device": format_bytes,
        "host": format_bytes,
        "share": format_percent,
        "B/element": lambda x: "-" if x is None else f"{x:.3f}",
    }

    @property
    def title(self) -> str:
        return f"Tensors by {self.by}"

    @property
    def bytes(self) -> int:
        """Number times dtype size over all leaves, shared buffers and donated arrays included."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """Bytes that one device holds, shared buffers once, donated arrays not."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory spaces."""
        return sum(leaf.host_bytes for leaf in self.leaves)

    @property
    def total_bytes(self) -> int:
        """Bytes over all devices, replicas counted each time."""
        return sum(leaf.total_bytes for leaf in self.leaves)

    @property
    def rows(self) -> list[Row]:
        return self.group_by(self.by)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = [f"total: {format_bytes(self.device_bytes)} per device, {format_bytes(self.bytes)} logical"]
        if self.host_bytes:
            notes.append(f"in host memory: {format_bytes(self.host_bytes)}")
        aliased = sum(leaf.bytes for leaf in self.leaves if leaf.status.startswith("alias"))
        donated = sum(leaf.bytes for leaf in self.leaves if leaf.status == "donated")
        if aliased:
            notes.append(f"{format_bytes(aliased)} share the buffer of an earlier leaf and are counted once")
        if donated:
            notes.append(f"{format_bytes(donated)} were donated and no longer exist")
        return tuple(notes)

    @property
    def sections(self) -> tuple[Report, ...]:
        return (LargestLeaves(self.leaves, self.largest),) if self.largest else ()

    def group_by(self, key: str) -> list[Row]:
        """Sum the leaves by an attribute of `Leaf`: "category", "dtype", "path", "shape" or "status".

        Returns:
          One row per value, in order of first appearance, with ``group``, ``leaves``, ``elements``, ``bytes``,
          ``per device``, ``host``, ``all devices``, ``share`` (of the bytes per device and host) and
          ``B/element``.
        """
        if key not in ("category", "dtype", "path", "shape", "status"):
            raise ValueError(f"group_by: found {key!r}, expected 'category', 'dtype', 'path', 'shape' or 'status'")
        groups: dict[Any, list[Leaf]] = {}
        for leaf in self.leaves:
            groups.setdefault(getattr(leaf, key), []).append(leaf)
        everything = self.device_bytes + self.host_bytes
        rows = []
        for value, members in groups.items():
            device, host = sum(m.device_bytes for m in members), sum(m.host_bytes for m in members)
            logical, elements = sum(m.bytes for m in members), sum(math.prod(m.shape) for m in members)
            rows.append(
                {
                    "group": value,
                    "leaves": len(members),
                    "elements": elements,
                    "bytes": logical,
                    "per device": device,
                    "host": host,
                    "all devices": sum(m.total_bytes for m in members),
                    "share": (device + host) / everything if everything else None,
                    "B/element": logical / elements if elements else None,
                }
            )
        return rows

    def grouped(self, key: str) -> Tensors:
        """The same leaves, with ``rows`` summed by another attribute (see `group_by`)."""
        self.group_by(key)
        return Tensors(self.leaves, key, self.largest)


@dataclass(frozen=True)
class LargestLeaves(Report):
    """The ``count`` leaves with the most bytes."""

    leaves: tuple[Leaf, ...]
    count: int

    columns: ClassVar[Mapping[str, Formatter]] = {
        "category": format_plain,
        "path": format_plain,
        "shape": format_plain,
        "dtype": format_plain,
        "bytes": format_bytes,
        "per device": format_bytes,
        "status": format_plain,
    }

    @property
    def title(self) -> str:
        return f"Largest {min(self.count, len(self.leaves))} of {len(self.leaves)} leaves"

    @property
    def rows(self) -> list[Row]:
        ordered = sorted(self.leaves, key=lambda leaf: -leaf.bytes)[: self.count]
        return [
            {
                "category": leaf.category,
                "path": leaf.path,
                "shape": leaf.shape,
                "dtype": leaf.dtype,
                "bytes": leaf.bytes,
                "per device": leaf.device_bytes + leaf.host_bytes,
                "status": leaf.status,
            }
            for leaf in ordered
        ]


def tensors(*, by: str = "category", largest: int = 0, shardings: Any = None, **trees: Any) -> Tensors:
    """Count the bytes of pytrees, given by category.

    Leaves may be arrays, NumPy arrays, Python numbers or shapes (`jax.ShapeDtypeStruct`, as `jax.eval_shape`
    returns). NumPy arrays and numbers count as a jitted function would receive them (float64 becomes float32
    unless 64 bits are enabled). A sharded leaf counts with its shard per device. Two leaves of real arrays
    with one buffer count once; donated (deleted) arrays count zero.

    Args:
      by: what ``rows`` are summed by: "category", "dtype", "path", "shape" or "status".
      largest: also list this many leaves with the most bytes.
      shardings: shardings for the leaves: one for all, or a mapping from category to a pytree that matches the
        category's (a prefix suffices). It overrides the leaves' own.
      **trees: one pytree per category; underscores in the name become spaces.

    Returns:
      A `Tensors`: prints as a table; has ``leaves``, ``bytes``, ``device_bytes``, ``total_bytes``, ``rows``.

    Raises:
      TypeError: a leaf is not an array; the message names its path.
      ValueError: a sharding does not divide its leaf, or ``by`` is unknown.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((3, 5)), "b": jnp.ones(5)}
      >>> report = tensors(parameters=params, optimizer_state=jax.eval_shape(optax.adamw(1e-3).init, params))
      >>> [(row["group"], row["bytes"]) for row in report.rows]
      [('parameters', 80), ('optimizer state', 164)]
    """
    seen: dict[Any, str] = {}
    leaves: list[Leaf] = []
    for name, tree in trees.items():
        category = name.replace("_", " ")
        wanted = shardings.get(name, shardings.get(category)) if isinstance(shardings, dict) else shardings
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        overrides = _broadcast_shardings(wanted, tree, category) if wanted is not None else [None] * len(flat)
        for (path, value), sharding in zip(flat, overrides, strict=True):
            leaves.append(_leaf(category, paths.name(path), value, sharding, seen))
    return Tensors(tuple(leaves), "category", largest).grouped(by)


def tree_bytes(tree: Any) -> int:
    """Number of elements times size of the dtype, summed over a pytree of arrays or shapes.

    Examples:
      >>> import jax.numpy as jnp
      >>> tree_bytes({"a": jnp.zeros((3, 5), jnp.bfloat16), "b": jnp.zeros((), jnp.int32)})
      34
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return sum(physical_bytes(*shape_dtype(value, paths.name(path))) for path, value in flat)


def live_bytes(platform: str | None = None) -> int:
    """Bytes of all arrays alive in this process, over all their devices, each buffer counted once.

    Args:
      platform: count only arrays of this backend ("cpu", "gpu", "tpu"); ``None`` means the default one.
    """
    buffers: dict[Any, int] = {}
    for array in jax.live_arrays(platform):
        buffers.update(_buffers(array))
    return sum(buffers.values())


def physical_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes that an array of this shape and dtype takes; 4-bit and 2-bit types are packed, keys are words.

    Examples:
      >>> import jax
      >>> physical_bytes((5, 3), "int4"), physical_bytes((5, 3), "float32")
      (8, 60)
      >>> physical_bytes((2,), jax.random.key(0).dtype)
      16
    """
    count = math.prod(shape)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return count * dtype.itemsize
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return -(-count * jnp.iinfo(dtype).bits // 8)
    if jnp.issubdtype(dtype, jnp.floating):
        return -(-count * jnp.finfo(dtype).bits // 8)
    return count * dtype.itemsize


def shape_dtype(value: Any, path: str) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a leaf as a jitted function would receive it; TypeError names the leaf's path."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__"):
        return tuple(value.shape), value.dtype  # ShapeDtypeStruct, ArgInfo, abstract values
    try:
        abstract = jax.typeof(value)
    except TypeError:
        raise TypeError(
            f"leaf {path or '(root)'}: found {type(value).__name__}, expected an array, a number or a"
            " jax.ShapeDtypeStruct; drop it from the tree or pass it as a static argument"
        ) from None
    return tuple(abstract.shape), abstract.dtype


def shard_bytes(shape: Sequence[int], dtype: Any, sharding: Any, path: str) -> int:
    """Bytes of one device's shard of an array.

    Raises:
      ValueError: the sharding does not divide the shape.
    """
    if sharding is None:
        return physical_bytes(shape, dtype)
    try:
        return physical_bytes(sharding.shard_shape(tuple(shape)), dtype)
    except ValueError as error:
        raise ValueError(
            f"leaf {path or '(root)'}: found shape {tuple(shape)}, which {sharding} does not divide; choose an axis"
            " that the mesh divides, or replicate this leaf"
        ) from error


def _leaf(category: str, path: str, value: Any, sharding: Any, seen: dict[Any, str]) -> Leaf:
    shape, dtype = shape_dtype(value, path)
    if sharding is None:
        sharding = getattr(value, "sharding", None)
    logical = physical_bytes(shape, dtype)
    per_device = shard_bytes(shape, dtype, sharding, path)
    devices = 1 if sharding is None else sharding.num_devices
    total, status = per_device * devices, ""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        if value.is_deleted():
            per_device, total, status = 0, 0, "donated"
        else:
            buffers = _buffers(value)
            owner = next((seen[key] for key in buffers if key in seen), None)
            if owner is not None:
                per_device, total, status = 0, 0, f"alias of {owner}"
            for key in buffers:
                seen.setdefault(key, f"{category}: {path}")
    in_host = getattr(sharding, "memory_kind", None) in ("pinned_host", "unpinned_host")
    return Leaf(
        category=category,
        path=path,
        shape=shape,
        dtype=str(dtype),
        bytes=logical,
        device_bytes=0 if in_host else per_device,
        host_bytes=per_device if in_host else 0,
        total_bytes=total,
        devices=devices,
        status=status,
    )


def _buffers(array: jax.Array) -> dict[Any, int]:
    """Buffers of a real array that are on this process, as (device, address) -> bytes."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    found = {}
    for shard in array.addressable_shards:
        nbytes = physical_bytes(shard.data.shape, shard.data.dtype)
        if nbytes:  # empty arrays have no buffer of their own
            found[(shard.device, shard.data.unsafe_buffer_pointer())] = nbytes
    return found


def _broadcast_shardings(shardings: Any, tree: Any, category: str) -> list[Any]:
    def is_sharding(node: Any) -> bool:
        return isinstance(node, jax.sharding.Sharding)

    try:
        return jax.tree.leaves(
            jax.tree.map(lambda s, part: jax.tree.map(lambda _: s, part), shardings, tree, is_leaf=is_sharding),
            is_leaf=is_sharding,
        )
    except ValueError as error:
        raise ValueError(f"shardings for {category}: their structure is not a prefix of the tree's; {error}") from None
