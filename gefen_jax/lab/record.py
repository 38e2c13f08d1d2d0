"""What a run leaves behind: its numbers, and where and with what they were made. All of it JSON."""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import gefen_jax
from gefen_jax.lab.train import Event, Run

SCHEMA = 1
PACKAGES = ("gefen-jax", "jax", "jaxlib", "optax", "flax", "numpy", "numba")


class Times(NamedTuple):
    """Wall times of a step in seconds: median, 20th and 80th percentile, and of how many steps."""

    median: float
    p20: float
    p80: float
    steps: int


@dataclasses.dataclass
class Record:
    """The numbers of one optimizer's run; `add` grows it event by event, so it is whole at any moment."""

    name: str
    label: str
    learning_rate: float  # peak of the schedule
    parameters: int  # number of them
    state_bytes: int
    peak_bytes: int
    memory: dict[str, Any]  # the parts of the peak, see `gefen_jax.accounting.memory.Memory`
    compile_seconds: float
    train_loss: list[float] = dataclasses.field(default_factory=list)  # one per step, nats
    step_seconds: list[float] = dataclasses.field(default_factory=list)  # one per step
    validation: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)  # step, loss, accuracy

    @classmethod
    def of(cls, name: str, label: str, learning_rate: float, parameters: int, run: Run) -> "Record":
        memory = dataclasses.asdict(run.memory)
        peak = run.memory.peak
        return cls(name, label, learning_rate, parameters, run.state_bytes, peak, memory, run.compile_seconds)

    def add(self, event: Event) -> None:
        count = len(event.losses)
        self.train_loss += event.losses.tolist()
        self.step_seconds += [event.seconds / count] * count if count else []
        if event.validation is not None:
            self.validation.append((event.step, *event.validation))

    @property
    def steps(self) -> int:
        return len(self.train_loss)

    @property
    def state_bytes_per_parameter(self) -> float:
        return self.state_bytes / self.parameters

    def step_time(self) -> Times | None:
        """Of all steps but the first; None if there is none."""
        times = self.step_seconds[1:]
        if not times:
            return None
        median, p20, p80 = np.percentile(times, [50, 20, 80]).tolist()
        return Times(median, p20, p80, len(times))

    def validation_losses(self) -> dict[int, float]:
        """The validation losses by step."""
        return {step: loss for step, loss, _ in self.validation}

    def as_dict(self) -> dict[str, Any]:
        timing = self.step_time()
        derived = {
            "state_bytes_per_parameter": self.state_bytes_per_parameter,
            "step_time": timing._asdict() if timing else None,
        }
        return dataclasses.asdict(self) | derived


def last_common_step(records: list[Record]) -> int | None:
    """The last step at which every record has a validation loss; None if there is none."""
    steps = set.intersection(*(set(record.validation_losses()) for record in records))
    return max(steps, default=None)


def environment() -> dict[str, Any]:
    """Versions, device, threads and commit: what a reader needs to judge or repeat a measurement."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions,
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


def write_json(path: Path, value: Any) -> None:
    """Write JSON that every reader accepts: a number that is not finite becomes null."""
    path.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
