"""Compile for a GPU on a machine without one, and read from the result what would run.

Needs the CUDA plugin of JAX (not the CUDA libraries), jax-triton, and JAX_PLATFORMS=cpu set before JAX is imported.
"""

from __future__ import annotations

import collections
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

TARGETS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 8, 0, 108, 1.41, 2039, 40, 85, 163),
    "h100": ("NVIDIA H100 80GB HBM3", 9, 0, 132, 1.98, 3352, 50, 85, 227),
    "h200": ("NVIDIA H200", 9, 0, 132, 1.98, 4800, 50, 151, 227),
    "b200": ("NVIDIA B200", 10, 0, 148, 1.97, 8000, 126, 192, 227),
}
"""Name, compute capability, cores, GHz, GB/s, MiB of L2, GB of memory, KiB of shared memory per block."""

_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
_ALLOCATIONS = {"AllocateBuffer"}


class Program(NamedTuple):
    """A compiled program, and what is in it.

    Attributes:
      launches: kernels and copies by kind, e.g. ``{"fusion": 3, "triton:gefen_step": 1}``.
      temporary: bytes of temporary memory.
      aliased: bytes of arguments that results are written over.
      kernels: the Triton kernels in it, by name.
      text: the optimized HLO.
    """

    launches: collections.Counter[str]
    temporary: int
    aliased: int
    kernels: dict[str, bytes]
    text: str

    @property
    def copies(self) -> int:
        """Copies of arrays."""
        return self.launches["copy"]

    @property
    def total(self) -> int:
        """Everything that is launched."""
        return sum(self.launches.values())


class Binary(NamedTuple):
    """What ptxas made of a kernel: registers per thread, bytes of spills, stack and machine code, and its parameters as
    (offset, size)."""

    registers: int
    spills: int
    stack: int
    code: int
    parameters: tuple[tuple[int, int], ...]


def unavailable() -> str | None:
    """Why nothing can be compiled here, in words; None if it can."""
    import importlib.util

    from gefen_pallas import compiled

    if importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "JAX's CUDA plugin is not installed (pip install jax-cuda12-plugin)"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "JAX_PLATFORMS=cpu was not set before JAX was imported"
    return compiled.unavailable()


def description(name: str) -> str:
    """The target of deviceless compilation, as XLA reads it."""
    model, major, minor, cores, clock, bandwidth, cache, memory, shared = TARGETS[name]
    return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {(shared + 1) * 1024} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {bandwidth * 10**9} l2_cache_size: {cache << 20} clock_rate_ghz: {clock}
      device_memory_size: {memory * 10**9} shared_memory_per_block_optin: {shared * 1024}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{model}"
    """


def mesh_of(name: str, devices: int = 1) -> Any:
    """A mesh with the axis "x" of so many GPUs of `TARGETS`, none of which is here."""
    from jax.experimental import topologies

    _provide_tools()
    topology = topologies.get_topology_desc(platform="cuda", target_config=description(name), topology=f"1x1x{devices}")
    return topologies.make_mesh(topology, (devices,), ("x",))


def compile_for(target: Any, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> Program:
    """Compile ``function`` for a GPU of `TARGETS`, or for the GPUs of a mesh from `mesh_of`.

    Arguments are pytrees of arrays or `jax.ShapeDtypeStruct`; those whose sharding is not on the mesh are replicated.
    """
    import jax

    mesh = mesh_of(target) if isinstance(target, str) else target
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        here = getattr(sharding, "mesh", None) == mesh
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if here else everywhere)

    abstract = jax.tree.map(placed, arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=tuple(donate)).trace(*abstract).lower()
        program = lowered.compile()
    memory = program.memory_analysis()
    text = program.as_text()
    kernels = _kernels(lowered.as_text())
    return Program(launches(text), memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels, text)


def launches(text: str) -> collections.Counter[str]:
    """Kernels and copies of an optimized HLO module, by kind."""
    large, small = by_size(text, 0)
    return large + small


def by_size(text: str, elements: int) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """The same, apart: those with a result or an operand of at least so many elements, and the others."""
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head:
            current = head.group(2)
            bodies[current] = []
            entry = current if head.group(1) else entry
        elif current and " = " in line:
            bodies[current].append(line)
    large: collections.Counter[str] = collections.Counter()
    small: collections.Counter[str] = collections.Counter()

    def walk(name: str) -> None:
        sizes: dict[str, int] = {}
        for line in bodies[name]:
            found = re.search(r"%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line)
            if found is None:
                small["unknown"] += 1
                continue
            result, shape, operation, rest = found.groups()
            sizes[result] = _largest(shape)
            if operation in _FREE:
                continue
            if operation == "call":
                walk(re.search(r"to_apply=%?([\w.\-]+)", line).group(1))  # type: ignore[union-attr]
                continue
            if operation == "custom-call":
                target = re.search(r'custom_call_target="([^"]+)"', line).group(1)  # type: ignore[union-attr]
                if target in _ALLOCATIONS:
                    continue
                operation = "triton" if target == "triton_kernel_call_ffi" else f"custom-call:{target}"
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            size = max([sizes[result], *(sizes.get(operand, 0) for operand in operands)])
            (large if size >= elements else small)[operation] += 1

    walk(entry)
    return large, small


def _largest(shape: str) -> int:
    """Elements of the largest array in an HLO shape."""
    return max(
        (math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\[([\d,]*)\]", shape)), default=0
    )


def _kernels(text: str) -> dict[str, bytes]:
    """PTX of the Triton kernels in a lowered module, by name."""
    found: dict[str, bytes] = {}
    for match in re.finditer(r'opaque = "((?:[^"\\]|\\.)*)"', text):
        packed = re.sub(rb"\\([0-9A-F]{2}|.)", _unescape, match.group(1).encode("latin-1"))
        content = zlib.decompress(packed)
        ptx = re.search(rb"\.version[\t\n\r -~]*", content).group(0)  # type: ignore[union-attr]
        ptx = ptx[: ptx.rindex(b"}") + 1] + b"\n"
        name = re.search(rb"\.entry (\w+)", ptx).group(1).decode()  # type: ignore[union-attr]
        found[name] = ptx
    return found


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match.group(1)
    if len(code) == 2:
        return bytes([int(code, 16)])
    return {b"n": b"\n", b"t": b"\t"}.get(code, code)


def assemble(ptx: bytes) -> Binary:
    """Assemble a kernel and read registers, spills and parameters from the binary."""
    target = re.search(rb"\.target (sm_\w+)", ptx).group(1).decode()  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_bytes(ptx)
        report = subprocess.run(
            [_tool("ptxas"), "-v", f"-arch={target}", str(source), "-o", str(cubin)],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        layout = subprocess.run(
            [_tool("cuobjdump"), "-elf", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    entries = re.findall(r"Ordinal\s*:\s*0x([0-9a-f]+)\s+Offset\s*:\s*0x([0-9a-f]+)\s+Size\s*:\s*0x([0-9a-f]+)", layout)
    places = sorted((int(ordinal, 16), int(offset, 16), int(size, 16)) for ordinal, offset, size in entries)
    stack, stores, loads = map(
        int,
        re.search(  # type: ignore[union-attr]
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        ).groups(),
    )
    registers = int(re.search(r"Used (\d+) registers", report).group(1))  # type: ignore[union-attr]
    section = r"^\s*\w+\s+\w+\s+(\w+)\s+\w+\s+\w+\s+PROGBITS\s.*\s\.text\."
    code = int(re.search(section, layout, re.MULTILINE).group(1), 16)  # type: ignore[union-attr]
    return Binary(registers, max(stores, loads), stack, code, tuple((offset, size) for _, offset, size in places))


def _wheel_tools() -> pathlib.Path:
    import triton

    return pathlib.Path(triton.__file__).parent / "backends" / "nvidia"


def _tool(name: str) -> str:
    bundled = _wheel_tools() / "bin" / name
    return str(bundled) if bundled.exists() else shutil.which(name) or name


def _provide_tools() -> None:
    """Let XLA find an assembler and libdevice in Triton's wheel where no CUDA toolkit is installed."""
    if shutil.which("ptxas") or not (_wheel_tools() / "bin" / "ptxas").exists():
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gefen-cuda-"))
    (folder / "bin").mkdir()
    (folder / "nvvm" / "libdevice").mkdir(parents=True)
    (folder / "bin" / "ptxas").symlink_to(_wheel_tools() / "bin" / "ptxas")
    (folder / "nvvm" / "libdevice" / "libdevice.10.bc").symlink_to(_wheel_tools() / "lib" / "libdevice.10.bc")
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={folder}".strip()
