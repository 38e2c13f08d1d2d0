"""What a run leaves behind: its numbers, as JSON."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gefen_jax.lab.sharded import bytes_on_one_device
from gefen_jax.lab.train import Event, Run

SCHEMA = 1


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
    device_state_bytes: int  # on one device: the same, if there is one
    device_parameter_bytes: int
    peak_bytes: int  # on one device
    memory: dict[str, Any]  # the parts of the peak, see `gefen_jax.accounting.memory.Memory`
    compile_seconds: float
    train_loss: list[float] = dataclasses.field(default_factory=list)  # one per step, nats
    step_seconds: list[float] = dataclasses.field(default_factory=list)  # one per step
    validation: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)  # step, loss, accuracy

    @classmethod
    def of(cls, name: str, label: str, learning_rate: float, parameters: int, run: Run) -> "Record":
        memory = dataclasses.asdict(run.memory)
        peak = run.memory.peak
        held = (run.state_bytes, bytes_on_one_device(run.opt_state), bytes_on_one_device(run.params))
        return cls(name, label, learning_rate, parameters, *held, peak, memory, run.compile_seconds)

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


def write_json(path: Path, value: Any) -> None:
    """Write JSON that every reader accepts: a number that is not finite becomes null."""
    path.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
