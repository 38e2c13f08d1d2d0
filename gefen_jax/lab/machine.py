"""Where and with what a measurement was made: versions, device, threads, commit."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

import gefen_jax

PACKAGES = ("gefen-jax", "jax", "jaxlib", "optax", "flax", "numpy", "numba")


def environment() -> dict[str, Any]:
    """Versions, device, threads and commit: what a reader needs to judge or repeat a measurement."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "threads": usable_cores(),
        "commit": commit(),
    }


def usable_cores() -> int:
    """The cores this process may run on: what XLA's thread pool is sized by."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str | None:
    """The commit of the package's own repository, with `-dirty` if files changed; None if it is installed."""
    root = Path(gefen_jax.__file__).resolve().parents[1]
    if not (root / ".git").exists():  # not a checkout: never name somebody else's repository around it
        return None
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("-dirty" if status else "")


def version(package: str) -> str | None:
    """The installed version of a distribution; None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
