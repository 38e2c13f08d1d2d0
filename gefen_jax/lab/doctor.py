"""Show versions, devices, threads, how the optimizer's step would run here and why, and what is missing."""

import argparse
import platform
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gefen_jax import explain, gefen
from gefen_jax.lab.machine import commit, usable_cores, version

CORE = ("gefen-jax", "jax", "jaxlib", "optax", "numpy", "numba")


class Optional(NamedTuple):
    """A package that something needs, and the extra that brings it."""

    package: str
    extra: str
    purpose: str


OPTIONAL = (
    Optional("flax", "demo", "the models of the demo and the benchmarks"),
    Optional("matplotlib", "demo", "the pictures"),
    Optional("rich", "demo", "progress and tables"),
    Optional("scikit-learn", "demo", "the digits data set"),
)
GPU = Optional("jax-triton", "cuda12", "the step as one kernel launch on NVIDIA GPUs (or the extra cuda13)")

# Leaves that stand for the kinds there are in a model.
EXAMPLES = {
    "embedding": jax.ShapeDtypeStruct((50257, 768), "float32"),
    "kernel": jax.ShapeDtypeStruct((768, 3072), "float32"),
    "small kernel": jax.ShapeDtypeStruct((64, 128), "float32"),
    "norm scale": jax.ShapeDtypeStruct((768,), "float32"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The doctor has no options."""


def run(args: argparse.Namespace) -> int:
    """The subcommand. Returns 0: a missing optional package is no fault."""
    print(report())
    return 0


def report() -> str:
    """The whole diagnosis as text."""
    sections = {"versions": {"python": platform.python_version()} | {n: version(n) or "missing" for n in CORE}}
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # both are what JAX raises if a chosen backend does not start
        sections["machine"] = machine() | {"devices": f"none, JAX cannot start its backend: {error!r}"}
    else:
        kinds = ", ".join(sorted({f"{device.device_kind} ({device.platform})" for device in devices}))
        sections["machine"] = machine() | {"devices": f"{len(devices)}: {kinds}"}
        if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
            sections["machine"]["note"] = "an NVIDIA driver is here, but JAX runs on the CPU: " + install("cuda12")
        sections["how a step runs here (leaf: implementation, reason)"] = implementations()
    wanted = (*OPTIONAL, GPU) if shutil.which("nvidia-smi") else OPTIONAL
    sections["optional packages"] = {item.package: availability(item) for item in wanted}
    return "\n".join(section(title, rows) for title, rows in sections.items()).rstrip()


def machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "usable cores": str(usable_cores()),
        "64-bit types": "on" if jnp.result_type(float) == jnp.float64 else "off",
        "commit": commit() or "not a checkout",
    }


def section(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows.items()), ""])


def implementations() -> dict[str, str]:
    """Which implementation a leaf of each kind gets on this machine, and why; and how `apply` steps them."""
    tx = gefen(1e-3)
    found = explain(jax.eval_shape(tx.init, EXAMPLES), tx=tx)
    rows = {f"{row.path} {row.shape}": f"{row.implementation} ({row.because})" for row in found.rows}
    return rows | {"apply": str(found.step)}


def availability(item: Optional) -> str:
    """The version, or what is missing without it and the command that installs it."""
    return version(item.package) or f"missing, needed for {item.purpose}: {install(item.extra)}"


def install(extra: str) -> str:
    return f"pip install 'gefen-jax[{extra}]'"
